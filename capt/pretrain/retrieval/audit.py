"""The audit of mined negatives: what would do harm in training, the distribution of scores, and a page for people."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from capt.pretrain.base.overlap import same_text
from capt.pretrain.pairs.known import negative_fault, positives_by_query

_BINS = 20


def faults(lines: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Rows that would do harm in training: a negative that is a positive of the query or the query, or one twice."""
    positives = positives_by_query((row["query"], row["pos"]) for row in lines)
    found = []
    for number, row in enumerate(lines):
        names = [same_text(text) for text in row["neg"]]
        query = same_text(row["query"])
        wrong = {negative_fault(name, query, positives[query]) for name in names}
        if "negative_is_positive" in wrong:
            found.append((number, f"a negative of {row['query'][:80]!r} is a positive of the same query"))
        elif "negative_is_query" in wrong:
            found.append((number, f"a negative of {row['query'][:80]!r} is the query itself"))
        elif len(set(names)) < len(names):
            found.append((number, f"{row['query'][:80]!r} has a negative twice"))
    return found


def histogram(values: Sequence[float]) -> dict[str, Any]:
    """Number, mean, quantiles and a histogram of scores."""
    if not values:
        return {"count": 0}
    rows: Float[np.ndarray, " n"] = np.asarray(values, dtype=np.float64)
    counts, edges = np.histogram(rows, bins=_BINS)
    quantiles = np.percentile(rows, [5, 25, 50, 75, 95]).tolist()
    return {
        "count": len(values), "mean": float(rows.mean()), "quantiles_5_25_50_75_95": quantiles,
        "counts": counts.tolist(), "edges": edges.tolist(),
    }  # fmt: skip


def page(audit: dict[str, Any]) -> str:
    """The audit as a page for people, which needs no network: figures, histograms and examples."""
    facts = {
        "rows read": audit["rows_read"], "rows written": audit["rows_written"],
        "rows with too few negatives": audit["rows_with_too_few_negatives"], "documents": audit["documents"],
        "model": audit["model"], "how texts are encoded": audit["protocol"],
        "cross-encoder": audit["cross_encoder"] or "none",
        **{f"rule {name}": value for name, value in audit["rules"].items() if value is not None},
        **{f"removed, {name}": f"{each['count']:,} ({each['share']:.1%})" for name, each in audit["removed"].items()},
    }  # fmt: skip
    # Texts are those of strangers: everything is escaped.
    table = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in facts.items())
    charts = "".join(
        f"<h2>Scores of {name}</h2>{_chart(audit[f'{kind}_scores'])}"
        for kind, name in (("positive", "positives"), ("negative", "negatives"))
    )
    examples = "".join(
        f"<h3>{html.escape(each['query'])}</h3><ul>"
        + "".join(f"<li><b>{each['score']:.3f} {html.escape(text)}</b></li>" for text in each["positives"])
        + "".join(f"<li>{one['score']:.3f} {html.escape(one['text'])}</li>" for one in each["negatives"])
        + "</ul>"
        for each in audit["examples"]
    )
    style = "body{font:15px sans-serif;max-width:60em;margin:2em auto}th{text-align:left;padding-right:1em}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Mined negatives</title><style>{style}</style>'
        f"<h1>Mined negatives</h1><table>{table}</table>{charts}"
        f"<h2>Examples (positives in bold)</h2>{examples}</html>\n"
    )


def _chart(scores: dict[str, Any]) -> str:
    if not scores["count"]:
        return "<p>none</p>"
    highest, edges = max(scores["counts"]), scores["edges"]
    bars = "".join(
        f'<rect x="{30 * i}" y="{100 - 100 * count / highest:.1f}" width="28" height="{100 * count / highest:.1f}">'
        f"<title>{edges[i]:.3f} to {edges[i + 1]:.3f}: {count:,}</title></rect>"
        for i, count in enumerate(scores["counts"])
    )
    return (
        f'<svg width="600" height="100" fill="#3b6ea5">{bars}</svg>'
        f"<p>{edges[0]:.3f} to {edges[-1]:.3f}, mean {scores['mean']:.3f}, {scores['count']:,} scores</p>"
    )
