"""A training step of one rank of many, on tensors without data (``tests/simulated.py``): contrast and all of it."""

from __future__ import annotations

import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capt.pretrain.base import distributed
from capt.pretrain.config.load import load_job
from capt.pretrain.contrastive.task import Scales
from capt.pretrain.contrastive.term import ContrastTerm
from capt.pretrain.contrastive.views import Views
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from capt.pretrain.language.batches import LanguageBatch
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.task import LanguageTask
from tests.simulated import Ledger, rank_of
from tests.wire import Sent, Wire

VOCABULARY, TAU = 50_265, 0.05


@dataclass(frozen=True)
class Simulated:
    """What one rank does and holds.

    Attributes:
        sent: every collective, in order.
        before: bytes that lived before (queue and representations; in a whole step queue and weights).
        peak: the largest number of bytes that lived.
        queue: bytes of this rank's rows and ids.
        flops: of matrix products.
        moved: bytes read and written by all other operators.
        operators: kernels that are launched, about.
        seconds: that the simulation took.
    """

    sent: tuple[Sent, ...]
    before: int
    peak: int
    queue: int
    flops: int
    moved: int
    operators: int
    seconds: float

    @property
    def received(self) -> int:
        """Bytes that this rank receives."""
        return sum(each.received for each in self.sent)


def job_at(world: int, samples: int, overrides: Sequence[str] = (), config: str = "capt_large") -> LanguageJob:
    """A shipped job at ``world`` ranks with ``samples`` of the global batch on each."""
    fixed = [f"batch.global={samples * world}", "run.log_every=1000000", "schedule.max_steps=1000000"]
    job = load_job(config, [*fixed, *overrides])
    assert isinstance(job, LanguageJob)
    return job


def simulate_contrast(job: LanguageJob, world: int, rank: int = 0) -> Simulated:
    """`contrast_step` of one simulated rank."""
    with (
        rank_of(world, rank),
        mock.patch("capt.pretrain.contrast.info_nce.check_precision"),
    ):  # of a GPU's types as well
        return contrast_step(job)


