"""The ``glue`` task: a classifier on a pretrained encoder (Liu et al. 2019, section 5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from capt.finetune.classifier import Classifier
from capt.finetune.glue.config import GlueJob
from capt.finetune.glue.data import dev_rows, train_rows
from capt.finetune.glue.objective import GlueObjective
from capt.finetune.glue.restore import classifier_on
from capt.finetune.restore import load_backbone
from capt.finetune.task import FineTuningTask, Identity
from capt.pretrain.base.overlap import report_overlap, shared
from capt.pretrain.base.randomness import derive
from capt.pretrain.config.schema import Job


class GlueFineTuning(FineTuningTask):
    """Cross entropy, or squared error for STS-B; metrics on the whole dev set, for MNLI on both (``_mismatched``)."""

    job: GlueJob

    def __init__(self, job: Job, run_dir: Path) -> None:
        assert isinstance(job, GlueJob)
        section, data = job.model, job.data
        torch.manual_seed(derive(job.run.seed, "init"))
        self._backbone = load_backbone(
            section.init,
            dropout=section.dropout,
            attention_dropout=section.attention_dropout,
            allow_missing=section.allow_missing,
        )
        self.tokenizer, encoder = self._backbone.tokenizer, self._backbone.encoder
        length = job.longest(encoder.max_positions)
        options: dict[str, Any] = {"types": encoder.reads_types}
        train = train_rows(data, self.tokenizer, length, **options)
        validation = dev_rows(data, self.tokenizer, length, **options)
        for suffix, rows in validation.items():
            report_overlap({"text": shared(train.texts, rows.texts)}, train="train", validation=f"dev{suffix}")
        super().__init__(
            job.with_encoder(self._backbone.hf_config, encoder.max_positions),
            data.glue_task.folder,
            train,
            validation,
            GlueObjective(data.glue_task),
            identity={
                "task": Identity(data.task, "data.task"),
                "tokenizer": Identity(self.tokenizer.fingerprint, "tokenizer of model.init"),
            },
            bucketing=data.bucketing,
            shuffle=data.shuffle,
        )
        self._tokenizer_folder = run_dir / "tokenizer"

    def build_model(self) -> Classifier:
        """The pretrained encoder under a new head."""
        return classifier_on(self._backbone.encoder, self.job)

    def flops_per_row(self, length: float) -> float:
        """Forward FLOP of the encoder on a row; those of the head are few."""
        return self._backbone.encoder.flops(length, read=1.0)

    def export_files(self) -> Mapping[str, Path]:
        """The tokenizer travels with every checkpoint."""
        self.tokenizer.save(self._tokenizer_folder)
        return {"tokenizer": self._tokenizer_folder}


TASK = GlueFineTuning
