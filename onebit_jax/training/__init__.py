"""The training step on a mesh."""
