"""Results of a retrieval evaluation: figures of rankings, what they are of, and where they are written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capt.pretrain.base.distributed import rank, synchronize_errors
from capt.pretrain.base.files import write_text
from capt.pretrain.base.paired import paired_difference
from capt.pretrain.config.retrieval import METRICS
from capt.pretrain.engine.checkpoint import find_best
from capt.pretrain.engine.evaluations import Figures, Section, keep_sections, run_of, sections_as_text, write_result
from capt.pretrain.engine.provenance import provenance
from capt.pretrain.retrieval.data import Collection
from capt.pretrain.retrieval.metrics import PROTOCOL, mean_metrics, query_metrics
from capt.pretrain.retrieval.rankings import Rankings, SearchCorpus

BM25, FUSION, RERANKED = "bm25", "fusion", "reranked"


def figures_of(
    collection: Collection, systems: Mapping[str, Rankings]
) -> tuple[dict[str, Figures], dict[str, list[dict[str, float]]], list[dict[str, Any]]]:
    """Return the mean figures of each system, those of each query, and these as lines of a file.

    A query without a relevant document has no part in any of them, as in trec_eval.
    """
    means: dict[str, Figures] = {}
    measured: dict[str, list[dict[str, float]]] = {}
    lines: list[dict[str, Any]] = []
    answerable = [max(collection.judged[name].values()) > 0 for name, _ in collection.queries]
    names = [name for (name, _), counts in zip(collection.queries, answerable, strict=True) if counts]
    for system, rankings in systems.items():
        chosen = [ranking for ranking, counts in zip(rankings, answerable, strict=True) if counts]
        figures = [query_metrics(ranking, collection.judged[name]) for name, ranking in zip(names, chosen, strict=True)]
        means[system], measured[system] = mean_metrics(figures), figures
        lines += [
            {"set": collection.name, "split": collection.split, "system": system, "query": name, **each}
            for name, each in zip(names, figures, strict=True)
        ]
    return means, measured, lines


def figure_differences(
    figures: Mapping[str, Sequence[Mapping[str, float]]], system: str, others: Sequence[str]
) -> dict[str, Figures]:
    """Margin of ``system`` over each of the ``others`` in each figure, on the same queries."""
    found: dict[str, Figures] = {}
    for other in others:
        for metric in METRICS:
            a, b = ([each[metric] for each in figures[name]] for name in (other, system))
            found[f"{system} - {other}, {metric}"] = paired_difference(a, b)._asdict()
    return found


def about_set(collection: Collection, corpus: SearchCorpus) -> list[str]:
    """The parts of a protocol that say what was asked of what, and which figures there are."""
    judged = [collection.judged[name] for name, _ in collection.queries]
    without = sum(max(each.values()) <= 0 for each in judged)
    found = set(corpus.names)
    missing = sum(document not in found for each in judged for document in each)
    return [
        f"{len(judged) - without} queries of {collection.split}, {len(corpus.names)} documents",
        *([f"{without} queries without a relevant document left out"] if without else []),
        *([f"{missing} judged documents are not in the corpus"] if missing else []),
        *collection.remarks,
        PROTOCOL,
        *([f"{len(corpus.selves)} queries are documents, each left out of its own ranking"] if corpus.selves else []),
    ]


def about_bm25() -> str:
    """The part of a protocol that says what BM25 is."""
    from importlib.metadata import version

    return f"bm25 = bm25s {version('bm25s')}, lucene, k1 1.5, b 0.75, no stop words, no stemming"


def finished(
    model: Path,
    sections: Sequence[Section],
    lines: Sequence[Mapping[str, Any]],
    per_query: Path | None,
    out: Path | None,
) -> dict[str, Any]:
    """Return the result of an evaluation, and write it where it is wanted, and into the run of ``model``. Collective.

    Args:
        model: what was measured.
        sections: one for each data set.
        lines: the figures of each query, for ``per_query``.
        per_query: file of JSON lines to write.
        out: JSON file to write the result to.
    """
    result: dict[str, Any] = {
        "checkpoint": str(model),
        "versions": provenance(),
        "sections": [section.model_dump() for section in sections],
    }
    with synchronize_errors():
        if rank() == 0:
            if per_query is not None:
                write_text(per_query, "".join(f"{json.dumps(line)}\n" for line in lines))
            if out is not None:
                write_result(out, result)
            # The run keeps the figures for reports and for the model card of an export.
            if run_of(model) is not None:
                keep_sections(find_best(model), result)
    return result


def as_text(result: dict[str, Any]) -> str:
    """The result of `evaluate` for people: a row for each figure, a column for each system."""
    return sections_as_text(result, "model", ".4f")
