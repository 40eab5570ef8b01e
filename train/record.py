"""What every program writes beside its figures: machine, versions, commit and command."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax


def machine() -> dict[str, Any]:
    """The machine as far as it says what it is."""
    # Elsewhere than on Linux there is none.
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, jax and the named packages; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "optax", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def where_and_when(record: Mapping[str, Any]) -> str:
    """Machine, version of JAX and day of a record, for the title of a picture.

    >>> made = {"device": "cpu", "cores": 2}
    >>> where_and_when({"machine": made, "versions": {"jax": "0.10.2"}, "date": "2026-11-25"})
    'simulated on 2 CPU cores, JAX 0.10.2, 2026-11-25'
    """
    place = record["machine"]
    where = (
        f"simulated on {place['cores']} CPU cores" if place["device"] == "cpu" else place["device"]
    )
    return ", ".join(
        x for x in (where, f"JAX {record['versions']['jax']}", record.get("date")) if x
    )


def commit() -> str:
    """The commit of this code, with "-dirty" if tracked files differ; "unknown" without git."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            describe, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def context(*packages: str) -> dict[str, Any]:
    """Machine, versions, day and commit of what is measured now."""
    return {
        "machine": machine(),
        "versions": versions(*packages),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }


def write(path: pathlib.Path, options: Any, figures: Any, *packages: str) -> None:
    """Writes figures as JSON.

    Args:
      path: the file.
      options: the program's options, a dataclass.
      figures: what was measured.
      *packages: whose versions matter besides jax's.

    Raises:
      SystemExit: the file cannot be written; its text is printed.
    """
    main = sys.modules["__main__"].__spec__
    command = (
        ["python", "-m", main.name.removesuffix(".__main__")] if main else ["python", sys.argv[0]]
    )
    record = {
        "command": shlex.join([*command, *sys.argv[1:]]),
        **context(*packages),
        "options": dataclasses.asdict(options),
        "figures": figures,
    }
    text = json.dumps(record, indent=1, default=str) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        # Hours may have gone into what would be lost.
        print(text)
        raise SystemExit(f"error: {path} cannot be written ({error}); its text is above") from error
