"""Draws docs' pictures from records and from the planner: ``python -m docs.pictures``."""

import pathlib

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from docs.recorded_figures import read_records
from onebit_jax import plan
from train.pictures import styles

FOLDER = pathlib.Path(__file__).parent
# Of each optimizer the record, its name there, and its name in the picture.
OPTIMIZERS = (
    ("lm-default", "1-bit Adam", "1-bit Adam"),
    ("lm/lamb-default", "1-bit LAMB", "1-bit LAMB"),
    ("lm/lamb-default", "LAMB", "LAMB"),
    ("lm/first", "Muon", "Muon"),
    ("lm/first", "Muon, 4 bits", "Muon, 4 bits"),
    ("lm/first", "1-bit Muon", "1-bit Muon"),
    ("lm/first", "0/1 Adam", "0/1 Adam"),
    ("lm/first", "Local steps, 4 bits", "Local steps, 16, 4 bits"),
    ("lm/local", "Every 6 steps, 4 bits", "Local steps, 6, 4 bits"),
    ("lm/birder", "Birder", "Birder"),
    ("lm/signs", "Signum", "Signum"),
    ("lm/signs", "Lion", "Lion"),
    ("lm/signs", "Distributed Lion", "Distributed Lion"),
)
NETWORK = {
    "Adam, float32": "JAX step, Adam, float32",
    "1-bit Adam": "JAX step, 1-bit Adam",
    "DDP, float16": "ready gradients, PyTorch DDP, float16",
    "1-bit Adam, bare optimizer": "ready gradients, 1-bit Adam",
}
LINKS = {"100mbit": 0.1, "1gbit": 1.0, "10gbit": 10.0}  # Gbit/s


def recorded(stem: str, kind: str, quantity: str) -> float:
    """A value of a record."""
    found = read_records(FOLDER / "figures" / f"{stem}.json", "")
    return next(values[0] for k, q, values in found if (k, q) == (kind, quantity))


def loss_over_bytes() -> Figure:
    """The held-out loss relative to Adam, over how many times fewer bytes a run sent."""
    figure = Figure((8.5, 5), layout="constrained")
    axes = figure.subplots()
    points = [("Adam", 1.0, 0.0)]
    for stem, kind, name in OPTIMIZERS:
        # Three seeds, or the first of them.
        base = "lm-default" if stem in ("lm-default", "lm/lamb-default") else "lm/first"
        loss, sent = (
            (recorded(stem, kind, x), recorded(base, "Adam", x))
            for x in ("held-out loss", "MB sent")
        )
        points.append((name, sent[1] / sent[0], 100 * (loss[0] / loss[1] - 1)))
    looks = styles([name for name, *_ in points])
    for (name, saved, change), look in zip(points, looks, strict=True):
        axes.plot(saved, change, "o", color=look["color"])
        left = name in ("1-bit Adam", "1-bit LAMB")
        axes.annotate(
            name,
            (saved, change),
            xytext=(-7, -4) if left else (7, -4),
            ha="right" if left else "left",
            textcoords="offset points",
            fontsize=9,
        )
    axes.axhline(0, color="0.85", zorder=0)
    axes.set(xscale="log", xlim=(0.8, 600), xticks=[1, 3, 10, 30, 100])
    axes.set_xticklabels(["1x", "3x", "10x", "30x", "100x"])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("fewer bytes in the whole run than Adam")
    axes.set_ylabel("held-out loss, relative to Adam (%)")
    axes.set_title("Loss over bytes saved: language model, 1 M parameters, 8 workers")
    return figure


def seconds_over_bandwidth() -> Figure:
    """Seconds per step of BERT-Base on two hosts."""
    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind, name in NETWORK.items():
        seconds = [recorded("network-2", kind, f"s at {x}") for x in LINKS]
        look = styles([kind])[0]["color"]
        whole = name.startswith("JAX")
        axes.plot([*LINKS.values()], seconds, "o-" if whole else "o--", color=look, label=name)
    axes.set(xscale="log", yscale="log", xticks=[*LINKS.values()])
    axes.set_xticklabels(["100 Mb/s", "1 Gb/s", "10 Gb/s"])
    axes.set(xlabel="bandwidth of the network", ylabel="seconds per step")
    axes.set_title("Time per step over network bandwidth: BERT-Base, two hosts")
    axes.legend(frameon=False, fontsize=9)
    return figure


def utilization() -> Figure:
    """Compute's share of the time, as the planner predicts it for eight sites."""
    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.subplots()
    bandwidths = [5e7 * 10 ** (i / 10) for i in range(24)]
    local = plan.local_steps(32, 4)
    rows = {
        "dense bfloat16": (plan.BFLOAT16, "Adam"),
        "1-bit Adam": (plan.FLAT, "1-bit Adam"),
        "local steps, 4 bits, every 16": (plan.local_steps(16, 4), "Local steps"),
        "local steps, 4 bits, every 32": (local, "Every "),
    }
    setting = plan.Setting(parameters=1e9, workers=8, bandwidth=1e9, step_time=1.5)
    for latency, dashes in ((50e-6, "-"), (50e-3, ":")):
        for name, (optimizer, look) in rows.items():
            settings = [setting._replace(bandwidth=x, latency=latency) for x in bandwidths]
            shares = [150 / plan.predict(optimizer, x).step for x in settings]
            label = name if dashes == "-" else None
            width = 2.5 if look == "Every " else 1.5
            colour = styles([look])[0]["color"]
            axes.plot(bandwidths, shares, dashes, color=colour, label=label, linewidth=width)
    axes.plot([], [], "k:", label="the same at a latency of 50 ms")
    axes.set(xscale="log", ylim=(0, 100), xticks=[5e7, 1e8, 1e9, 1e10])
    axes.set_xticklabels(["50 Mb/s", "100 Mb/s", "1 Gb/s", "10 Gb/s"])
    axes.set(xlabel="bandwidth between sites", ylabel="compute's share of the time (%)")
    axes.set_title("Predicted: 8 sites, 10^9 parameters, 1.5 s of compute per step")
    axes.legend(frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    for draw in (loss_over_bytes, seconds_over_bandwidth, utilization):
        name = draw.__name__.replace("_", "-")
        draw().savefig(FOLDER / f"{name}.png", dpi=110)
