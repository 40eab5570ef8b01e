"""Trains for a chosen time under a random sequence of faults, and checks the run after each.

    python -m benchmarks.soak --minutes 30
    python -m benchmarks.soak --minutes 5 --seed 1 --out runs/soak

First a run of two processes that nothing disturbs, some of whose batches make a worker's gradient
NaN, infinite or too large to be squared. Then the same run again and again until the time is up,
each time with every kind of fault in an order and at moments that the seed decides. Kinds that were
not made yet come first, and the time is extended until each of them was made once. After every
fault the run must go on: its losses equal those of the undisturbed run bit for bit until the number
of workers is changed, and are within 2 % of them after that; the bad batches, and no others, are
left out; replicas are compared at every checkpoint.

Where Linux, root and iproute2 allow it, each process has a network namespace of its own and the
output folder a small file system; elsewhere the faults that need these are named and left out.
"""

import argparse
import contextlib
import json
import pathlib
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.cluster import places
from benchmarks.soak import faults
from benchmarks.soak.training import Training, WrongError

_PROCESSES = 2
# The longest wait, in seconds, from a run that goes on to the next fault.
_PAUSE = 6.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a run was lost."""
    options = _options(arguments)
    out = pathlib.Path(options.out).resolve()
    if out.exists():
        print(f"error: --out {out} exists; give another folder", file=sys.stderr)
        return 2
    disk = out / "disk"
    with contextlib.ExitStack() as made:
        found = made.enter_context(places(_PROCESSES))
        kinds = dict(faults.EVERYWHERE)
        without = faults.small_disk(disk)
        if not without:
            made.callback(faults.unmount, disk)
            kinds |= faults.ON_SMALL_DISK
        if found.network is not None:
            kinds |= faults.IN_NAMESPACES
        for why in filter(None, (found.why, without)):
            print(f"left out: {why}", flush=True)

        def training(name: str) -> Training:
            return Training(
                disk / name,
                out / "logs" / name,
                found,
                seed=options.seed,
                steps=options.steps,
                timeout=options.process_timeout,
            )

        undisturbed = training("undisturbed")
        made.callback(undisturbed.end)
        undisturbed.start()
        while not undisturbed.finished:
            undisturbed.await_progress()
        undisturbed.codes(60, *undisturbed.ranks)
        undisturbed.check(undisturbed, resized_at=None)
        events, lost = _soak(options, training, kinds, undisturbed)
        bad = len(undisturbed.bad_steps(options.steps))
    summary = _summary(options, events, lost, kinds, bad)
    (out / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (out / "summary.md").write_text(summary)
    print(summary)
    return 1 if lost else 0


def _soak(
    options: argparse.Namespace,
    training: Any,
    kinds: dict[str, faults.Fault],
    undisturbed: Training,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs under faults until the time is up and each was made; what was done and what was lost."""
    rng, events, lost = random.Random(options.seed), [], []
    until, number = time.monotonic() + 60 * options.minutes, 0
    missing = {*kinds, faults.RESIZE}
    while time.monotonic() < until or missing:
        number += 1
        run = training(f"run-{number}")
        try:
            for event in _one_run(run, rng, kinds, missing, undisturbed, until):
                events.append(event | {"run": number})
                print(json.dumps(events[-1]), flush=True)
        except WrongError as error:
            lost.append(f"run {number}: {error}")
            print(f"LOST: {lost[-1]}", flush=True)
        finally:
            run.end()
            shutil.rmtree(run.folder, ignore_errors=True)
            for leftover in run.folder.parent.glob("filler"):
                leftover.unlink()
    return events, lost


def _one_run(
    run: Training,
    rng: random.Random,
    kinds: dict[str, faults.Fault],
    missing: set[str],
    undisturbed: Training,
    until: float,
) -> Any:
    """One run to its end, or to the end of the time; yields what was done to it.

    Each kind of fault that has been made, whatever came of it, is taken out of `missing`.
    """
    resized_at: int | None = None
    order = sorted(rng.sample(list(kinds), len(kinds)), key=lambda kind: kind not in missing)
    # Not at once, since losses are only nearly the same from then on; every run has its turn of it.
    bound = min if faults.RESIZE in missing else max
    place = bound(rng.randrange(2, 5), len(missing - {faults.RESIZE}))
    order.insert(place, faults.RESIZE)
    run.start()
    while not run.finished and (time.monotonic() < until or missing):
        kind = order.pop(0) if order else rng.choice([*kinds, faults.RESIZE])
        # Before the first checkpoint too, and while JAX still starts or compiles.
        at_once = kind in ("kill -9", "SIGTERM") and rng.random() < 0.3
        if not at_once:
            run.await_progress()
            time.sleep(_PAUSE * rng.random())
        if run.finished:
            break
        saved = run.saved()
        if kind == faults.RESIZE:
            said = faults.resize(run, rng)
            resized_at = run.saved() if resized_at is None else resized_at
        else:
            try:
                said = kinds[kind](run, rng)
            except WrongError:
                if run.finished:  # before the fault came
                    break
                missing.discard(kind)
                raise
        missing.discard(kind)
        if not run.running() and not run.finished:
            if run.saved() < saved:
                raise WrongError(f"{kind}: checkpoint {saved} is gone, {run.saved()} is the last")
            run.start()
        if not at_once:
            run.await_progress()
        compared = run.check(undisturbed, resized_at=resized_at)
        yield {"kind": kind, "said": said, "step": run.saved(), "compared": compared}
    if run.finished:
        run.codes(60, *run.ranks)
        compared = run.check(undisturbed, resized_at=resized_at)
        ours, theirs = (of.result()["heldout_loss"] for of in (run, undisturbed))
        yield {
            "kind": "finished",
            "said": f"held out {ours}, undisturbed {theirs}",
            "step": compared,
        }
        if abs(ours / theirs - 1) > (0 if resized_at is None else 0.01):
            raise WrongError(f"held-out loss {ours}, undisturbed {theirs}")


def _summary(
    options: argparse.Namespace,
    events: list[dict[str, Any]],
    lost: list[str],
    kinds: dict[str, faults.Fault],
    bad: int,
) -> str:
    count = Counter(event["kind"] for event in events)
    lines = [
        f"{options.minutes:g} minutes, seed {options.seed}",
        "",
        "| fault | made and survived |",
    ]
    lines += ["| --- | --- |"]
    lines += [f"| {kind} | {count[kind]} |" for kind in (*kinds, faults.RESIZE)]
    lines += [f"| bad batches, in each whole run of {options.steps} steps | {bad} |"]
    lines += ["", f"Runs that came to their end: {count['finished']}. Lost: {len(lost)}."]
    return "\n".join([*lines, *lost]) + "\n"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="for how long")
    parser.add_argument("--seed", type=int, default=0, help="of faults, batches and bad batches")
    parser.add_argument("--steps", type=int, default=4000, help="of each run, 1,000 or more")
    parser.add_argument("--process-timeout", type=int, default=45, help="as of the programs")
    parser.add_argument("--out", default="runs/soak", help="a folder that is not there yet")
    options = parser.parse_args(arguments)
    for name, least in (("minutes", 0.1), ("seed", 0), ("steps", 1000), ("process_timeout", 6)):
        if not getattr(options, name) >= least:
            parser.error(f"--{name.replace('_', '-')}: expected {least} or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
