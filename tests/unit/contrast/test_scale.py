"""The simulation of many ranks: its bytes are those of docs/contrast.md and of real ranks, its memory adds up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from capt.pretrain.base import distributed
from capt.pretrain.plan.devices import CENTRAL, DEVICES
from capt.pretrain.plan.predict import collective_seconds, zero_received
from capt.pretrain.plan.rehearsal import Simulated
from capt.pretrain.plan.simulated import OpTracer, Work, rank_of
from tests.benchmarks.scale_forms import contrast_received
from tests.benchmarks.scale_proof import as_on_a_gpu, measures, real_contrast
from tests.benchmarks.scale_step import job_at, simulate_contrast, simulate_step
from tests.benchmarks.scale_tables import state_bytes
from tests.benchmarks.scale_time import step_time
from tests.support import run_ranks

SMALL = (
    "model.size=custom", "model.layers=2", "model.hidden=32", "model.heads=2", "model.ffn=48", "model.max_positions=16",
    "data.sequence_length=16", "batch.micro=4", "contrast.drift=none", "contrast.queue_share=null",
)  # fmt: skip
WIDTH, SAMPLES, H100 = 32, 8, DEVICES["h100"]


def _simulated(world: int, queue: int, *overrides: str) -> Simulated:
    return simulate_contrast(job_at(world, SAMPLES, [*SMALL, f"contrast.queue={queue}", *overrides]), world)


@pytest.mark.parametrize(
    ("world", "queue", "option"),
    [
        (1, 507, "contrast.cached=true"),
        (2, 0, "contrast.cached=true"),
        (8, 507, "contrast.cached=false"),
        (8, 507, "contrast.precision=bf16"),
        (64, 0, "contrast.mask_duplicates=false"),
        (64, 507, "contrast.cached=true"),
        (8, 507, "contrast.drift=moments contrast.cached=false"),
        (8, 507, "contrast.drift=mean contrast.queue_share=1"),
        (8, 507, "contrast.queue_share=0 contrast.hardness=5"),
        (8, 507, "contrast.hardness=5 contrast.queue_share=0.5"),
        (8, 507, "contrast.queue_weight=0.1"),
        (8, 507, "contrast.queue_weight=0.1 contrast.drift=moments contrast.hardness=5 contrast.in_batch=local"),
    ],
)
def test_received_bytes_are_the_closed_form(world: int, queue: int, option: str) -> None:
    job = job_at(world, SAMPLES, [*SMALL, f"contrast.queue={queue}", *option.split()])
    found = simulate_contrast(job, world).sent
    assert [(each.name, each.received) for each in found] == contrast_received(job, world, WIDTH)


def test_a_thousand_ranks_of_one_pair_each() -> None:
    job = job_at(1024, 1, [*SMALL, "batch.micro=1", "contrast.queue=4096"])
    found = simulate_contrast(job, 1024, rank=1023)
    assert [(each.name, each.received) for each in found.sent] == contrast_received(job, 1024, WIDTH)
    assert found.queue == 4 * (WIDTH * 4 + 8)


def test_without_live_negatives_no_log_sums_travel() -> None:
    job = job_at(4, SAMPLES, [*SMALL, "contrast.queue=64", "contrast.in_batch=none"])
    found = simulate_contrast(job, 4).sent
    assert [(each.name, each.received) for each in found] == contrast_received(job, 4, WIDTH)
    assert len(found) == 3


@pytest.mark.parametrize(
    ("world", "options"), [(2, ["contrast.drift=moments"]), (4, []), (4, ["contrast.cached=false"])]
)
def test_simulated_ranks_send_hold_and_compute_what_real_ones_do(world: int, options: list[str]) -> None:
    options = [*SMALL, "contrast.queue=507", *options]
    job = job_at(world, SAMPLES, options)
    real = run_ranks(real_contrast, world, SAMPLES, options)
    assert real == [measures(simulate_contrast(job, world, rank)) for rank in range(world)]
    assert sum(size for _, size in real[0]["received"]) > 0


def _kept_by_gloo() -> int:
    kept = 0
    with as_on_a_gpu():
        for _ in range(200):
            x = torch.zeros(64)
            before = x._use_count()
            dist.all_reduce(x)
            kept += x._use_count() > before
    return kept


def test_what_a_backend_keeps_for_a_moment_is_waited_for() -> None:
    """Without that a rank's memory is some bytes more in one run of five."""
    assert run_ranks(_kept_by_gloo, 2) == [0, 0]


@pytest.mark.parametrize("drift", ["mean", "moments"])
def test_drift_costs_one_copy_of_the_shard(drift: str) -> None:
    plain, following = _simulated(8, 8 * 8192), _simulated(8, 8 * 8192, f"contrast.drift={drift}")
    assert following.peak - plain.peak < 1.1 * 8192 * WIDTH * 4


def test_memory_follows_storages_and_not_views() -> None:
    with rank_of(2), OpTracer() as tracer:
        a = torch.empty(100, 10)
        assert tracer.live == 4000
        b = a[10:].t()
        c = a * 2
        assert tracer.live == 8000
        del a, c
        assert (tracer.live, tracer.peak) == (4000, 8000)  # b keeps the storage of a
        del b
        assert tracer.live == 0


