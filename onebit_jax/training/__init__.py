"""The training step on a mesh, and the processes that train and end together."""
