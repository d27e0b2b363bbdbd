"""``capt evaluate`` of a reranker: the order that it gives to the candidates of its held-out queries, or of a file.

The metrics are nDCG@10 and MRR@10 over every candidate, beside those of the scores that the rows have.
"""

from __future__ import annotations

from pathlib import Path

from capt.finetune.evaluation import EvaluationSets, as_text, evaluate_command
from capt.finetune.load import FineTuned, load_fine_tuned
from capt.finetune.rerank.config import RerankJob
from capt.finetune.rerank.data import read_splits
from capt.finetune.rerank.groups import CandidateRows
from capt.finetune.rerank.objective import RerankObjective
from capt.finetune.text_training import Classifier, build_classifier
from capt.pretrain.base.errors import DataError
from capt.pretrain.engine.checkpoint import read_metadata

__all__ = ["as_text", "command"]


def _measured(trained: FineTuned[RerankJob, Classifier], data: Path | None) -> EvaluationSets:
    """The candidates of a file in any form of the training data, with a teacher's scores or without; from None those of
    the queries that the run held out.

    Raises:
        DataError: the file cannot be read, the run has held out no query, or its files hold out others by now.
    """
    job, length = trained.job, trained.job.data.sequence_length
    assert length is not None, "TextJob.with_encoder fills it in"
    if data is not None:
        section = {"train": [str(data)], "validation": [], "validation_fraction": 0.0, "max_train": None}
        job = job.model_copy(update={"data": job.data.model_copy(update={**section, "ranks": (0, None)})})
    # The loss of a teacher's scores cannot be told without them; the order can.
    splits = read_splits(
        job, trained.tokenizer, length, types=trained.model.reads_types, needs_teacher=data is None
    )  # fmt: skip
    rows = splits.validation if data is None else CandidateRows(splits.train)
    if rows is None:
        raise DataError(f"{trained.checkpoint}: the run held out no query: name a file with --data FILE")
    if data is None and _held_out(splits.digest) != _held_out(str(read_metadata(trained.checkpoint).task.get("rows"))):
        files = ", ".join(job.data.validation or job.data.train)
        raise DataError(
            f"{files}: changed since {trained.checkpoint} was trained, and the queries that are held out now may be "
            "trained ones: put the file back, or name queries with --data FILE"
        )
    title = "the candidates of held-out queries" if data is None else f"the candidates of {data.name}"
    return EvaluationSets(title, {"": rows}, RerankObjective(job), {"queries": rows.queries})


def _held_out(digest: str) -> str:
    """The digest of the held-out rows in that of `Splits`."""
    return digest.rpartition("validation ")[2]


command = evaluate_command(lambda path: load_fine_tuned(path, RerankJob, "rerank", build_classifier), _measured)
