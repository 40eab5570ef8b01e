"""Output folders: one run at a time in each, and the `config.json` that says which may go on."""

import contextlib
import fcntl
import json
import os
import pathlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from train.config import RunConfig, option_name, shared_options
from train.registry import REGISTRY

_NOTHING: Mapping[str, str] = types.MappingProxyType({})
# Of several runs within a folder, the program that made them.
_MAKER = "several_runs_of"


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Holds a folder until the block ends or the process does.

    The lock is on an open file beside the folder, so that a killed run does not hold it.

    Raises:
        ValueError: another run holds the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"--out {folder}: another run is training there; wait for it, or give another --out"
            ) from error
        yield


def check_folder(
    config: RunConfig,
    identity: Mapping[str, str] = _NOTHING,
    free: Iterable[str] | None = None,
) -> None:
    """Checks that the output folder, where there is one, holds a run of the same trajectory.

    Args:
        config: the run.
        identity: what must not have changed either, as for `write_config`.
        free: options that may have changed; None for those that leave a run's trajectory alone.

    Raises:
        ValueError: what decides the trajectory differs, or the folder is something else.
    """
    path = config.folder / "config.json"
    if not path.exists():
        if config.folder.exists() and (not config.folder.is_dir() or os.listdir(config.folder)):
            raise ValueError(
                f"--out {config.folder}: exists and is no run of this program; give another folder"
            )
        return
    earlier = _read(path)
    free = _free(config) if free is None else free
    kept = {x: y for x, y in shared_options(config).items() if x not in free}
    for name, value in (kept | dict(identity)).items():
        if earlier.get(name) != value:
            raise ValueError(
                f"--out {config.folder}: holds a run with "
                f"{option_name(name) if hasattr(config, name) else name} {earlier.get(name)}, "
                f"this one has {value}; give the same, or another --out"
            )


def _free(config: RunConfig) -> tuple[str, ...]:
    """Options that leave the trajectory alone."""
    shares = isinstance(config.schedule_warmup, float) or isinstance(config.warmup, float)
    # Those that the folder has would go on with the new number, too, once this start wrote it.
    begun = (name for name in REGISTRY if (config.folder / name).exists())
    entries = [REGISTRY[name] for name in (*config.optimizers, *begun)]
    # Workers that take local steps meet in the last one.
    follow = shares or any(entry.follows_steps or entry.local_steps for entry in entries)
    # Otherwise nothing depends on how many will follow.
    more = ("steps",) if config.schedule == "exponential" and not follow else ()
    return (*config.FREE, *more)


def check_together(program: str, config: RunConfig, runs: Sequence[RunConfig]) -> None:
    """Checks the output folder of runs that have folders of their own within it.

    One report compares all that are there, so they must differ in nothing but `RunConfig.OWN`.

    Args:
        program: the module that makes them.
        config: what was asked for.
        runs: that come of it.

    Raises:
        ValueError: the folder holds runs with other options, or something else.
    """
    if not _are_within(config, runs):
        return
    free = (*_free(config), *config.OWN)
    found = {path.parent for path in config.folder.glob("*/config.json")}
    if found - {run.folder for run in runs}:
        # Those that are not asked for again stay as they are, and as they were judged.
        free = tuple(option for option in free if option not in ("steps", "eval_batches"))
    check_folder(config, {_MAKER: program}, free)


def write_together(program: str, config: RunConfig, runs: Sequence[RunConfig]) -> None:
    """Writes the `config.json` that `check_together` reads."""
    if _are_within(config, runs):
        write_config(config, {_MAKER: program})


def _are_within(config: RunConfig, runs: Sequence[RunConfig]) -> bool:
    """Whether runs have folders within the one that was asked for."""
    return any(run.folder != config.folder for run in runs)


def _read(path: pathlib.Path) -> dict[str, Any]:
    """The options in a `config.json`; a `ValueError` where it is damaged."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: {error}. Put back a copy, or give another --out"
        ) from error


def write_config(config: RunConfig, identity: Mapping[str, str] = _NOTHING) -> None:
    """Writes `config.json` into the output folder, which is made.

    Args:
        config: the run.
        identity: what else it holds, under names that no option has.
    """
    config.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(shared_options(config) | dict(identity), indent=2) + "\n"
    (config.folder / "config.json").write_text(text, encoding="utf-8")
