"""CAPT from Python: the functions behind the commands, with values in place of words of a command line.

``load`` gives a model that encodes, searches and predicts; ``train``, ``evaluate`` and ``mine`` do what the commands of
these names do. Nothing heavy is imported before it is needed. What a user can set right is a `UserError`, as there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_type_hints, overload

from capt.pretrain.base.errors import ConfigError, DataError, RunFailedError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

    from capt.finetune.text_predictor import TextClassifier, TextPrediction
    from capt.pretrain.retrieval.encoders import TextEncoder
    from capt.pretrain.retrieval.index import Hit, SearchIndex
    from capt.pretrain.retrieval.neighbors import TextNeighbor

Place = str | PathLike[str]
"""A path, or where a model is asked for ``USER/NAME`` of the hub."""


# A trained model.


class Model:
    """A trained model, as `load` returns it: an encoder of texts, or a classifier of texts.

    Args:
        source: where it was loaded from.
        encoder: an encoder, which has `encode`, `similarity` and `search`.
        classifier: a classifier, which has `predict`.
    """

    def __init__(
        self, source: Path, *, encoder: TextEncoder | None = None, classifier: TextClassifier | None = None
    ) -> None:
        self.source = source
        self._encoder, self._classifier = encoder, classifier
        self._indexes: dict[Path, SearchIndex] = {}

    @overload
    def encode(self, texts: str, prompt: str | None = None) -> Float[np.ndarray, " d"]: ...

    @overload
    def encode(self, texts: Sequence[str], prompt: str | None = None) -> Float[np.ndarray, "n d"]: ...

    def encode(self, texts: str | Sequence[str], prompt: str | None = None) -> Float[np.ndarray, ...]:
        """Return the vector of a text, or of each of several, in fp32.

        The vectors are those that ``SentenceTransformer.encode`` gives for the folder, or for what ``capt convert --to
        sentence-transformers`` makes of a run.

        Args:
            texts: a text, or several.
            prompt: the name of a prompt of the model (``"query"`` and ``"document"`` are always known), or a text that
                precedes each; None = the model's default, which most models have not.

        Raises:
            ConfigError: the model is a classifier.
        """
        from capt.pretrain.retrieval.encode import encode_in_batches

        encoder, role = self._require_encoder("encode").prompted(prompt)
        rows = encode_in_batches(encoder, [texts] if isinstance(texts, str) else list(texts), role)
        return rows[0] if isinstance(texts, str) else rows

    def similarity(
        self, first: Sequence[str] | Float[np.ndarray, "m d"], second: Sequence[str] | Float[np.ndarray, "n d"]
    ) -> Float[np.ndarray, "m n"]:
        """Return the similarity of each of ``first`` to each of ``second``: cosine, or what the model was made for.

        Args:
            first: vectors, or texts, which are encoded without a prompt.
            second: the same.
        """
        from capt.pretrain.retrieval.search import unit_rows

        encoder = self._require_encoder("similarity")
        left, right = self._rows(first), self._rows(second)
        encoder.require_vectors("similarity multiplies them; search compares others too")
        if encoder.similarity == "cosine":
            left, right = unit_rows(left), unit_rows(right)
        return cast("np.ndarray", left @ right.T)

    def _rows(self, values: Sequence[str] | Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        """The vectors themselves, or those of texts."""
        if isinstance(values, Sequence):
            return self.encode(values)
        return values

    @overload
    def search(  # type: ignore[overload-overlap]
        self, queries: Sequence[str], documents: Place, top: int = 10, mode: str | None = None
    ) -> list[list[Hit]]: ...

    @overload
    def search(
        self, queries: Sequence[str], documents: Sequence[str], top: int = 10, mode: str | None = None
    ) -> list[list[TextNeighbor]]: ...

    def search(
        self, queries: Sequence[str], documents: Place | Sequence[str], top: int = 10, mode: str | None = None
    ) -> list[list[TextNeighbor]] | list[list[Hit]]:
        """Return the nearest documents of each query, the best first.

        Queries and documents have the prompts that the model has for them.

        Args:
            queries: what is asked.
            documents: texts, among which the search is exact; or the folder of an index of ``capt search build``, built
                with this model.
            top: how many of them for each query.
            mode: of an index: ``hybrid`` (the default), ``dense`` or ``bm25``; texts are searched by vectors alone.

        Raises:
            ConfigError: no such mode.
            CheckpointError: the index was built with another model.
        """
        from capt.pretrain.retrieval.neighbors import nearest_texts

        if isinstance(documents, str | PathLike):
            from capt.pretrain.retrieval.index import SearchIndex

            folder = Path(documents)
            # Kept, with its encoder, for the next call.
            if folder not in self._indexes:
                self._indexes[folder] = SearchIndex.open(folder, self.source)
            return self._indexes[folder].search(list(queries), top, mode or "hybrid")
        if mode not in (None, "dense"):
            raise ConfigError(f"mode {mode!r}: texts are searched by vectors; capt search build makes an index")
        return nearest_texts(self._require_encoder("search"), list(queries), list(documents), top)

    def predict(self, texts: Sequence[str] | Sequence[tuple[str, str]], *, batch: int = 32) -> list[TextPrediction]:
        """Return a label, labels or a score for each text, or for each pair of texts.

        Args:
            texts: texts, or pairs of them.
            batch: rows of a forward pass.

        Raises:
            ConfigError: the model is no classifier.
            DataError: single texts for a model of pairs, or the other way round; one text outside a list, or a mixture.
        """
        if self._classifier is None:
            raise ConfigError(f"{self.source}: an encoder, which predicts nothing; name a run of capt finetune")
        rows = [] if isinstance(texts, str) else list(texts)
        if all(isinstance(row, str) for row in rows) and not isinstance(texts, str):
            return self._classifier.predict(cast("list[str]", rows), batch=batch)
        pairs = [row for row in rows if not isinstance(row, str) and [type(text) for text in row] == [str, str]]
        if not pairs or len(pairs) < len(rows):
            raise DataError("predict takes a list of texts, or a list of pairs of texts")
        return self._classifier.predict([one for one, _ in pairs], [two for _, two in pairs], batch=batch)

    def _require_encoder(self, what: str) -> TextEncoder:
        if self._encoder is None:
            raise ConfigError(f"{self.source}: a classifier, which has no {what} but predict; name an encoder")
        return self._encoder


def load(
    model: Place,
    *,
    pooling: str | None = None,
    length: int | None = None,
    query_prompt: str | None = None,
    document_prompt: str | None = None,
) -> Model:
    """Load a run or checkpoint, a Hugging Face or sentence-transformers folder, or a model of the hub.

    It is on the GPU of this process where there is one. A run is loaded from its best checkpoint, else its newest.

    Args:
        model: a path, a `Run`, or ``USER/NAME`` of the hub.
        pooling: ``mean``, ``cls`` or ``head`` of an encoder; a sentence-transformers folder says it itself.
        length: tokens of a text at most; None = the model's own limit.
        query_prompt: what precedes every query; None = as the model says.
        document_prompt: what precedes every document; None = as the model says.

    Raises:
        CheckpointError: nothing is there, or it is no encoder and no classifier of texts.
        ConfigError: an option that the model does not take.
    """
    from capt.finetune.text_predictor import load_text_classifier, predicts
    from capt.pretrain.models.hf_config import source_path
    from capt.pretrain.retrieval.encoders import load_text_encoder
    from capt.pretrain.retrieval.options import EncoderOptions

    path = source_path(str(Path(model)) if isinstance(model, PathLike) else model)
    options = EncoderOptions(pooling, length, query_prompt, document_prompt)
    if not predicts(path):
        return Model(path, encoder=load_text_encoder(path, options))
    if options != EncoderOptions():
        raise ConfigError(f"{path}: a classifier, which takes no pooling, length or prompts")
    return Model(path, classifier=load_text_classifier(path))


# A run.


class Run:
    """A run folder, as `train` returns it."""

    def __init__(self, folder: Place) -> None:
        self.folder = Path(folder)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric, those of validation as ``validation/NAME``. Raises ``DataError``."""
        from capt.pretrain.engine.metrics_file import METRICS, read_metrics

        rows = read_metrics(self.folder / METRICS)
        last: dict[str, float] = {}
        for row in rows.training:
            last |= row.figures
        for row in rows.validation:
            last |= {f"validation/{name}": value for name, value in row.figures.items()}
        return last

    def export(self, out: Place, to: str, *, overwrite: bool = False, **options: Any) -> Path:
        """Write the run for other libraries, as ``capt convert`` does; returns ``out``.

        Args:
            out: a new folder (for word vectors a file).
            to: ``hf``, ``sentence-transformers``, ``onnx``, or what else the task offers.
            overwrite: replace an older export.
            options: those of the task's export, such as ``pooling``.
        """
        from capt.pretrain.convert.dispatch import convert

        return convert(self.folder, Path(out), to=to, overwrite=overwrite, **options)

    def evaluate(self, **options: Any) -> Any:
        """Measure the run, as `evaluate` does."""
        return evaluate(self.folder, **options)


