"""Watching a run: metrics, replicas, healthy ranges."""
