"""The command ``python -m onebit_jax``."""

import argparse
import math
import pathlib
import sys

from onebit_jax import plan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m onebit_jax")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "plan",
        help="predict whether one bit pays, before any code is changed",
        description="Predicts time and volume of a run, dense and with one bit, and advises.",
        epilog="Rates are such as 10Gbit, 100Mbit or, in bytes, 25GB; durations such as 50us. "
        "Optimizers that a calibration does not have are left out.",
    )
    defaults = plan.Setting._field_defaults
    required = command.add_argument_group("required")
    required.add_argument("--parameters", required=True, type=float, help="of the model: 340e6")
    required.add_argument("--workers", required=True, type=int, help="devices that train")
    required.add_argument("--bandwidth", required=True, help="of one node's card, each way")
    required.add_argument(
        "--step-time", required=True, help="of a step's compute with Adam, without exchange"
    )
    required.add_argument("--steps", required=True, type=int, help="of the run")
    command.add_argument(
        "--warmup",
        type=float,
        default=defaults["warmup"],
        help="share of the steps that is an optimizer's warm-up (default: %(default)s)",
    )
    command.add_argument(
        "--warmup-bits",
        type=int,
        default=defaults["warmup_bits"],
        help="of the gradients in a warm-up: 32, 16, 8 or 4 (default: %(default)s)",
    )
    command.add_argument(
        "--every",
        type=int,
        default=defaults["every"],
        help="steps from one exchange of local steps to the next (default: %(default)s)",
    )
    command.add_argument(
        "--local-bits",
        type=int,
        default=defaults["local_bits"],
        help="per value that local steps exchange: 32, 8, 4, 2 or 1 (default: %(default)s)",
    )
    command.add_argument(
        "--per-node",
        type=int,
        default=defaults["per_node"],
        help="devices that share a card (default: %(default)s)",
    )
    command.add_argument(
        "--latency", default="50us", help="of one message between nodes (default: %(default)s)"
    )
    command.add_argument(
        "--local-bandwidth",
        default="25GB",
        help="between the devices of a node (default: %(default)s, PCIe 4.0 x16)",
    )
    command.add_argument(
        "--memory-bandwidth", default="1TB", help="of one device (default: %(default)s)"
    )
    command.add_argument(
        "--host-bandwidth",
        help="of a node's own software between memory and card (default: no limit, as with RDMA)",
    )
    command.add_argument(
        "--efficiency",
        type=float,
        default=defaults["efficiency"],
        help="share of the bandwidth that collectives reach (default: %(default)s)",
    )
    command.add_argument(
        "--calibration",
        type=pathlib.Path,
        metavar="FILE",
        help="JSON of `python -m benchmarks.step`, in place of --memory-bandwidth",
    )
    return parser


def main(arguments: list[str]) -> None:
    """Runs the command; bad input ends it with exit code 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        # 340e6 is how people write it; what is no whole number is refused with the rest.
        whole = options.parameters.is_integer()
        setting = plan.Setting(
            parameters=int(options.parameters) if whole else options.parameters,
            workers=options.workers,
            bandwidth=plan.parse_rate("bandwidth", options.bandwidth),
            step_time=plan.parse_seconds("step_time", options.step_time),
            steps=options.steps,
            warmup=options.warmup,
            warmup_bits=options.warmup_bits,
            every=options.every,
            local_bits=options.local_bits,
            per_node=options.per_node,
            latency=plan.parse_seconds("latency", options.latency),
            local_bandwidth=plan.parse_rate("local_bandwidth", options.local_bandwidth),
            memory_bandwidth=plan.parse_rate("memory_bandwidth", options.memory_bandwidth),
            efficiency=options.efficiency,
            host_bandwidth=(
                plan.parse_rate("host_bandwidth", options.host_bandwidth)
                if options.host_bandwidth
                else math.inf
            ),
            calibration=options.calibration and plan.read_calibration(options.calibration),
        )
        result = plan.plan(setting)
    except ValueError as error:
        parser.error(str(error))
    print(plan.table(result))


if __name__ == "__main__":
    main(sys.argv[1:])
