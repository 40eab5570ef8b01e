"""The benchmark of a shaped network: its pure parts, and a run of it with two hosts."""

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.network import hosts, plot
from benchmarks.network.__main__ import Options, joined, main
from benchmarks.network.report import print_tables, table

ROOT = pathlib.Path(__file__).resolve().parents[2]
DENSE, ONEBIT = "Adam, float32", "1-bit Adam"


@pytest.mark.parametrize(
    ("name", "bits"), [("100mbit", 10**8), ("1gbit", 10**9), ("10gbit", 10**10), ("unshaped", None)]
)
def test_bandwidths(name, bits):
    assert hosts.bits_per_second(name) == bits


@pytest.mark.parametrize("name", ["", "1", "1 gbit", "0gbit", "-1gbit", "1.5gbit", "1kbit"])
def test_refuses_what_is_no_bandwidth(name):
    with pytest.raises(ValueError, match=f"bandwidth='{name}' must be .* write 100mbit"):
        hosts.bits_per_second(name)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(bandwidths=("fast",)), "bandwidth='fast'"),
        (Options(kinds=(DENSE, "SGD")), "kinds={'SGD'} must be among 'Adam, float32'"),
    ],
)
def test_refuses_options_before_anything_is_timed(options, expected):
    with pytest.raises(ValueError, match=expected):
        main(options)


def test_says_what_the_machine_lacks(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "need Linux, root, iproute2" in (hosts.why_unavailable() or "")
    with pytest.raises(SystemExit, match="need Linux, root, iproute2"):
        main(Options())


def test_a_packet_carries_66_bytes_of_headers():
    full_packets = 1000
    assert hosts.payload_bytes(full_packets * (1448 + 66), full_packets) == full_packets * 1448


def figure(seconds, sent, packets, wire):
    return {"seconds": seconds, "sent": sent, "packets": packets, "wire_bytes": wire}


def test_figures_of_two_turns_add_up():
    first = figure([1.0], 10, 1, 8)
    assert joined(None, first) == first
    again = {"seconds": [2.0, 3.0], "sent": 20, "packets": 2}
    assert joined(first, again) == {"seconds": [1.0, 2.0, 3.0], "sent": 30, "packets": 3}


def test_table_has_medians_and_bytes_a_step():
    dense = figure([0.2, 0.4, 0.3], 3 * 4_066_000, 3 * 1000, 4_000_000)
    other = figure([0.1], 2e6, 0, None)
    head, *lines = table({DENSE: dense, "DDP": other}, DENSE).splitlines()
    assert head.split() == [
        *("ms,", "median", "least", "most", "steps", "faster"),
        *("sent,", "MB", "payload", "program", "ratio"),
    ]
    cells = ["300.0", "200.0", "400.0", "3", "1.00", "4.07", "4.00", "4.00", "1.000"]
    assert lines[0].removeprefix(DENSE).split() == cells
    assert lines[1].split() == ["DDP", "100.0", "100.0", "100.0", "1", "3.00", "2.00", "2.00"]


def test_table_without_the_kind_to_compare_with():
    assert " nan " in table({ONEBIT: figure([0.1], 1, 0, 1)}, DENSE)


def test_prints_how_much_faster_the_readme_loop_is(capsys):
    kinds = {DENSE: figure([3.0], 1, 0, 1), ONEBIT: figure([0.5], 1, 0, None)}
    made = {"hosts": 2, "bandwidth": "1gbit", "kinds": kinds}
    given_up = {2: {"DDP": "1gbit: no answer in 300 s"}}
    print_tables({"elements": 8, "tables": [made], "given_up": given_up}, DENSE)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "2 hosts, 1gbit, 8 elements"
    assert lines[-2] == f"README's loop, 1-bit Adam: 6.00 times as fast as {DENSE}"
    assert lines[-1] == "DDP: given up with 2 hosts at 1gbit: no answer in 300 s"


def test_draws_kinds_that_lack_a_bandwidth(tmp_path):
    seconds = {DENSE: figure([1.0], 1, 0, 1)}
    tables = [
        {"hosts": 2, "bandwidth": "unshaped", "kinds": seconds},
        {"hosts": 2, "bandwidth": "1gbit", "kinds": seconds | {ONEBIT: figure([0.1], 1, 0, 1)}},
        {"hosts": 4, "bandwidth": "1gbit", "kinds": {}},
    ]
    plot.draw(tables, "what, where, when", tmp_path / "network.png")
    assert (tmp_path / "network.png").stat().st_size > 0


@pytest.fixture(scope="module")
def machine():
    if reason := hosts.why_unavailable():
        pytest.skip(f"cannot make hosts: {reason}")


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


@pytest.mark.usefixtures("machine")
def test_removes_its_hosts_after_an_error():
    before = namespaces()

    def fail():
        with hosts.network(2) as network:
            assert len(namespaces() - before) == 3
            network.shape("1gbit")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert namespaces() <= before


@pytest.mark.slow
@pytest.mark.usefixtures("machine")
def test_two_hosts_send_what_the_program_says(tmp_path):
    path = tmp_path / "network.json"
    options = ["--hosts", "2", "--bandwidths", "1gbit", "--kinds", DENSE, ONEBIT]
    options += ["--shape", "128", "128", "--rounds", "2", "--steps", "2", "--json", str(path)]
    command = [sys.executable, "-m", "benchmarks.network", *options]
    before = namespaces()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 hosts, 1gbit, 262,144 elements" in done.stdout
    assert namespaces() <= before
    assert path.with_suffix(".png").exists()

    figures = json.loads(path.read_text())["figures"]
    assert figures["given_up"] == {"2": {}}
    [at_1gbit] = figures["tables"]
    kinds = at_1gbit["kinds"]
    for kind in DENSE, ONEBIT:
        steps = len(kinds[kind]["seconds"])
        assert steps == 4
        payload = hosts.payload_bytes(kinds[kind]["sent"], kinds[kind]["packets"]) / steps
        # Gloo's own messages and those that keep the processes together are in the count too.
        assert kinds[kind]["wire_bytes"] <= payload < 1.02 * kinds[kind]["wire_bytes"] + 4096
    assert kinds[DENSE]["wire_bytes"] > 31 * kinds[ONEBIT]["wire_bytes"]
