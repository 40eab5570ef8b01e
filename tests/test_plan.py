import collections
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import __main__ as command
from onebit_jax import plan, wire

FLAT, HIERARCHICAL = plan.row("onebit_adam", "flat"), plan.row("onebit_adam")
DILOCO = plan.local_steps(30, 32)
SETTING = plan.Setting(
    parameters=1_000_000, workers=8, bandwidth=1e9, step_time=0.1, steps=1000, latency=0.0
)
# With the paper's warm-up.
DENSE_WARMUP = SETTING._replace(warmup_bits=32)
ARGUMENTS = ["--parameters", "340e6", "--workers", "64", "--per-node", "4", "--bandwidth"]
ARGUMENTS += ["10Gbit", "--step-time", "0.45", "--steps", "150000", "--warmup", "0.15"]

# Tang et al., ICML 2021, table 1: BERT-Large, batch 16 a GPU, float16 gradients, four V100 a node,
# 40 Gb Ethernet that carries 4.1 Gb/s. Nodes, milliseconds of the all-reduce, and of all else.
ETHERNET = {4: (2133.24, 176.61), 8: (2173.35, 174.25), 16: (2275.43, 172.11)}


def ethernet(nodes, bandwidth=4.1e9):
    # One node's own all-reduce took 239.76 ms: 4.25 GB/s from device to device.
    local = 8 * 2 * 3 / 4 * 680e6 / 0.23976
    return plan.Setting(
        parameters=340_000_000,
        workers=4 * nodes,
        per_node=4,
        bandwidth=bandwidth,
        step_time=ETHERNET[nodes][1] / 1e3,
        steps=162_000,
        warmup=24_500 / 162_000,
        local_bandwidth=local,
        warmup_bits=32,
    )


@pytest.mark.parametrize("nodes", [4, 8, 16])
def test_dense_all_reduce_against_the_published_profile(nodes):
    # Of two nodes, too, docs/plan.md says how far off the model is, and why.
    predicted = plan.predict(plan.BFLOAT16, ethernet(nodes)).exchange
    assert 1e3 * predicted == pytest.approx(ETHERNET[nodes][0], rel=0.1)


