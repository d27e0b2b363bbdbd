"""The ``capt_vl`` task: both views of each pair in one forward pass, LXMERT's losses and CAPT's, one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import quoted
from capt.pretrain.base.verification import all_ranks
from capt.pretrain.config.reader import as_override
from capt.pretrain.config.schema import Job
from capt.pretrain.contrastive.task import ContrastState, ContrastTask, HeldOut, Scales
from capt.pretrain.contrastive.views import Views
from capt.pretrain.data.mixture import MixtureSampler
from capt.pretrain.data.mixture_dataset import held_out_samples
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Progress, Rows, SampleOrder, StepMetrics
from capt.pretrain.models.lxmert.config import step_flops
from capt.pretrain.vision_language.batches import MaskingVocabulary, VisionLanguageAssembler, VisionLanguageBatch
from capt.pretrain.vision_language.config import VisionLanguageJob
from capt.pretrain.vision_language.load import (
    ANSWERS,
    REGIONS,
    FeatureKind,
    read_answers,
    read_features,
    require_features,
    require_same_answers,
    start_from,
)
from capt.pretrain.vision_language.module import Counts, VisionLanguageModule, VisionLanguageOutput, divisors, loss_sums
from capt.pretrain.vision_language.pairs import EncodedPairs
from capt.pretrain.vision_language.prepare import PreparedVisionLanguage, prepare
from capt.pretrain.vision_language.validation import validate

_Digest = Annotated[str, Field(pattern="^[0-9a-f]{32,64}$")]


class _State(ContrastState):
    """State of a vision-language task in a checkpoint."""

    text: _Digest
    regions: _Digest
    mixture: _Digest | None = None


class VisionLanguageTask(ContrastTask[VisionLanguageBatch]):
    """LXMERT under its own objectives and the CAPT loss (CAPT paper, section 4)."""

    job: VisionLanguageJob
    State = _State
    data_name = "data"
    noise = ("objectives",)

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, VisionLanguageJob)
        super().__init__(job)
        self._run_dir = run_dir
        self.prepared: PreparedVisionLanguage = prepare(job, ranks=all_ranks(), run_dir=run_dir)
        self.job = self.prepared.job

    @property
    def samples(self) -> int:
        """Pairs of a sentence and its picture."""
        return len(self.prepared.train)

    @property
    def width(self) -> int:
        """The hidden size of the encoder."""
        return int(self.job.model.hidden)

    @property
    def fingerprint(self) -> str:
        """The digest of the tokenizer."""
        return self.prepared.tokenizer.fingerprint

    def digests(self) -> Mapping[str, tuple[str, str]]:
        """The sentences' and the store's."""
        store = self.prepared.store.manifest
        data = {"text": ("sentences", self.prepared.text), "regions": ("regions", store.key)}
        order = self.prepared.order
        return data if order is None else {**data, "mixture": ("shares of data.mixture", order.key)}

    def sample_order(self) -> SampleOrder:
        """The order of the pairs, or that of a mixture."""
        order, mixed = super().sample_order(), self.prepared.order
        return order if mixed is None else replace(order, **mixed.fields)

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Refuse another answer table and features of another kind too: classes and columns would mean other things.

        Raises:
            CheckpointError: the checkpoint is of one of these, or as `ContrastTask.load_state`.
        """
        super().load_state(folder, state)
        answers = self.prepared.answers
        require_features(self.prepared.store, read_features(folder), str(folder))
        if answers is not None:
            require_same_answers(folder, read_answers(folder, len(answers)), answers.answers)

    def build_module(self) -> nn.Module:
        """LXMERT with its heads (and the temperature, when learned), or what ``model.init`` names."""
        module = VisionLanguageModule(self.job, self.job.model)
        if self.prepared.start is not None:
            answers = self.prepared.answers
            start_from(module.lxmert, self.prepared.start, None if answers is None else answers.answers)
        return module

    def assembler(self, split: str) -> VisionLanguageAssembler:
        """Return the assembler of the micro-batches of a split."""
        pairs = self.prepared.train if split == "train" else self.prepared.validation
        assert pairs is not None
        return self._assembler(split, pairs, self.prepared.order if split == "train" else None)

    def _held_out(self) -> list[HeldOut[VisionLanguageBatch]]:
        """Return the held-out samples of each source."""
        pairs = self.prepared.validation
        if pairs is None:
            return []
        names = [part.name for part in self.job.data.mixture] or [""]
        sizes = dict(zip(names, pairs.parts, strict=True))
        # A source without held-out sentences takes no part.
        samples = held_out_samples(self.job.validate_.samples, {name: size for name, size in sizes.items() if size})
        ends = dict(zip(names, accumulate(sizes.values()), strict=True))
        rows = {name: range(ends[name] - sizes[name], ends[name]) for name in samples}
        return [
            HeldOut(name, self._assembler("validation", pairs, None, rows[name]), number)
            for name, number in samples.items()
        ]

    def _assembler(
        self, split: str, pairs: EncodedPairs, order: MixtureSampler | None, rows: range | None = None
    ) -> VisionLanguageAssembler:
        return VisionLanguageAssembler(
            pairs,
            self.prepared.store,
            MaskingVocabulary.of(self.prepared.tokenizer),
            self.job.objectives,
            self.job.contrast,
            length=self.job.data.sequence_length,
            seed=self.job.run.seed if split == "train" else 0,  # validation is the same for every seed
            stream=f"pairs/{split}",
            order=order,
            rows=rows,
        )

    def rows(self, batch: VisionLanguageBatch) -> Rows:
        """The pairs; of each its sentence in both views, the regions of its picture and which of them are masked."""
        parts = (batch.tokens, batch.corrupted, batch.present, batch.zeroed, batch.boxes, batch.matched)
        return Rows(batch.numbers.numpy(), [part.numpy() for part in parts])

    def scales(self, batch: list[VisionLanguageBatch], device: torch.device) -> Scales:
        """Every loss of LXMERT is its sum over the whole step divided by the counts of the whole step."""
        section = self.job.objectives
        by = divisors(_counts(batch, device), section.region_rate, section.region_scope)
        return {name: distributed.world_size() * len(batch) / count for name, count in by.items()}

    def losses(
        self, engine: Engine, batch: VisionLanguageBatch, scales: Scales, step: int
    ) -> tuple[Views | None, Tensor, dict[str, Tensor]]:
        """Return the contrasted views of a micro-batch, the sum of LXMERT's losses, and its metrics."""
        only = self._contrasted(batch, engine.device)
        batch = batch.to(engine.device)
        output: VisionLanguageOutput = engine(batch, step=step)
        metrics: dict[str, Tensor] = {}
        loss: Tensor | float = 0.0
        weights = self.job.objectives.weights()
        for name, (loss_sum, correct) in loss_sums(output.lxmert, batch, self.job.objectives).items():
            mean = loss_sum * scales[name].to(loss_sum.dtype)
            loss = loss + weights[name] * mean  # a weight of 0 as well: every parameter has a gradient
            if weights[name]:
                metrics[f"loss/{name}"] = mean
                if correct is not None:
                    metrics[f"accuracy/{name}"] = correct * scales[name]
        assert isinstance(loss, Tensor)
        return (_views(output, batch, only) if self.contrasts else None), loss, metrics

    def represent(self, engine: Engine, batch: VisionLanguageBatch, step: int) -> Views:
        """Both views of a micro-batch, without LXMERT's heads."""
        only = self._contrasted(batch, engine.device)
        batch = batch.to(engine.device)
        return _views(engine(batch, step=step, heads=False), batch, only)

    def _contrasted(self, batch: VisionLanguageBatch, device: torch.device) -> Tensor | None:
        """The rows that the contrast sees; None for all of them."""
        if not self.contrasts or self.job.contrast.mismatched:
            return None
        return batch.matched.nonzero().flatten().to(device)

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """Losses and accuracies of all objectives, and the metrics of the contrast, on held-out pairs."""
        parts = self._held_out()
        return self.validated(validate(engines["model"], parts, self.job), progress) if parts else {}

    def validation_fault(self) -> str:
        """Return the reason why the held-out pairs do not suffice for `validate`, or ""."""
        if self.prepared.validation is None:
            return "there are no held-out pairs; set data.validation" if self.job.checkpoint.best is not None else ""
        if not self.contrasts:
            return ""
        found = 0
        batches = (part.assembler(np.array([n])) for part in self._held_out() for n in range(part.samples))
        for batch in batches:
            found += self.job.contrast.mismatched or bool(batch.matched[0] == 1)
            # Two pairs can be compared.
            if found == 2:
                return ""
        return (
            f"it compares matching pairs with each other, and has {found}; raise validate.samples, or data.validation"
        )

    def flops_per_step(self) -> float:
        """Forward and backward FLOP of one global batch, both views."""
        job, store = self.job, self.prepared.store.manifest
        length = job.data.sequence_length
        masked = self.prepared.train.record.tokens / len(self.prepared.train) * job.objectives.word_rate
        return job.batch.global_ * step_flops(job.model, length, store.most_regions, masked, self.contrasts)

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Commands that measure, fine-tune and export the model."""
        finetune = f"capt finetune vqa {quoted(as_override('model.init', str(run_dir)))}"
        if self.job.data.source == "files":
            finetune += (
                f" {quoted(as_override('data.regions', str(self.job.data.regions)))} data.train=... data.validation=..."
            )
        return [
            finetune,
            f"capt evaluate {quoted(run_dir)} --data FILE (losses and retrieval on held-out pairs)",
            f"capt convert {quoted(run_dir)} OUT --to hf",
        ]

    def export_files(self) -> Mapping[str, Path]:
        """Tokenizer, kind of features, and answer table of a model with an answer head travel with every checkpoint."""
        prepared, folder = self.prepared, self._run_dir
        files = {"tokenizer": prepared.tokenizer_folder, REGIONS: FeatureKind.of(prepared.store).save(folder)}
        if prepared.answers is not None:
            files[ANSWERS] = folder / ANSWERS
            prepared.answers.save(files[ANSWERS])
        return files


def _views(output: VisionLanguageOutput, batch: VisionLanguageBatch, only: Tensor | None) -> Views:
    assert output.lxmert.s is not None
    assert output.lxmert.s_hat is not None
    return Views(output.lxmert.s, output.lxmert.s_hat, batch.ids, output.temperature, only)


def _counts(batch: Sequence[VisionLanguageBatch], device: torch.device) -> Tensor:
    """`Counts` of the whole step over all ranks. Filled in on the device: to copy them there would mean to wait."""
    here = [sum(column) for column in zip(*(Counts.of(micro_batch) for micro_batch in batch), strict=True)]
    return distributed.all_reduce_sum(
        torch.stack([torch.full((), count, dtype=torch.float64, device=device) for count in here])
    )


TASK = VisionLanguageTask
