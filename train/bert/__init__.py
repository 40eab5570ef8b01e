"""BERT pre-training with one-bit optimizers, beside dense Adam."""
