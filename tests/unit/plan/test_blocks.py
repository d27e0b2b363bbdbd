"""A loop over blocks is simulated for those that differ alone: figures are those of all blocks."""

from __future__ import annotations

import pytest

from capt.pretrain.base.traits import DeviceTraits
from capt.pretrain.config.load import load_job
from capt.pretrain.contrast import kernels
from capt.pretrain.models import cross_entropy
from capt.pretrain.plan import simulated
from capt.pretrain.plan.rehearsal import Simulated, simulate_step

SIZES = [
    "model.size=custom", "model.layers=1", "model.hidden=32", "model.heads=2", "model.ffn=48", "model.max_positions=16",
    "data.sequence_length=16", "tokenizer.vocab_size=300", "batch.micro=8", "batch.global=64",
]  # fmt: skip


def _found(more: list[str], *, gpu: bool) -> tuple[Simulated, dict[str, int]]:
    found, marks, _ = simulate_step(load_job("capt_large", [*SIZES, *more]), 4, gpu=gpu)
    return found, marks


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "more",
    [
        ["contrast.queue=215", "contrast.precision=bf16x3"],
        ["contrast.queue=1024", "contrast.cached=false"],
        ["contrast.queue=215", "contrast.hardness=1", "contrast.drift=moments"],
        ["contrast.queue=0", "model.activation_checkpointing=full"],
    ],
    ids=["cached", "parts", "weighted", "live"],
)
def test_figures_are_those_of_all_blocks(monkeypatch: pytest.MonkeyPatch, more: list[str], *, gpu: bool) -> None:
    # Blocks of a size that leaves some anchors and some classes over.
    monkeypatch.setitem(kernels._LARGEST_BLOCK, "cuda" if gpu else "cpu", (31, 61))
    monkeypatch.setitem(cross_entropy._BLOCK_BYTES, "cuda" if gpu else "cpu", 4 * 320 * 9)
    once = _found(more, gpu=gpu)
    monkeypatch.setattr(simulated._WithoutValues, "blocks", DeviceTraits.blocks)
    assert _found(more, gpu=gpu) == once


def test_the_time_of_a_plan_does_not_depend_on_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, count = [0], simulated.OpTracer._count

    def counted(*args: object) -> None:
        ran[0] += 1
        count(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(simulated.OpTracer, "_count", counted)
    plain = ["contrast.drift=none", "contrast.queue_share=null"]
    times = []
    for queue in (2**24, 2**30):
        ran[0] = 0
        operators = _found([f"contrast.queue={queue}", *plain], gpu=True)[0].operators
        times.append((ran[0], operators))
    assert times[0][0] == times[1][0] < times[0][1] < times[1][1]
