"""Checkpoints of a run: checked before anything is restored, and against damage.

Needs Orbax: ``pip install '.[checkpoint]'`` in the checkout. ``onebit_jax`` alone does not.
"""

try:
    from orbax.checkpoint import v1  # noqa: F401
except ImportError as error:
    raise ImportError(
        "onebit_jax.checkpoint needs Orbax: pip install '.[checkpoint]' in its checkout"
    ) from error

from onebit_jax.checkpoint.checkpoints import Checkpoints, Restored

__all__ = ["Checkpoints", "Restored"]
