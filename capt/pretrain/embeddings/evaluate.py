"""``capt evaluate`` of word embeddings: word similarity and analogies, of a run or of any vector file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.files import read_json
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.embeddings.load import load_embeddings
from capt.pretrain.embeddings.similarity import CASE_RULE, RULES, find_sets, score_analogies, score_sets
from capt.pretrain.engine.checkpoint import find_best
from capt.pretrain.engine.evaluations import EVALUATION, run_of, save_artifact, write_result

MEASURED = ("word_similarity", "analogies")
"""The parts of a result; each maps the name of a set, or of a file, to its figures."""


def command(
    checkpoint: Path,
    *,
    word_similarity: Path | None = None,
    analogies: Path | None = None,
    out: Path | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Measure word vectors on sets of word pairs, on analogies, or on both.

    The run folder keeps the result for reports; what was measured of the same checkpoint on other sets stays there.

    Args:
        checkpoint: a run, a checkpoint, or a file of vectors.
        word_similarity: a file of word pairs, or a folder of them.
        analogies: a file in the form of ``questions-words.txt``.
        out: a file to write the result to.
        progress: called with the number of questions that are done, and of all.

    Raises:
        ConfigError: neither pairs nor analogies are given.
        DataError: a file is missing or faulty, or no pair and no question has vectors.
        CheckpointError: there is no checkpoint, or it is damaged or of another task.
    """
    if word_similarity is None and analogies is None:
        raise ConfigError("nothing to measure: give --word-similarity DIR, --analogies FILE, or both")
    sets = find_sets(word_similarity) if word_similarity is not None else None
    start = time.monotonic()
    source = find_best(checkpoint) if checkpoint.is_dir() else checkpoint
    vectors = load_embeddings(source)
    result: dict[str, Any] = {
        "checkpoint": str(source), "words": len(vectors), "dimensions": vectors.width, "case": CASE_RULE,
        "unknown_words": RULES,
    }  # fmt: skip
    if sets is not None:
        result["word_similarity"] = score_sets(vectors, sets)
    if analogies is not None:
        result["analogies"] = {analogies.name: score_analogies(vectors, analogies, progress)}
    result["seconds"] = round(time.monotonic() - start, 1)
    if source.is_dir():
        _keep(source, result)
    if out is not None:
        write_result(out, result)
    return result


def _keep(checkpoint: Path, result: Mapping[str, Any]) -> None:
    """Write the result into the run folder, together with the other sets that are measured of this checkpoint."""
    run, name = run_of(checkpoint), EVALUATION.format(checkpoint=checkpoint.name)
    if run is None:
        return
    try:
        before = read_json(run / name)
    except (FileNotFoundError, DataError):
        before = None
    kept = dict(result)
    for part in MEASURED:
        old = before.get(part) if isinstance(before, dict) else None
        if isinstance(old, dict) or part in kept:
            kept[part] = {**(old if isinstance(old, dict) else {}), **kept.get(part, {})}
    save_artifact(checkpoint, name, kept)


def as_text(result: dict[str, Any]) -> str:
    """Write a line for each set, with both rules for unknown words and the coverage."""
    lines = [f"{result['checkpoint']}: {result['words']:,} words, {result['dimensions']} dimensions"]
    if "word_similarity" in result:
        lines += _similarity_lines(result["word_similarity"])
    for name, sections in result.get("analogies", {}).items():
        lines += ["", *_analogy_lines(name, sections)]
    return "\n".join(lines)


def _similarity_lines(sets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    width = max(len("set"), *map(len, sets))
    lines = ["", f"  {'set':<{width}}  {'pairs':>7}  {'covered':>15}  {'words known':>15}  {'drop':>6}  {'zero':>6}"]
    for name, row in sets.items():
        lines.append(
            f"  {name:<{width}}  {row['pairs']:>7,}  {_share(row['covered'], row['pairs']):>15}  "
            f"{_share(row['known'], row['words']):>15}  {_number(row['drop']):>6}  {_number(row['zero']):>6}"
        )
    rules = "; ".join(f"{name}: {what}" for name, what in RULES.items())
    return [*lines, f"  Spearman's rho x 100 of the cosines. {rules}.", f"  Upper case: {CASE_RULE}."]


def _analogy_lines(name: str, sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    width = max(len("section"), *map(len, sections))
    lines = [
        f"  {name}: share of analogies that are answered right (3CosAdd), in per cent",
        f"  {'section':<{width}}  {'questions':>9}  {'covered':>15}  {'of covered':>10}  {'of all':>6}",
    ]
    for section, row in sections.items():
        lines.append(
            f"  {section:<{width}}  {row['questions']:>9,}  {_share(row['covered'], row['questions']):>15}  "
            f"{_number(row['accuracy_covered']):>10}  {_number(row['accuracy_all']):>6}"
        )
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.0f}%)" if whole else "0"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
