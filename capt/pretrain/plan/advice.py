"""Changes of a job that would make it fit, or faster, each simulated and ranked by what it brings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.schema import Job
from capt.pretrain.plan.predict import Prediction, compiles, predict
from capt.pretrain.plan.step import RankStep, contrast_of

_MOST = 16
"""Changes that are simulated, at most."""
_ENOUGH = 2
"""Changes that are looked for where the job itself does not fit."""
_WORTH = 1.02
"""A change that brings less is not named."""
_NOT_SIMULATED = ("model.compile=", "engine.zero_stage=")
"""Keys that leave the simulated step as it is: what they change is predicted from it."""


@dataclass(frozen=True)
class Change:
    """Keys to set, and what is predicted of the job with them."""

    keys: tuple[str, ...]
    prediction: Prediction
    speed: float
    """Steps in the time of one of the job as it is."""

    def to_json(self) -> dict[str, Any]:
        """The change as plain values."""
        return {
            "keys": list(self.keys),
            "speed": self.speed,
            "seconds_per_step": self.prediction.seconds,
            "memory": self.prediction.memory.total,
        }


def changes(job: Job, found: Prediction) -> list[Change]:
    """Return changes that are faster than ``job``, the fastest first; for one that does not fit, any that fit."""
    tried: list[Change] = []
    simulated: dict[tuple[str, ...], RankStep] = {(): found.step}
    for keys, changed in itertools.islice(_candidates(job, found), _MOST):
        if not found.fits and len(tried) == _ENOUGH:
            break
        try:
            alike = tuple(key for key in keys if not key.startswith(_NOT_SIMULATED))
            prediction = predict(changed, found.cluster, step=simulated.get(alike))
        # The job's own rules refuse this combination.
        except ConfigError:
            continue
        simulated[alike] = prediction.step
        speed = found.seconds / prediction.seconds
        if prediction.fits and (speed > _WORTH or not found.fits):
            tried.append(Change(keys, prediction, speed))
    return sorted(without_ballast(tried), key=lambda change: -change.speed)


def without_ballast(tried: Sequence[Change]) -> list[Change]:
    """The changes of which no part is as fast alone."""
    return [
        change
        for change in tried
        if not any(set(part.keys) < set(change.keys) and part.speed >= change.speed for part in tried)
    ]


def _candidates(job: Any, found: Prediction) -> Iterator[tuple[tuple[str, ...], Job]]:
    """Jobs that compute the same: other micro-batches, recomputation and compilation, alone and together.

    For a job that does not fit also higher stages of ZeRO, the lowest first, without those at which no batch would fit.
    """
    world = found.cluster.count
    model: Any = getattr(job, "model", None)
    per_rank = -(-job.batch.global_ // world)
    micro = min(per_rank, job.micro_batch(world))
    # Micro-batches may differ by one sample, so any size is allowed: halves and doubles of the present one.
    if job.shares_unevenly:
        fits = sorted(
            {*(micro >> n for n in range(1, micro.bit_length())), *(min(per_rank, micro << n) for n in (1, 2))}
        )
    else:
        # Micro-batches are equal: the sizes are the divisors.
        fits = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
    smaller, larger = [n for n in fits if n < micro][::-1], [n for n in fits if n > micro]
    sizes = [micro, *larger[:2], *smaller[:1]] if found.fits else [micro, *smaller]
    recompute = getattr(model, "activation_checkpointing", None)
    switches: list[dict[str, Any]] = [{}]
    if recompute is not None:
        switches.append({"activation_checkpointing": "none" if recompute != "none" else "full"})
    if found.fits and hasattr(model, "compile") and not compiles(job, found.cluster.device):
        switches += [{**each, "compile": True} for each in switches]
    for sharded, size, change in itertools.product(_stages(job, found), sizes, switches):
        keys = [f"model.{name}={str(value).lower()}" for name, value in change.items()]
        keys += [f"batch.micro={size}"] if size != micro else []
        if sharded.engine.zero_stage != job.engine.zero_stage:
            keys.append(f"engine.zero_stage={sharded.engine.zero_stage}")
        if keys:
            yield tuple(keys), sharded.model_copy(update={
                "batch": job.batch.model_copy(update={"micro": size}),
                **({"model": model.model_copy(update=change)} if model is not None and change else {}),
            })  # fmt: skip


def _stages(job: Any, found: Prediction) -> list[Any]:
    """The job, and for one that does not fit those with higher stages of ZeRO, as far as weights and states fit."""
    stage = job.engine.zero_stage
    if found.fits or found.cluster.count == 1 or stage == 0:  # ZeRO 0 has optimizers that the others refuse
        return [job]
    # ZeRO 3 takes no number of kept graphs.
    section = contrast_of(job)
    highest = 3 if section is None or section.keep in ("auto", 0) else 2
    engines = (job.engine.model_copy(update={"zero_stage": each}) for each in range(stage, highest + 1))
    jobs = [job.model_copy(update={"engine": engine}) for engine in engines]
    have = found.cluster.device.memory
    return [each for each in jobs if predict(each, found.cluster, step=found.step).memory.of_weights <= have]
