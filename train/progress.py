"""The progress bar of a training: it counts steps, and says what is being compiled."""

from collections.abc import Callable
from typing import Any

import optax
from tqdm import tqdm

from onebit_jax.transforms.phases import Phase

_STEPS: dict[Phase | None, str] = {
    "warmup": "warm-up step",
    "compression": "compressed step",
    "local": "local step",
    "sync": "step that synchronises",
    "refresh": "step that refreshes the variance",
    None: "step",
}


class StepBar(tqdm):
    """A bar of steps on standard error.

    Args:
        name: what is trained.
        steps: how many there are.
        done: how many were made before.
        **options: of `tqdm`.
    """

    def __init__(self, name: str, steps: int, done: int = 0, **options: Any):
        super().__init__(
            desc=name, total=steps, initial=done, unit=" steps", dynamic_ncols=True, **options
        )

    def compiling(self, phase: Phase | None) -> None:
        """Says so at once: the step of a large model compiles for a minute."""
        self.set_postfix_str(f"compiling the {_STEPS[phase]}")


def announced(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    announce: Callable[[Phase | None], None],
) -> tuple[Callable[..., Any], optax.GradientTransformationExtraArgs]:
    """A loss and an optimizer that say for which phase a training step of them is compiled.

    Args:
        loss_fn: as for `onebit_jax.train_step`.
        tx: the optimizer.
        announce: told the phase, when the step has been traced and compiling follows; None for
            an optimizer that has none, or a step that has them all.

    Returns:
        The loss and the optimizer to make the step of. They compute what the given ones do.
    """
    extended = optax.with_extra_args_support(tx)
    loss_traced = False

    def loss(*args: Any, **named: Any) -> Any:
        nonlocal loss_traced
        loss_traced = True
        return loss_fn(*args, **named)

    def update(updates: Any, state: Any, params: Any = None, *, phase: Any = None, **extra: Any):
        nonlocal loss_traced
        # A step's checks trace the optimizer too, without a loss, and for any phase.
        if loss_traced:
            announce(phase)
            loss_traced = False
        return extended.update(updates, state, params, phase=phase, **extra)

    return loss, optax.GradientTransformationExtraArgs(tx.init, update)
