"""Weak pairs, text and a test set from the structure of a corpus itself: titles of documents, docstrings of functions.

``make quickstart-retrieval`` and the study of mining train on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from capt.pretrain.base.atomic import new_file
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.overlap import same_text
from capt.pretrain.base.randomness import derive
from capt.pretrain.data.docstrings import write_pairs
from capt.pretrain.retrieval.data import read_documents, read_json_lines, read_queries

PAIRS, TEXT, BEIR = "pairs.jsonl", "text.txt", "beir"
_HELD_OUT = 500


def write_title_pairs(beir: Path, out: Path) -> int:
    """Write the title of each document of a BEIR folder with its text as a pair, and all texts; returns the pairs.

    ``out`` gets ``pairs.jsonl`` (query: the title, pos: the text without it) and ``text.txt``, a document a paragraph.
    The queries of the folder are in neither; a title that is a query of the folder is left out.

    Raises:
        DataError: no document has a title and a text.
    """
    asked = {same_text(text) for _, text in read_queries(beir)}
    pairs: list[dict[str, Any]] = []
    texts: list[str] = []
    both = zip(read_documents(beir), read_documents(beir, titles=False), strict=True)
    for (_, whole), (_, text) in both:
        title = whole.removesuffix(text).strip()
        body = text.strip().removeprefix(title).strip()
        texts.append(f"{title}\n{body}".strip())
        if title and body and same_text(title) not in asked:
            pairs.append({"query": title, "pos": [body]})
    if not pairs:
        raise DataError(f"{beir}: no document has a title and a text, of which a pair could be made")
    _write_lines(out / PAIRS, pairs)
    with new_file(out / TEXT) as file:
        file.write("\n\n".join(text for text in texts if text) + "\n")
    return len(pairs)


def write_docstring_data(out: Path, limit: int | None = None, folders: Sequence[Path] | None = None) -> int:
    """Write pairs of the installed packages' docstrings and signatures, and a BEIR folder of those that are held out.

    ``out`` gets ``pairs.jsonl``, ``text.txt`` (all pairs that are not held out) and ``beir``, whose corpus is all
    signatures and whose queries are held-out paragraphs; returns the number of pairs.

    Args:
        out: a folder.
        limit: pairs at most, chosen by hash.
        folders: of Python files; without them those of the installed packages.
    """
    write_pairs(out, folders)
    rows = sorted((row for _, row in read_json_lines(out / PAIRS)), key=lambda row: derive(1, "pairs", row["query"]))
    rows = rows[:limit]
    held_out = rows[: min(_HELD_OUT, len(rows) // 10)]
    pairs = rows[len(held_out) :]
    signatures = list(dict.fromkeys(row["pos"][0] for row in rows))
    number = {text: i for i, text in enumerate(signatures)}
    _write_lines(out / BEIR / "corpus.jsonl", ({"_id": f"d{i}", "text": text} for i, text in enumerate(signatures)))
    queries = ({"_id": f"q{i}", "text": row["query"]} for i, row in enumerate(held_out))
    _write_lines(out / BEIR / "queries.jsonl", queries)
    judged = "".join(f"q{i}\td{number[row['pos'][0]]}\t1\n" for i, row in enumerate(held_out))
    with new_file(out / BEIR / "qrels" / "test.tsv") as file:
        file.write("query-id\tcorpus-id\tscore\n" + judged)
    _write_lines(out / PAIRS, pairs)
    with new_file(out / TEXT) as file:
        file.write("".join(f"{row['query']}\n{row['pos'][0]}\n\n" for row in pairs))
    return len(pairs)


def write_data(out: Path, beir: Path | None) -> str:
    """Write what training needs, from a BEIR folder or the installed packages; says what was written.

    Raises:
        DataError: as `write_title_pairs`.
    """
    out.mkdir(parents=True)
    if beir is None:
        return f"{write_docstring_data(out):,} pairs of docstrings and signatures in {out}"
    (out / BEIR).symlink_to(beir.absolute())
    return f"{write_title_pairs(beir, out):,} pairs of titles and texts in {out}"


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
