"""Hosts of a chosen bandwidth on one machine: a network namespace each, joined by a bridge."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

UNSHAPED = "unshaped"
# Ethernet, IPv4, and TCP with its timestamps: what a packet carries besides its payload.
_HEADER_BYTES = 14 + 20 + 32
# A segment of 64 KB must pass whole, and a burst must last longer than a timer is late. Any more
# would let a small exchange through unshaped.
_LEAST_BURST_BYTES = 128 * 1024
_BURST_SECONDS = 2e-3
_UNITS = {"mbit": 10**6, "gbit": 10**9}


def bits_per_second(bandwidth: str) -> int | None:
    """What a bandwidth's name says; None if it is not limited.

    Raises:
      ValueError: for a name that says nothing.

    >>> bits_per_second("100mbit")
    100000000
    """
    if bandwidth == UNSHAPED:
        return None
    match = re.fullmatch(r"([1-9]\d*)([mg]bit)", bandwidth)
    if not match:
        raise ValueError(
            f"bandwidth={bandwidth!r} must be a whole number of mbit or gbit, or {UNSHAPED!r}: "
            "write 100mbit or 1gbit."
        )
    return int(match[1]) * _UNITS[match[2]]


def payload_bytes(sent_bytes: float, sent_packets: float) -> float:
    """What is left of an interface's count without headers.

    The kernel hands segments of up to 64 KB to a virtual interface, which counts each as one packet
    with one header. So this holds whatever the segments' sizes were.
    """
    return sent_bytes - _HEADER_BYTES * sent_packets


def why_unavailable() -> str | None:
    """What keeps this machine from making hosts; None if nothing does."""
    try:
        with network(2) as hosts:
            hosts.shape("1gbit")
    except (OSError, RuntimeError) as error:
        return (
            f"Network namespaces need Linux, root, iproute2, util-linux and, in a container, "
            f"--privileged: {error}"
        )
    return None


class Host(NamedTuple):
    """One host: the name of its namespace and its address."""

    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        """A command line that runs `command` on this host, with a host name of its own to set."""
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", *command]


class Network:
    """Hosts, each with an `eth0` of its own; :func:`network` makes and removes them."""

    def __init__(self, hosts: list[Host], switch: str):
        self.hosts = hosts
        self._switch = switch
        self._bandwidth = UNSHAPED

    def shape(self, bandwidth: str) -> None:
        """Limits what each host sends and what it receives to `bandwidth` each."""
        if bandwidth == self._bandwidth:
            return
        rate = bits_per_second(bandwidth)
        for rank, host in enumerate(self.hosts):
            for namespace, device in (host.namespace, "eth0"), (self._switch, f"port{rank}"):
                qdisc = ["tc", "-n", namespace, "qdisc"]
                if rate is None:
                    _call(*qdisc, "del", "dev", device, "root")
                    continue
                burst = max(_LEAST_BURST_BYTES, int(rate * _BURST_SECONDS) // 8)
                limits = ["rate", f"{rate}bit", "burst", f"{burst}b", "latency", "50ms"]
                _call(*qdisc, "replace", "dev", device, "root", "tbf", *limits)
        self._bandwidth = bandwidth


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Makes `count` hosts, not yet limited, and removes them in the end, come what may.

    The bridge lies in a namespace too, so that the machine's own network is left alone.

    Raises:
      RuntimeError: the kernel refused.
    """
    # The number of the process keeps two runs apart.
    prefix = f"onebit-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = [Host(f"{prefix}-{rank}", f"10.77.0.{rank + 1}") for rank in range(count)]
    with contextlib.ExitStack() as made:

        def add(namespace: str) -> None:
            _call("ip", "netns", "add", namespace)
            made.callback(_call, "ip", "netns", "del", namespace)

        add(switch)
        _call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "bridge", "up")
        for rank, (namespace, address) in enumerate(hosts):
            add(namespace)
            port = ["peer", "name", f"port{rank}", "netns", switch]
            _call("ip", "link", "add", "eth0", "netns", namespace, "type", "veth", *port)
            _call("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _call("ip", "-n", namespace, "link", "set", device, "up")
            _call("ip", "-n", switch, "link", "set", f"port{rank}", "master", "bridge", "up")
        yield Network(hosts, switch)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
