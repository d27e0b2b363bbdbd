"""Predictions of a classifier of texts: of a run on labels or GLUE, or of a ``...ForSequenceClassification`` folder.

A folder is read by the readers of encoders (`capt.pretrain.models.hf_folder`) and computed by our own classifier, which
has the layers of the family's class. So runs, folders of others, rerankers among them, and exports take one path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from capt.finetune.batches import TextRows
from capt.finetune.columns import TextColumns, find_texts, id_column, open_texts, text_in
from capt.finetune.config import TextJob
from capt.finetune.encoding import encode_texts
from capt.finetune.evaluation import results_of_rows
from capt.finetune.load import load_backbone, load_fine_tuned
from capt.finetune.new_rows import RowWindow, predict_file
from capt.finetune.text_task import Kind
from capt.finetune.text_training import Classifier, build_classifier
from capt.pretrain.base.distributed import device, synchronize_errors
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, shown
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.base.verification import digest_of, sha256
from capt.pretrain.engine.checkpoint import find_best, read_manifest
from capt.pretrain.models.foreign.families import family_of
from capt.pretrain.models.hf_config import list_names, local_folder
from capt.pretrain.models.hf_folder import is_hf, read_json, read_tensors
from capt.pretrain.models.sentence_folder import encoder_folder, is_classifier, labels_of
from capt.pretrain.registry import job_class
from capt.tokenizer.encode import TextTokenizer

BATCH = 32
"""Rows of a forward pass."""


class TextPrediction(NamedTuple):
    """The prediction for one text or pair of texts.

    Attributes:
        label: the most probable class; None for scores and several labels.
        labels: the labels that are more probable than not, where a text may have several.
        score: of a regression or a reranker.
        probabilities: of each class or label, in the order of the classes.
        scores: of a regression with several outputs, in their order.
    """

    label: str | None = None
    labels: tuple[str, ...] = ()
    score: float | None = None
    probabilities: Mapping[str, float] = {}
    scores: Mapping[str, float] = {}


@dataclass(frozen=True)
class Outputs:
    """The meaning of a classifier's outputs.

    Attributes:
        kind: a class, a score or several labels.
        names: of the classes, class 0 first, or of several scores; none for one score.
        scale: a score is ``scale * output + offset``.
        offset: the score of an output of 0.
        score_range: the lowest and the highest score, where there are any.
        sigmoid: whether a score goes through the sigmoid, as rerankers' scores do.
    """

    kind: Kind
    names: tuple[str, ...]
    scale: float = 1.0
    offset: float = 0.0
    score_range: tuple[float, float] | None = None
    sigmoid: bool = False

    @property
    def columns(self) -> dict[str, type]:
        """The columns of a prediction in a table, the prediction itself first."""
        if self.kind == "regression":
            return {f"score_{name}": float for name in self.names} or {"score": float}
        first: dict[str, type] = {"label": str} if self.kind == "classification" else {"labels": list}
        return first | {f"probability_{name}": float for name in self.names}

    def cells(self, prediction: TextPrediction) -> dict[str, Any]:
        """Return a prediction as a row has it."""
        if self.kind == "regression":
            return dict(zip(self.columns, prediction.scores.values() or (prediction.score,), strict=True))
        first: Any = prediction.label if self.kind == "classification" else list(prediction.labels)
        return dict(zip(self.columns, (first, *prediction.probabilities.values()), strict=True))

    def predictions(self, logits: Float[np.ndarray, "n outputs"]) -> list[TextPrediction]:
        """Return the prediction of each row of outputs, computed in float64 and rounded to fp32."""
        x = logits.astype(np.float64)
        if self.kind == "regression" and self.names:
            return [TextPrediction(scores=self._named(row)) for row in x]
        if self.kind == "regression":
            lowest, highest = self.score_range or (-np.inf, np.inf)
            scores = np.clip(self.scale * x[:, 0] + self.offset, lowest, highest)
            return [TextPrediction(score=_short(each)) for each in (_sigmoid(scores) if self.sigmoid else scores)]
        if self.kind == "multi_label":
            chosen = [tuple(name for name, each in zip(self.names, row, strict=True) if each > 0) for row in x]
            return [
                TextPrediction(labels=each, probabilities=self._named(row))
                for each, row in zip(chosen, _sigmoid(x), strict=True)
            ]
        shares = np.exp(x - x.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        return [TextPrediction(label=self.names[row.argmax()], probabilities=self._named(row)) for row in shares]

    def _named(self, row: Float[np.ndarray, " outputs"]) -> dict[str, float]:
        return {name: _short(each) for name, each in zip(self.names, row, strict=True)}


def _sigmoid(x: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    # tanh overflows nowhere.
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


def _short(x: float) -> float:
    """The number with the fewest digits that fp32 does not tell from ``x``: the others are noise in a table."""
    return float(str(np.float32(x)))


@dataclass(frozen=True)
class TextClassifier:
    """A classifier in evaluation mode, on this rank's device.

    Attributes:
        source: the run, checkpoint or folder.
        model: the encoder under its head.
        tokenizer: of the encoder.
        outputs: what the logits mean.
        pair: whether it reads pairs of texts; None = it reads both.
        length: tokens of a row at most, special tokens included.
        fingerprint: gives a hash of its files, and is called where it is needed: weights may have gigabytes.
        known: names of the columns of its training data.
        quotes: whether cells of a table are between quotes, as a job says it.
    """

    source: Path
    model: Classifier
    tokenizer: TextTokenizer
    outputs: Outputs
    pair: bool | None
    length: int
    fingerprint: Callable[[], str]
    known: tuple[str | None, ...] = ()
    quotes: bool | None = None

    def logits(
        self, first: Sequence[str], second: Sequence[str] | None = None, *, batch: int = BATCH
    ) -> tuple[Float[np.ndarray, "n outputs"], int]:
        """Return the outputs for texts, or pairs of them, and the number of rows that were cut.

        Raises:
            DataError: single texts for a model of pairs, or the other way round.
        """
        if self.pair not in (None, second is not None):
            reads = "pairs of texts" if self.pair else "single texts"
            raise DataError(f"{self.source}: the model reads {reads}, and these are {'pairs' if second else 'single'}")
        types = self.model.reads_types
        encoded = encode_texts(first, second, self.tokenizer, self.length, source=None, types=types)
        rows = TextRows(encoded, None, self.tokenizer.special.pad, types=types)

        def keep(outputs: Tensor, _: Any) -> dict[str, Tensor]:
            return {"logits": outputs}

        return results_of_rows(self.model.to(device()), rows, keep, batch, device())["logits"], encoded.cut

    def pair_lengths(self, first: Sequence[str], second: Sequence[str]) -> list[int]:
        """The number of tokens of each pair of texts, cut as `logits` cuts it."""
        lengths: list[int] = encode_texts(first, second, self.tokenizer, self.length, source=None).lengths.tolist()
        return lengths

    def predict(
        self, first: Sequence[str], second: Sequence[str] | None = None, *, batch: int = BATCH
    ) -> list[TextPrediction]:
        """Return the prediction for each text, or pair of texts (`logits`)."""
        return self.outputs.predictions(self.logits(first, second, batch=batch)[0]) if first else []


def predicts(path: Path) -> bool:
    """Return whether `load_text_classifier` is for the model at ``path``, and not a reader of encoders."""
    folder = local_folder(path)
    if is_hf(folder):
        return is_classifier(read_json(encoder_folder(folder) / "config.json"))
    if not folder.is_dir():
        return False
    return issubclass(job_class(read_manifest(find_best(folder)).task), TextJob)


def load_text_classifier(path: Path) -> TextClassifier:
    """Load a classifier: a run or checkpoint on labelled texts, or a folder or hub id of a family that is known here.

    Raises:
        CheckpointError: nothing is there, it is damaged, or no classifier of texts.
    """
    folder = local_folder(path)
    return _of_folder(path, encoder_folder(folder)) if is_hf(folder) else _of_checkpoint(path, find_best(folder))


def _of_checkpoint(path: Path, checkpoint: Path) -> TextClassifier:
    manifest = read_manifest(checkpoint)
    kind = job_class(manifest.task)
    if not issubclass(kind, TextJob):
        raise CheckpointError(f"{path}: a checkpoint of task {manifest.task}, which has no classifier of texts")
    trained = load_fine_tuned(checkpoint, kind, manifest.task, build_classifier)
    data, task = trained.job.data, trained.job.data.text_task
    assert data.sequence_length is not None, "TextJob.with_encoder fills it in"
    outputs = Outputs(task.kind, task.names, task.scale, task.offset, task.score_range)
    known = tuple(getattr(data, name, None) for name in ("text", "second"))
    hashes = {name: record.sha256 for name, record in manifest.files.items()}
    return TextClassifier(
        path, trained.model, trained.tokenizer, outputs, task.pair, data.sequence_length, lambda: digest_of(hashes),
        known, getattr(data, "quotes", None),
    )  # fmt: skip


def _of_folder(path: Path, folder: Path) -> TextClassifier:
    """The classifier in a folder of transformers."""
    config, where = read_json(folder / "config.json"), str(folder / "config.json")
    if not is_classifier(config):
        raise CheckpointError(
            f"{path}: {shown(config.get('architectures'))} in config.json is no ...ForSequenceClassification, and "
            "predicts no labels; name such a folder, or a run of capt finetune"
        )
    family = family_of(config, where)
    for key, value in family.keys.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"{where}: {key} is {shown(config[key])}; heads with {value!r} are computed here")
    backbone, count = load_backbone(folder, dropout=0.0, attention_dropout=0.0), labels_of(config)
    eps = None if family.norm is None else backbone.hf_config[family.norm[1]]
    model = Classifier(backbone.encoder, count, 0.0, family.activation, eps)
    names = {"dense": family.dense, "out": family.out} | ({} if family.norm is None else {"norm": family.norm[0]})
    tensors = read_tensors(folder)
    head = {
        f"{ours}.{part}": f"{theirs}.{part}"
        for ours, theirs in names.items()
        for part, _ in getattr(model, ours).named_parameters()
    }
    state = model.state_dict()
    if wrong := [
        theirs for ours, theirs in head.items() if theirs not in tensors or tensors[theirs].shape != state[ours].shape
    ]:
        raise CheckpointError(f"{path}: the head is not that of {family.architecture}: {list_names(wrong)}")
    model.load_state_dict({ours: tensors[theirs] for ours, theirs in head.items()}, strict=False)
    tokens = folder / "tokenizer_config.json"
    limit = read_json(tokens).get("model_max_length") if tokens.is_file() else None
    room = backbone.encoder.max_positions
    length = min(int(limit), room) if isinstance(limit, int | float) and limit >= 8 else room
    files = [each for each in sorted(folder.iterdir()) if each.suffix in (".json", ".safetensors", ".txt", ".model")]
    return TextClassifier(
        path, model.eval(), backbone.tokenizer, _outputs_of(config, count, where), None, length,
        lambda: digest_of({each.name: sha256(each) for each in files}),
    )  # fmt: skip


def _outputs_of(config: Mapping[str, Any], count: int, where: str) -> Outputs:
    """The meaning of the outputs as transformers' pipeline and the library of rerankers take it."""
    problem = config.get("problem_type")
    if count == 1:
        given = config.get("sentence_transformers")
        activation = given.get("activation_fn") if isinstance(given, dict) else None
        activation = activation or config.get("sbert_ce_default_activation_function")
        # A score that nothing is said of is a regression's, or goes through the sigmoid, the default of rerankers.
        activation = str(activation or ("Identity" if problem == "regression" else "Sigmoid"))
        if activation.rpartition(".")[2] not in ("Sigmoid", "Identity"):
            raise CheckpointError(f"{where}: activation function {shown(activation)}; Sigmoid and Identity are known")
        return Outputs("regression", (), sigmoid=activation.endswith("Sigmoid"))
    named = config.get("id2label")
    names = tuple(
        str(named.get(str(i), f"LABEL_{i}")) if isinstance(named, dict) else f"LABEL_{i}" for i in range(count)
    )
    if len(set(names)) < count:
        raise CheckpointError(f"{where}: two outputs of id2label have one name; rename one of them")
    kinds: dict[Any, Kind] = {"multi_label_classification": "multi_label", "regression": "regression"}
    return Outputs(kinds.get(problem, "classification"), names)


