"""A training under faults for a chosen time: see `__main__`."""
