"""The files of a corpus: which ones the patterns of a job name, and their bytes, on this host or in a store."""

from __future__ import annotations

import glob
import hashlib
import io
import json
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import open_regular
from capt.pretrain.base.stores import StoreFile, contents_of, is_url, listed, reader, require_unchanged
from capt.pretrain.base.verification import ALONE, Ranks
from capt.pretrain.data.formats import TextFile, format_of, suffix_of, suffixes

WIKITEXT_START = r"^ = [^=]"
"""The pattern of the first line of an article of WikiText, its title `` = Title = ``; sections have more signs."""

TEXTS = {".txt": None, ".md": None, ".tokens": WIKITEXT_START, ".raw": WIKITEXT_START}
"""The suffixes of plain text, each with the pattern of the first line of a document; None = a blank line ends it."""


def resolve_paths(patterns: Sequence[str], key: str, *, any_suffix: bool = False) -> list[Path]:
    """Find the files that ``patterns``, the paths or globs of the key ``key``, name; matches of a glob are sorted.

    Raises ``DataError`` for a pattern without a match (with the nearest existing name), a file named twice, under
    another name of it too, or, unless ``any_suffix``, a suffix that no reader of text knows.
    """
    paths: dict[Path, None] = {}
    real: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        # A file whose name has a bracket or an asterisk is no pattern.
        matches = [path] if path.is_file() else sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        files = [match for match in matches if match.is_file()]
        if not files:
            raise DataError(f"{key}: {why_missing(path)}")
        for file in files:
            _require_new(file, real, key)
            if not any_suffix:
                require_form(file)
            paths[file] = None
    return list(paths)


def resolve_files(patterns: Sequence[str], key: str, ranks: Ranks = ALONE) -> list[TextFile]:
    """Return the files that ``patterns``, paths, addresses in a store, or globs of these, name; as `resolve_paths`.

    All ``ranks`` call this; one of them asks the stores.
    """
    found: dict[str, list[tuple[str, int, str]]] = {}
    urls = [pattern for pattern in patterns if is_url(pattern)]
    if urls:
        with ranks.synchronize_errors():
            # One rank asks the stores, and all have the same list, in the same order.
            if ranks.rank == 0:
                found = {url: [(file.url, file.size, file.tag) for file in listed(url)] for url in urls}
        found = ranks.broadcast(found)
    files: dict[TextFile, None] = {}
    real: dict[Path, Path] = {}
    for pattern in patterns:
        there = [StoreFile(*file) for file in found.get(pattern, ())]
        some: Sequence[TextFile] = there or resolve_paths([pattern], key)
        for file in some:
            if file in files:
                raise DataError(f"{key}: {file} is named twice")
            if isinstance(file, Path):
                _require_new(file, real, key)
            require_form(file)
            files[file] = None
    return list(files)


def _require_new(file: Path, real: dict[Path, Path], key: str) -> None:
    """Note a file in ``real``, by what it is without links. Raises ``DataError`` where it is there already."""
    other = real.setdefault(file.resolve(), file)
    if other is not file:
        names = f"{file} is named twice" if other == file else f"{other} and {file} are one file, by a link"
        raise DataError(f"{key}: {names}; name it once")


def held_out_files(patterns: Sequence[str], train: Sequence[TextFile], ranks: Ranks = ALONE) -> list[TextFile]:
    """Find the files of ``data.validation_files``. Raises ``DataError`` as `resolve_files`, and for one trained on."""
    held_out = resolve_files(patterns, "data.validation_files", ranks)
    # Compared by real path, so that a link to a training file is found.
    trained = {file.resolve() if isinstance(file, Path) else file for file in train}
    for file in held_out:
        if (file.resolve() if isinstance(file, Path) else file) in trained:
            raise DataError(f"data.validation_files: {file} is training text too (data.files)")
    return held_out


def opened(path: TextFile) -> AbstractContextManager[io.BufferedReader]:
    """Open a file, here or in a store."""
    return reader(path) if isinstance(path, StoreFile) else open_regular(path)


def opened_in_turn(paths: Sequence[TextFile]) -> Generator[AbstractContextManager[io.BufferedReader]]:
    """Open each file, in order. Small ones of a store are fetched while those before them are read.

    A file in a store is whole and unchanged when its block ends, or that raises ``DataError``.
    """
    with closing(contents_of([path for path in paths if isinstance(path, StoreFile) and path.is_small])) as fetched:
        for path in paths:
            if not isinstance(path, StoreFile):
                yield open_regular(path)
            elif path.is_small:
                yield reader(path, next(fetched))
            else:
                yield _unchanged(path)


@contextmanager
def _unchanged(file: StoreFile) -> Iterator[io.BufferedReader]:
    with reader(file) as raw:
        yield raw
    require_unchanged(file)


def size_of(path: TextFile) -> int:
    """Return the bytes of a file, here or in a store."""
    return path.size if isinstance(path, StoreFile) else path.stat().st_size


def identity(file: StoreFile) -> str:
    """Hash what the store says of a file; it is not read. Raises ``DataError`` where no change would show."""
    if not file.tag:
        raise DataError(f"{file}: the server says neither ETag nor Last-Modified, so no change is seen; download it")
    return hashlib.sha256(json.dumps([file.url, file.size, file.tag]).encode()).hexdigest()


def require_form(path: TextFile) -> None:
    """Raise ``DataError`` for a file that is neither plain text nor a table, by its name."""
    if suffix_of(path) not in TEXTS:
        format_of(path, TEXTS)


def parts_of(path: TextFile) -> Literal["lines", "groups"] | None:
    """Return how a file of text can be divided, by its name."""
    return "lines" if suffix_of(path) in TEXTS else format_of(path).parts


def why_missing(path: Path) -> str:
    """Say why a path or pattern names no file, with the nearest name that exists, or what else to do."""
    if path.is_dir():
        # Name the pattern for the form that the folder has most of.
        found = Counter(suffix_of(Path(name)) for name in glob.glob(f"{glob.escape(str(path))}/*"))
        known = (*TEXTS, *suffixes())
        suffix = next((suffix for suffix, _ in found.most_common() if suffix in known), ".txt")
        return f"{path} is a folder; name its files, for example {path}/*{suffix}"
    if path.exists():
        return f"{path} is not a regular file"
    if not path.parent.is_dir() and not glob.has_magic(str(path.parent)):
        begins = "" if path.is_absolute() else f", which begins at {Path.cwd()}"
        return f"{path} does not exist: there is no folder {path.parent}; correct the path{begins}"
    if glob.has_magic(str(path)):
        return f"{path} does not exist: the pattern matches no file; change it, or name the files"
    there = sorted(p.name for p in path.parent.iterdir() if p.is_file())
    if near := get_close_matches(path.name, there, n=1):
        return f"{path} does not exist; did you mean {path.with_name(near[0])}?"
    some = f"has {', '.join(there[:3])}{', ...' if there[3:] else ''}" if there else "has no files"
    return f"{path} does not exist; the folder {path.parent.resolve()} {some}: correct the path"