def train(job: Place, *, nproc: int | None = None, preflight: bool = True, **overrides: Any) -> Run:
    """Train a job to its end, as ``capt pretrain`` and ``capt finetune`` do, and return its run.

    The job runs in processes of its own, which write their log to stderr. ``run={"resume": "auto"}`` goes on where the
    folder holds a run of the same job.

    Args:
        job: the name of a shipped job, or a YAML file.
        nproc: processes on this host; None = one for each GPU, or one.
        preflight: examine this host before the start.
        overrides: keys of the job: ``schedule={"max_steps": 100}`` for a section, ``**{"schedule.max_steps": 100}`` for
            a single one.

    Raises:
        UserError: the job is wrong, or what it reads is not there.
        RunFailedError: its processes have failed, or have stopped before the end.
    """
    from capt.launcher.plan import Options
    from capt.launcher.start import begin
    from capt.pretrain.config.load import job_from_mapping, load_mapping
    from capt.pretrain.engine.run_folder import DONE, STOPPED, read_status

    given = list(_as_overrides(overrides))
    folder = job_from_mapping(load_mapping(str(job), given), str(job)).run.dir
    code = begin(
        "capt.pretrain", str(job), given, Options.given(nproc=nproc), debug=False, show=None, preflight=preflight
    )
    if code != DONE:
        status = read_status(folder)
        reason = f": {status.reason}" if status is not None and status.reason else ""
        what = "stopped before its end" if code == STOPPED else f"failed with exit code {code}"
        raise RunFailedError(f"{folder}: the job {what}{reason}")
    return Run(folder)


