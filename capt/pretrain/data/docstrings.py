"""Real English that every machine already has: the docstrings of the installed Python packages and of Python itself.

The sources are parsed, never imported. Out of the docstrings come their prose paragraphs: no code, doctests, tables,
signatures or markup, and no paragraph twice (methods that share a description are everywhere).
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from capt.pretrain.base.atomic import new_file
from capt.pretrain.base.cache import require_cache
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.parallel import ProgressCallback, ordered_map

_FORMAT = 2
"""Counted up when what is taken from a docstring changes, so that old caches are not used."""
FILES_A_TASK = 50
_FEWEST_WORDS = 8
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
"""Other environments' packages below the standard library, and tests: a quarter of the code, hardly any prose."""
_FUNCTION_WORDS = re.compile(
    "a|an|and|are|as|at|be|been|but|by|can|each|for|from|given|has|have|if|in|into|is|it|its|may|must|no|not|of|on|one"
    "|only|or|other|should|so|such|than|that|the|their|them|then|there|these|they|this|to|used|was|we|when|where|which"
    "|while|will|with|you|your",
    re.IGNORECASE,
)
_FIELD = re.compile(r"(?::[\w ]+:|@\w+|[-*+•]|\(?\d+[.)]|\.\. [\w-]+::|\*{0,2}\w+(?: \([^)]*\))?:)(?:\s+|$)")
_CODE = re.compile(r"[*\w]+(?:, [*\w]+)* : |>>>|\.\.\. |\$ |#|\||```|\+[-=]|([^\w\s])\1{2,}$")
_ROLE = re.compile(r":[a-zA-Z:]+:`[~!]?([^`<]*?)(?: ?<[^`]*>)?`")
_MARKS = re.compile(r"`+_*|\*\*")
_WORD = re.compile(r"[(\"']*[A-Za-z]+(?:['-][A-Za-z]+)*[)\"'.,;:!?]*")


def python_folders() -> list[Path]:
    """The standard library and the site-packages of this interpreter, and the folders of packages that these link to.

    Links are the lines of ``.pth`` files and the finders that editable installs put in their place.
    """
    own = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    linked = {path.resolve() for folder in own for path in _linked(folder)}
    linked |= {path.resolve() for path in _editable()}
    # a folder inside another one is read with that one
    paths = own | {path for path in linked if not (own | linked).intersection(path.parents)}
    return sorted(path for path in paths if path.is_dir())


def _linked(folder: Path) -> Iterator[Path]:
    """The folders that the ``.pth`` files of ``folder`` add to the search path, as ``site`` reads these files."""
    for file in sorted(folder.glob("*.pth")):
        for line in file.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines():
            if line.strip() and not line.startswith(("#", "import ", "import\t")):
                yield folder / line.rstrip()


def _editable() -> Iterator[Path]:
    """The folders of the packages of editable installs, wherever a finder has them."""
    for distribution in metadata.distributions():
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            for name in (distribution.read_text("top_level.txt") or "").split():
                spec = find_spec(name) if name.isidentifier() else None
                yield from map(Path, (spec and spec.submodule_search_locations) or ())


def docstring_file(
    cache: Path,
    workers: int,
    folders: Sequence[Path] | None = None,
    progress: ProgressCallback | None = None,
) -> Path:
    """A text file with the docstrings of all files below ``folders``, with one document per module.

    ``folders`` are ``python_folders()`` unless given.

    Written to ``cache`` once for a given set of source files (their names and sizes), and reused after that.
    ``progress`` gets the number of files read and of all files. Raises ``DataError`` when there is no docstring at all.
    """
    files = [path for folder in (folders or python_folders()) for path in python_files(folder)]
    # Names and sizes are compared in place of the content: no file is opened to see that the cache is good.
    listing = [(str(path), path.stat().st_size) for path in files]
    key = hashlib.sha256(json.dumps([_FORMAT, sys.version_info[:2], listing]).encode()).hexdigest()[:16]
    path = cache / f"docstrings-{key}.txt"
    if path.is_file():
        return path
    tasks = [files[i : i + FILES_A_TASK] for i in range(0, len(files), FILES_A_TASK)]
    seen: set[bytes] = set()
    require_cache(cache)
    with new_file(path) as out:
        for number, documents in enumerate(ordered_map(_read_files, tasks, workers), start=1):
            for document in documents:
                new = [paragraph for paragraph in document if _is_new(paragraph, seen)]
                if new:
                    out.write("\n".join(new) + "\n\n")
            if progress is not None:
                progress(min(number * FILES_A_TASK, len(files)), len(files))
        if not seen:
            raise DataError(f"data.source: no docstrings in {len(files)} Python files; give text in data.files")
    return path


def prose(docstring: str) -> Iterator[str]:
    """The English paragraphs of a docstring, each on one line, markup removed."""
    paragraph: list[str] = []
    first = last = 0
    hanging = False
    # The empty line at the end closes the last paragraph.
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        field, is_code = _FIELD.match(text), _CODE.match(text) is not None
        # A field such as `x: the first` continues in lines that are indented further.
        same = indent == last or (hanging and indent > first)
        if paragraph and (not text or is_code or field or not same):
            yield from _english(" ".join(paragraph))
            paragraph = []
        if text and not is_code:
            if not paragraph:
                first, hanging = indent, field is not None
            last = indent
            paragraph.append(text[field.end() :] if field else text)


def _english(text: str) -> Iterator[str]:
    """``text`` without markup if it is English: enough words, nearly all plain, a fair share of them function words."""
    text = " ".join(_MARKS.sub("", _ROLE.sub(r"\1", text)).split())
    words = text.split(" ")
    plain = [word for word in words if _WORD.fullmatch(word)]
    common = sum(_FUNCTION_WORDS.fullmatch(word.strip("()\"'.,;:!?")) is not None for word in plain)
    # Control characters and lone surrogates do occur in docstrings, escaped; a text file cannot hold them.
    if not text.isprintable():
        return
    if len(words) >= _FEWEST_WORDS and len(plain) >= 0.8 * len(words) and common >= 0.2 * len(words):
        yield text


def _is_new(paragraph: str, seen: set[bytes]) -> bool:
    digest = hashlib.blake2b(paragraph.encode(), digest_size=8).digest()
    known = digest in seen
    seen.add(digest)
    return not known


def _read_files(paths: Sequence[Path]) -> list[list[str]]:
    """The prose of every module that has some; a file that is not Python of this version has none."""
    documents = []
    for path in paths:
        tree = parsed_module(path)
        if tree is None:
            continue
        docstrings = [ast.get_docstring(node) or "" for node in _definitions(tree)]
        documents.append([paragraph for text in docstrings for paragraph in prose(text)])
    return [document for document in documents if document]


def parsed_module(path: Path) -> ast.Module | None:
    """Return the syntax tree of a file; None where it has no docstring, or is not Python of this version."""
    try:
        source = path.read_bytes()
        if b'"""' not in source:  # two thirds of the time goes into parsing
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escape sequences
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(node: Definition) -> Iterator[Definition]:
    """The module, its classes and functions, in the order of the source."""
    yield node
    for child in node.body:
        if isinstance(child, Definition):
            yield from _definitions(child)


def python_files(folder: Path) -> Iterator[Path]:
    """Yield every source file below ``folder`` that may hold prose, in a fixed order."""
    for parent, folders, files in os.walk(folder):
        # In place: os.walk then does not go into those left out.
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        yield from (Path(parent, name) for name in sorted(files) if name.endswith(".py"))
