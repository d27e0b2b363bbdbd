"""The ``capt_language`` task: one forward pass over both views, MLM and CAPT losses, one optimizer step."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError, quoted
from capt.pretrain.base.process import host_memory
from capt.pretrain.base.verification import all_ranks, digest_of
from capt.pretrain.bottleneck.config import POOLED
from capt.pretrain.bottleneck.folder import start_heads
from capt.pretrain.bottleneck.heads import bottleneck_flops
from capt.pretrain.config.schema import Job
from capt.pretrain.contrastive.task import Assemble, ContrastState, ContrastTask, HeldOut, Scales, masked_scale
from capt.pretrain.contrastive.views import Views
from capt.pretrain.data.corruption import IGNORE
from capt.pretrain.data.mixture_dataset import MixtureDataset, held_out_samples
from capt.pretrain.data.passages import PassageDataset
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.task import Progress, Role, Rows, SampleOrder, StepMetrics, is_logged
from capt.pretrain.language.batches import LanguageAssembler, LanguageBatch, ViewPlan, Windows
from capt.pretrain.language.config import LanguageJob
from capt.pretrain.language.module import LanguageModule, LanguageOutput
from capt.pretrain.language.prepare import PreparedLanguage, prepare, vocabulary_of
from capt.pretrain.language.validation import validate
from capt.pretrain.models.architecture import flops_per_token
from capt.pretrain.models.hf_model import start_from

logger = logging.getLogger(__name__)


class _State(ContrastState):
    """State of a language task in a checkpoint; earlier versions do not say on which text and which model."""

    text: Annotated[str, Field(max_length=1000)] | None = None
    mixture: Annotated[str, Field(max_length=1000)] | None = None
    length: int | None = None
    encoder: dict[str, Any] | None = None
    pooling: str | None = None


class LanguageTask(ContrastTask[LanguageBatch]):
    """An encoder under masked-language-model and CAPT losses (CAPT paper, sections 2 and 3)."""

    job: LanguageJob
    State = _State
    data_name = "text"
    noise = ("corruption",)

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, LanguageJob)
        super().__init__(job)
        self.prepared: PreparedLanguage = prepare(job, ranks=all_ranks(), run_dir=run_dir)
        self.job = self.prepared.job
        self.model_config = self.prepared.model_config

    @property
    def samples(self) -> int:
        """Windows of the training text."""
        return len(self.prepared.train)

    @property
    def pretext(self) -> str:
        """The view of the job."""
        return f"data.view {self.job.data.view}"

    @property
    def views_differ(self) -> bool:
        """True for all views but those that differ by dropout."""
        return self.job.data.views.differs

    @property
    def width(self) -> int:
        """The hidden size of the encoder."""
        return self.model_config.hidden

    @property
    def fingerprint(self) -> str:
        """The digest of the tokenizer."""
        return self.prepared.tokenizer.fingerprint

    def digests(self) -> Mapping[str, tuple[str, str]]:
        """The text's."""
        key, at_once = self.prepared.train.key, self.job.data.shards_at_once
        # Groups of another size make another order, which a run must not continue by mistake.
        text = {"text": ("text", key if at_once is None else f"{key}/{at_once}")}
        if isinstance(self.prepared.train, MixtureDataset):
            text["mixture"] = ("shares of data.mixture", self.prepared.train.order.key)
        return text

    def sample_order(self) -> SampleOrder:
        """The order of the windows: that of a mixture; by groups of shards where ``data.shards_at_once`` is set."""
        order, at_once = super().sample_order(), self.job.data.shards_at_once
        data = self.job.data
        if data.views.draw is not None:  # what a span holds depends on these too
            spans = {"view": data.view, "spans": data.spans.model_dump(mode="json"), "mlm": self.job.mlm.views}
            order = replace(order, noise=digest_of({"corruption": order.noise, **spans}))
        if isinstance(self.prepared.train, MixtureDataset):
            return replace(order, **self.prepared.train.order.fields)
        return order if at_once is None else replace(order, block=self.prepared.train.block, at_once=at_once)

    def build_module(self) -> nn.Module:
        """The encoder with its heads (and the temperature, when learned), or what ``model.init`` names."""
        module = LanguageModule(self.job, self.model_config)
        if self.prepared.source is not None:
            start_from(module.capt, self.prepared.source, str(self.job.model.init), head=self.job.mlm.head)
        if module.bottleneck is not None:
            section = self.job.bottleneck
            logger.info("bottleneck: %s, of %s", section.head, POOLED[module.bottleneck.pooling])
            if self.prepared.source is not None:
                start_heads(module.bottleneck, section, self.prepared.heads, str(self.job.model.init))
        return module

    def _require_memory(self) -> None:
        """Refuse sizes beyond this host's memory, before the operating system ends a process for them."""
        super()._require_memory()
        need, have = 4 * self.model_config.elements, host_memory()
        if need > have:
            raise ConfigError(
                f"the model takes {need / 2**30:,.1f} GiB on every rank, this host has {have / 2**30:,.1f}: take "
                "smaller model.* sizes"
            )

    def assembler(self, split: str) -> LanguageAssembler:
        """Return the assembler of the micro-batches of training, or of validation without a mixture."""
        if split == "train":
            return self._assembler(self.prepared.train, split, self.job.run.seed)
        (windows,) = self.prepared.validation.values()
        return self._assembler(windows, split, 0)  # validation is the same for every seed

    def _assembler(self, windows: Windows, split: str, seed: int) -> LanguageAssembler:
        return LanguageAssembler(
            windows,
            self.prepared.corruptor,
            seed=seed,
            stream=f"corruption/{split}",
            shuffle=True,
            pad_id=self.model_config.pad_id,
            cross_document_attention=self.job.data.cross_document_attention,
            at_once=self.job.data.shards_at_once,
            ordinary=vocabulary_of(self.prepared.tokenizer).is_ordinary() if self.job.bottleneck.on else None,
            plan=ViewPlan.of(self.job, split),
        )

    def micro_batch(self, assembler: Assemble[LanguageBatch], samples: np.ndarray, step: int) -> LanguageBatch:
        """The samples, corrupted at the rate of the step."""
        assert isinstance(assembler, LanguageAssembler)
        return assembler(samples, self.job.corruption.rate_at(step / self.job.schedule.max_steps))

    def rows(self, batch: LanguageBatch) -> Rows:
        """The windows, their tokens, and the corrupted tokens with what is to be predicted."""
        # Of both views a row may have masked positions.
        masked = [each.unflatten(0, (-1, len(batch.ids))).transpose(0, 1) for each in (batch.positions, batch.labels)]
        parts = (batch.tokens, batch.corrupted, *(each.flatten(1) for each in masked))
        return Rows(batch.ids.numpy(), [part.numpy() for part in parts])

    def scales(self, batch: list[LanguageBatch], device: torch.device) -> Scales:
        """Each loss is a sum over what it predicts, divided by the number of that in the whole step."""
        # Counted before the batch is on the device, where it would have to be waited for.
        masked = sum(int(np.count_nonzero(micro_batch.labels.numpy() != IGNORE)) for micro_batch in batch)
        here = {"mlm": masked, **self.bottleneck_counts(batch)}
        return {name: masked_scale(count, len(batch), device) for name, count in here.items()}

    def bottleneck_counts(self, batch: list[LanguageBatch]) -> dict[str, int]:
        """Count the predictions of each head of the bottleneck in this rank's step: texts, and words."""
        section, sizes = self.job.bottleneck, [part.sizes for part in batch if part.sizes is not None]
        bow = {"bow": sum(each.texts for each in sizes)} if section.bow else {}
        return bow | ({"decoder": sum(each.words for each in sizes)} if section.decoder else {})

    def losses(
        self, engine: Engine, batch: LanguageBatch, scales: Scales, step: int
    ) -> tuple[Views | None, Tensor, dict[str, Tensor]]:
        """Return the views of a micro-batch to contrast, its other losses times their weights, and its metrics."""
        batch = batch.to(engine.device)
        output = self._forward(engine, batch, step)
        out = output.capt
        # The factor comes from a count in float64.
        mlm = out.mlm_loss_sum * scales["mlm"].to(out.mlm_loss_sum.dtype)
        metrics = {"loss/mlm": mlm, "accuracy/mlm": out.mlm_correct * scales["mlm"]}
        loss = self.job.mlm.weight * mlm
        if output.bottleneck is not None:
            for name, weight, total, correct in output.bottleneck.of(self.job.bottleneck):
                term = total * scales[name].to(total.dtype)
                loss = loss + weight * term
                metrics |= {f"loss/{name}": term, f"accuracy/{name}": correct * scales[name]}
        return (_views(output, batch) if self.contrasts else None), loss, metrics

    def represent(self, engine: Engine, batch: LanguageBatch, step: int) -> Views:
        """Both views of a micro-batch, without the language model's head."""
        batch = batch.to(engine.device)
        return _views(self._forward(engine, batch, step, mlm=False), batch)

    def _forward(self, engine: Engine, batch: LanguageBatch, step: int, *, mlm: bool = True) -> LanguageOutput:
        output: LanguageOutput = engine(
            batch.tokens, batch.corrupted, batch.positions, batch.labels if mlm else None, batch.documents,
            padded=batch.padded, runs=batch.runs, step=step, texts=batch.texts, originals=batch.originals,
        )  # fmt: skip
        return output

    def step(self, engines: Mapping[str, Engine], batch: list[LanguageBatch], progress: Progress) -> StepMetrics:
        """Do one optimizer step; see `ContrastTask.step`. Of spans a logged step says how many are no negatives."""
        no_mask = not self.contrasts or not self.job.contrast.mask_duplicates
        if no_mask or batch[0].instances is None or not is_logged(self.job, progress.step + 1):
            return super().step(engines, batch, progress)
        left_out = self._left_out(batch, progress.step)  # before the rows of the step are queued
        return {**super().step(engines, batch, progress), "contrast/left_out": left_out}

    def _left_out(self, batch: list[LanguageBatch], step: int) -> Tensor:
        """The share of the other samples' spans, and of the queue, that are of a sample's own instance. Collective."""
        device = distributed.device()
        mine = torch.cat([part.instances for part in batch if part.instances is not None])
        instances, _ = distributed.gather_ragged(mine.to(device))
        known, place, counts = torch.unique(instances, return_inverse=True, return_counts=True)
        n = len(instances)
        same: Tensor = 2 * (counts[place] - 1).sum().double()
        others = 2.0 * n * (n - 1)
        queue = None if self.contrast is None or step < self.job.contrast.queue_start else self.contrast.queue
        if queue is not None:
            at = torch.searchsorted(known, queue.ids).clamp(max=len(known) - 1)
            here = torch.stack([(counts[at] * (known[at] == queue.ids)).sum(), at.new_tensor(n * len(at))]).double()
            here = distributed.all_reduce_sum(here)
            share: Tensor = (same + here[0]) / (others + here[1])
            return share
        return same.div(max(1.0, others))

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        """MLM loss and accuracy, retrieval, alignment, uniformity and noise invariance on held-out text."""
        parts = self._held_out()
        return self.validated(validate(engines["model"], parts, self.job), progress) if parts else {}

    def _held_out(self) -> list[HeldOut[LanguageBatch]]:
        """Return the held-out text of each source."""
        windows = self.prepared.validation
        samples = held_out_samples(self.job.validate_.samples, {name: len(part) for name, part in windows.items()})
        return [
            HeldOut(name, self._assembler(windows[name], "validation", 0), number) for name, number in samples.items()
        ]

    def text_ids(self, texts: Sequence[str], role: Role) -> list[list[int]]:
        """The ids of each text, cut to the position table; queries and documents are read alike."""
        return self.prepared.tokenizer.encode_framed(texts, self.model_config.max_positions)

    def text_vectors(self, engines: Mapping[str, Engine], ids: Sequence[Sequence[int]]) -> Tensor:
        """Unit rows of a batch of texts, by ``validate.retrieval.pooling``."""
        longest, pad = max(map(len, ids)), self.model_config.pad_id
        tokens = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in ids], device=engines["model"].device)
        rows: Tensor = engines["model"](tokens, padded=True, step=0, pooling=self.job.validate_.retrieval.pooling)
        return rows

    def validation_fault(self) -> str:
        """Return the reason why the held-out text does not suffice for `validate`."""
        windows = sum(map(len, self.prepared.validation.values()))
        if not windows:  # which was told as the text was prepared
            return "there is no held-out text" if self.job.checkpoint.best is not None else ""
        parts = self._held_out()
        samples = sum(part.samples for part in parts)
        if samples < 2:
            what = "validate.samples" if windows > 1 else "data.validation_fraction, or set data.validation_files"
            return f"it compares sequences with each other, and has {samples}; raise {what}"
        with_text, best = {part.source for part in parts}, str(self.job.checkpoint.best)
        for name in [part.name for part in self.job.data.mixture if part.name not in with_text]:
            missing = f"source {name} of data.mixture has no held-out text, or validate.samples is too small"
            if best.endswith(f"/{name}"):
                return f"{missing}, and checkpoint.best is {best}"
            logger.warning("%s: validation leaves it out", missing)
        for part in parts if self.job.masks else ():
            # One window at a time: the first one with a masked token is enough.
            numbers = range(part.samples)
            if all(bool((part.assembler(np.array([number])).labels == IGNORE).all()) for number in numbers):
                of = f" of source {part.source}" if part.source else ""
                return (
                    f"no token of the held-out text{of} is masked; raise corruption.*, validate.samples, or the "
                    "held-out text"
                )
        return ""

    def flops_per_step(self) -> float:
        """Forward and backward FLOP of one global batch, both views."""
        length, views = self._sample_tokens, 2 if self.contrasts else 1
        windows, seen = self.prepared.train, None
        if self.job.data.views.draw is None and not self.job.data.cross_document_attention:
            assert not isinstance(windows, PassageDataset)
            seen = windows.tokens_seen()
        masked = self.prepared.corruptor.slots / self.job.data.sequence_length if self.job.masks else 0.0
        masked *= 2 if self.job.mlm.views == "both" else 1
        per_token = flops_per_token(self.model_config, length, masked, views, seen)
        return self.job.batch.global_ * (
            length * per_token + bottleneck_flops(self.job.bottleneck, self.model_config, length)
        )

    @cached_property
    def _sample_tokens(self) -> int:
        """Tokens of a view of a sample: those of a window, or of spans in the mean over some samples."""
        if self.job.data.views.draw is None:
            return int(self.job.data.sequence_length)
        batch = self.assembler("train")(np.arange(min(_LOOKED_AT, self.samples)))
        real = sum(int((rows != self.model_config.pad_id).sum()) for rows in (batch.tokens, batch.corrupted))
        return max(1, round(real / 2 / len(batch.ids)))

    def tokens(self, batch: list[LanguageBatch], sequences: int) -> int:
        """Tokens of a step of ``sequences`` over all ranks, of one view; of spans by their mean length."""
        return sequences * self._sample_tokens

    def save_state(self, folder: Path) -> dict[str, Any]:
        """The state of a contrast, the length of windows, and the model that the weights belong to."""
        model: dict[str, Any] = {
            "length": self.job.data.sequence_length, "encoder": self.model_config.fixed_by_weights()
        }  # fmt: skip
        if (pooling := self.job.trained_pooling) is not None:
            model["pooling"] = pooling
        return {**super().save_state(folder), **model}

    def compare(self, stored: Any, folder: Path) -> None:
        """Refuse another model, and windows of another length unless they are meant; the log says what changes.

        Raises:
            CheckpointError: as `ContrastTask.load_state`, or a key of ``model`` or the length differs.
        """
        super().compare(stored, folder)
        model, length = self.model_config, self.job.data.sequence_length
        # None: saved by an earlier version.
        if stored.length not in (None, length):
            if not self.job.data.allow_change:
                raise CheckpointError(
                    f"{folder}: trained on windows of {stored.length} tokens, this job has data.sequence_length "
                    f"{length}; data.allow_change=true continues with these, which are numbered anew"
                )
            logger.warning(
                "data.sequence_length was %d up to here and is %d from now on: other windows, and not the rest of an"
                " epoch of the old ones", stored.length, length,
            )  # fmt: skip
        pooling = self.job.trained_pooling
        if None not in (stored.pooling, pooling) and stored.pooling != pooling:
            logger.warning(
                "bottleneck.pooling was %s up to here and is %s from now on: the heads begin with another vector",
                stored.pooling, pooling,
            )  # fmt: skip
        for name, was in (stored.encoder or {}).items():
            now = json.loads(json.dumps(getattr(model, name, None)))  # as it is stored
            if was != now and name not in model.free_of_init:
                raise CheckpointError(f"{folder}: model.{name} is {was} there but {now} in this job; set it to {was}")
            if was != now:
                logger.warning("model.%s was %s up to here and is %s from now on", name, was, now)

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """Commands that measure and export the encoder."""
        start = "" if self.job.model.init is None else "; --before beside the model it started from"
        return [
            f"capt evaluate {quoted(run_dir)} --text HELD_OUT.txt "
            f"(what the encoder has learnt; --sts FOLDER for similarity{start})",
            f"capt convert {quoted(run_dir)} OUT --to hf (or sentence-transformers, onnx)",
        ]

    def export_files(self) -> Mapping[str, Path]:
        """Every checkpoint holds a copy of the tokenizer."""
        return {"tokenizer": self.prepared.tokenizer_folder}


def _views(output: LanguageOutput, batch: LanguageBatch) -> Views:
    assert output.capt.s is not None
    assert output.capt.s_hat is not None
    ids = batch.ids if batch.instances is None else batch.instances
    return Views(output.capt.s, output.capt.s_hat, ids, output.temperature)


_LOOKED_AT = 256
"""Samples by which the mean length of a span is told."""

TASK = LanguageTask
