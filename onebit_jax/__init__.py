"""Optax optimizers that send one bit per parameter, and the collectives beneath them."""
