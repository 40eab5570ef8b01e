"""Four processes of one device each over Gloo, against one process of four devices."""

import pathlib
import socket
import subprocess
import sys
import time

import numpy as np

from tests.process_worker import WORKERS

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 600  # a loaded machine starts four interpreters slowly
TOLERANCE = 1e-5  # relative to each tensor's largest value


def run(folder, processes):
    """Runs the processes to their end; what their devices held, by name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = [folder / f"{processes}-{rank}.log" for rank in range(processes)]
    children = []
    try:
        for rank, log in enumerate(logs):
            arguments = [str(folder), str(processes), str(rank), str(port)]
            command = [sys.executable, "-m", "tests.process_worker", *arguments]
            with log.open("w") as file:
                children.append(subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file))
        deadline = time.monotonic() + SECONDS
        # Those that are left wait for one that has failed, so nobody waits for them.
        while None in (codes := [child.poll() for child in children]):
            if any(codes) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    finally:
        for child in children:
            child.kill()
            child.wait()
    output = "\n".join(f"--- {log.stem}:\n{log.read_text()[-4000:]}" for log in logs)
    assert codes == [0] * processes, f"exit codes {codes} (None: still running)\n{output}"

    held = {}
    for rank in range(processes):
        with np.load(folder / f"{processes}-{rank}.npz") as file:
            held.update(file)
    return held


def test_four_processes_train_as_one_does(tmp_path):
    together, apart = run(tmp_path, 1), run(tmp_path, WORKERS)
    assert together.keys() == apart.keys()
    for name, expected in together.items():
        if name.startswith("step"):
            np.testing.assert_array_equal(apart[name], expected, err_msg=name)
        elif expected.dtype != np.uint8:  # bytes hold the scales, whose last bits may differ
            allowed = TOLERANCE * np.abs(expected).max(initial=0)
            np.testing.assert_allclose(apart[name], expected, 0, allowed, err_msg=name)
    compensated = [
        value
        for name, value in together.items()
        if name.startswith("step") and ".worker_compensated.value[0]" in name
    ]
    assert len(np.unique(compensated, axis=0)) == WORKERS
