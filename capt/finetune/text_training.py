"""Fine-tuning of a classifier on labelled texts, on a pretrained encoder (Liu et al. 2019, section 5.1)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from capt.finetune.batches import Batch, LengthGroup, TextInputs, TextRows
from capt.finetune.config import TextJob
from capt.finetune.evaluation import Objective, RowResults
from capt.finetune.load import load_backbone
from capt.finetune.metrics import compute_metrics
from capt.finetune.task import FineTuningTask, Identity
from capt.finetune.text_task import TextTask
from capt.pretrain.base.errors import CheckpointError, quoted
from capt.pretrain.base.overlap import report_overlap, shared
from capt.pretrain.base.randomness import derive
from capt.pretrain.models.encoder import Encoder
from capt.pretrain.models.foreign.encoder import build_encoder
from capt.pretrain.models.foreign.families import family_of
from capt.pretrain.models.layers import dropout, initialise_weights
from capt.pretrain.models.lora import add_lora
from capt.tokenizer.encode import TextTokenizer


class TextObjective:
    """Cross entropy of classes, of each label, or squared error of scores; and the task's metrics (`Objective`)."""

    def __init__(self, task: TextTask) -> None:
        self.task = task

    @property
    def metric(self) -> str:
        """The metric that selects models."""
        return self.task.metrics[0]

    def loss(self, outputs: Float[Tensor, "n outputs"], labels: Num[Tensor, "n ..."]) -> Float[Tensor, ""]:
        """Mean cross entropy, over rows and labels where a row has several labels.

        For scores the mean squared error of (score - offset) / scale: score / 5 for STS-B, as fairseq trains it.
        """
        if self.task.kind == "regression":
            return F.mse_loss(outputs[:, 0], (labels - self.task.offset) / self.task.scale)
        if self.task.kind == "multi_label":
            return F.binary_cross_entropy_with_logits(outputs, labels)
        return F.cross_entropy(outputs, labels)

    def row_results(self, outputs: Float[Tensor, "n outputs"], batch: Batch[TextInputs]) -> dict[str, Tensor]:
        """The ``logits`` of each row."""
        return {"logits": outputs}

    def predictions(self, results: RowResults) -> Num[np.ndarray, "n ..."]:
        """Classes (int64), labels as 0 or 1 (int64, a column each), or scores (float32) in the range of the task."""
        logits = results["logits"]
        predicted: np.ndarray
        if self.task.kind == "regression":
            lowest, highest = self.task.score_range or (-np.inf, np.inf)
            predicted = np.clip(self.task.scale * logits[:, 0] + self.task.offset, lowest, highest).astype(np.float32)
        elif self.task.kind == "multi_label":
            predicted = (logits > 0).astype(np.int64)
        else:
            predicted = logits.argmax(1).astype(np.int64)
        return predicted

    def metrics(self, results: RowResults, rows: TextRows) -> dict[str, float]:
        """``loss``, the task's metrics, ``degenerate`` and ``baseline`` (`capt.finetune.metrics.compute_metrics`)."""
        labels = rows.labels
        assert labels is not None, "a data set without labels is refused where it is read"
        loss = self.loss(torch.from_numpy(results["logits"]), torch.from_numpy(labels))
        gold = labels.astype(np.int64) if self.task.kind == "multi_label" else labels
        measured = compute_metrics(self.task.metrics, self.predictions(results), gold, scale=self.task.scale)
        return {"loss": float(loss), **measured}


# The classifier that tasks of labelled texts are fine-tuned with, on any encoder.


_ACTIVATIONS = {"tanh": F.tanh, "gelu": F.gelu, "relu": F.relu}


