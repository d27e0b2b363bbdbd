"""The ``capt_language`` task: one forward pass over both views, MLM and CAPT losses, one optimizer step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from pretrain.base.errors import CheckpointError, ConfigError
from pretrain.base.randomness import EPOCHS, derive
from pretrain.base.records import Count, Record, parse_record
from pretrain.config.schema import Job
from pretrain.contrast import ContrastStats
from pretrain.contrast.kernels.products import check_precision
from pretrain.contrast.term import ContrastTerm, diagnostics
from pretrain.data.corruption import IGNORE
from pretrain.data.sampler import micro_batches
from pretrain.engine import distributed
from pretrain.engine.engines.base import Engine
from pretrain.engine.loading import training_batches
from pretrain.engine.optim.settings import ModuleOptimizer
from pretrain.engine.task import Progress, StepMetrics, is_logged
from pretrain.engine.verification import all_ranks
from pretrain.language.batches import Assembler, LanguageBatch
from pretrain.language.config import LanguageJob
from pretrain.language.module import LanguageModule
from pretrain.language.prepare import Prepared, prepare
from pretrain.language.validation import validate
from pretrain.models.flops import flops_per_token
from pretrain.models.hf_model import start_from


class _State(Record):
    """The part of ``state.json`` that `LanguageTask.save_state` writes: digests of tokenizer and text, queue length."""

    tokenizer: str = Field(pattern="^[0-9a-f]{64}$")
    text: Annotated[str, Field(max_length=1000)] | None = None
    queue: Count


class LanguageTask:
    """RoBERTa under masked-language-model and CAPT losses (CAPT paper, sections 2 and 3)."""

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, LanguageJob)
        self.status = ""
        self.contrasts = job.contrast.weight > 0
        if self.contrasts:
            check_precision(job.contrast.precision, distributed.device())
        self.prepared: Prepared = prepare(job, ranks=all_ranks(), run_dir=run_dir)
        self.job = self.prepared.job
        self.model_config = self.prepared.model_config
        self.contrast: ContrastTerm | None = None
        self._module: LanguageModule | None = None

    def build_modules(self) -> Mapping[str, nn.Module]:
        """The encoder with its heads (and the temperature, when learned), initialised from the seed."""
        self._require_memory()
        torch.manual_seed(derive(self.job.run.seed, "init"))
        self._module = LanguageModule(self.job, self.model_config)
        if self.prepared.source is not None:
            start_from(self._module.capt, self.prepared.source, str(self.job.model.init))
        if self.contrasts:
            self.contrast = ContrastTerm(self.job.contrast, self.model_config.hidden, self.job.batch.global_)
        return {"model": self._module}

    def _require_memory(self) -> None:
        """Refuse sizes beyond this host's memory, before the operating system ends a process for them."""
        need = 4 * self.model_config.elements
        contrast = self.job.contrast
        if self.contrasts and distributed.device().type == "cpu":
            rows = contrast.queue // distributed.world_size()
            need += rows * (8 + self.model_config.hidden * (4 if contrast.queue_dtype == "fp32" else 2))
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if need > have:
            raise ConfigError(
                f"the model (and contrast.queue, where it lies in host memory) takes {need / 2**30:,.1f} GiB on every "
                f"rank, this host has {have / 2**30:,.1f}: take smaller model.* sizes or a shorter contrast.queue"
            )

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """None of its own."""
        return {}

    def build_batches(self, progress: Progress) -> Iterator[list[LanguageBatch]]:
        """This rank's micro-batches of each coming step."""
        batch = self.job.batch
        if progress.samples // len(self.prepared.train) >= EPOCHS:
            raise CheckpointError(f"state.json: {progress.samples} samples are over {EPOCHS:,} epochs of this text")
        steps = self.job.schedule.max_steps - progress.step
        starts = range(progress.samples, progress.samples + steps * batch.global_, batch.global_)
        shape = (batch.global_, batch.micro, distributed.world_size(), distributed.rank())
        assembler = self._assembler("train")

        def assemble(start: int) -> list[LanguageBatch]:
            return [assembler(samples) for samples in micro_batches(start, *shape)]

        return training_batches(assemble, starts, self.job.loader)

    def _assembler(self, split: str) -> Assembler:
        windows = self.prepared.train if split == "train" else self.prepared.validation
        assert windows is not None
        return Assembler(
            windows,
            self.prepared.corruptor,
            seed=self.job.run.seed if split == "train" else 0,  # validation is the same for every seed
            stream=f"corruption/{split}",
            shuffle=True,
            pad_id=self.model_config.pad_id,
            cross_document_attention=self.job.data.cross_document_attention,
        )

    def step(self, engines: Mapping[str, Engine], batch: list[LanguageBatch], progress: Progress) -> StepMetrics:
        """One optimizer step over the micro-batches of ``batch``.

        MLM is the sum over masked tokens divided by their number in the whole step (all ranks, all micro-batches);
        CAPT is the mean over micro-batches of Eq. 4's mean form, each micro-batch being one batch over all ranks.
        """
        engine = engines["model"]
        assert self._module is not None
        tau = self._module.temperature(progress.step)
        stats = ContrastStats() if self.contrasts and is_logged(self.job, progress.step + 1) else None
        # Counted on the host and filled in on the device: to copy a number to a device would mean to wait for it.
        masked_here = sum(int(np.count_nonzero(micro_batch.labels.numpy() != IGNORE)) for micro_batch in batch)
        masked = distributed.all_reduce_sum(
            torch.full((), masked_here, dtype=torch.float64, device=engine.device)
        ).clamp_min(1)
        # The engine averages over ranks and micro-batches; this factor makes a mean over masked tokens of it.
        mlm_scale = distributed.world_size() * len(batch) / masked
        totals: dict[str, Tensor] = {}
        for micro_batch in batch:
            loss, metrics = self._losses(engine, micro_batch.to(engine.device), mlm_scale, progress.step, stats)
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
        self, engine: Engine, batch: LanguageBatch, mlm_scale: Tensor, step: int, stats: ContrastStats | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch and its metrics; pushes both views into the queue, and fills ``stats`` if given."""
        output = engine(
            batch.tokens, batch.corrupted, batch.positions, batch.labels, batch.documents,
            padded=batch.padded, runs=batch.runs, step=step,
        )  # fmt: skip
        out = output.capt
        mlm = out.mlm_loss_sum * mlm_scale.to(out.mlm_loss_sum.dtype)
        metrics = {"loss/mlm": mlm, "accuracy/mlm": out.mlm_correct * mlm_scale}
        loss = mlm
        if self.contrast is not None:
            capt = self.contrast.loss(
                out.s, out.s_hat, temperature=output.temperature, ids=batch.ids, step=step, stats=stats
            )
            loss = mlm + self.job.contrast.weight * capt
            metrics["loss/capt"] = capt
        metrics["loss"] = loss
        return loss, metrics

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """MLM loss and accuracy, retrieval, alignment, uniformity and noise invariance on held-out text."""
        if self.prepared.validation is None:
            return {}
        return validate(engines["model"], self._assembler("validation"), self.job, len(self.prepared.validation))

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Save this rank's queue shard; the JSON state names tokenizer and text by their digests."""
        if self.contrast is not None:
            self.contrast.save(folder)
        return {
            "tokenizer": self.prepared.tokenizer.fingerprint,
            "text": self.prepared.train.shards.manifest.key,
            "queue": self.job.contrast.queue,
        }

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Reload the queue for this world size; refuse another tokenizer, and other text unless it is meant.

        Raises:
            CheckpointError: the checkpoint was trained with another tokenizer, or on other text (a checkpoint of an
                earlier version does not say on which).
        """
        stored = parse_record(_State, state, folder / "state.json", error=CheckpointError)
        if stored.tokenizer != self.prepared.tokenizer.fingerprint:
            raise CheckpointError(
                f"{folder}: trained with tokenizer {stored.tokenizer[:12]}, this job has "
                f"{self.prepared.tokenizer.fingerprint[:12]}; set tokenizer.* as it was, or "
                f"tokenizer.path to a copy of {folder / 'tokenizer'}"
            )
        text = self.prepared.train.shards.manifest.key
        if stored.text not in (None, text) and not self.job.data.allow_change:
            raise CheckpointError(
                f"{folder}: trained on other text than this job reads (files or data.* options have changed since);"
                " data.allow_change=true goes on with what there is now"
            )
        if self.contrast is not None and stored.queue:
            self.contrast.load(folder)

    def flops_per_step(self) -> float:
        """Forward and backward FLOP of one global batch, both views."""
        length = self.job.data.sequence_length
        return (
            self.job.batch.global_
            * length
            * flops_per_token(
                self.model_config, length, self.prepared.corruptor.slots / length, views=2 if self.contrasts else 1
            )
        )

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Commands that measure and export the encoder."""
        return [
            f"capt evaluate {run_dir} --text HELD_OUT.txt (what the encoder has learnt; --sts FOLDER for similarity)",
            f"capt convert {run_dir} OUT --to hf (or sentence-transformers, onnx)",
        ]

    def export_files(self) -> Mapping[str, Path]:
        """Every checkpoint holds a copy of the tokenizer."""
        return {"tokenizer": self.prepared.tokenizer_folder}


TASK = LanguageTask
