"""Processes that train together and end together: one that fails ends all, with the reason."""
