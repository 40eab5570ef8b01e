"""States of optimizers: where they lie, and their way to other workers and optimizers."""
