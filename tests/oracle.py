"""Trajectories recorded from DeepSpeed, as tests read them."""

import json
import pathlib

import numpy as np


class Recording:
    """One file of `oracle/`: a fixed tape of gradients and what DeepSpeed made of it."""

    def __init__(self, path: pathlib.Path):
        self._data = np.load(path)
        self.hyperparameters = json.loads(str(self._data["meta"]))
        self.names = self.hyperparameters["order"]
        # Call 0 discards its gradient and changes nothing: update t is call t + 1.
        self.learning_rates = self._data["lr"][1:]
        self.initial = {name: self._data[f"p0/{name}"] for name in self.names}

    def tree(self, kind: str) -> dict[str, np.ndarray]:
        """What was recorded for every tensor, `[updates, workers, ...]`: `g`, `p`, `we`, `se`."""
        return {name: self._data[f"{kind}/{name}"][1:] for name in self.names}

    def array(self, kind: str) -> np.ndarray:
        """What was recorded of the whole model, `[updates, workers, ...]`, such as LAMB's `we`."""
        return self._data[kind][1:]
