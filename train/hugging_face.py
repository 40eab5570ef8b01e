"""Checkpoint folders in Hugging Face's layout: what the readers of all models have in common.

No code of a checkpoint runs: safetensors are numbers, and the rest is JSON and text.
"""

import json
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from flax import traverse_util
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from train.corpus import read_utf8

# A path in a tree of parameters.
Place = tuple[str | int, ...]
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
    """Reads a file of JSON as `config.json`; a ``ValueError`` says what is wrong with it."""
    try:
        values = json.loads(read_utf8(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no configuration but {type(values).__name__}")
    return values


def sizes_of(
    values: Mapping[str, Any], names: Mapping[str, str], path: pathlib.Path
) -> dict[str, Any]:
    """The sizes of a model that a `config.json` gives.

    Args:
        values: of the file.
        names: what it calls them, by our names; `hidden` and `heads`, which divide it, among them.
        path: of the file.

    Raises:
        ValueError: sizes are missing, or no numbers that such a model can have; all are named.
    """
    wrong = [
        f"{name} is {values[name]!r:.60}, not a whole number of at least 1, below 2**31"
        if name in values
        else f"{name} is missing"
        for name in names.values()
        if not (type(values.get(name)) is int and 1 <= values[name] < 2**31)
    ]
    hidden, heads = names["hidden"], names["heads"]
    if not wrong and values[hidden] % values[heads]:
        wrong = [f"{hidden} {values[hidden]} is no multiple of {heads} {values[heads]}"]
    if wrong:
        raise ValueError(f"{path} is no configuration of this model: {'; '.join(wrong)}")
    return {ours: values[name] for ours, name in names.items()}


def check_architecture(
    path: pathlib.Path, found: Mapping[str, Any], expected: Mapping[str, Any], but: str = ""
) -> None:
    """Raises ``ValueError`` for an entry of a `config.json` that is another one than expected."""
    wrong = [
        f"{name} is {found.get(name)!r}, not {value!r}"
        for name, value in expected.items()
        if found.get(name) != value
    ]
    if wrong:
        raise ValueError(f"{path} is of another architecture{but}: {'; '.join(wrong)}")


def check_layers(layers: int, tensors: Iterable[str], prefix: str, path: pathlib.Path) -> None:
    """Checks a number of layers against the names of tensors, before trees of it are made.

    Raises:
        ValueError: the file has no tensor of the last layer.
    """
    if not any(name.startswith(f"{prefix}{layers - 1}.") for name in tensors):
        raise ValueError(
            f"{path} does not hold the model of its {CONFIG}: num_hidden_layers is {layers}, but "
            f"no tensor is called {prefix}{layers - 1}"
        )


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads a file of safetensors; a ``ValueError`` says that it is none."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error


def to_params(
    tensors: Mapping[str, np.ndarray],
    places: Mapping[str, Place],
    shapes: Any,
    path: pathlib.Path,
    optional: Collection[str] = (),
) -> dict[Any, Any]:
    """The tensors of a file as parameters, float32; a `kernel` is transposed in the file.

    Args:
        tensors: by name.
        places: where each of them belongs.
        shapes: parameters, or what has their shapes.
        path: of the file.
        optional: parts that a file has or has not, as wholes.

    Raises:
        ValueError: tensors are missing, too many or of other shapes, all of which are named.
    """
    of_place = cast(Mapping[Any, Any], traverse_util.flatten_dict(shapes))
    flat: dict[Place, np.ndarray] = {}
    present = {places[name][0] for name in tensors if name in places}
    faults = []
    for name, place in places.items():
        step = -1 if place[-1] == "kernel" else 1
        expected = of_place[place].shape[::step]
        if name in tensors:
            if tensors[name].shape != expected:
                faults.append(f"{name} has shape {tensors[name].shape}, not {expected}")
            value = np.asarray(tensors[name], np.float32)
            flat[place] = value.T if step < 0 else value
        elif place[0] not in optional or place[0] in present:
            faults.append(f"{name} is missing")
    faults += [f"{name} is not a part of this model" for name in tensors if name not in places]
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(f"{path} does not hold the model of its {CONFIG}:\n  {listed}")
    return traverse_util.unflatten_dict(flat)


def to_tensors(params: Any, places: Mapping[str, Place]) -> dict[str, np.ndarray]:
    """The tensors of a file of parameters, as far as they are there: undoes `to_params`."""
    flat: Mapping[Any, Any] = traverse_util.flatten_dict(params)
    found = {name: np.asarray(flat[place]) for name, place in places.items() if place in flat}
    return {
        name: value.T if places[name][-1] == "kernel" else value for name, value in found.items()
    }


def write(root: pathlib.Path, config: Mapping[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes both files into a folder, which is made."""
    root.mkdir(parents=True, exist_ok=True)
    whole = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
    save_file(whole, root / TENSORS, metadata={"format": "pt"})
    (root / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
