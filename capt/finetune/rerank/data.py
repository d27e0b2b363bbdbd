"""Read the queries of a ``rerank`` job: through the store of pairs, which all ranks of a host share."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from capt.finetune.order import chosen_rows
from capt.finetune.rerank.config import RerankJob
from capt.finetune.rerank.groups import CandidateRows, Groups, grouped, require_both, some_queries, usable
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.verification import Verifier, all_ranks
from capt.pretrain.pairs.data_config import require_others
from capt.pretrain.pairs.prepare import pairs_of, prepare_source
from capt.pretrain.pairs.sources import SourceRows
from capt.tokenizer.encode import TextTokenizer


class Splits(NamedTuple):
    """The queries that are trained on, the held-out ones, and a digest of all."""

    train: Groups
    validation: CandidateRows | None
    digest: str


def read_splits(
    job: RerankJob, tokenizer: TextTokenizer, length: int, *, types: bool, needs_teacher: bool = True
) -> Splits:
    """Read, encode and divide the queries of a job. Collective.

    Args:
        job: the job.
        tokenizer: of the encoder.
        length: tokens of a pair at most, special tokens included.
        types: whether the encoder reads token types.
        needs_teacher: refuse rows without a teacher's scores where the loss of the job reads them.

    Raises:
        DataError: rows that cannot be read, or that the loss of the job cannot train on; on all ranks.
    """
    data = job.data
    verifier = Verifier(data.cache, all_ranks())
    fraction = 0.0 if data.validation or data.validation_fraction == 0 else data.validation_fraction
    found: dict[str, SourceRows | None] = {}
    graded = {}
    for key in ("train", "validation"):
        if not getattr(data, key):
            continue
        source = data.source(key, length)
        # Of rows with grades the negatives come from the grades.
        with verifier.ranks.synchronize_errors():
            files = source.paths()
            if key == "validation":
                require_others(files, data.source("train", 8).paths(), "data.validation", "queries")
            is_graded = next(islice(pairs_of(source, files), 1))[1].score is not None
        source = source.model_copy(update={"negatives": 0 if is_graded else 1})
        share = None if fraction == "auto" else float(fraction)
        # The prompts of rows are those of encoders: a search gives a reranker the query alone.
        prepared = prepare_source(
            source, files, share if key == "train" else 0.0, tokenizer, length, verifier, held_out={}, prompts=False
        )
        if prepared.train is None:
            raise DataError(
                f"data.validation_fraction {fraction} holds out all queries of {', '.join(data.train)}; lower it"
            )
        found[key], graded[key] = prepared.train, is_graded
        if key == "train" and prepared.held_out is not None:
            found["validation"], graded["validation"] = prepared.held_out, is_graded
    options = {"types": types}
    # All ranks of held-out queries are measured.
    ranks = {"train": data.ranks}
    rows = {
        key: usable(grouped(each, data), job, f"data.{key}", ranks.get(key, (0, None)), needs_teacher=needs_teacher)
        for key, each in found.items()
        if each is not None
    }
    require_both(rows["train"], job)
    train = some_queries(rows["train"], chosen_rows(len(rows["train"]), data.max_train))
    groups = {
        key: Groups(each, job, tokenizer, length, is_graded=graded[key], **options)
        for key, each in {**rows, "train": train}.items()
    }
    held_out = groups.get("validation")
    digest = ", ".join(f"{key} {each.digest[:16]}" for key, each in rows.items())
    return Splits(groups["train"], None if held_out is None else CandidateRows(held_out), digest)
