"""Trains a toy model with Levanter's trainer, and prints what came of it as JSON.

python levanter_run.py onebit_adam|adam LEARNING_RATE     # with examples/ in PYTHONPATH
"""

import json
import logging
import pathlib
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onebit_jax import wire

STEPS, AXIS = 40, "replica"
VOCABULARY, SEQUENCES, LENGTH = 64, 8, 32


def loss_fn(model: Any, example: Any, *, key: Any = None) -> Any:
    return model.compute_next_token_loss(example, key=key)


def main(name: str, learning_rate: float) -> None:
    import haliax  # pyright: ignore[reportMissingImports]
    from levanter.models.gpt2 import Gpt2Config  # pyright: ignore[reportMissingImports]
    from levanter.models.lm_model import LmExample  # pyright: ignore[reportMissingImports]
    from levanter.optim.config import OptimizerConfig  # pyright: ignore[reportMissingImports]
    from levanter.tracker import NoopConfig  # pyright: ignore[reportMissingImports]
    from levanter.trainer import Trainer, TrainerConfig  # pyright: ignore[reportMissingImports]
    from levanter.utils.mesh import MeshConfig  # pyright: ignore[reportMissingImports]
    from levanter_onebit import ReplicaTrainer  # pyright: ignore[reportMissingImports]

    one_bit = name.startswith("onebit")
    options: dict[str, Any] = {"axis": AXIS, "onebit_warmup": 8} if one_bit else {}
    optimizer = OptimizerConfig.get_choice_class(name)(
        learning_rate=learning_rate, warmup=0.1, weight_decay=0.0, **options
    )
    batch_axes = ["data"] if one_bit else [AXIS, "data"]
    config = TrainerConfig(
        id="toy",
        num_train_steps=STEPS,
        train_batch_size=SEQUENCES,
        tracker=NoopConfig(),
        require_accelerator=False,
        log_dir=pathlib.Path(tempfile.mkdtemp()),
        mesh=MeshConfig(
            axes={AXIS: 2, "data": 2, "model": 1}, compute_mapping={"batch": batch_axes}
        ),
    )
    config.initialize()
    model = Gpt2Config(max_seq_len=LENGTH, hidden_dim=32, num_layers=2, num_heads=2)
    batch_axis, place = haliax.Axis("batch", SEQUENCES), haliax.Axis("position", LENGTH)
    rng, key = np.random.default_rng(0), jax.random.key(0)

    def example() -> Any:
        begins = rng.integers(0, VOCABULARY, SEQUENCES)[:, None]
        tokens = jnp.asarray((np.arange(LENGTH) + begins) % VOCABULARY, jnp.int32)
        return haliax.vmap(LmExample.causal, batch_axis)(haliax.named(tokens, (batch_axis, place)))

    made = optimizer.build(STEPS)
    given = {"axis": AXIS} if one_bit else {}
    trainer = (ReplicaTrainer if one_bit else Trainer)(
        config, made, loss_fn, add_default_hooks=False, **given
    )
    losses = []
    with trainer:
        vocabulary = haliax.Axis("vocab", VOCABULARY)
        state = trainer.initial_state(key, model_init=lambda: model.build(vocabulary, key=key))
        for _ in range(STEPS):
            info = trainer.train_step(state, example())
            state = info.state
            losses.append(float(info.loss))
        step = trainer._jit_train_step_fn_no_hook.lower(state, (example(),), {}).compile()
        sent = wire.collectives(step, trainer.device_mesh)
    arrays = [
        [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        for tree in (state.model, state.opt_state)
    ]
    copies = [
        {np.asarray(s.data).tobytes() for s in x.addressable_shards if s.index == index}
        for x in arrays[0]
        for index in {s.index for s in x.addressable_shards}
    ]
    large = [x for x in arrays[1] if x.size >= 2**11]
    report = {
        "losses": losses,
        "replicas_equal": all(len(same) == 1 for same in copies),
        "state": [x.addressable_shards[0].data.size / x.size for x in large],
        "sent": [[x.op, x.dtype, x.axis, x.bytes_sent] for x in sent if x.bytes_sent],
    }
    print("REPORT", json.dumps(report))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(sys.argv[1], float(sys.argv[2]))
