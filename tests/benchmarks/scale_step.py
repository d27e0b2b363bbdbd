"""Steps of shipped jobs as `bench_scale` asks for them, and their contrast on a simulated or a real rank."""

from __future__ import annotations

from collections.abc import Sequence

from capt.pretrain.config.load import load_job
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.plan import rehearsal
from capt.pretrain.plan.rehearsal import Simulated

VOCABULARY = 50_265


def job_at(world: int, samples: int, overrides: Sequence[str] = (), config: str = "capt_large") -> LanguageJob:
    """A shipped job at ``world`` ranks with ``samples`` of the global batch on each."""
    fixed = [f"batch.global={samples * world}", "run.log_every=1000000", "schedule.max_steps=1000000"]
    job = load_job(config, [*fixed, *overrides])
    assert isinstance(job, LanguageJob)
    return job


def simulate_contrast(job: LanguageJob, world: int, rank: int = 0) -> Simulated:
    """`contrast_step` of one simulated rank."""
    return rehearsal.simulate_contrast(job, _width(job), world, rank)


def contrast_step(job: LanguageJob) -> Simulated:
    """The contrast of a step of this rank, simulated or real."""
    return rehearsal.contrast_step(job, _width(job))


def simulate_step(job: LanguageJob, world: int, rank: int = 0) -> tuple[Simulated, dict[str, int]]:
    """A whole step of the language task but for the update; and bytes that lived when, and those of the weights."""
    found, marks, _ = rehearsal.simulate_step(job, world, rank)
    return found, marks


def _width(job: LanguageJob) -> int:
    return job.model.for_tokenizer(VOCABULARY, 1).hidden
