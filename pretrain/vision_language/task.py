"""The ``capt_vl`` task: both views of each pair in one forward pass, LXMERT's losses and CAPT's, one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from pretrain.base.errors import CheckpointError
from pretrain.base.randomness import EPOCHS, derive
from pretrain.base.records import Count, Record, parse_record
from pretrain.config.schema import Job
from pretrain.contrast import ContrastStats
from pretrain.contrast.kernels.products import check_precision
from pretrain.contrast.term import ContrastTerm, diagnostics
from pretrain.data.sampler import micro_batches
from pretrain.engine import distributed
from pretrain.engine.engines.base import Engine
from pretrain.engine.loading import training_batches
from pretrain.engine.optim.settings import ModuleOptimizer
from pretrain.engine.task import Progress, StepMetrics, is_logged
from pretrain.engine.verification import all_ranks
from pretrain.models.lxmert.flops import step_flops
from pretrain.models.lxmert.model import LxmertOutput
from pretrain.vision_language.batch import PairBatch
from pretrain.vision_language.batches import Assembler
from pretrain.vision_language.config import VisionLanguageJob
from pretrain.vision_language.features import REGIONS, FeatureKind
from pretrain.vision_language.module import VisionLanguageModule
from pretrain.vision_language.objectives import Counts, divisors, loss_sums
from pretrain.vision_language.prepare import Prepared, prepare
from pretrain.vision_language.restore import ANSWERS
from pretrain.vision_language.start import start_from
from pretrain.vision_language.validation import validate

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{32,64}$")]


class _State(Record):
    """The part of ``state.json`` that `VisionLanguageTask.save_state` writes: digests, and the queue's length."""

    tokenizer: _Digest
    text: _Digest
    regions: _Digest
    queue: Count


