"""The optimizers, one algorithm a file, as Optax gradient transformations."""
