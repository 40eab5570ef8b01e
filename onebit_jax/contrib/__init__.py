"""Published methods to compare with: compressors, optimizers, and the paper's 1-bit LAMB."""

from onebit_jax.contrib.cada import cada
from onebit_jax.contrib.drive import Drive
from onebit_jax.contrib.fetch_sgd import fetch_sgd
from onebit_jax.contrib.largest_values import LargestValues
from onebit_jax.contrib.majority_vote import MajorityVote
from onebit_jax.contrib.onebit_lamb_published import onebit_lamb_published

__all__ = ["Drive", "LargestValues", "MajorityVote", "cada", "fetch_sgd", "onebit_lamb_published"]
