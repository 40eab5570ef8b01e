"""Pre-training of a language model, and a comparison of the optimizers that it is done with."""
