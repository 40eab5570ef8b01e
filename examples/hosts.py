"""Trains a small network on all devices of one host or many; docs/clusters.md has launch lines.

python examples/hosts.py                                  # all GPUs or TPU chips of this host
srun python examples/hosts.py --nodes 2                   # Slurm; Open MPI 4 in the same way
python examples/hosts.py --nodes 2 --coordinator HOST:PORT --processes 2 --process-id I
python examples/hosts.py --cpu-devices 4                  # simulated, on any machine
"""

import argparse
import socket
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.transforms.algorithm import PHASES

ROWS_A_DEVICE, STEPS = 64, 1000


def make_mesh(nodes: int, simulated: bool) -> jax.sharding.Mesh:
    """A row of devices for each node, or an end with the reason why there is none."""
    devices = jax.devices()
    if devices[0].platform == "cpu" and not simulated:
        sys.exit(
            f"error: JAX finds no accelerator on {socket.gethostname()}: "
            "pip install 'jax[cuda13]', and see what nvidia-smi says; or give --cpu-devices 4"
        )
    if len(devices) % nodes:
        sys.exit(
            f"error: {len(devices)} devices in {jax.process_count()} processes do not divide "
            f"among --nodes {nodes}"
        )
    shape, names = (nodes, len(devices) // nodes), ("node", "local")
    if len({getattr(device, "slice_index", 0) for device in devices}) == 1:
        return jax.make_mesh(shape, names)
    # Of several TPU slices, which jax.make_mesh refuses.
    rows = mesh_utils.create_hybrid_device_mesh((1, shape[1]), (nodes, 1), devices)
    return jax.sharding.Mesh(rows, names, axis_types=(jax.sharding.AxisType.Explicit,) * 2)


def report(text: str) -> None:
    """Prints it once, not in every process."""
    if jax.process_index() == 0:
        print(text, flush=True)


def loss_fn(params, batch):
    """Mean squared error of a network with one hidden layer."""
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def train(mesh: jax.sharding.Mesh) -> None:
    """Trains, and reports what each phase sends."""
    axes = mesh.axis_names
    tx = onebit_jax.onebit_adam(1e-2, weight_decay=0.01, axis_name=axes)
    # The same on all processes; each has rows of its own.
    params = {
        "in": 0.3 * jax.random.normal(jax.random.key(0), (8, 64)),
        "out": jnp.zeros((64, 1)),
    }
    rng = np.random.default_rng(jax.process_index())
    x = rng.normal(size=(ROWS_A_DEVICE * jax.local_device_count(), 8)).astype(np.float32)
    rows = {"x": x, "y": np.sin(x.sum(1, keepdims=True))}
    by_worker = NamedSharding(mesh, P(axes))
    # Told the number of all rows, JAX refuses a process that has fewer than its share.
    total = ROWS_A_DEVICE * jax.device_count()
    batch = {
        k: jax.make_array_from_process_local_data(by_worker, v, (total, *v.shape[1:]))
        for k, v in rows.items()
    }

    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    for i in range(STEPS):
        params, opt_state, metrics = step(params, opt_state, batch)
        if i % 200 == 199:
            report(f"{i + 1} loss {metrics['loss']:.4f} {PHASES[metrics['phase']]}")
    sent = onebit_jax.wire.by_phase(step, params, opt_state, batch, mesh=mesh)
    report(onebit_jax.wire.table(sent))


def main() -> None:
    """Reads the options, and trains."""
    parser = argparse.ArgumentParser(description="Trains a small network on one or many hosts.")
    parser.add_argument(
        "--nodes", type=int, default=1, help="hosts, or TPU slices, between which bits travel"
    )
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, which all hosts reach")
    parser.add_argument("--processes", type=int, help="total number of processes")
    parser.add_argument("--process-id", type=int, help="index of this process, from 0")
    parser.add_argument(
        "--timeout", type=int, default=60, help="seconds to wait for the others, 3 or more"
    )
    parser.add_argument(
        "--cpu-devices", type=int, help="simulate this number of CPU devices per process"
    )
    options = parser.parse_args()
    if options.nodes < 1:
        parser.error(f"--nodes {options.nodes}: expected 1 or more")
    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    if options.coordinator or options.nodes > 1:
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process_id,
            initialization_timeout=options.timeout,
            heartbeat_timeout_seconds=options.timeout // 3,
            shutdown_timeout_seconds=options.timeout,
        )
    mesh = make_mesh(options.nodes, bool(options.cpu_devices))
    processes = jax.process_count()
    count = f"{processes} {'process' if processes == 1 else 'processes'}, {jax.device_count()}"
    sizes = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    report(f"{count} {jax.devices()[0].device_kind} devices, mesh {sizes}")
    train(mesh)


if __name__ == "__main__":
    main()
