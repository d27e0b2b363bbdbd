"""Weak pairs, text and a test set from the structure of a corpus itself: titles of documents, docstrings of functions.

``make quickstart-retrieval`` and the study of mining train on them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from capt.pretrain.base.atomic import new_file
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.overlap import same_text
from capt.pretrain.base.randomness import derive
from capt.pretrain.data.docstrings import write_pairs
from capt.pretrain.data.tables import read_file
from capt.pretrain.retrieval.data import read_collections, read_documents, read_queries

PAIRS, TEXT, BEIR = "pairs.jsonl", "text.txt", "beir"
_HELD_OUT, _SHOWN = 500, 4


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
        # Documents read title, space, text: the title is what comes before the text.
        title = whole.removesuffix(text).strip()
        # Some sets repeat the title at the beginning of the text, where it would give the answer away.
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


def write_docstring_data(
    out: Path,
    limit: int | None = None,
    folders: Sequence[Path] | None = None,
    searched: Collection[str] | None = None,
) -> int:
    """Write pairs of the installed packages' docstrings and signatures, and a BEIR folder of those that are held out.

    ``out`` gets ``pairs.jsonl``, ``text.txt`` (all pairs that are not held out) and ``beir``, whose corpus is all
    signatures and whose queries are held-out paragraphs; returns the number of pairs.

    Args:
        out: a folder.
        limit: pairs at most, chosen by hash.
        folders: of Python files; without them those of the installed packages.
        searched: packages whose signatures are the corpus, and whose paragraphs may be held out; None: all.
    """
    write_pairs(out, folders)
    # By hash: the same rows are held out wherever the packages lie, and in whatever order.
    rows = sorted((row for _, _, row in read_file(out / PAIRS)), key=lambda row: derive(1, "pairs", row["query"]))
    rows = rows[:limit]
    library = [row for row in rows if searched is None or package_of(row["pos"][0]) in searched]
    held_out = library[: min(_HELD_OUT, len(library) // 10)]
    asked = {row["query"] for row in held_out}
    # A paragraph that is asked in the test is in no training pair, whatever its signature.
    pairs = [row for row in rows if row["query"] not in asked]
    signatures = list(dict.fromkeys(row["pos"][0] for row in library))
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


TOUR = (
    "os", "shutil", "glob", "sys", "argparse", "re", "math", "random", "statistics", "urllib", "smtplib", "datetime",
    "zlib", "timeit", "profile", "pstats", "doctest", "unittest", "xmlrpc", "email", "json", "csv", "xml", "sqlite3",
    "gettext", "locale", "codecs",
)  # fmt: skip
"""The packages that chapter 10 of the Python tutorial, "Brief Tour of the Standard Library", shows, in its order."""


def write_library_search(out: Path, folders: Sequence[Path] | None = None) -> str:
    """Write the data of ``make quickstart-pairs``: a search in Python's own library by what a function does.

    Beside what `write_docstring_data` writes there are ``library.txt``, the signatures of the standard library, and
    ``queries.txt`` and ``answers.txt``: of each of the first four packages of `TOUR` that have one, the first held-out
    paragraph by hash, and the signatures of their functions. Returns what was written.
    """
    out.mkdir(parents=True)
    count = write_docstring_data(out, folders=folders, searched=sys.stdlib_module_names)
    (searched,) = read_collections(out / BEIR)
    library = dict(searched.documents())
    shown: dict[str, tuple[str, str]] = {}
    for number, paragraph in searched.queries:
        (signature,) = (library[each] for each in searched.judged[number])
        shown.setdefault(package_of(signature), (paragraph, signature))
    chosen = [shown[package] for package in TOUR if package in shown][:_SHOWN]
    _write_text(out / "library.txt", library.values())
    _write_text(out / "queries.txt", (paragraph for paragraph, _ in chosen))
    _write_text(out / "answers.txt", (signature for _, signature in chosen))
    return (
        f"{count:,} pairs of what a function does and its signature; {len(searched.queries):,} of Python's own library "
        f"are held out, to be searched among its {len(library):,} signatures"
    )


def package_of(signature: str) -> str:
    """The first part of a function's name."""
    return signature.partition(".")[0]


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


def _write_text(path: Path, lines: Iterable[str]) -> None:
    with new_file(path) as file:
        file.writelines(f"{line}\n" for line in lines)
