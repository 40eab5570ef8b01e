"""Buckets: how large they are, and that they change nothing but how the bytes are cut."""

import jax
import numpy as np
import pytest

from onebit_jax.collectives import buckets
from tests.workers import on_workers


def test_buckets_by_themselves_are_for_several_cpu_hosts(monkeypatch):
    assert buckets.bucket_limit("auto") is None
    assert buckets.bucket_limit(256) == 256
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert buckets.bucket_limit("auto") == 2**18
    assert buckets.bucket_limit(None) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert buckets.bucket_limit("auto") is None


@pytest.mark.parametrize(
    ("limit", "order", "lengths"),
    [
        # Sections of 300, 40, 200 and 100 bytes.
        (256, (), [150, 150, 240, 100]),
        (256, (2, 1, 0), [240, 150, 150, 100]),
        (384, (3, 2), [300, 340]),
        (640, (), [640]),
        (None, (), [640]),
    ],
    ids=str,
)
def test_rows_travel_in_buckets(limit, order, lengths):
    sent = []

    def collective(bucket):
        sent.append(bucket.shape[-1])
        return bucket

    def travel(rows):
        sections = [rows[..., :300], rows[..., 300:340], rows[..., 340:540], rows[..., 540:]]
        return buckets.in_buckets(collective, sections, limit, order)

    rows = np.random.default_rng(0).integers(0, 256, (2, 3, 640), np.uint8)
    received = on_workers(travel, 2)(rows)
    np.testing.assert_array_equal(received, rows)
    assert sent == lengths


def test_a_section_larger_than_a_bucket_shares_none_with_another():
    cut = buckets.buckets_of([5, 100, 5, 5, 31, 30], 30)
    assert [[tuple(part) for part in bucket] for bucket in cut] == [
        [(0, 0, 5)],
        *[[(1, start, start + 25)] for start in (0, 25, 50, 75)],
        [(2, 0, 5), (3, 0, 5)],
        [(4, 0, 15)],
        [(4, 15, 31)],
        [(5, 0, 30)],
    ]
