"""Training a DCGAN on CIFAR-10."""