def contrast_step(job: LanguageJob) -> Simulated:
    """The contrast of a step of this rank, simulated or real: forward, backward and push; the encoder is left out.

    The queue is full. The representations of the rank's samples are leaves, as in a cached step. Without
    ``contrast.cached`` the micro-batches are contrasted one after the other.
    """
    section, width, begin, world = job.contrast, _width(job), time.monotonic(), distributed.world_size()
    n, parts = job.batch.global_ // world, job.accumulation(world)
    sizes = [n] if section.is_cached(parts) else [n // parts] * parts
    with Ledger() as ledger:
        term = ContrastTerm(section, width, job.batch.global_)
        _fill(term, width)
        stored = ledger.live
        views = [Views(_rows(k, width), _rows(k, width), torch.arange(k), TAU) for k in sizes]
        ledger.reset()
        before = ledger.live
        with Wire() as wire:
            for each in views:
                term.loss(each, step=section.queue_start).backward()
        return _simulated(wire, ledger, before, stored, begin)


def simulate_step(job: LanguageJob, world: int, rank: int = 0) -> tuple[Simulated, dict[str, int]]:
    """A whole step of the language task but for the update; and bytes that lived when, and the number of weights.

    Gradients stay where they are: averaging and updating them is the engine's, whose traffic and state are formulas.
    """
    begin = time.monotonic()
    with mock.patch("capt.pretrain.language.task.prepare", return_value=_prepared(job)):
        task = _Task(job, Path())
    batch = [_batch(job, world) for _ in range(job.accumulation(world))]
    with rank_of(world, rank), mock.patch.object(LanguageTask, "_require_memory"), Ledger() as ledger:
        module = task.build_modules()["model"]
        weights = sum(p.numel() for p in module.parameters())
        term = task.contrast
        assert term is not None
        _fill(term, task.width)
        stored = 0 if term.queue is None else term.queue.shard_size * (task.width * term.queue.rows.element_size() + 8)
        before, marks = ledger.live, {"weights": 4 * weights, "queue": stored}
        ledger.reset()
        with Wire() as wire, _marked(term, ledger, marks):
            engine = _Gradients(module, job)  # type: ignore[abstract]  # nothing else of an engine is asked for
            task.step({"model": engine}, batch, Progress())
        marks["peak of the step"] = max(ledger.peak, marks["peak of the contrast"], marks["peak before the contrast"])
        return _simulated(wire, ledger, before, stored, begin), marks


def _fill(term: ContrastTerm, width: int) -> None:
    if term.queue is not None:
        size = term.queue.shard_size
        term.queue.enqueue(F.normalize(torch.randn(size, width), dim=1), ids=torch.arange(size) + (1 << 40))


def _rows(count: int, width: int) -> Tensor:
    return F.normalize(torch.randn(count, width), dim=1).requires_grad_()


@contextmanager
def _marked(term: ContrastTerm, ledger: Ledger, marks: dict[str, int]) -> Iterator[None]:
    """Write down what lives before the contrast of the step, at most, and what at most while it is computed."""
    plain = term.loss

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        marks.setdefault("peak before the contrast", ledger.peak)
        marks["when the contrast begins"] = ledger.live
        ledger.peak = ledger.live
        value = plain(*args, **kwargs)
        marks["peak of the contrast"] = max(ledger.peak, marks.get("peak of the contrast", 0))
        return value

    with mock.patch.object(term, "loss", loss):
        yield


def _simulated(wire: Wire, ledger: Ledger, before: int, queue: int, begin: float) -> Simulated:
    return Simulated(
        tuple(wire.sent), before, ledger.peak, queue, ledger.flops, ledger.moved, ledger.operators,
        time.monotonic() - begin,
    )  # fmt: skip


class _Task(LanguageTask):
    """Counts the masked tokens of a step without reading them, for they have no values."""

    def scales(self, batch: list[LanguageBatch], device: torch.device) -> Scales:
        here = sum(micro_batch.labels.numel() for micro_batch in batch)
        masked = distributed.all_reduce_sum(torch.full((), here, dtype=torch.float64, device=device))
        return {"mlm": distributed.world_size() * len(batch) / masked.clamp_min(1)}


class _Gradients(Engine):
    """The part of an engine that a simulated step needs: forward in the job's precision, backward, no update."""

    name, zero_stage, at_boundary = "model", 0, True

    def __init__(self, module: nn.Module, job: LanguageJob) -> None:
        self._module, self._bf16 = module.train(), job.engine.precision == "bf16"
        self._settings = ModuleOptimizer(job.optimizer)
        self._optimizer = torch.optim.SGD(module.parameters())  # has no state; nothing is updated

    @property
    def optimizer_settings(self) -> ModuleOptimizer:
        return self._settings

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16) if self._bf16 else nullcontext():
            return self._module(*args, **kwargs)

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        loss.backward()

    def step(self, loss: Tensor | None = None) -> None:
        """No update."""

    def gradient_norm(self) -> Tensor:
        return torch.zeros(())


def _width(job: LanguageJob) -> int:
    return job.model.for_tokenizer(VOCABULARY, 1).hidden


def _slots(job: LanguageJob) -> int:
    return round(job.corruption.rate * (job.data.sequence_length - 2))


def _prepared(job: LanguageJob) -> Any:
    """What `prepare` would make of text and tokenizer, without any."""
    return types.SimpleNamespace(
        job=job, model_config=job.model.for_tokenizer(VOCABULARY, 1), source=None,
        corruptor=types.SimpleNamespace(slots=_slots(job)),
    )  # fmt: skip


def _batch(job: LanguageJob, world: int) -> LanguageBatch:
    n, length, slots = job.micro_batch(world), job.data.sequence_length, _slots(job)
    tokens, masked = torch.zeros(n, length, dtype=torch.int64), torch.zeros(n, slots, dtype=torch.int64)
    return LanguageBatch(
        tokens=tokens, corrupted=tokens, positions=masked, labels=masked, ids=torch.arange(n), padded=False,
        documents=None,
    )  # fmt: skip
