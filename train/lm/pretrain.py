"""Pre-trains a language model with optimizers of `train.registry`, and compares them.

    python -m train.lm.pretrain                                # the main job, in runs/lm-nano
    python -m train.lm.pretrain --size micro --corpus TEXTS --steps 5000 --warmup 750
    python -m train.lm.pretrain --optimizers adam onebit_lamb --learning-rate 1e-3
    python -m train.lm.pretrain --tokenizer bpe --vocab-size 8192 --corpus TEXTS
    python -m train.lm.pretrain --mesh data=2,fsdp=2,tensor=2  # the model split over four devices
    python -m train.lm.pretrain --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from train import config, digest
from train.config import AXIS
from train.lm import data
from train.lm.data import BYTES, FILE, ByteTokenizer, Tokenizer, load_bpe, train_bpe
from train.lm.model import LMConfig, init_params, next_token_loss
from train.lm.sharding import FAST_AXES, FSDP, gathered, param_specs
from train.program import Program
from train.report import Metric, Wording, loss_metric
from train.training import Task


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
        if len(sizes) < len(pairs) or not named or 0 in sizes.values():
            raise ValueError(
                f"--mesh {self.mesh}: expected {AXIS}=N, and beside it {FAST_AXES[0]}=N, "
                f"{FAST_AXES[1]}=N or both, each once, separated by commas"
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


def make_task(config: Config) -> Task:
    """The pre-training that options ask for.

    Raises:
        ValueError: a text is missing or unfit, or the run's tokenizer is not that of its options.
    """
    text, heldout, tokenizer = data.load(
        config.corpus, config.heldout, functools.partial(make_tokenizer, config)
    )
    axes = config.fast_axes
    shape = config.size, len(tokenizer.token_bytes)
    model = LMConfig.of_size(*shape, dropout=config.dropout, **config.precision)
    return Task(
        config,
        init=functools.partial(init_params, model, config.seed),
        loss_fn=gathered(next_token_loss(model), axes) if axes else next_token_loss(model),
        examples=data.examples(text, config.sequence_length),
        heldout=data.examples(heldout, config.sequence_length),
        judge=functools.partial(
            heldout_losses, jax.jit(next_token_loss(model, train=False)), tokenizer.token_bytes
        ),
        write_files=tokenizer.save,
        param_specs=functools.partial(param_specs, axes) if axes else None,
        identity={
            "tokenizer_digest": tokenizer.digest,
            "text_digest": digest.of_arrays(text, heldout),
        },
    )


def make_tokenizer(config: Config, pieces: Sequence[str]) -> Tokenizer:
    """The tokenizer that options ask for: that of the run that goes on, or one of `pieces`.

    Raises:
        ValueError: that of the run is not what the options say, or the text is too short for one.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    path = config.folder / FILE
    if path.exists():
        return load_bpe(path, config.vocab_size)
    return train_bpe(pieces, config.vocab_size)


def heldout_losses(
    loss_fn: Callable[[Any, Any], Any], token_bytes: np.ndarray, params: Any, batches: Iterable[Any]
) -> dict[str, float]:
    """The mean loss of a held-out token in nats, and of a byte in bits; and their numbers.

    Losses of a byte can be compared between tokenizers, those of a token cannot.

    Args:
        loss_fn: from `next_token_loss`, without dropout, jitted.
        token_bytes: how many bytes each token stands for.
        params: the model's parameters.
        batches: the held-out ones.
    """
    # In a program, as a batch may lie on the devices of several processes.
    count_bytes = jax.jit(lambda targets: jnp.take(jnp.asarray(token_bytes), targets).sum())
    nats, tokens, text_bytes = 0.0, 0, 0
    for batch in batches:
        size = batch["targets"].size
        nats += size * float(loss_fn(params, batch)[0])
        tokens += size
        text_bytes += int(count_bytes(batch["targets"]))
    return {
        "heldout_loss": nats / tokens,
        "heldout_bits_per_byte": nats / text_bytes / math.log(2),
        "heldout_tokens": tokens,
        "heldout_bytes": text_bytes,
    }


WORDING = Wording(
    program="train.lm.pretrain",
    title=lambda config: f"Language model {config['size']}",
    heldout_loss="heldout_loss",
    held_out=lambda result: f"{result['heldout_bytes']:,} bytes",
    metrics=lambda _: {
        "held-out bits per byte": loss_metric("heldout_bits_per_byte"),
        "held-out loss, nats per token": Metric(lambda run: run.result["heldout_loss"]),
    },
)
PROGRAM = Program(WORDING.program, Config, make_task, WORDING.write)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