def _as_overrides(given: Mapping[str, Any]) -> Iterable[str]:
    """Write values as the command line has them: a section key by key, other values as JSON."""
    from capt.pretrain.config.reader import as_override

    for name, value in given.items():
        parts = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, each in parts.items():
            plain = str(Path(each)) if isinstance(each, PathLike) else each
            yield as_override(key, plain) if isinstance(plain, str) else f"{key}={json.dumps(plain, default=str)}"


# Commands with options.


def evaluate(model: Place, **options: Any) -> Any:
    """Measure a model, as ``capt evaluate`` does, and return what it prints with ``--json``.

    Args:
        model: a run, a checkpoint, a folder, or ``USER/NAME`` of the hub.
        options: those of the command, with ``_`` for ``-``: ``retrieval="beir/nfcorpus"``, ``bm25=True``,
            ``dims=[256, 64]``. One that may be repeated takes a list.

    Raises:
        UserError: as the command.
    """
    from capt.launcher.commands.evaluate import evaluate_options, measure_model
    from capt.pretrain.models.hf_config import source_path

    kind, of_tasks = evaluate_options()
    given = _values((kind,), options, "capt.evaluate")
    return measure_model(source_path(str(Path(model)) if isinstance(model, PathLike) else model), given, of_tasks)[0]


def mine(
    pairs: Place | Sequence[Place],
    *,
    model: Place,
    out: Place,
    corpus: Place | None = None,
    cross_encoder: Place | None = None,
    store: Place | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Mine hard negatives for pairs, as ``capt mine`` does, and return the audit.

    Args:
        pairs: files with queries and positives.
        model: the encoder that finds the negatives.
        out: a new folder for ``pairs.jsonl`` and the audit.
        corpus: what is searched; None = the positives of all pairs.
        cross_encoder: the run or the folder of a reranker whose scores the rules judge by.
        store: folder of the vectors; None = in this host's cache.
        options: further options of the command, with ``_`` for ``-``: ``number=5``, ``relative_margin=0.05``.

    Raises:
        UserError: as the command.
    """
    from capt.launcher.commands import options as o
    from capt.launcher.commands.retrieval import mine_pairs
    from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, Rules, VectorOptions

    given = _values((Rules, EncoderOptions, VectorOptions, o.RankOptions), options, "capt.mine")
    files = [pairs] if isinstance(pairs, str | PathLike) else pairs
    return mine_pairs(
        [Path(each) for each in files], Path(model), Path(out), Path(corpus) if corpus else None,
        o.chosen(Rules, given), Path(cross_encoder) if cross_encoder else None, o.chosen(EncoderOptions, given),
        o.chosen(EncodeOptions, {**given, "store": str(store) if store else None}), o.chosen(o.RankOptions, given),
    )  # fmt: skip


def _values(kinds: Sequence[Any], options: Mapping[str, Any], who: str) -> dict[str, Any]:
    """Check options against the fields of classes of options, and convert them to their types.

    Raises:
        ConfigError: there is no such option, or the value is not of its type.
    """
    from pydantic import TypeAdapter, ValidationError

    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    known = [each.name for kind in kinds for each in fields(kind)]
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{who}: no option {name!r}; {did_you_mean(name, known)}")
        if value is None:
            continue
        hint = hints[name]
        several = "list[" in str(hint)
        if several and (isinstance(value, str | PathLike) or not isinstance(value, Sequence)):
            value = [value]
        # Numbers with commas between them, as the command line has them.
        if not several and isinstance(value, list | tuple):
            value = ",".join(map(str, value))
        try:
            values[name] = TypeAdapter(hint).validate_python(value)
        except ValidationError:
            raise ConfigError(f"{who}: {name}={value!r} is not of the type of this option, {hint}") from None
    return values
