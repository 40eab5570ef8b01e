"""Buckets: how large they are, and that they change nothing but how the bytes are cut."""

import jax
import numpy as np
import pytest

from onebit_jax.collectives import buckets
from tests.workers import AXIS, on_workers


def test_buckets_by_themselves_are_for_several_cpu_hosts(monkeypatch):
    assert buckets.bucket_limit("auto") is None
    assert buckets.bucket_limit(256) == 256
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert buckets.bucket_limit("auto") == 2**18
    assert buckets.bucket_limit(None) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert buckets.bucket_limit("auto") is None


@pytest.mark.parametrize(
    ("limit", "lengths"), [(256, [256, 256, 128]), (640, [640]), (None, [640])], ids=str
)
def test_rows_travel_in_buckets(limit, lengths):
    sent = []

    def collective(bucket):
        sent.append(bucket.shape[-1])
        return bucket

    rows = np.random.default_rng(0).integers(0, 256, (2, 3, 640), np.uint8)
    received = on_workers(lambda x: buckets.in_buckets(collective, x, limit, AXIS), 2)(rows)
    np.testing.assert_array_equal(received, rows)
    assert sent == lengths
