"""What the processes of a run must have alike: options, code, and the output folder."""

import contextlib
import pathlib
import secrets
import time
from collections.abc import Callable
from types import ModuleType

import onebit_jax
import train
from train import digest, record
from train.config import RunConfig, option_name, shared_options

_MARK = ".seen-by-all-processes"
_LOOK_SECONDS = 10.0


def joined(
    program: str, config: RunConfig, exit_status: Callable[[BaseException], tuple[int, str] | None]
) -> contextlib.AbstractContextManager[onebit_jax.ProcessGroup]:
    """The processes of a run of a program; see `onebit_jax.process_group`.

    All of them run the same code with the same options, so that none waits for what the others do
    not do, and steps, evaluations and reports may take as long as they need.

    Args:
        program: its module.
        config: its options.
        exit_status: as for `onebit_jax.process_group`.
    """
    several = {
        "coordinator_address": config.coordinator,
        "num_processes": config.processes,
        "process_id": config.process_id,
    }
    return onebit_jax.process_group(
        **({} if config.coordinator == "auto" else several),
        timeout=config.process_timeout,
        stall_timeout=None,
        same={"the program": program} | of_options(config) | of_code(),
        exit_status=exit_status,
    )


def check_shared(folder: pathlib.Path, group: onebit_jax.ProcessGroup) -> None:
    """Makes sure that all processes see the folder that process 0 has made.

    Raises:
        ValueError: they do not.
    """
    if group.num_processes == 1:
        return
    mark = folder / _MARK
    first = group.process_id == 0
    if first:
        mark.write_text(secrets.token_hex(8), encoding="utf-8")
    group.agree({})
    # A folder of a network may show late what was written elsewhere.
    deadline = time.monotonic() + _LOOK_SECONDS
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS / 50)
    seen = mark.read_text(encoding="utf-8") if mark.exists() else "nothing"
    name = "--out must be one folder for all processes, on a disk that they share; a mark in it"
    group.agree({name: seen})
    if first:
        mark.unlink()


def of_options(config: RunConfig) -> dict[str, str]:
    """The options that all processes must have alike, as the command line has them."""
    return {option_name(name): str(value) for name, value in shared_options(config).items()}


def of_code() -> dict[str, str]:
    """Versions of what computes, and of the code itself, whose version need not tell."""
    versions = record.versions("numpy", "flax", "grain", "orbax-checkpoint", "tokenizers")
    code = {f"the code of {x.__name__}": _of_package(x) for x in (train, onebit_jax)}
    return versions | code


def _of_package(package: ModuleType) -> str:
    root = pathlib.Path(str(package.__file__)).parent
    return digest.of_files(sorted(root.rglob("*.py")))
