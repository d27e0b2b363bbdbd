"""The tables of `bench_scale`: scenarios of a CAPT-Large step, each simulated, with its predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from capt.pretrain.config.load import load_job
from capt.pretrain.plan.devices import CASES, CENTRAL, FAST, SLOW, cluster
from capt.pretrain.plan.predict import Stage, predict, zero_received
from capt.pretrain.plan.rehearsal import Simulated
from capt.pretrain.plan.simulated import Work
from capt.pretrain.plan.step import rank_step
from tests.benchmarks.scale_step import job_at, simulate_contrast
from tests.benchmarks.scale_time import CHEAP, DEAR, H100, MIDDLE, Given, StepTime, step_time

GLOBAL = 8192
"""Samples of a step over all ranks, as ``capt_large`` has them."""
WORLDS = (8, 64, 1024)
QUEUES = (0, 1 << 16, 1 << 20, 1 << 24)
ZERO = 1


def state_bytes(weights: int, stage: Stage, world: int) -> int:
    """Weights, gradients and both moments of Adam of a rank, all in fp32.

    Stages 1 and 2 update a copy of the weights that a rank owns (DeepSpeed's ``single_partition_of_fp32_groups``).
    """
    whole, spread = {0: (4, 0), 1: (2, 3), 2: (1, 4), 3: (0, 4)}[stage]
    return 4 * weights * whole + 4 * weights * spread // world


@dataclass(frozen=True)
class Scenario:
    """A step of ``world`` ranks with ``samples`` each, against ``queue`` rows."""

    world: int
    samples: int
    queue: int
    options: tuple[str, ...] = ()

    @property
    def micro(self) -> int:
        """Samples of a micro-batch: those of ``capt_large``, or all that there are."""
        return min(16, self.samples)

    @property
    def overrides(self) -> list[str]:
        """Overrides of ``capt_large``."""
        return [f"batch.micro={self.micro}", f"contrast.queue={self.queue}", *self.options]

    def named(self) -> dict[str, Any]:
        """The first cells of its rows."""
        return {"W": self.world, "samples a rank": self.samples, "K": f"{self.queue:,}",
                "options": " ".join(self.options)}  # fmt: skip


PAPER = ("contrast.drift=none", "contrast.queue_share=null")
"""The paper's queue, without the guard of the shipped job."""
FULL = [Scenario(world, GLOBAL // world, queue) for world in WORLDS for queue in QUEUES]
OTHERS = [
    *(Scenario(64, 128, QUEUES[-1], (f"contrast.precision={each}",)) for each in ("tf32", "bf16x3")),
    Scenario(64, 128, QUEUES[-1], ("contrast.precision=bf16x3", "contrast.queue_dtype=bf16")),
    Scenario(64, 128, QUEUES[-1], ("contrast.hardness=1",)),
    Scenario(8, 1024, QUEUES[-1], PAPER),
    Scenario(1024, 8, QUEUES[-1], PAPER),
    Scenario(1024, 128, QUEUES[-1]),
]


@dataclass(frozen=True)
class Encoder:
    """A step without the contrast, for one way to compute it: work and model FLOP of a sample, bytes of activations."""

    weights: int
    work: Work
    activations: int
    flops: float


class Prediction:
    """All scenarios, simulated once."""

    def __init__(self, scenarios: Sequence[Scenario], config: str = "capt_large", extra: Sequence[str] = ()) -> None:
        self._config, self._extra = config, tuple(extra)
        self._encoders: dict[tuple[int, bool], Encoder] = {}
        self.found: dict[Scenario, Simulated] = {}
        for each in scenarios:
            self.found[each] = simulate_contrast(self._job(each), each.world)
            self.encoder(each)

    def _job(self, of: Scenario) -> Any:
        return job_at(of.world, of.samples, [*of.overrides, *self._extra], self._config)

    def encoder(self, of: Scenario) -> Encoder:
        """By a step of two micro-batches, or of one where a step has no more: further ones only repeat."""
        job = self._job(of)
        cached = job.contrast.is_cached(job.accumulation(of.world))
        key = (of.micro, cached)
        if key not in self._encoders:
            samples = of.micro * (1 if of.samples == of.micro else 2)
            small = Scenario(of.world, samples, 0, (f"contrast.cached={str(cached).lower()}",))
            step = rank_step(self._job(small), of.world, gpu=True)
            flops = step.flops / (samples * of.world)
            activations = step.peak - 8 * step.weights
            self._encoders[key] = Encoder(step.weights, step.encoder * (1 / samples), activations, flops)
        return self._encoders[key]

    def time(self, of: Scenario, given: Given = MIDDLE) -> StepTime:
        """The model's time of a step."""
        job, encoder = self._job(of), self.encoder(of)
        parts = job.accumulation(of.world)
        traffic = zero_received(encoder.weights, ZERO, of.world, parts, job.contrast.is_cached(parts))
        update = 7 * 4 * encoder.weights // of.world  # reads weights, gradients, moments; writes all but gradients
        return step_time(self.found[of], encoder.work * of.samples, traffic, update, of.world,
                         job.contrast.precision, given)  # fmt: skip

    def longer(self, of: Scenario, given: Given = MIDDLE) -> float:
        """Time that the queue adds to a step, as a share of the step without it."""
        without = next(e for e in self.found if (e.world, e.samples, e.queue) == (of.world, of.samples, 0))
        return self.time(of, given).total / self.time(without, given).total - 1

    def contrast_row(self, of: Scenario) -> dict[str, Any]:
        """Work of the rank for the contrast."""
        found = self.found[of]
        return {
            **of.named(),
            "collectives": len(found.sent),
            "MB received": round(found.received / 1e6, 2),
            "queue, MB": round(found.queue / 1e6, 1),
            "peak above, MB": round((found.peak - found.before) / 1e6, 1),
            "operations, T": round(found.flops / 1e12, 3),
            "operators": found.operators,
        }

    def memory_row(self, of: Scenario) -> dict[str, Any]:
        """Peak memory of the rank, in GB."""
        found, encoder = self.found[of], self.encoder(of)
        state, work = state_bytes(encoder.weights, ZERO, of.world), found.peak - found.before
        largest = max(encoder.activations, work)
        cells = {"weights and optimizer": state, "activations": encoder.activations, "queue": found.queue,
                 "contrast": work, "at most": state + found.queue + largest}  # fmt: skip
        return {**of.named(), **{name: f"{value / 1e9:.2f}" for name, value in cells.items()}}

    def time_row(self, of: Scenario) -> dict[str, Any]:
        """The predicted milliseconds of a step."""
        time, needed = self.time(of), self.encoder(of).flops * of.samples
        low, high = sorted(self.time(of, given).share for given in (CHEAP, DEAR))
        mfu, *bracket = (f"{100 * needed / H100.bf16 / self.time(of, Given(given, given)).total:.1f}"
                         for given in (CENTRAL, SLOW, FAST))  # fmt: skip
        cells = {"encoder": time.encoder, "ZeRO": time.zero, "update": time.update,
                 "arithmetic": max(time.device, time.launches), "wire": time.wire, "step": time.total}  # fmt: skip
        return {
            **of.named(),
            **{f"{name}, ms": f"{1e3 * seconds:.1f}" for name, seconds in cells.items()},
            "contrast, share": f"{time.share:.1%} ({low:.1%} to {high:.1%})",
            "MFU, %": f"{mfu} ({' to '.join(bracket)})",
        }


SHIPPED = (8, 64, 128, 1024)
"""Numbers of GPUs at which the shipped ``capt_large`` is predicted."""
_LARGE_MICRO = 64


def shipped_rows() -> list[dict[str, Any]]:
    """``capt_large`` by ``capt plan`` at numbers of H100s: as shipped, and with larger micro-batches."""
    rows = []
    for world, micro in ((world, micro) for world in SHIPPED for micro in (None, _LARGE_MICRO)):
        if micro is not None and GLOBAL // world < micro:
            continue
        changed = () if micro is None else (f"batch.micro={micro}",)
        found: Any = predict(load_job("capt_large", list(changed)), cluster(f"{world}xh100"), CASES)
        low, high = (100 * found.mfu(case) for case in ("slow", "fast"))
        fast, slow = found.bracket
        rows.append({
            "GPUs": world,
            "keys": " ".join(changed) or "as shipped",
            "GiB of 79.1": f"{found.memory.total / 2**30:.1f}",
            "MB received": f"{sum(found.wire.values()) / 1e6:,.0f}",
            "step, s": f"{found.seconds:.3g} ({fast:.3g} to {slow:.3g})",
            "tokens/s": f"{found.tokens / found.seconds:,.0f}",
            "MFU, %": f"{100 * found.mfu():.1f} ({low:.1f} to {high:.1f})",
            "days": f"{found.steps * found.seconds / 86_400:.1f}",
            "GPU hours": f"{found.steps * found.seconds / 3600 * world:,.0f}",
        })  # fmt: skip
    return rows