class FirstToken(nn.Module):
    """The final hidden state of the first token (``<s>``, ``[CLS]``) of each sequence; no other output is computed.

    ``encoder`` is called ``model`` here because checkpoints name its parameters so.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.model = encoder

    def forward(
        self, tokens: Int[Tensor, "n L"], types: Int[Tensor, "n L"] | None, padded: bool
    ) -> Float[Tensor, "n h"]:
        """Hidden states of the first token; ``padded`` says whether any token is padding."""
        first = torch.zeros_like(tokens[:, :1])
        return self.model(tokens, types, padded=padded, rows=first)[:, 0]  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """Dropout, dense, tanh, dropout, out on the first token's hidden state, as RoBERTa's classification head.

    fairseq's ``pooler_dropout`` is 0, transformers' ``classifier_dropout`` that of the hidden layers: ``probability``.
    Families whose own head in transformers has another activation get that one, and those with a LayerNorm (ModernBERT)
    that head: dense, activation, LayerNorm, dropout, out.

    Args:
        encoder: the encoder below the head.
        outputs: columns of the logits.
        probability: dropout of the head.
        activation: ``tanh``, ``gelu`` or ``relu``.
        norm_eps: epsilon of the LayerNorm; None = there is none.
    """

    def __init__(
        self,
        encoder: Encoder,
        outputs: int,
        probability: float,
        activation: str = "tanh",
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.encoder = FirstToken(encoder)
        self.reads_types = encoder.reads_types
        self.probability = probability
        width, plain = encoder.hidden_size, norm_eps is None
        self.dense = nn.Linear(width, width, bias=plain)
        self.norm = None if norm_eps is None else nn.LayerNorm(width, eps=norm_eps, bias=False)
        self.out = nn.Linear(width, outputs)
        for layer in (self.dense, self.out):
            # The deviation of BERT's initialisation.
            initialise_weights(layer, 0.02)
        self._activation = _ACTIVATIONS[activation]

    def forward(
        self,
        tokens: Int[Tensor, "n L"],
        types: Int[Tensor, "n L"] | None,
        padded: bool,
        groups: Sequence[LengthGroup] | None = None,
    ) -> Float[Tensor, "n outputs"]:
        """Logits (of scores: score / 5), in fp32 also under autocast.

        Args:
            tokens: ids, padded on the right.
            types: token types, where the encoder reads them.
            padded: whether any token is padding.
            groups: rows that the encoder reads together, without the padding beyond their longest; None = all rows.
        """
        x = self.encoder(tokens, types, padded) if groups is None else self._of_groups(tokens, types, groups)
        if self.norm is None:
            x = self._activation(self.dense(dropout(x, self.probability, self.training)))
        else:
            x = self.norm(self._activation(self.dense(x)))
        x = dropout(x, self.probability, self.training)
        return self.out(x).float()  # type: ignore[no-any-return]

    def _of_groups(self, tokens: Tensor, types: Tensor | None, groups: Sequence[LengthGroup]) -> Float[Tensor, "n h"]:
        states = [
            self.encoder(tokens[rows, :longest], None if types is None else types[rows, :longest], padded)
            for rows, longest, padded in groups
        ]
        return torch.cat(states)[torch.cat([group.rows for group in groups]).argsort()]


# What a classifier's outputs mean on labelled texts: loss, predictions and metrics.


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
        # The encoder first: rows are encoded by its tokenizer and cut to its longest input.
        self.tokenizer, encoder = self._backbone.tokenizer, self._backbone.encoder
        # A text in both splits would be a question whose answer was taught: the log says how many there are.
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
            self.objective_of(job),
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

    def objective_of(self, job: Any) -> Objective:
        """The loss and the metrics of the job's outputs."""
        return TextObjective(job.data.text_task)

    def build_model(self) -> Classifier:
        """The pretrained encoder under a new head."""
        return classifier_on(self._backbone.encoder, self.job)

    def next_steps(self, run_dir: Path) -> Sequence[str]:
        """The same of a task that is not of texts, and predictions for new rows."""
        *first, convert = super().next_steps(run_dir)
        predict = f"capt predict {quoted(run_dir)} FILE --out predictions.csv (labels or scores of new texts)"
        return [*first, predict, f'{convert[:-1]}: pipeline("text-classification"))']

    def flops_per_row(self, length: float) -> float:
        """Forward FLOP of the encoder on a row; those of the head are few."""
        return self._backbone.encoder.flops(length, read=1.0)

    def export_files(self) -> Mapping[str, Path]:
        """The tokenizer travels with every checkpoint."""
        self.tokenizer.save(self._tokenizer_folder)
        return {"tokenizer": self._tokenizer_folder}