# The rows of a table.


class NewText(NamedTuple):
    """A row of the table: its id, where there is a column of ids, its text and the second text of a pair."""

    id: str | None
    text: str
    second: str | None


class TextPredictor:
    """A classifier and a table of new texts (`capt.finetune.new_rows.Predictor`).

    Args:
        classifier: the model.
        file: a table of any format.
        text: column of the text; None = as in the training data, or a usual name.
        second: column of the second text of a pair.
        batch: rows of a forward pass.
    """

    def __init__(
        self, classifier: TextClassifier, file: Path, text: str | None, second: str | None, batch: int
    ) -> None:
        self._classifier, self._file, self._batch = classifier, file, batch
        table = open_texts(file, classifier.quotes)
        self._texts = find_texts(table, text, second, pair=classifier.pair, known=classifier.known)
        self._id = id_column(table, self._texts)
        self.predicted = next(iter(classifier.outputs.columns))
        shown_beside = [name for name in (self._id, *self._texts) if name is not None]
        if twice := [name for name in shown_beside if name in classifier.outputs.columns]:
            raise ConfigError(f"{file}: the column {twice[0]!r} has the name of a prediction; rename it")
        self.columns: dict[str, type] = {name: str for name in shown_beside} | classifier.outputs.columns

    def identity(self) -> dict[str, Any]:
        """Return the hashes of model and file, and the options."""
        model = self._classifier.fingerprint()
        return {"model": model, "file": sha256(self._file), "texts": list(self._texts), "batch": self._batch}

    def rows(self) -> Iterator[NewText]:
        """Yield the rows of the table. Raises ``DataError`` for one without a text."""
        texts: TextColumns = self._texts
        for place, _, cells in open_texts(self._file, self._classifier.quotes).rows:
            second = None if texts.second is None else text_in(cells, texts.second, place)
            found = None if self._id is None else cells.get(self._id)
            yield NewText(None if found is None else str(found), text_in(cells, texts.text, place), second)

    def predict(self, rows: Sequence[NewText]) -> RowWindow:
        """Return the texts of some rows with their predictions."""
        outputs, second = self._classifier.outputs, None
        if self._texts.second is not None:
            second = [row.second or "" for row in rows]
        logits, cut = self._classifier.logits([row.text for row in rows], second, batch=self._batch)
        names = (self._id, *self._texts)
        beside = [{name: cell for name, cell in zip(names, row, strict=True) if name is not None} for row in rows]
        found = outputs.predictions(logits)
        return RowWindow([row | outputs.cells(each) for row, each in zip(beside, found, strict=True)], cut)


def command(
    model: Path,
    file: Path,
    out: Path,
    *,
    text: str | None = None,
    second: str | None = None,
    batch: int = BATCH,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Predict the rows of a table of texts, or of pairs of texts; see `capt.pretrain.commands`.

    ``out`` has the id of a row where the file has one, its texts and its prediction. ``text`` and ``second`` name
    columns. Raises ``CheckpointError`` and ``DataError`` as `load_text_classifier` and `predict_file`.
    """
    with synchronize_errors(patient=True):
        predictor = TextPredictor(load_text_classifier(model), file, text, second, batch)
    return predict_file(predictor, file, out, progress=progress)