@pytest.mark.parametrize(
    ("shards", "workers", "through_a_card"), [(4, 16, 1), (8, 8, 1), (32, 2, 4)]
)
def test_of_a_split_model_each_device_sends_and_works_its_part(shards, workers, through_a_card):
    """Nodes of 8: two workers each, one, or a quarter of one; numbers by hand."""
    setting = SETTING._replace(workers=workers, shards=shards, per_node=8, local_bandwidth=1e15)
    nodes = max(8 // shards, 1)
    others = workers // nodes
    for row, b in ((plan.FLOAT32, 4), (HIERARCHICAL, 1 / 8)):
        predicted = plan.predict(row, setting)
        sent = 2 * (others - 1) / others * b * 1e6 / through_a_card
        assert predicted.step_bytes == pytest.approx(sent)
        assert predicted.exchange == pytest.approx(8 * sent / 1e9, rel=1e-3)
    assert plan.predict(HIERARCHICAL, setting).work == pytest.approx(1e6 / shards * 13 * 8 / 8e12)


def test_state_on_a_device_is_what_init_makes():
    tx = onebit_jax.onebit_adam(1e-3, axis_name="data")
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = {"w": np.zeros((4 * 2**10, 2**10), np.float32)}
    split = {"axis_name": "data", "param_specs": jax.P("fsdp")}
    state = onebit_jax.init(tx, params, mesh, **split)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert plan.state_bytes(HIERARCHICAL, workers=2) == pytest.approx(held / 2**20, abs=1e-3)
    assert plan.state_bytes(plan.FLOAT32, workers=2) == pytest.approx(8, abs=1e-3)


def test_the_table_of_a_split_model_says_what_a_device_sends_and_holds(capsys):
    command.main(["plan", *ARGUMENTS, "--shards", "4"])
    first, *rows = capsys.readouterr().out.splitlines()
    assert "64 workers of 4 devices, 4 devices per node" in first
    assert rows[1].split()[-3:] == ["device", "its", "state"]
    dense = next(row for row in rows if row.startswith("dense float32"))
    # Of 340 M parameters 85 M, of which each sends 2 x 63 / 64 x 4 bytes; two moments in float32.
    assert re.search(r"669 MB +680 MB$", dense)


def test_share_of_the_all_reduce_in_a_step_against_the_published_profile():
    step = plan.predict(plan.BFLOAT16, ethernet(16))
    assert step.exchange / step.step == pytest.approx(0.93, abs=0.01)


def test_the_compressed_stage_is_as_long_as_the_busier_link_and_its_messages():
    """8 nodes of 4 devices: the formula that the docs give, with numbers by hand."""
    setting = ethernet(8)._replace(latency=1e-3)
    size = 340e6 / 8
    across, inside = 8 / setting.bandwidth, 8 / setting.local_bandwidth
    all_to_all = max(4 * 28 / 32 * size * across, 3 / 32 * size * inside)
    all_gather = max(31 / 32 * size * across, 31 / 32 * size * inside)
    flat = plan.predict(FLAT, setting)
    assert flat.exchange == pytest.approx(all_to_all + all_gather + (28 + 7) * 1e-3)
    between = 2 * 7 / 8 * size * across + 14 * 1e-3
    within = 3 / 4 * (32 + 1) * size * inside
    assert plan.predict(HIERARCHICAL, setting).exchange == pytest.approx(between + within)
    assert flat.step == pytest.approx(setting.step_time + flat.exchange + flat.work)
    dense, warmup = plan.predict(plan.FLOAT32, setting), 24_500
    assert flat.warmup_step == pytest.approx(dense.step)
    by_phase = warmup * dense.step + (162_000 - warmup) * flat.step
    frozen = plan.predict(FLAT._replace(refreshed=False), setting)
    assert frozen.run == pytest.approx(by_phase)
    # 16 refreshes in each octave; each exchanges gradients on top of the momentum.
    refreshes = 16 * math.log2(162_000 / warmup)
    assert flat.run == pytest.approx(by_phase + refreshes * (dense.exchange + dense.work))


def test_compressed_stage_on_infiniband_against_the_published_speedup():
    # Published: 2 on 64 V100, 8 a node, with the share of the line rate that the published 336.40
    # ms of the dense all-reduce mean.
    setting = ethernet(8)._replace(
        workers=64, per_node=8, step_time=0.15059, bandwidth=100e9, local_bandwidth=336e9
    )  # 336 Gb/s: one node's own all-reduce took 28.18 ms
    share = plan.predict(plan.BFLOAT16, setting).exchange / 0.3364
    setting = setting._replace(efficiency=share)
    speedup = plan.predict(plan.BFLOAT16, setting).step / plan.predict(FLAT, setting).step
    assert speedup == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(("parameters", "published"), [(25_600_000, 2.47), (110_000_000, 6.26)])
def test_birder_against_the_published_speedup(parameters, published):
    # 64 A100, 8 a node, 10 Gb/s, against float32. The steps' own compute is not published: between
    # 50 and 100 ms, which is assumed here, the model passes the published figure.
    speedups = []
    for step_time in (0.05, 0.1):
        setting = plan.Setting(
            parameters, 64, 10e9, step_time, 1, per_node=8, local_bandwidth=2400e9
        )
        dense = plan.predict(plan.FLOAT32, setting).step
        speedups.append(dense / plan.predict(plan.row("birder"), setting).step)
    assert speedups[0] > published > speedups[1]


def test_runs_of_any_length_are_planned_at_once():
    found = plan.predict(plan.row("zero_one_adam"), DENSE_WARMUP._replace(steps=10**15))
    assert 0 < found.run_bytes < math.inf


@pytest.mark.parametrize("steps", [1_000, 20_000, 152_000])
def test_zero_one_adam_exchanges_in_its_published_step_sets(steps):
    setting = DENSE_WARMUP._replace(steps=steps, warmup=0.0822)
    freeze = round(steps * 0.0822)
    counts = collections.Counter(
        onebit_jax.zero_one_adam_phase(t, variance_freeze=freeze) for t in range(steps)
    )
    dense = plan.predict(plan.FLOAT32, setting)
    found = plan.predict(plan.row("zero_one_adam"), setting)
    compressed = counts["compression"] + counts["sync"]
    expected = dense.step_bytes * (counts["warmup"] + compressed / 32)
    assert found.run_bytes == pytest.approx(expected)
    after = counts["sync"] + counts["local"]
    assert found.step_bytes == pytest.approx(dense.step_bytes / 32 * counts["sync"] / after)
    added = counts["warmup"] * dense.exchange + compressed * (found.exchange + found.work)
    assert found.run == pytest.approx(steps * setting.step_time + added)
    if steps == 152_000:  # published: up to 54 % fewer rounds
        assert counts["local"] / steps == pytest.approx(0.54, abs=0.04)


@pytest.mark.parametrize(
    ("steps", "warmup", "said"),
    [
        (150, 0.15, "before update 160, and this run has 150: give it warmup=N"),
        (300, 0.15, "before update 160, but this counts 45: --warmup 0.53 counts all"),
        (300, 0.54, ""),
        (2000, 0.15, ""),
    ],
)
def test_a_run_too_short_for_the_default_warmup_is_told(steps, warmup, said):
    advice = plan.plan(SETTING._replace(steps=steps, warmup=warmup)).advice
    assert said in advice if said else "before update" not in advice


def test_volume_is_the_published_formula():
    for w in (0.0, 0.15, 1.0):
        setting = DENSE_WARMUP._replace(warmup=w)
        onebit = plan.predict(FLAT._replace(refreshed=False), setting)
        share = onebit.run_bytes / plan.predict(plan.FLOAT32, setting).run_bytes
        assert share == pytest.approx(w + (1 - w) / 32)


@pytest.mark.parametrize("warmup_bits", [32, 8, 4])
def test_volume_of_a_warm_up_is_its_bits(warmup_bits):
    setting = SETTING._replace(warmup=1.0, warmup_bits=warmup_bits)
    dense = plan.predict(plan.FLOAT32, setting)
    share = plan.predict(FLAT, setting).run_bytes / dense.run_bytes
    assert share == pytest.approx((warmup_bits + (warmup_bits < 32) / 8) / 32)
    bfloat16 = plan.predict(FLAT, setting._replace(warmup_bits=16))
    assert bfloat16.run_bytes == dense.run_bytes / 2
    assert bfloat16.warmup_step == pytest.approx(plan.predict(plan.BFLOAT16, setting).step)


def bytes_of_programs(tx, *phases):
    mesh = jax.make_mesh((8,), ("data",))
    params = {"w": jnp.ones((1024, 1024))}
    step = onebit_jax.train_step(lambda p, x: jnp.sum(p["w"] @ x[0]), tx, mesh)
    state, batch = onebit_jax.init(tx, params, mesh), np.ones((8, 1024), np.float32)
    sent = wire.by_phase(step, params, state, batch, mesh=mesh, phases=phases)
    return [wire.bytes_sent(sent[phase]) for phase in phases]


def test_volume_is_that_of_the_compiled_programs():
    setting = SETTING._replace(parameters=1024 * 1024, warmup=1.0, steps=1)
    tx = onebit_jax.onebit_adam_published(1e-3, warmup=1, axis_name="data")
    dense, onebit = bytes_of_programs(tx, "warmup", "compression")
    for sent, optimizer in ((dense, plan.FLOAT32), (onebit, FLAT)):
        assert plan.predict(optimizer, setting).step_bytes == pytest.approx(sent, rel=0.01)
    tx = onebit_jax.onebit_adam(1e-3, axis_name="data")
    predicted = plan.predict(FLAT, setting).run_bytes
    assert [predicted] == pytest.approx(bytes_of_programs(tx, "warmup"), rel=0.01)


@pytest.mark.parametrize("bits", [1, 4])
def test_volume_of_local_steps_is_that_of_an_exchange_shared_out(bits):
    tx = onebit_jax.local_steps(
        optax.adam(1e-3), optax.sgd(1.0), every=10, axis_name="data", bits=bits
    )
    [sent] = bytes_of_programs(tx, "sync")
    setting = SETTING._replace(parameters=1024 * 1024)
    predicted = plan.predict(plan.local_steps(10, bits), setting).step_bytes
    assert 10 * predicted == pytest.approx(sent, rel=0.01)


def test_a_plan_has_local_steps_dense_and_at_the_bits_asked_for():
    def names(bits):
        result = plan.plan(SETTING._replace(every=7, local_bits=bits))
        return [p.optimizer.name for p in result.onebit[len(plan.rows()) :]]

    assert names(32) == ["DiLoCo, every 7"]
    assert names(2) == ["DiLoCo, every 7", "local steps, 2 bits, every 7"]


def test_a_warm_up_at_8_bits_is_calibrated_by_the_mean_at_8_bits(tmp_path):
    calibration = plan.read_calibration(write_calibration(tmp_path / "step.json"))
    setting = SETTING._replace(calibration=calibration, warmup_bits=8)
    work = calibration["compressed_mean at 8 bits, Adam"] - calibration["Adam, no exchange"]
    [warmup] = {p.warmup_step for p in plan.plan(setting).onebit if p.optimizer == FLAT}
    on_the_wire = plan.predict(plan.COMPRESSED_MEAN_8, setting).exchange
    assert warmup == pytest.approx(setting.step_time + work * setting.parameters + on_the_wire)
    del calibration["compressed_mean at 8 bits, Adam"]
    with pytest.raises(ValueError, match=r"needs \['compressed_mean at 8 bits, Adam'\] too"):
        plan.plan(setting)


def test_sockets_cost_time_on_top_of_the_wire():
    free = plan.predict(plan.FLOAT32, SETTING)
    sockets = plan.predict(plan.FLOAT32, SETTING._replace(host_bandwidth=4e9))
    assert sockets.exchange - free.exchange == pytest.approx(8 * free.step_bytes / 4e9)


@pytest.mark.parametrize("optimizer", [plan.FLOAT32, plan.row("signum"), FLAT, DILOCO])
def test_what_computing_hides_is_not_waited_for(optimizer):
    alone, whole = (plan.predict(optimizer, SETTING._replace(overlap=x)) for x in (0.0, 1.0))
    longer = SETTING._replace(step_time=alone.exchange / 0.4, overlap=0.5)
    assert whole.exchange == alone.exchange
    # Workers that take local steps have nothing to send before they have come to their end.
    if optimizer is DILOCO:
        assert whole == alone
        return
    waited = max(0.0, alone.exchange - SETTING.step_time)
    assert whole.step == pytest.approx(SETTING.step_time + waited + alone.work)
    assert plan.predict(optimizer, longer).step == pytest.approx(longer.step_time + alone.work)


def test_all_of_a_step_hides_an_exchange_that_is_one_step_late():
    late = plan.MUON_ONE_STEP_LATE
    fast = plan.predict(late, SETTING)
    assert 0 < fast.exchange < SETTING.step_time
    assert fast.step == pytest.approx(SETTING.step_time + fast.work)
    slow = plan.predict(late, SETTING._replace(bandwidth=SETTING.bandwidth / 100))
    assert slow.step == pytest.approx(slow.exchange + slow.work)
    assert plan.predict(late, SETTING._replace(overlap=0.5)) == fast


def test_volume_of_an_exchange_one_step_late_is_that_of_the_compiled_program():
    tx = onebit_jax.onebit_muon(1e-3, axis_name="data", bits=1, delay=1)
    predicted = plan.predict(plan.MUON_ONE_STEP_LATE, SETTING._replace(parameters=1024 * 1024))
    assert [predicted.step_bytes] == pytest.approx(bytes_of_programs(tx, "compression"), rel=0.01)


def test_warm_ups_and_refreshes_are_waited_for():
    slow = SETTING._replace(bandwidth=1e8)
    waiting, hidden = (plan.predict(FLAT, slow._replace(overlap=x)) for x in (0.0, 0.5))
    assert hidden.warmup_step == waiting.warmup_step
    compressed = (1 - SETTING.warmup) * SETTING.steps
    assert waiting.step > hidden.step
    assert waiting.run - hidden.run == pytest.approx(compressed * (waiting.step - hidden.step))


def test_utilization_is_the_share_of_compute_in_a_step():
    bandwidths, every = (1e8, 1e10), (1, 30)
    shares = plan.utilization(SETTING, bandwidths, every)
    assert shares.bandwidths == bandwidths
    assert [*shares.rows] == [
        *("dense float32", "dense bfloat16", "1-bit Adam", "DiLoCo, every 1", "DiLoCo, every 30"),
        *("local steps, 4 bits, every 1", "local steps, 4 bits, every 30"),
    ]
    for i, bandwidth in enumerate(bandwidths):
        at = SETTING._replace(bandwidth=bandwidth)
        share = at.step_time / plan.predict(DILOCO, at).step
        assert shares.rows["DiLoCo, every 30"][i] == pytest.approx(share)
    assert all(0 < slow < fast <= 1 for slow, fast in shares.rows.values())


def test_forms_agree_where_each_node_has_one_device():
    flat, hierarchical = (plan.predict(optimizer, SETTING) for optimizer in (FLAT, HIERARCHICAL))
    assert hierarchical._replace(optimizer=flat.optimizer) == flat


def test_only_the_hierarchical_form_does_not_grow_with_the_devices_of_a_node():
    two, four = (SETTING._replace(workers=8 * L, per_node=L) for L in (2, 4))
    assert plan.predict(FLAT, four).step_bytes > 1.5 * plan.predict(FLAT, two).step_bytes
    assert plan.predict(HIERARCHICAL, four).step_bytes == plan.predict(HIERARCHICAL, two).step_bytes


def test_within_one_node_nothing_crosses_the_card_and_the_advice_is_not_to_use_it():
    result = plan.plan(SETTING._replace(per_node=8, latency=1.0, local_bandwidth=2400e9))
    assert all(p.run_bytes == 0 for p in (*result.dense, *result.onebit))
    assert result.thresholds[HIERARCHICAL.name] == (0, 0)
    assert result.advice.startswith("Do not use it")


@pytest.mark.parametrize("optimizer", plan.rows(), ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("per_node", [1, 4])
def test_thresholds_are_where_the_runs_take_the_same_time(optimizer, per_node):
    setting = SETTING._replace(per_node=per_node, local_bandwidth=1e15, latency=50e-6)
    thresholds = plan.plan(setting).thresholds[optimizer.name]
    for dense, threshold in zip((plan.FLOAT32, plan.BFLOAT16), thresholds, strict=True):
        assert threshold > 0
        sides = ((0.9 * threshold, True), (1.1 * threshold, False))
        if math.isinf(threshold):
            assert not optimizer.warmup
            sides = ((1e12, True), (1e18, True))
        for bandwidth, faster in sides:
            at = setting._replace(bandwidth=bandwidth)
            assert (plan.predict(optimizer, at).run < plan.predict(dense, at).run) == faster


def test_threshold_is_the_lowest_where_one_bit_loses_in_between_and_wins_again():
    # Slow local links limit the dense exchange; the flat form still gains from a faster card.
    setting = plan.Setting(
        340_000_000, 64, 1e9, 0.45, 10**6, 0.0, per_node=8, latency=0.0, memory_bandwidth=8.8e11
    )
    threshold = plan.plan(setting).thresholds[FLAT.name][1]

    def faster(bandwidth):
        at = setting._replace(bandwidth=bandwidth)
        return plan.predict(FLAT, at).run < plan.predict(plan.BFLOAT16, at).run

    assert faster(1e18)
    assert 0 < threshold < 1e12
    assert not faster(1.05 * threshold)


def test_no_bandwidth_pays_for_a_run_that_is_all_warm_up():
    result = plan.plan(DENSE_WARMUP._replace(warmup=1.0))
    assert result.thresholds[FLAT.name] == (0, 0)
    assert result.advice.startswith("Do not use it")


@pytest.mark.parametrize(
    ("setting", "matches"),
    [
        (DENSE_WARMUP._replace(bandwidth=1e7), r"1-bit Adam, flat, is \d+\.\dx as fast .*use it"),
        (
            DENSE_WARMUP._replace(bandwidth=2e9),
            r"Hardly worth it: .* would take \d\.\d % less time",
        ),
        (DENSE_WARMUP._replace(bandwidth=1e11), r"Do not use it: .* would take 0\.\d % less time"),
        (
            DENSE_WARMUP._replace(bandwidth=1e11, memory_bandwidth=1e10),
            r"Do not use it: .* \d\.\d % more time .* no compression .* would be faster below \d",
        ),
    ],
    ids=["use", "hardly", "small", "dear"],
)
def test_advice(setting, matches):
    assert re.match(matches, plan.plan(setting).advice)


def test_advice_is_the_form_that_ends_first():
    setting = SETTING._replace(workers=64, per_node=8, bandwidth=1e8, local_bandwidth=2400e9)
    assert plan.plan(setting).advice.startswith("1-bit Adam, hierarchical, is")
    one_device_a_node = setting._replace(per_node=1)
    assert plan.plan(one_device_a_node).advice.startswith("1-bit Adam, flat, is")


def write_calibration(path, **changes):
    kinds = {
        "Adam with pmean": [0.3, 0.9, 0.3],
        "Adam, no exchange": [0.1, 0.1, 0.7],
        "1-bit Adam, warm-up": [0.4],
        "1-bit Adam": [0.2],
    }
    kinds = {kind: [0.5] for kind in plan.calibrated_kinds()} | kinds
    figures = {"elements": 1000, "kinds": {kind: {"seconds": s} for kind, s in kinds.items()}}
    path.write_text(json.dumps({"figures": figures | changes}), encoding="utf-8")
    return path


def test_calibration_replaces_the_memory_bandwidth(tmp_path):
    calibration = plan.read_calibration(write_calibration(tmp_path / "step.json"))
    setting = DENSE_WARMUP._replace(parameters=2000, calibration=calibration, memory_bandwidth=1.0)
    dense, onebit = plan.plan(setting).dense[0], plan.plan(setting).onebit[0]
    assert dense.work == pytest.approx(0.4)
    assert onebit.work == pytest.approx(0.2)
    assert onebit.warmup_step == pytest.approx(0.1 + 0.6 + dense.exchange)


def test_calibration_in_which_compression_is_dear_turns_the_advice(tmp_path):
    calibration = plan.read_calibration(write_calibration(tmp_path / "step.json"))
    setting = SETTING._replace(bandwidth=1e8, calibration=calibration | {"1-bit Adam": 0.1})
    assert plan.plan(setting._replace(calibration=None)).advice.startswith(
        "1-bit Adam, flat, is 2.9x as fast"
    )
    assert plan.plan(setting).advice.startswith("Do not use it")


def test_optimizers_that_a_calibration_does_not_have_are_left_out(tmp_path, capsys):
    seconds = {"seconds": [0.5]}
    kinds = ("Adam, no exchange", "Adam with pmean", "1-bit Adam", "1-bit Adam, warm-up")
    path = write_calibration(tmp_path / "step.json", kinds=dict.fromkeys(kinds, seconds))
    calibration = plan.read_calibration(path)
    result = plan.plan(DENSE_WARMUP._replace(calibration=calibration))
    assert [p.optimizer for p in result.onebit] == [FLAT, HIERARCHICAL, DILOCO]
    assert result.left_out == (*plan.rows()[2:], plan.local_steps(30, 4))
    assert result.thresholds.keys() == {FLAT.name, HIERARCHICAL.name, DILOCO.name}
    command.main(["plan", *ARGUMENTS, "--warmup-bits", "32", "--calibration", str(path)])
    printed = capsys.readouterr().out
    measured = [line.split("  ")[-1].strip() for line in printed.splitlines()[2:9]]
    dense, onebit = ["Adam with pmean"] * 2, ["1-bit Adam"] * 2
    assert measured == ["work measured as", *dense, *onebit, dense[0], ""]
    names = ", ".join(row.name for row in result.left_out)
    assert names.startswith("1-bit LAMB, 0/1 Adam, ")
    assert f"\nLeft out, since the calibration does not have them: {names}.\n" in printed


def test_utilization_leaves_out_what_a_calibration_does_not_have(tmp_path):
    kinds = ("Adam, no exchange", "Adam with pmean", "1-bit Adam", "1-bit Adam, warm-up")
    path = write_calibration(
        tmp_path / "step.json", kinds={kind: {"seconds": [0.5]} for kind in kinds}
    )
    setting = DENSE_WARMUP._replace(calibration=plan.read_calibration(path))
    rows = plan.utilization(setting, (1e9,), (1,)).rows
    assert [*rows] == ["dense float32", "dense bfloat16", "1-bit Adam", "DiLoCo, every 1"]


@pytest.mark.parametrize("bits", [4, 32])
def test_no_compute_hides_an_exchange_of_local_steps(bits):
    """What they exchange is known after the update alone, also where they do so in each."""
    setting = SETTING._replace(overlap=0.5)
    every = [plan.predict(plan.local_steps(n, bits), setting).step for n in (1, 2, 4)]
    assert every[0] > every[1] > every[2]
    alone = plan.predict(plan.local_steps(1, bits), SETTING._replace(overlap=0.0))
    assert every[0] == alone.step


def test_an_optimizer_without_its_warm_up_in_the_calibration_is_left_out(tmp_path):
    calibration = plan.read_calibration(write_calibration(tmp_path / "step.json"))
    del calibration["1-bit LAMB, warm-up"]
    result = plan.plan(DENSE_WARMUP._replace(calibration=calibration))
    assert result.left_out == (plan.row("onebit_lamb"),)
    assert "work measured as" in plan.table(result)


def test_without_a_calibration_nothing_is_left_out():
    result = plan.plan(SETTING)
    assert not result.left_out
    assert "Left out" not in plan.table(result)
    assert "work measured" not in plan.table(result)


@pytest.mark.parametrize(
    "changes", [{"elements": 0}, {"kinds": []}, {"kinds": {"Adam with pmean": {"seconds": []}}}]
)
def test_calibration_that_is_no_record_is_refused(tmp_path, changes):
    with pytest.raises(ValueError, match=r"calibration=.*step\.json.*is no record"):
        plan.read_calibration(write_calibration(tmp_path / "step.json", **changes))


def test_calibration_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"calibration=.*cannot be read.*benchmarks\.step --json"):
        plan.read_calibration(tmp_path / "step.json")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("parameters", 0, "must be an int of at least 1"),
        ("parameters", 3.5, "must be an int"),
        ("workers", 1, "must be an int of at least 2: a single worker exchanges"),
        ("workers", 9, "must be a multiple of per_node=2"),
        ("workers", 2**31, r"must be below 2\*\*31: JAX numbers devices in 32 bits"),
        ("shards", 0, "must be an int of at least 1: the devices that a worker"),
        ("shards", 3, "must divide per_node=2, or be a multiple of it"),
        ("steps", 0, "must be"),
        ("bandwidth", 0.0, "must be above 0 and finite, in bit/s"),
        ("bandwidth", "10Gbit", "must be"),
        ("step_time", math.nan, "must be above 0 and finite, in seconds"),
        ("local_bandwidth", -1.0, "must be"),
        ("memory_bandwidth", math.inf, "must be"),
        ("latency", -1.0, "must be at least 0"),
        ("warmup", 15, r"must be in \[0, 1\]"),
        ("overlap", 1.5, r"must be in \[0, 1\]: the share of a step that hides"),
        ("overlap", -0.1, r"must be in \[0, 1\]"),
        ("warmup_bits", 2, "must be 32, 16, 8 or 4, bits per value"),
        ("local_bits", 16, "must be 32, 8, 4, 2 or 1, bits per value"),
        ("every", 0, "must be an int of at least 1: the steps from one exchange"),
        ("every", 2.5, "must be an int of at least 1"),
        ("efficiency", 0.0, r"must be in \(0, 1\]"),
        ("host_bandwidth", 0.0, "must be above 0"),
    ],
)
def test_bad_settings_are_refused(field, value, message):
    with pytest.raises(ValueError, match=rf"^{field}={re.escape(repr(value))} {message}"):
        plan.plan(SETTING._replace(per_node=2)._replace(**{field: value}))


