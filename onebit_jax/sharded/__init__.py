"""Optimizers beside a sharded model, in training loops of others."""
