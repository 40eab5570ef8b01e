"""Residual networks on CIFAR-10, and a comparison of the optimizers that they are trained with."""
