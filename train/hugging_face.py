"""Checkpoint folders in Hugging Face's layout: what the readers of all models have in common.

No code of a checkpoint runs: safetensors are numbers, and the rest is JSON and text.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from train.corpus import read_utf8

CONFIG, TENSORS = "config.json", "model.safetensors"


def check_files(root: pathlib.Path, *besides: Sequence[str]) -> None:
    """Raises ``ValueError`` unless a folder has both files, and one of each choice ``besides``."""
    choices = ((CONFIG,), (TENSORS,), *besides)
    missing = [names for names in choices if not any((root / name).is_file() for name in names)]
    if missing:
        raise ValueError(
            f"{root} has no {', no '.join(' or '.join(names) for names in missing)}: give a "
            f"checkpoint's folder in Hugging Face's layout"
        )


def read_config(path: pathlib.Path) -> dict[str, Any]:
    """Reads a `config.json`; a ``ValueError`` says what is wrong with it."""
    try:
        values = json.loads(read_utf8(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no configuration but {type(values).__name__}")
    return values


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads a file of safetensors; a ``ValueError`` says that it is none."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error


def refuse(path: pathlib.Path, faults: Sequence[str]) -> None:
    """Raises ``ValueError`` with all that is wrong with a file of tensors, if anything is."""
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(f"{path} does not hold the model of its {CONFIG}:\n  {listed}")


def write(root: pathlib.Path, config: Mapping[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes both files into a folder, which is made."""
    root.mkdir(parents=True, exist_ok=True)
    whole = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
    save_file(whole, root / TENSORS, metadata={"format": "pt"})
    (root / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
