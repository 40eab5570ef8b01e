"""The options of a pre-training of a language model."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from train import config
from train.config import AXIS, MOST
from train.lm.sharding import FAST_AXES, FSDP
from train.lm.tokenizer import BYTES


@dataclasses.dataclass(frozen=True)
class Config(config.TextConfig):
    """Pre-trains a decoder-only language model with each of several optimizers, from one seed.

    All see the same batches. The same command again goes on where it stopped. At the end
    `report.md` and `loss.png` in the output folder compare the optimizers.

    Attributes:
        tokenizer: Tokens: bytes, or byte pairs as in GPT-2, which are trained on the corpus.
        vocab_size: Tokens of bpe, the 256 bytes included.
        mesh: Sizes of the mesh's axes, as data=2,fsdp=2,tensor=2: workers lie along data, and the
            model is split over fsdp (parameters, their state, and a worker's share of the batch)
            and tensor (heads, the feed-forward layer and the vocabulary). None: data alone.
        scale_per: With a mesh that splits tensors, what has a scale of compressed signs of its own.
    """

    MODEL: ClassVar[str] = "lm"
    FREE: ClassVar[tuple[str, ...]] = (*config.TextConfig.FREE, "mesh")

    size: Literal["nano", "micro", "small", "medium"] = "nano"
    optimizers: config.OptimizerNames = ("adam", "onebit_adam", "onebit_muon")
    sequence_length: Annotated[int, config.whole(2)] = 128
    dropout: config.Fraction = 0.0
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    mesh: str | None = None
    scale_per: Literal["shard", "tensor"] = "shard"
    vocab_size: Annotated[
        int, config.Range(f"more than the {BYTES} bytes, below 2**31", lambda x: BYTES < x < 2**31)
    ] = 1024
    steps: config.Count = 400
    learning_rate: config.Positive = 4e-3
    schedule_warmup: int | float = 40
    warmup: int | float | Literal["auto"] = "auto"

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The axes in `mesh`, by name.

        Raises:
            ValueError: it is not a list of axes, or has another number of workers than `workers`.
        """
        if self.mesh is None:
            return {}
        pairs = [entry.split("=") for entry in self.mesh.split(",")]
        sizes = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
        named = {AXIS} <= sizes.keys() <= {AXIS, *FAST_AXES}
        if len(sizes) < len(pairs) or not named or not all(0 < n <= MOST for n in sizes.values()):
            raise ValueError(
                f"--mesh {self.mesh}: expected {AXIS}=N, and beside it {FAST_AXES[0]}=N, "
                f"{FAST_AXES[1]}=N or both, each once, separated by commas; N at least 1"
            )
        if self.workers not in (None, sizes[AXIS]):
            raise ValueError(
                f"--workers {self.workers}: --mesh {self.mesh} has {sizes[AXIS]} workers along "
                f"{AXIS}; leave one of the two out"
            )
        return sizes

    @property
    def worker_count(self) -> int:
        """How many workers there are."""
        return self.mesh_axes.get(AXIS, super().worker_count)

    @property
    def fast_axes(self) -> dict[str, int]:
        """The mesh's axes that the model is split over, those of size 1 left out."""
        sizes = self.mesh_axes
        return {name: sizes[name] for name in FAST_AXES if sizes.get(name, 1) > 1}

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes, by name: slow ones, that workers lie along, then fast ones."""
        return super().axes | self.fast_axes

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Those of the mesh's axes that a batch is split over."""
        return (*self.slow_axes, *(name for name in self.fast_axes if name == FSDP))

    def exchange(self) -> dict[str, Any]:
        """Options of the exchange that are not each optimizer's own."""
        own = {} if self.scale_per == "shard" else {"scale_per": self.scale_per}
        return super().exchange() | own

    def requirements(self) -> Iterator[tuple[str, bool, str]]:
        """Options, whether each suits the others, and what it must be."""
        yield from super().requirements()
        split = self.scale_per == "shard" or bool(self.fast_axes)
        yield "scale_per", split, "shard, since no --mesh splits tensors"
