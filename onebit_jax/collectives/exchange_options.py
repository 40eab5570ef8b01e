"""What users choose of an exchange: one argument ``exchange=``, or a ``compressor=``."""

import dataclasses
from typing import Any, Literal

import jax.core

from onebit_jax import validation
from onebit_jax.collectives.compressor import Compressor, Form
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.collectives.k_bits import KBits
from onebit_jax.collectives.one_bit import OneBit, ResidualDtype, Scale, ScalePer
from onebit_jax.collectives.packing import check_bucket_bytes


@dataclasses.dataclass(frozen=True)
class ExchangeOptions:
    """Options of the exchange that an optimizer with error feedback takes as ``exchange=``.

    Attributes:
      scale: the scale at one bit: ``"rms"`` (root mean square, the papers' choice, and better with
        error feedback) or ``"mean_abs"`` (mean absolute value).
      scale_per: where tensors are split between devices (:func:`onebit_jax.on_mesh`), one scale at
        one bit per ``"shard"``, or per ``"tensor"``: each exchange then sums 8 bytes per tensor
        over the fast axes, and in one stage equals that of whole tensors. At 2, 4 and 8 bits 256
        values share a scale.
      residual_dtype: dtype of the arrays that hold residuals, and in a warm-up the momentum:
        ``"float32"``, or ``"bfloat16"``, which takes ``2 + 2/n`` bytes per parameter less. Its
        rounding errors are lost: up to one part in 256 of a value, each step.
      local_dtype: dtype within a node in the hierarchical form: ``"float32"``, or ``"bfloat16"``
        for half the bytes there.
      bucket_bytes: the largest message from one worker to another in one collective, a multiple of
        128; None for one message. ``"auto"`` is the fastest as measured (docs/performance.md):
        buckets between CPU hosts, whose transport does not send large messages while it receives.
        In :func:`onebit_jax.train_step` buckets travel during the backward pass.
      form: ``"two-stage"``, the papers': an all-to-all, a server that averages and compresses
        again, an all-gather. ``"one-stage"``: an all-gather, and every worker averages; with ``n``
        workers or nodes it sends ``n/2`` times the bytes, and its state has no server's residual,
        ``4/n`` bytes per parameter, but ``n/8`` instead of ``1/8`` bytes of received bits.
        ``"auto"`` is one stage with up to two workers or nodes, where it sends no more, else two,
        and for :func:`onebit_jax.onebit_lamb_published`, which cuts tensors out of one, always two.

    Raises:
      ValueError: for an invalid option.
    """

    scale: Scale = "rms"
    scale_per: ScalePer = "shard"
    residual_dtype: ResidualDtype = "float32"
    local_dtype: LocalDtype = "float32"
    bucket_bytes: int | Literal["auto"] | None = "auto"
    form: Form | Literal["auto"] = "auto"

    def __post_init__(self):
        self._compressor()
        validation.check_name("local_dtype", self.local_dtype, "float32", "bfloat16")
        check_bucket_bytes(self.bucket_bytes)
        validation.check_form(self.form)

    def _compressor(self, *, fused: bool = False) -> OneBit:
        return OneBit(self.scale, self.residual_dtype, fused, self.scale_per)

    def one_bit(self, axis_name: Any, *, fused: bool = False) -> Exchange:
        """The exchange at one bit."""
        return self.of(axis_name, self._compressor(fused=fused))

    def at_bits(self, axis_name: Any, bits: int) -> Exchange:
        """The exchange at 1, 2, 4 or 8 bits."""
        return self.one_bit(axis_name) if bits == 1 else self.of(axis_name, KBits(bits))

    def of(self, axis_name: Any, compressor: Compressor) -> Exchange:
        """The exchange with a given compressor; ``ValueError`` for options it does not have."""
        if not isinstance(compressor, OneBit) and self._compressor() != OneBit():
            raise ValueError(
                f"scale={self.scale!r}, scale_per={self.scale_per!r}, "
                f"residual_dtype={self.residual_dtype!r} are options of one bit with error "
                f"feedback, but {compressor} has none of them: leave them out."
            )
        if self.form not in ("auto", *compressor.forms):
            raise ValueError(
                f"form={self.form!r} is not a form of {compressor}, which has "
                f"{compressor.forms[0]!r} only: leave it out."
            )
        return Exchange(axis_name, compressor, self.local_dtype, self.bucket_bytes, self.form)

    def travel(self) -> "ExchangeOptions":
        """The options of sending alone, which apply to any compressor."""
        return dataclasses.replace(self, scale="rms", scale_per="shard", residual_dtype="float32")


def check_options(exchange: Any) -> None:
    """Raises ``ValueError`` unless an argument ``exchange`` is an :class:`ExchangeOptions`."""
    if not isinstance(exchange, ExchangeOptions):
        raise ValueError(
            f"exchange={exchange!r} must be options of an exchange: "
            f"onebit_jax.ExchangeOptions(...), or left out."
        )


def check_compressor(compressor: Any, bits: int, default_bits: int) -> None:
    """Raises ``ValueError`` unless an argument ``compressor`` is one, in place of ``bits``."""
    methods = ("init", "compress", "serve", "decompress", "forms")
    if isinstance(compressor, type) or not all(hasattr(compressor, name) for name in methods):
        raise ValueError(
            f"compressor={compressor!r} must be a compressor, such as onebit_jax.MajorityVote(), "
            f"or left out, so that bits={bits} decides."
        )
    if bits != default_bits:
        raise ValueError(f"bits={bits} and compressor={compressor} exclude each other: give one.")


def check_decay_counts(name: str, decay: Any, compressor: Compressor | None) -> None:
    """Raises ``ValueError`` for a decay of residuals other than 1 where none are kept.

    Args:
      name: the argument's.
      decay: the factor of residuals; not looked at where it is traced.
      compressor: what is given; None for 32 bits.
    """
    known = not isinstance(decay, jax.core.Tracer)
    if known and float(decay) != 1 and not hasattr(compressor, "residuals"):
        which = "bits=32" if compressor is None else compressor
        raise ValueError(
            f"{name}={decay!r} multiplies residuals, but {which} keeps none: leave it out."
        )


def check_unused(exchange: ExchangeOptions) -> None:
    """Raises ``ValueError`` for options of an exchange at 32 bits, which compresses nothing."""
    if exchange != ExchangeOptions():
        raise ValueError(
            f"exchange={exchange!r} are options of an exchange of fewer bits, but with bits=32 "
            f"nothing is compressed: leave them out, or give 1, 2, 4 or 8 bits."
        )
