"""Optimizer states: placing, resizing and converting them."""