def test_products_are_counted() -> None:
    with rank_of(2), OpTracer() as tracer:
        a, b, out = torch.empty(3, 5), torch.empty(5, 7), torch.empty(3, 7)
        torch.mm(a, b, out=out)
        torch.addmm(out, a, b, out=out)
        assert tracer.work.flops == 2 * 2 * 3 * 5 * 7
        assert tracer.moved == 0
        out.exp_()  # reads and writes
        assert tracer.moved == 2 * 3 * 7 * 4
        out.add_(out.sum(1, keepdim=True))
        assert tracer.moved == (2 + 1 + 2) * 3 * 7 * 4 + 2 * 3 * 4
        out.zero_()
        assert tracer.moved == (2 + 1 + 2 + 1) * 3 * 7 * 4 + 2 * 3 * 4


def test_the_queue_costs_its_rows_its_products_and_nothing_else() -> None:
    small, large = _simulated(8, 8 * 65536), _simulated(8, 8 * 131072)
    assert large.queue - small.queue == 65536 * (WIDTH * 4 + 8)
    assert large.peak - large.queue == small.peak - small.queue  # the workspace is a block, whatever the queue
    assert large.flops - small.flops == 4 * 2 * SAMPLES * (8 * 65536) * WIDTH  # 4 m K d
    assert large.received == small.received


def test_ranks_cost_their_anchors() -> None:
    """The anchors of all ranks, their sums, and the copy in which these are sent: 3 W m d floats, and some rows."""
    peaks = {world: _simulated(world, 64 * world) for world in (32, 64)}
    grown = (peaks[64].peak - peaks[32].peak) / (32 * 2 * SAMPLES)
    assert 3 * 4 * WIDTH <= grown < 3 * 4 * WIDTH + 64


def test_a_whole_step_has_the_contrasts_traffic_and_holds_its_weights() -> None:
    overrides = [*SMALL, "contrast.queue=512"]
    job = job_at(8, SAMPLES, overrides)
    step, marks = simulate_step(job, 8)
    contrast = [(each.name, each.received) for each in step.sent if each.received > 8]
    assert contrast == contrast_received(job, 8, WIDTH)
    assert [each.received for each in step.sent if each.received <= 8] == [8]  # masked tokens of the step, counted
    assert marks["queue"] == 64 * (WIDTH * 4 + 8)
    assert marks["weights"] + marks["queue"] <= marks["when the contrast begins"] <= marks["peak of the contrast"]


def test_memory_of_a_cached_step_is_flat_in_its_micro_batches() -> None:
    peaks = [
        simulate_step(job_at(2, 4 * parts, [*SMALL, "contrast.queue=0"]), 2)[1]["peak of the step"] for parts in (2, 4)
    ]
    rows = 2 * 4 * 2 * WIDTH * 4  # of the two further micro-batches, both views
    assert peaks[1] - peaks[0] <= 8 * rows  # values, gradients, and the anchors and sums of two ranks


def test_a_process_of_a_group_simulates_no_other() -> None:
    with rank_of(4), pytest.raises(RuntimeError, match="process of its own"), rank_of(2):
        pass
    assert distributed.world_size() == 1


def test_formulas_of_zero() -> None:
    weights, world = 1000, 4
    received: dict[Any, int] = {
        stage: sum(size for _, size in zero_received(weights, stage, world, 2, cached=True)) for stage in (0, 1, 2, 3)
    }
    assert received == {0: 4000, 1: 7000, 2: 11000, 3: 24000}
    messages = [size for name, size in zero_received(weights, 1, world, 2, True, bucket=300) if name == "allreduce_"]
    assert messages == [1200, 1200, 1200, 400]
    assert [state_bytes(weights, stage, world) for stage in (0, 1, 2, 3)] == [16000, 11000, 8000, 4000]


def test_time_is_latency_for_small_and_bandwidth_for_large_collectives() -> None:
    tiny, huge = (collective_seconds("_allgather_base_", size, 1024, CENTRAL, H100) for size in (8, 10**11))
    assert tiny == pytest.approx(3.6e-6 + 896 * 1.8 * 0.47e-6 + 127 * 2.7e-6, rel=1e-6)
    assert huge == pytest.approx(10**11 / 360e9, rel=0.02)
    assert collective_seconds("allreduce_", 8, 1024, CENTRAL, H100) == pytest.approx(2 * tiny - 3.6e-6)
    within = collective_seconds("_allgather_base_", 3600, 8, CENTRAL, H100)
    assert within == pytest.approx(3.6e-6 + 7 * 0.47e-6 + 3600 / 120e9)
    found = _simulated(8, 512)
    time = step_time(found, Work({"bfloat16": 1e15}, 0, 0), [], 0, 8, "fp32")
    assert time.share == pytest.approx(time.contrast / (time.encoder + time.contrast))
    assert time.wire == pytest.approx(sum(collective_seconds(s.name, s.received, 8, CENTRAL, H100) for s in found.sent))
