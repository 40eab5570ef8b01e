"""Trains a small network on all devices of one host or of many; docs/start.md has the launch lines.

python examples/hosts.py                                  # all GPUs or TPU chips of this host
srun python examples/hosts.py --nodes 2                   # Slurm; Open MPI 4 in the same way
python examples/hosts.py --nodes 2 --coordinator HOST:PORT --processes 2 --process-id I
python examples/hosts.py --cpu-devices 4                  # simulated, on any machine
"""

import argparse
import socket
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax

ROWS_A_DEVICE, STEPS = 64, 1000


def await_process_0(address: str, seconds: float) -> None:
    """Ends this process with a line where JAX would abort it with a stack trace."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        sys.exit(f"error: --coordinator {address}: expected HOST:PORT, such as node01:12345")
    problem, end = None, time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with socket.create_connection((host, int(port)), timeout=seconds):
                return
        except OSError as error:
            problem = error
            time.sleep(0.2)
    sys.exit(f"error: --coordinator {address}: no process 0 there in {seconds} s ({problem})")


def meet(options: argparse.Namespace) -> None:
    """Joins this process to the others, or ends it with the reason why it cannot."""
    chosen = {}
    if options.coordinator is not None:
        if options.processes is None or options.process_id is None:
            sys.exit("error: --coordinator needs --processes N and --process-id I, I from 0 to N-1")
        if options.process_id > 0:
            await_process_0(options.coordinator, options.timeout)
        chosen = {
            "coordinator_address": options.coordinator,
            "num_processes": options.processes,
            "process_id": options.process_id,
        }
    elif options.nodes == 1:
        return
    try:
        jax.distributed.initialize(
            **chosen,
            initialization_timeout=options.timeout,
            heartbeat_timeout_seconds=20,
            shutdown_timeout_seconds=20,
        )
    except ValueError as error:
        sys.exit(
            f"error: JAX finds no cluster here that it knows ({error}): start this under Slurm or "
            "Open MPI 4, or give --coordinator HOST:PORT --processes N --process-id I"
        )


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
    return jax.make_mesh((nodes, len(devices) // nodes), ("node", "local"))


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
    batch = {k: jax.make_array_from_process_local_data(by_worker, v) for k, v in rows.items()}

    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    for i in range(STEPS):
        params, opt_state, metrics = step(params, opt_state, batch)
        if i % 200 == 199:
            report(f"{i + 1} loss {metrics['loss']:.4f} phase {metrics['phase']}")
    sent = onebit_jax.wire.by_phase(step, params, opt_state, batch, mesh=mesh)
    report(onebit_jax.wire.table(sent))


def main() -> None:
    """Reads the options, and trains."""
    parser = argparse.ArgumentParser(description="Trains a small network on one or many hosts.")
    parser.add_argument(
        "--nodes", type=int, default=1, help="hosts, or slices, between which bits travel"
    )
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, which all hosts reach")
    parser.add_argument("--processes", type=int, help="of all hosts together")
    parser.add_argument("--process-id", type=int, help="this one's number, from 0")
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for the others")
    parser.add_argument(
        "--cpu-devices", type=int, help="simulate so many on the CPU of each process"
    )
    options = parser.parse_args()
    if options.nodes < 1:
        parser.error(f"--nodes {options.nodes}: expected 1 or more")
    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    meet(options)
    mesh = make_mesh(options.nodes, bool(options.cpu_devices))
    kind = jax.devices()[0].device_kind
    count = f"{jax.process_count()} processes, {jax.device_count()} devices ({kind})"
    report(f"{count}, {dict(mesh.shape)}")
    train(mesh)


if __name__ == "__main__":
    main()
