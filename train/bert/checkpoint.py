"""The former place of `train.checkpoint`."""

from train.checkpoint import abstract

__all__ = ["abstract"]
