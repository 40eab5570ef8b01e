"""Times training steps of `train` beside the same models in PyTorch."""