def test_a_calibration_of_other_kinds_is_refused():
    with pytest.raises(ValueError, match=r"has the kinds .* but needs \['1-bit Adam', "):
        plan.plan(SETTING._replace(calibration={"Adam with pmean": 1e-9}))
    none = dict.fromkeys(plan.calibrated_kinds(), 1.0) | {"1-bit Adam": 0.0}
    with pytest.raises(ValueError, match=r"calibration\['1-bit Adam'\]=0\.0 must be above 0"):
        plan.plan(SETTING._replace(calibration=none))


RATES = {"1000000": 1e6, "56kbit": 5.6e4, "4.1Gbit": 4.1e9, "100 Mbit/s": 1e8, "1e10": 1e10}
RATES |= {"25GB": 2e11, "1.5Tbit": 1.5e12}
AMBIGUOUS = ["10Gb", "10G", "fast", "-1Gbit", "10gbit", "", "1.2.3"]
WITHOUT_UNIT = ["10", "0", "999999", "2.5e3"]


def test_rates():
    assert {text: plan.parse_rate("bandwidth", text) for text in RATES} == pytest.approx(RATES)
    for text in AMBIGUOUS:
        with pytest.raises(ValueError, match=r"bandwidth='.*' must be a rate such as 10Gbit"):
            plan.parse_rate("bandwidth", text)
    for text in WITHOUT_UNIT:
        with pytest.raises(ValueError, match=r"='.*' means .*bit/s.*as in 10Gbit.*as in 10e9"):
            plan.parse_rate("bandwidth", text)


