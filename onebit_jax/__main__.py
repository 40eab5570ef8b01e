"""The command ``python -m onebit_jax``."""

import argparse
import pathlib
import sys
from typing import Any

from onebit_jax import plan

_REQUIRED = (
    ("--parameters", float, "of the model: 340e6"),
    ("--workers", int, "replicas of the model that train"),
    ("--bandwidth", str, "of one node's card, each way"),
    ("--step-time", str, "of a step's compute with Adam, without exchange"),
    ("--steps", int, "of the run"),
)
# With what stands for the default of `plan.Setting`; None for that itself.
_OPTIONAL = (
    ("--warmup", float, None, "share of the steps that is an optimizer's warm-up"),
    ("--warmup-bits", int, None, "of the gradients in a warm-up: 32, 16, 8 or 4"),
    ("--every", int, None, "steps from one exchange of local steps to the next"),
    ("--local-bits", int, None, "per value that local steps exchange: 32, 8, 4, 2 or 1"),
    ("--per-node", int, None, "devices that share a card"),
    ("--shards", int, None, "devices of a worker, over whose fast links the model is split"),
    ("--overlap", float, None, "share of a step's compute that hides exchanges: 2/3 with buckets"),
    ("--latency", str, "50us", "of one message between nodes"),
    ("--local-bandwidth", str, "25GB", "between the devices of a node, as by PCIe 4.0 x16"),
    ("--memory-bandwidth", str, "1TB", "of one device"),
    ("--efficiency", float, None, "share of the bandwidth that collectives reach"),
)
_PARSED = {
    "bandwidth": plan.parse_rate,
    "local_bandwidth": plan.parse_rate,
    "memory_bandwidth": plan.parse_rate,
    "host_bandwidth": plan.parse_rate,
    "step_time": plan.parse_seconds,
    "latency": plan.parse_seconds,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m onebit_jax")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "plan",
        help="predict whether one bit pays, before any code is changed",
        description="Predicts time and volume of a run, dense and with one bit, and advises.",
        epilog="Rates are such as 10Gbit, 100Mbit or, in bytes, 25GB; durations such as 50us. "
        "Optimizers that a calibration lacks are omitted.",
        argument_default=argparse.SUPPRESS,
    )
    required = command.add_argument_group("required")
    for name, kind, text in _REQUIRED:
        required.add_argument(name, required=True, type=kind, help=text)
    for name, kind, default, text in _OPTIONAL:
        field = name.removeprefix("--").replace("-", "_")
        default = plan.Setting._field_defaults[field] if default is None else default
        text = f"{text} (default: %(default)s)"
        command.add_argument(name, type=kind, default=default, help=text)
    command.add_argument(
        "--host-bandwidth",
        help="of a node's own software between memory and card (default: no limit, as with RDMA)",
    )
    command.add_argument(
        "--calibration",
        type=pathlib.Path,
        metavar="FILE",
        help="JSON of `python -m benchmarks.step`, in place of --memory-bandwidth",
    )
    command.add_argument(
        "--utilization",
        action="store_true",
        help="print instead how much of the time is compute, over bandwidths and steps between "
        "exchanges",
    )
    return parser


def main(arguments: list[str]) -> None:
    """Runs the command; bad input ends it with exit code 2."""
    parser = _parser()
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    del options["command"]
    shares = options.pop("utilization", False)
    try:
        for field, value in options.items():
            # Python's argparse makes an empty list of `--option=--`.
            if value in ("", []):
                raise ValueError(f"--{field.replace('_', '-')} must have a value.")
            if field in _PARSED:
                options[field] = _PARSED[field](field, value)
        # 340e6 is how people write it; what is no whole number is refused with the rest.
        if options["parameters"].is_integer():
            options["parameters"] = int(options["parameters"])
        if "calibration" in options:
            options["calibration"] = plan.read_calibration(options["calibration"])
        setting = plan.Setting(**options)
        if shares:
            text = plan.utilization_table(plan.utilization(setting))
        else:
            text = plan.table(plan.plan(setting))
    except ValueError as error:
        parser.error(str(error))
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
