"""Rerankers: models that give a pair of texts one score, as one kind of object; their scores are kept like vectors.

A query and its candidates are ordered by the score, the best first; of equal scores the one that was first stays first,
but where a protocol says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from capt.pretrain.base.distributed import device
from capt.pretrain.base.errors import CheckpointError, DataError, shown
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.commands import command_module, task_of
from capt.pretrain.engine.checkpoint import find_best
from capt.pretrain.engine.run_folder import holds_run
from capt.pretrain.engine.task import Role
from capt.pretrain.models.hf_config import SENTENCE_FILES, local_folder
from capt.pretrain.models.hf_folder import is_hf
from capt.pretrain.registry import FOREIGN_CLASSIFIER
from capt.pretrain.retrieval.encode import embed, rows_in_batches, rows_of
from capt.pretrain.retrieval.encoders import facts_of, hashes_of_checkpoint, hashes_of_folder
from capt.pretrain.retrieval.options import EncodeOptions
from capt.pretrain.retrieval.sentence_models import limit_of, load_cross_encoder, token_counts
from capt.pretrain.retrieval.store import DType, Pair, VectorIdentity

RERANKED_HITS = 50
"""Documents of a query that a reranker reads in a search, if no more are asked for."""
_ROLE: Role = "text"


class PairScorer(ABC):
    """A model in evaluation mode that gives a query with a document one score; higher is better.

    Args:
        name: for messages.
        facts: what files decide (`capt.pretrain.retrieval.encoders.facts_of`), and ``length``, tokens of a pair.
    """

    def __init__(self, name: str, facts: Mapping[str, Any]) -> None:
        self.name, self._facts = name, facts

    @abstractmethod
    def scores(self, pairs: Sequence[Pair]) -> Float[np.ndarray, " n"]:
        """The score of each pair, computed in one pass."""

    @abstractmethod
    def lengths(self, pairs: Sequence[Pair], role: Role = _ROLE) -> list[int]:
        """The number of tokens of each pair, as the model reads it."""

    def identity(self, role: Role = _ROLE, dtype: DType = "fp32") -> VectorIdentity:
        """Everything that decides the score of a pair; scores are stored in fp32 whatever vectors are."""
        return VectorIdentity(prompt="", dimension=1, dtype="fp32", **self._facts)

    def encode(self, pairs: Sequence[Pair], role: Role = _ROLE) -> Float[np.ndarray, "n 1"]:
        """The score of each pair as a row. Raises ``DataError`` for one that is not finite."""
        found = np.asarray(self.scores(pairs), dtype=np.float32).reshape(len(pairs), 1)
        if not np.isfinite(found).all():
            query, document = pairs[int(np.flatnonzero(~np.isfinite(found[:, 0]))[0])]
            raise DataError(
                f"{self.name}: a score that is not finite for the query {shown(query, 60)} with {shown(document, 60)}"
            )
        return found

    def protocol(self) -> str:
        """Say in one line how a pair gets its score."""
        length = f"at most {self._facts['length']} tokens of a pair" if self._facts["length"] else "pairs of any length"
        return f"{self._facts['pooling']}, {length}, {self._facts['precision']} on {device().type}"


class CrossScorer(PairScorer):
    """A folder for the ``CrossEncoder`` of sentence-transformers, computed by it, activation function included."""

    def __init__(self, name: str, model: Any, facts: Mapping[str, Any]) -> None:
        self._model, self._limit = model.to(device()).eval(), limit_of(model)
        super().__init__(name, {**facts, "length": self._limit or 0})

    def scores(self, pairs: Sequence[Pair]) -> Float[np.ndarray, " n"]:
        """The scores of ``CrossEncoder.predict``."""
        given = self._model.predict(list(pairs), batch_size=len(pairs), show_progress_bar=False)
        return np.asarray(given, dtype=np.float32)

    def lengths(self, pairs: Sequence[Pair], role: Role = _ROLE) -> list[int]:
        """The number of tokens of each pair; of characters where the folder has no such tokenizer."""
        counts = token_counts(self._model, pairs, self._limit)
        return [len(query) + len(document) for query, document in pairs] if counts is None else counts


class RunScorer(PairScorer):
    """A checkpoint of a task that gives pairs of texts one score.

    ``model`` is a `capt.finetune.text_predictor.TextClassifier`.
    """

    def __init__(self, name: str, model: Any, facts: Mapping[str, Any]) -> None:
        self._model = model
        super().__init__(name, {**facts, "length": model.length})

    def scores(self, pairs: Sequence[Pair]) -> Float[np.ndarray, " n"]:
        """The scores that ``capt predict`` writes."""
        first, second = ([pair[place] for pair in pairs] for place in (0, 1))
        found = self._model.predict(first, second, batch=len(pairs))
        return np.array([each.score for each in found], dtype=np.float32)

    def lengths(self, pairs: Sequence[Pair], role: Role = _ROLE) -> list[int]:
        """The number of tokens of each pair."""
        first, second = ([pair[place] for pair in pairs] for place in (0, 1))
        lengths: list[int] = self._model.pair_lengths(first, second)
        return lengths


def load_reranker(path: Path) -> PairScorer:
    """The reranker at ``path``: a run or checkpoint with one score for pairs, a folder or hub id of a cross-encoder.

    Raises:
        CheckpointError: none of them, damaged, or code or pickles in it.
    """
    folder = local_folder(path, SENTENCE_FILES)
    if is_hf(folder) or (folder / "modules.json").is_file() or not holds_run(folder):
        model = load_cross_encoder(path)
        return CrossScorer(str(path), model, facts_of(hashes_of_folder(folder), "the score of CrossEncoder"))
    checkpoint = find_best(folder)
    # One reader for the checkpoints of every task on texts.
    classifier = command_module(checkpoint, FOREIGN_CLASSIFIER, "predict").load_text_classifier(checkpoint)
    if list(classifier.outputs.columns) != ["score"] or classifier.pair is False:
        raise CheckpointError(
            f"{path}: a checkpoint of task {task_of(checkpoint)}, which gives no single score for a pair of texts; "
            "name the run or the folder of a reranker"
        )
    return RunScorer(str(path), classifier, facts_of(hashes_of_checkpoint(checkpoint), "the score of the run"))


def score_pairs(
    scorer: PairScorer, pairs: Sequence[Pair], options: EncodeOptions, progress: ProgressCallback | None = None
) -> list[float]:
    """The scores of pairs, in their order, shared by all ranks and kept in the store (`embed`). Collective."""
    store = embed(scorer, pairs, _ROLE, options, progress, len(pairs))
    scores: list[float] = rows_of(store, pairs)[:, 0].tolist()
    return scores


def ordered_by_score(scorer: PairScorer, query: str, documents: Sequence[str]) -> list[tuple[int, float]]:
    """The numbers of documents and their scores for a query, the best first; equal ones stay as they are.

    They are computed by this rank alone, and stored nowhere.
    """
    pairs = [(query, document) for document in documents]
    scores: list[float] = rows_in_batches(scorer, pairs, _ROLE, 1)[:, 0].tolist()
    return sorted(enumerate(scores), key=lambda scored: -scored[1])
