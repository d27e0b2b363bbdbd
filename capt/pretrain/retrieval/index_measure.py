"""Measuring a search on questions of one's own, and writing an index for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.errors import ConfigError, DataError, shown
from capt.pretrain.base.parallel import batched
from capt.pretrain.data.tables import read_table
from capt.pretrain.engine.evaluations import Figures, Section
from capt.pretrain.engine.provenance import provenance, used_versions
from capt.pretrain.pairs.cells import DOCUMENT_IDS, GRADES, number_of, values
from capt.pretrain.retrieval.index import MODES, SearchIndex
from capt.pretrain.retrieval.metrics import DEPTH, PROTOCOL, mean_metrics, query_metrics
from capt.pretrain.retrieval.rerankers import PairScorer
from capt.pretrain.retrieval.results import RERANKED, figure_differences
from capt.pretrain.retrieval.search import BLOCK

_QUESTIONS = ("query", "question")
_ANSWERS = ("document", *sorted(DOCUMENT_IDS, key=lambda name: name in ("_id", "id")))
"""Names of the id of an answer, ``id`` last: beside another it is that of the row."""
EXPORTS = ("npy", "parquet")


def read_judged(path: Path) -> dict[str, dict[str, int]]:
    """Read questions and the ids of the documents that answer each, from a table with ``query`` and ``document``.

    A question may have several rows, and a row of jsonl a list of ids. A column of grades (`GRADES`) is the judgement
    of the documents of its row; without one it is 1. Raises ``DataError``.
    """
    judged: dict[str, dict[str, int]] = {}
    for where, _, row in read_table(path):
        named = [next((name for name in names if name in row), None) for names in (_QUESTIONS, _ANSWERS)]
        query, documents = (values(row[name]) if name else [] for name in named)
        if len(query) != 1 or not documents or not all(isinstance(each, str | int) for each in (*query, *documents)):
            has = ", ".join(map(shown, list(row)[:10]))
            raise DataError(f'{where}: "query" with a text and "document" with the id of one are expected, not {has}')
        grade = next((_grade(where, name, row[name]) for name in GRADES if name in row), 1)
        judged.setdefault(str(query[0]).strip(), {}).update(dict.fromkeys(map(str, documents), grade))
    if judged and not any(grade > 0 for grades in judged.values() for grade in grades.values()):
        raise DataError(f"{path}: no grade above 0, so that no document answers a question")
    return judged


def _grade(where: str, column: str, value: Any) -> int:
    grade = number_of(where, value, column)
    if grade % 1:
        raise DataError(f"{where}: {column!r} is {grade:g}: a judgement is a whole number, above 0 of an answer")
    return int(grade)


def measure_index(index: SearchIndex, questions: Path, reranker: PairScorer | None = None) -> dict[str, Any]:
    """Measure every mode of ``index`` on ``questions`` (`read_judged`), and the reranked hybrid with a ``reranker``.

    Returns ``checkpoint``, ``versions`` and ``sections`` as `capt.pretrain.retrieval.evaluate.evaluate` has them.
    Raises ``DataError``: a document is not in the index.
    """
    judged = read_judged(questions)
    if not judged:
        raise DataError(f"{questions}: no question in it")
    known = {row["id"] for row in index.documents()}
    if missing := [name for names in judged.values() for name in names if name not in known]:
        raise DataError(
            f"{questions}: the document {shown(missing[0])} is not in the index, whose ids are such as "
            f"{shown(min(known))}; write them as capt search shows them"
        )
    queries = list(judged)
    found = {mode: index.search(queries, DEPTH, mode) for mode in MODES}
    if reranker is not None:
        found[RERANKED] = index.search(queries, DEPTH, reranker=reranker)
    measured = {
        system: [
            query_metrics([hit.document for hit in hits], judged[query])
            for query, hits in zip(queries, each, strict=True)
        ]
        for system, each in found.items()
    }
    first, *_ = found
    differences: dict[str, Figures] = figure_differences(measured, first, [name for name in found if name != first])
    section = Section(
        name=questions.name, systems={name: mean_metrics(each) for name, each in measured.items()},
        protocol=f"{len(queries)} questions, {len(index)} documents; {PROTOCOL}; {index.encoder.protocol()}; "
        f"{used_versions()}",
        dimension=index.encoder.dimension, differences=differences,
    )  # fmt: skip
    return {"checkpoint": str(index.folder), "versions": provenance(), "sections": [section.model_dump()]}


def export_index(index: SearchIndex, out: Path, form: str) -> None:
    """Write the passages and vectors of an index into the new folder ``out``, one row for each passage.

    ``npy`` gives ``vectors.npy`` and, in the same order, ``passages.jsonl``; ``parquet`` gives both in
    ``passages.parquet``. Vectors have length 1 where the model's are compared by cosine.

    Raises:
        ConfigError: no such form.
        DataError: ``out`` is taken.
    """
    if form not in EXPORTS:
        raise ConfigError(f"--to {form}: choose from {', '.join(EXPORTS)}")
    with new_folder(out) as folder:
        if form == "npy":
            index.copy_to(folder)
        else:
            _write_parquet(folder / "passages.parquet", index)


def _write_parquet(path: Path, index: SearchIndex) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = [(name, pyarrow.string()) for name in ("id", "file", "text", "fields")]
    numbers = [(name, pyarrow.int64()) for name in ("line", "passage")]
    kind = pyarrow.float32() if index.vectors.dtype == np.float32 else pyarrow.float16()
    schema = pyarrow.schema([*texts, *numbers, ("vector", pyarrow.list_(kind, index.vectors.shape[1]))])
    rows, first = index.passages(), 0
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for block in batched(rows, BLOCK):
            vectors = np.ascontiguousarray(index.vectors[first : first + len(block)])
            columns = {name: [row[name] for row in block] for name in ("id", "file", "text", "line", "passage")}
            columns["fields"] = [json.dumps(row["fields"], ensure_ascii=False) for row in block]
            flat = pyarrow.array(vectors.reshape(-1), type=kind)
            columns["vector"] = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
            writer.write_table(pyarrow.table(columns, schema=schema))
            first += len(block)
