"""Formats and parses rates, sizes and durations; formats tables."""

import re
from collections.abc import Sequence


def _scaled(value: float, unit: str) -> str:
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while value >= 1000 and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {prefixes[power]}{unit}"


def format_rate(bandwidth: float) -> str:
    """Writes a bandwidth in bit/s: ``"4.1 Gbit/s"``."""
    return _scaled(bandwidth, "bit/s")


def format_size(count: float) -> str:
    """Writes a number of bytes: ``"2.55 GB"``."""
    return _scaled(count, "B")


def format_time(seconds: float) -> str:
    """Writes a duration, in milliseconds below a second: ``"450.0 ms"``, ``"4.3 d"``."""
    if abs(seconds) < 1:
        return f"{1e3 * seconds:.1f} ms"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            count = seconds / length
            return f"{count:.1f} {unit}" if count < 1e6 else f"{count:.3g} {unit}"
    return f"{seconds:.2f} s"


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of plain text: names at the left, then columns that end at the right.

    >>> format_table([["", "bytes"], ["all", "8"]])
    ['     bytes', 'all      8']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


_BITS = {"": 1, "bit": 1, "B": 8}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_DURATIONS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
# A smaller number without a unit lacks its unit by mistake: no card or memory is so slow.
_LEAST_BARE_RATE = 1e6
_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)"


def _matched(field: str, text: str, pattern: str) -> re.Match[str] | None:
    if not isinstance(text, str):
        raise ValueError(f"{field}={text!r} must be text, with its unit, such as 10Gbit or 50us.")
    # Only the digits 0 to 9: a message would not show the difference to other scripts' digits.
    return re.fullmatch(pattern, text.strip(), re.ASCII)


def parse_rate(field: str, text: str) -> float:
    """Reads a bandwidth in bit/s.

    Args:
      field: its name, for the error.
      text: such as ``10Gbit``, ``100 Mbit/s``, ``25GB`` (bytes) or a plain number of bit/s, of
        at least 1 Mbit/s.

    >>> parse_rate("bandwidth", "10Gbit"), parse_rate("local_bandwidth", "25GB/s")
    (10000000000.0, 200000000000.0)
    """
    match = _matched(field, text, _NUMBER + r"\s*([kMGT]?)(bit|B|)(?:/s)?")
    if not match or (match[2] and not match[3]):
        raise ValueError(
            f"{field}={text!r} must be a rate such as 10Gbit or 100Mbit, or 25GB for bytes; a "
            f"plain number is in bit/s. Write the unit out as bit or B."
        )
    rate = float(match[1]) * _PREFIXES[match[2]] * _BITS[match[3]]
    if not match[3] and rate < _LEAST_BARE_RATE:
        raise ValueError(
            f"{field}={text!r} means {format_rate(rate)}, which is too slow to be meant: write the "
            f"unit, as in 10Gbit, or the number of bit/s in full, as in 10e9."
        )
    return rate


def parse_seconds(field: str, text: str) -> float:
    """Reads a duration in seconds.

    Args:
      field: its name, for the error.
      text: such as ``50us``, ``450ms`` or a plain number of seconds.

    >>> parse_seconds("step_time", "450ms")
    0.45
    """
    match = _matched(field, text, _NUMBER + r"\s*(s|ms|us|)")
    if not match:
        raise ValueError(
            f"{field}={text!r} must be a duration such as 50us, 450ms or 0.45s; a plain number is "
            f"in seconds."
        )
    return float(match[1]) * _DURATIONS[match[2]]
