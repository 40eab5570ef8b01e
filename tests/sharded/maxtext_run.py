"""Runs MaxText's pre-training by the launcher in `examples`, and prints what came of it as JSON.

python maxtext_run.py LAUNCHER|none BASE_YML [OPTION=VALUE...]
"""

import importlib.util
import json
import sys
from typing import Any

import jax
import numpy as np

from onebit_jax import wire


def report(state: Any, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What a step sends, whether replicas agree, and what a device holds of the optimizer."""
    leaves = jax.tree.leaves(state.inner_state)
    mesh = next(x.sharding.mesh for x in leaves if isinstance(x.sharding, jax.NamedSharding))
    floats = [x for x in jax.tree.leaves(state.inner_state.model) if x.dtype == np.float32]
    of_model = [np.asarray(x) for x in floats]
    kept = jax.tree.leaves(state.inner_state.optimizer)
    return {
        # A branch that is never taken is MaxText's own synchronization.
        "sent": [
            [x.op, x.dtype, x.axis, x.operand_bytes]
            for x in wire.collectives(compiled, mesh)
            if x.group_size > 1 and not x.where.startswith("conditional")
        ],
        "replicas_differ_by": max(float(abs(x - x[:1]).max()) for x in of_model),
        "state_bytes": sum(x.addressable_shards[0].data.nbytes for x in kept),
    }


def main(launcher: str, arguments: list[str]) -> None:
    from absl import app
    from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]

    run = train.main
    if launcher != "none":
        spec: Any = importlib.util.spec_from_file_location("launcher", launcher)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        run = module.main
    compiled: list[jax.stages.Compiled] = []
    lowered_type: Any = jax.stages.Lowered
    compile_program, train_loop = lowered_type.compile, train.train_loop

    def compile_and_keep(lowered: Any, *args: Any, **options: Any) -> Any:
        compiled.append(compile_program(lowered, *args, **options))
        return compiled[-1]

    def loop(*args: Any) -> Any:
        state = train_loop(*args)
        print("REPORT", json.dumps(report(state, compiled[0])))
        return state

    lowered_type.compile, train.train_loop = compile_and_keep, loop
    app.run(run, [sys.argv[0], *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