class VisionLanguageTask:
    """LXMERT under its own objectives and the CAPT loss (CAPT paper, section 4)."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, VisionLanguageJob)
        self.status, self._run_dir = "", run_dir
        self.contrasts = job.contrast.weight > 0
        if self.contrasts:
            check_precision(job.contrast.precision, distributed.device())
        self.prepared: Prepared = prepare(job, ranks=all_ranks(), run_dir=run_dir)
        self.job = self.prepared.job
        self.contrast: ContrastTerm | None = None
        self._module: VisionLanguageModule | None = None

    def build_modules(self) -> Mapping[str, nn.Module]:
        """LXMERT with its heads (and the temperature, when learned), initialised from the seed or ``model.init``."""
        torch.manual_seed(derive(self.job.run.seed, "init"))
        self._module = VisionLanguageModule(self.job, self.job.model)
        if self.prepared.start is not None:
            answers = self.prepared.answers
            start_from(self._module.lxmert, self.prepared.start, None if answers is None else answers.answers)
        if self.contrasts:
            self.contrast = ContrastTerm(self.job.contrast, self.job.model.hidden, self.job.batch.global_)
        return {"model": self._module}

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """None of its own."""
        return {}

    def build_batches(self, progress: Progress) -> Iterator[list[PairBatch]]:
        """This rank's micro-batches of each coming step."""
        batch = self.job.batch
        if progress.samples // len(self.prepared.train) >= EPOCHS:
            raise CheckpointError(f"state.json: {progress.samples} samples are over {EPOCHS:,} epochs of this data")
        steps = self.job.schedule.max_steps - progress.step
        starts = range(progress.samples, progress.samples + steps * batch.global_, batch.global_)
        shape = (batch.global_, batch.micro, distributed.world_size(), distributed.rank())
        assembler = self._assembler("train")

        def assemble(start: int) -> list[PairBatch]:
            return [assembler(samples) for samples in micro_batches(start, *shape)]

        return training_batches(assemble, starts, self.job.loader)

    def _assembler(self, split: str) -> Assembler:
        pairs = self.prepared.train if split == "train" else self.prepared.validation
        assert pairs is not None
        return Assembler(
            pairs,
            self.prepared.store,
            self.prepared.vocabulary,
            self.job.objectives,
            self.job.contrast,
            length=self.job.data.sequence_length,
            seed=self.job.run.seed if split == "train" else 0,  # validation is the same for every seed
            stream=f"pairs/{split}",
        )

    def step(self, engines: Mapping[str, Engine], batch: list[PairBatch], progress: Progress) -> StepMetrics:
        """One optimizer step over the micro-batches of ``batch``.

        Every loss of LXMERT is its sum over the whole step (all ranks, all micro-batches) divided by the counts of the
        whole step; CAPT is the mean over micro-batches, each of them being one batch over all ranks.
        """
        engine = engines["model"]
        assert self._module is not None
        tau = self._module.temperature(progress.step)
        stats = ContrastStats() if self.contrasts and is_logged(self.job, progress.step + 1) else None
        # The engine averages over ranks and micro-batches; with these factors that makes means over the step's counts.
        factor = distributed.world_size() * len(batch)
        by = divisors(_counts(batch, engine.device), self.job.objectives.region_rate)
        scales = {name: factor / count for name, count in by.items()}
        totals: dict[str, Tensor] = {}
        for micro_batch in batch:
            loss, metrics = self._losses(engine, micro_batch, scales, progress.step, stats)
            engine.backward(loss)
            engine.step()
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value.detach() / len(batch)
        progress.samples += self.job.batch.global_
        progress.tokens += self.job.batch.global_ * self.job.data.sequence_length
        report: StepMetrics = {**totals, "grad_norm": engine.gradient_norm()}
        if self.contrasts:
            report |= diagnostics(stats, tau)
        return report

    def _losses(
        self, engine: Engine, batch: PairBatch, scales: Mapping[str, Tensor], step: int, stats: ContrastStats | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch and its metrics; pushes both views into the queue, and fills ``stats`` if given."""
        rows = self._contrasted(batch, engine.device)
        batch = batch.to(engine.device)
        out, temperature = engine(batch, step=step)
        metrics: dict[str, Tensor] = {}
        loss: Tensor | float = 0.0
        weights = self.job.objectives.weights()
        for name, (loss_sum, correct) in loss_sums(out, batch, self.job.objectives).items():
            mean = loss_sum * scales[name].to(loss_sum.dtype)
            loss = loss + weights[name] * mean  # a weight of 0 as well: every parameter has a gradient
            if weights[name]:
                metrics[f"loss/{name}"] = mean
                if correct is not None:
                    metrics[f"accuracy/{name}"] = correct * scales[name]
        if self.contrast is not None:
            metrics["loss/capt"] = self._contrast_loss(out, batch.ids, rows, temperature, step, stats)
            loss = loss + self.job.contrast.weight * metrics["loss/capt"]
        assert isinstance(loss, Tensor)
        return loss, {**metrics, "loss": loss}

    def _contrasted(self, batch: PairBatch, device: torch.device) -> Tensor | None:
        """The rows that the contrast sees; None for all of them."""
        if not self.contrasts or self.job.contrast.mismatched:
            return None
        return batch.matched.nonzero().flatten().to(device)

    def _contrast_loss(
        self, out: LxmertOutput, ids: Tensor, rows: Tensor | None, temperature: float | Tensor, step: int,
        stats: ContrastStats | None,
    ) -> Tensor:  # fmt: skip
        assert self.contrast is not None
        assert out.s is not None
        assert out.s_hat is not None
        return self.contrast.loss(out.s, out.s_hat, temperature=temperature, ids=ids, step=step, stats=stats, only=rows)

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """Losses and accuracies of all objectives, and the metrics of the contrast, on held-out pairs."""
        if self.prepared.validation is None:
            return {}
        return validate(engines["model"], self._assembler("validation"), self.job, len(self.prepared.validation))

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Save this rank's queue shard; the JSON state names tokenizer, sentences and store by their digests."""
        if self.contrast is not None:
            self.contrast.save(folder)
        return {
            "tokenizer": self.prepared.tokenizer.fingerprint,
            "text": self.prepared.text,
            "regions": self.prepared.store.manifest.key,
            "queue": self.job.contrast.queue,
        }

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Reload the queue for this world size; refuse another tokenizer, and other data unless it is meant.

        Raises:
            CheckpointError: the checkpoint was trained with another tokenizer, on other sentences or other regions.
        """
        stored = parse_record(_State, state, folder / "state.json", error=CheckpointError)
        if stored.tokenizer != self.prepared.tokenizer.fingerprint:
            raise CheckpointError(
                f"{folder}: trained with tokenizer {stored.tokenizer[:12]}, this job has "
                f"{self.prepared.tokenizer.fingerprint[:12]}; set tokenizer.* as it was, or "
                f"tokenizer.path to a copy of {folder / 'tokenizer'}"
            )
        now = {"sentences": (stored.text, self.prepared.text)}
        now["regions"] = (stored.regions, self.prepared.store.manifest.key)
        for what, (then, found) in now.items():
            if then != found and not self.job.data.allow_change:
                raise CheckpointError(
                    f"{folder}: trained on other {what} than this job reads (files have changed since); "
                    "data.allow_change=true goes on with what there is now"
                )
        if self.contrast is not None and stored.queue:
            self.contrast.load(folder)

    def flops_per_step(self) -> float:
        """Forward and backward FLOP of one global batch, both views."""
        job, store = self.job, self.prepared.store.manifest
        length = job.data.sequence_length
        masked = self.prepared.train.record.tokens / len(self.prepared.train) * job.objectives.word_rate
        return job.batch.global_ * step_flops(job.model, length, store.most_regions, masked, self.contrasts)

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Commands that measure, fine-tune and export the model."""
        statements = bool(self.prepared.train.untrue.any())  # which pretraining has from NLVR v1 alone
        finetune = f"capt finetune {'nlvr1' if statements else 'vqa'} model.init={run_dir}"
        if self.job.data.source == "files":
            finetune += f" data.regions={self.job.data.regions} data.train=... data.validation=..."
        return [
            finetune,
            f"capt evaluate {run_dir} --data FILE (losses and retrieval on held-out pairs)",
            f"capt convert {run_dir} OUT --to hf",
        ]

    def export_files(self) -> Mapping[str, Path]:
        """Tokenizer, kind of features, and answer table of a model with an answer head travel with every checkpoint."""
        prepared, folder = self.prepared, self._run_dir
        files = {"tokenizer": prepared.tokenizer_folder, REGIONS: FeatureKind.of(prepared.store).save(folder)}
        if prepared.answers is not None:
            files[ANSWERS] = folder / ANSWERS
            prepared.answers.save(files[ANSWERS])
        return files


def _counts(batch: Sequence[PairBatch], device: torch.device) -> Tensor:
    """`Counts` of the whole step over all ranks. Filled in on the device: to copy them there would mean to wait."""
    here = [sum(column) for column in zip(*(Counts.of(micro_batch) for micro_batch in batch), strict=True)]
    return distributed.all_reduce_sum(
        torch.stack([torch.full((), count, dtype=torch.float64, device=device) for count in here])
    )


TASK = VisionLanguageTask
