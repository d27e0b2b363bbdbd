"""Fine-tuning of a classifier on labelled texts, on a pretrained encoder (Liu et al. 2019, section 5.1)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from capt.finetune.batches import TextRows
from capt.finetune.classifier import Classifier
from capt.finetune.config import TextJob
from capt.finetune.load import load_backbone
from capt.finetune.task import FineTuningTask, Identity
from capt.finetune.text_objective import TextObjective
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.base.overlap import report_overlap, shared
from capt.pretrain.base.randomness import derive
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import build_encoder
from capt.pretrain.models.foreign.families import family_of
from capt.pretrain.models.lora import add_lora
from capt.tokenizer.encode import TextTokenizer


def classifier_on(encoder: Encoder, job: TextJob) -> Classifier:
    """``encoder`` under a freshly initialised head for the job's task."""
    section, task = job.model, job.data.text_task
    assert section.encoder is not None, "TextJob.with_encoder fills it in"
    head = section.dropout if section.classifier_dropout is None else section.classifier_dropout
    if section.lora is not None:
        add_lora(encoder, section.lora)
    family = family_of(section.encoder, "model.encoder")
    eps = None if family.norm is None else section.encoder[family.norm[1]]
    return Classifier(encoder, max(1, len(task.names)), head, family.activation, eps)


def build_classifier(job: TextJob, checkpoint: Path) -> Classifier:
    """The classifier of a checkpoint's job, to load the weights into. Raises ``CheckpointError`` without an encoder."""
    section = job.model
    if section.encoder is None:
        raise CheckpointError(
            f"{checkpoint / 'config.yaml'}: model.encoder is not set; every checkpoint of fine-tuning has it"
        )
    encoder = build_encoder(
        section.encoder,
        dropout=section.dropout,
        attention_dropout=section.attention_dropout,
        source=str(checkpoint),
    )
    return classifier_on(encoder, job)


class TextFineTuning(FineTuningTask):
    """Fine-tuning on labelled texts; a subclass reads them.

    Args:
        job: the job; what follows from its encoder is filled in here.
        run_dir: the run folder, which gets the tokenizer.
        identity: what a resumed run must share, beside the tokenizer.
        validation_name: what the log calls the validation sets.
    """

    job: TextJob

    def __init__(
        self, job: TextJob, run_dir: Path, identity: Mapping[str, Identity], validation_name: str = "dev"
    ) -> None:
        section, data = job.model, job.data
        torch.manual_seed(derive(job.run.seed, "init"))
        self._backbone = load_backbone(
            section.init,
            dropout=section.dropout,
            attention_dropout=section.attention_dropout,
            allow_missing=section.allow_missing,
        )
        self.tokenizer, encoder = self._backbone.tokenizer, self._backbone.encoder
        train, validation = self.read_rows(job, self.tokenizer, job.longest(encoder.max_positions), encoder.reads_types)
        for suffix, rows in validation.items():
            report_overlap(
                {"text": shared(train.texts, rows.texts)}, train="train", validation=f"{validation_name}{suffix}"
            )
        super().__init__(
            job.with_encoder(self._backbone.hf_config, encoder.max_positions),
            data.text_task.title,
            train,
            validation,
            TextObjective(data.text_task),
            identity={**identity, "tokenizer": Identity(self.tokenizer.fingerprint, "tokenizer of model.init")},
            bucketing=data.bucketing,
            shuffle=data.shuffle,
        )
        self._tokenizer_folder = run_dir / "tokenizer"

    @abstractmethod
    def read_rows(
        self, job: Any, tokenizer: TextTokenizer, length: int, types: bool
    ) -> tuple[TextRows, dict[str, TextRows]]:
        """Read the training set and the validation sets by the suffix of their metrics.

        Args:
            job: the job.
            tokenizer: that of the encoder.
            length: tokens that a row may have, special tokens included.
            types: whether the encoder reads token types.
        """

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