@pytest.mark.parametrize("text", ["1h", "5min", "soon", "-1", ""])
def test_durations_in_no_known_unit_are_refused(text):
    with pytest.raises(ValueError, match=r"latency='.*' must be a duration such as 50us"):
        plan.parse_seconds("latency", text)


def test_command_prints_the_table_and_ends_with_the_advice(capsys):
    command.main(["plan", *ARGUMENTS, "--warmup-bits", "8", "--every", "20", "--local-bits", "2"])
    printed = capsys.readouterr().out
    setting = plan.Setting(340_000_000, 64, 10e9, 0.45, 150_000, 0.15, per_node=4)
    setting = setting._replace(warmup_bits=8, every=20, local_bits=2)
    assert printed == plan.table(plan.plan(setting)) + "\n"
    assert printed.rstrip().endswith(plan.plan(setting).advice)


def test_command_prints_the_utilization(capsys):
    command.main(["plan", *ARGUMENTS, "--overlap", "0.67", "--utilization"])
    setting = plan.Setting(340_000_000, 64, 10e9, 0.45, 150_000, 0.15, per_node=4, overlap=0.67)
    table = plan.utilization_table(plan.utilization(setting))
    assert capsys.readouterr().out == table + "\n"
    assert "5 Gbit/s" in table.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warmup", "15"], "warmup=15.0 must be in [0, 1]"),
        (["--bandwidth", "10"], "bandwidth='10' means 10 bit/s"),
        (["--every", "0"], "every=0 must be an int of at least 1"),
        (["--calibration", "absent.json"], "calibration='absent.json' cannot be read"),
        (["--host-bandwidth="], "--host-bandwidth must have a value"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_command_ends_with_2_and_says_why(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(["plan", *ARGUMENTS, *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


# Options of the command without a value.

OTHERS = ("--host-bandwidth", "--calibration", "--latency", "--local-bits")


@pytest.mark.parametrize("name", [*ARGUMENTS[::2], *OTHERS])
def test_an_option_without_a_value_ends_the_command_with_a_line(name, capsys):
    given = zip(ARGUMENTS[::2], ARGUMENTS[1::2], strict=True)
    arguments = [f"{option}={value}" for option, value in given if option != name]
    with pytest.raises(SystemExit, match="2"):
        command.main(["plan", *arguments, f"{name}=--"])
    error = capsys.readouterr().err.splitlines()
    assert error[-1] == f"python -m onebit_jax: error: {name} must have a value."
