"""Weak pairs, text and a test set from the structure of a corpus itself: titles, first sentences, docstrings.

The targets ``quickstart`` of the Makefile and the study of mining train on them.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from capt.pretrain.base.atomic import new_file
from capt.pretrain.base.errors import DataError, counted
from capt.pretrain.base.overlap import same_text
from capt.pretrain.base.parallel import ProgressCallback, ordered_map
from capt.pretrain.base.randomness import derive
from capt.pretrain.data.docstrings import FILES_A_TASK, Definition, parsed_module, prose, python_files, python_folders
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.tables import read_file
from capt.pretrain.retrieval.data import read_collections, read_documents, read_queries

PAIRS, TEXT, BEIR = "pairs.jsonl", "text.txt", "beir"
_HELD_OUT, _SHOWN = 500, 4
_MOST, _FEWEST = 20_000, 100
"""Pairs that are made of text at most, and at least."""
_TITLE, _WORDS = 200, 3
"""Characters of a first line that may be a title, and words that a beginning has at least."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


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


def write_text_data(files: Sequence[Path], out: Path) -> int:
    """Write pairs of some text files, and a BEIR folder of those that are held out; returns the number of pairs.

    Of a document, or of each part of 4,096 characters of a long one, the query is the first line where it is short, as
    a title is, else the first sentence, and the positive what follows. ``out`` gets ``pairs.jsonl`` and ``text.txt``
    (what follows of all, and the queries that are trained on), and ``beir``: one query in ten, 500 at most, among all
    that follows.

    Raises:
        DataError: the files have fewer than a hundred such pairs.
    """
    divided = (_beginning_and_rest(passage.text) for passage in FileCorpus(files, "text", None))
    # By hash, and each beginning once: the same are held out whatever the order of the files.
    pairs = {same_text(both[0]): both for both in divided if both is not None}
    rows = sorted(pairs.values(), key=lambda both: derive(1, "pairs", both[0]))[:_MOST]
    if len(rows) < _FEWEST:
        raise DataError(
            f"{files[0]}: {counted(len(rows), 'document')} with a beginning and more after it, of {_FEWEST} that a "
            "search is measured with: give more text (a blank line between documents)"
        )
    bodies = list(dict.fromkeys(rest for _, rest in rows))
    number = {body: i for i, body in enumerate(bodies)}
    held_out = rows[: min(_HELD_OUT, len(rows) // 10)]
    asked = [(beginning, number[rest]) for beginning, rest in held_out]
    _write_beir(out / BEIR, bodies, asked)
    _write_lines(out / PAIRS, ({"query": query, "pos": [rest]} for query, rest in rows[len(held_out) :]))
    with new_file(out / TEXT) as file:
        file.writelines(f"{rest}\n\n" for _, rest in held_out)
        file.writelines(f"{query}\n{rest}\n\n" for query, rest in rows[len(held_out) :])
    return len(rows) - len(held_out)


def _beginning_and_rest(text: str) -> tuple[str, str] | None:
    """Divide a document into its title or first sentence and what follows; None where either has too few words."""
    first, _, rest = text.strip().partition("\n")
    if not rest or len(first) > _TITLE:
        whole = " ".join(text.split())
        end = _SENTENCE.search(whole)
        first, rest = (whole[: end.start()], whole[end.end() :]) if end else (whole, "")
    # Blank lines separate documents of the text that is written.
    rest = "\n".join(line for line in rest.split("\n") if line.strip())
    return (first.strip(), rest) if len(first.split()) >= _WORDS and len(rest.split()) >= 2 * _WORDS else None


def write_docstring_data(
    out: Path,
    limit: int | None = None,
    folders: Sequence[Path] | None = None,
    searched: Collection[str] | None = None,
    progress: ProgressCallback | None = None,
) -> int:
    """Write pairs of the installed packages' docstrings and signatures, and a BEIR folder of those that are held out.

    ``out`` gets ``pairs.jsonl``, ``text.txt`` (all pairs that are not held out) and ``beir``, whose corpus is all
    signatures and whose queries are held-out paragraphs; returns the number of pairs.

    Args:
        out: a folder.
        limit: pairs at most, chosen by hash.
        folders: of Python files; without them those of the installed packages.
        searched: packages whose signatures are the corpus, and whose paragraphs may be held out; None: all.
        progress: called with files read and all files.
    """
    write_pairs(out, folders, progress=progress)
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
    _write_beir(out / BEIR, signatures, [(row["query"], number[row["pos"][0]]) for row in held_out])
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


def write_library_search(
    out: Path, folders: Sequence[Path] | None = None, progress: ProgressCallback | None = None
) -> str:
    """Write the data of ``make quickstart``: a search in Python's own library by what a function does.

    Beside what `write_docstring_data` writes there are ``library.txt``, the signatures of the standard library, and
    ``queries.txt`` and ``answers.txt``: of each of the first four packages of `TOUR` that have one, the first held-out
    paragraph by hash, and the signatures of their functions. ``progress`` as `write_docstring_data`. Returns what was
    written.
    """
    out.mkdir(parents=True)
    count = write_docstring_data(out, folders=folders, searched=sys.stdlib_module_names, progress=progress)
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


def write_data(
    out: Path, beir: Path | None, files: Sequence[Path] = (), progress: ProgressCallback | None = None
) -> str:
    """Write what training needs, from a BEIR folder, files of text or the installed packages; says what was written.

    ``progress`` as `write_docstring_data`.

    Raises:
        DataError: as `write_title_pairs` and `write_text_data`.
    """
    out.mkdir(parents=True)
    if beir is not None:
        (out / BEIR).symlink_to(beir.absolute())
        return f"{write_title_pairs(beir, out):,} pairs of titles and texts in {out}"
    if files:
        return f"{write_text_data(files, out):,} pairs of the beginnings of documents and what follows in {out}"
    return f"{write_docstring_data(out, progress=progress):,} pairs of docstrings and signatures in {out}"


def _write_beir(folder: Path, corpus: Sequence[str], asked: Sequence[tuple[str, int]]) -> None:
    """Write a corpus and queries, each with the number of its document."""
    _write_lines(folder / "corpus.jsonl", ({"_id": f"d{i}", "text": text} for i, text in enumerate(corpus)))
    _write_lines(folder / "queries.jsonl", ({"_id": f"q{i}", "text": query} for i, (query, _) in enumerate(asked)))
    judged = "".join(f"q{i}\td{document}\t1\n" for i, (_, document) in enumerate(asked))
    with new_file(folder / "qrels" / "test.tsv") as file:
        file.write("query-id\tcorpus-id\tscore\n" + judged)


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_text(path: Path, lines: Iterable[str]) -> None:
    with new_file(path) as file:
        file.writelines(f"{line}\n" for line in lines)


def write_pairs(
    folder: Path,
    folders: Sequence[Path] | None = None,
    workers: int = 2,
    progress: ProgressCallback | None = None,
) -> int:
    """Write pairs of what a function does and its name with its arguments, and return how many.

    ``folder/pairs.jsonl`` has a query (the first English paragraph of the docstring) and a positive
    (``shutil.copytree(src, dst, symlinks)``: module, name, and the names of the arguments) on each line. Left out are
    functions of which any part of the name begins with an underscore, functions of tests, and paragraphs that describe
    more than one function, where nothing but the function's own name tells them apart. ``progress`` gets the number of
    files read and of all files.

    Raises:
        DataError: no function has such a docstring.
    """
    files = [(each, path) for each in (folders or python_folders()) for path in python_files(each)]
    tasks = [files[i : i + FILES_A_TASK] for i in range(0, len(files), FILES_A_TASK)]
    described: dict[str, set[tuple[str, str]]] = {}
    for number, found in enumerate(ordered_map(_read_signatures, tasks, workers), start=1):
        for paragraph, signature in found:
            # Methods of many classes share a description, with their own name in it.
            described.setdefault(_without_name(paragraph, signature), set()).add((paragraph, signature))
        if progress is not None:
            progress(min(number * FILES_A_TASK, len(files)), len(files))
    pairs = [next(iter(alike)) for alike in described.values() if len(alike) == 1]
    if not pairs:
        raise DataError(f"no function in {len(files)} Python files has a docstring")
    _write_lines(folder / PAIRS, ({"query": paragraph, "pos": [signature]} for paragraph, signature in pairs))
    return len(pairs)


_HIDDEN = re.compile(r"(^|\.)_|(^|[._])tests?([._]|$)")
"""Names of which a part begins with an underscore, or that are of tests."""


def _read_signatures(files: Sequence[tuple[Path, Path]]) -> list[tuple[str, str]]:
    """The first English paragraph of every public function, and its name with the names of its arguments.

    ``files``: a folder of modules, and a file in it.
    """
    found = []
    for folder, path in files:
        module = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        tree = None if _HIDDEN.search(module) else parsed_module(path)
        for node, name in _functions(tree, "") if tree is not None else ():
            paragraph = next(prose(ast.get_docstring(node) or ""), None)
            if paragraph is not None and not _HIDDEN.search(name):
                found.append((paragraph, f"{module}.{name}({_arguments(node, name)})"[:200]))
    return found


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """The names of the arguments as a call gives them: without that of the object or class of a method."""
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    if "." in name and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [each.arg for each in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return ", ".join(names)


def _without_name(paragraph: str, signature: str) -> str:
    """``paragraph`` with a blank for each word that is a part of the function's own name."""
    own = set(signature.partition("(")[0].split("."))
    return " ".join("" if word.strip("\"'.,;:()") in own else word for word in paragraph.split(" "))


def _functions(node: Definition, prefix: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """The functions of a module and of its classes, with names such as ``Path.exists``."""
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, f"{prefix}{child.name}"
