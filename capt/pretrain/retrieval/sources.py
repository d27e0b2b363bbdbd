"""Documents as people keep them: folders of text, Markdown and HTML, tables, BEIR folders, here or in a store."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from io import BufferedReader
from pathlib import Path

from capt.pretrain.base.errors import DataError, counted, shown
from capt.pretrain.base.files import text_lines
from capt.pretrain.base.stores import is_url, listed, tree
from capt.pretrain.data.formats import ReadOptions, TextFile, format_of, suffix_of, suffixes
from capt.pretrain.data.paths import TEXTS, opened_in_turn, size_of, why_missing
from capt.pretrain.pairs.cells import DOCUMENT_IDS, beir_file
from capt.pretrain.retrieval.data import document_row

logger = logging.getLogger(__name__)

HTML = (".html", ".htm")
_HIDDEN = ("script", "style", "noscript", "template")
"""Elements whose text nobody reads."""
_INLINE = (
    *("a", "abbr", "b", "bdi", "bdo", "cite", "code", "em", "font", "i", "kbd", "mark", "q", "s", "samp", "small"),
    *("span", "strong", "sub", "sup", "tt", "u", "var", "wbr"),
)
"""Elements that may begin and end within a word."""
_WEB = ("http://", "https://")


@dataclass(frozen=True)
class SourceDocument:
    """A document and its place.

    Attributes:
        name: its id; of a file of text the file, of a row without an id the file and the line.
        file: where it is from.
        line: its first line there, or its row; from 1.
        text: the whole text, of a row with its title.
        fields: the other cells of a row.
        is_row: whether it is a row of a table, whose passages all have its line.
    """

    name: str
    file: str
    line: int
    text: str
    fields: dict[str, str] = field(default_factory=dict)
    is_row: bool = False


@dataclass(frozen=True)
class SourceOptions:
    """Options of reading documents.

    Attributes:
        column: the column of a table that has the text.
        lines: whether each line of a file of text is a document of its own.
    """

    column: str = "text"
    lines: bool = False


def find_sources(sources: Sequence[str], apart: Path | None = None) -> list[TextFile]:
    """The files of documents that paths, folders, patterns and addresses in a store name, each once by whatever name.

    Of a folder these are its files of text, HTML and tables, in the folders below as well but for hidden ones; of a
    BEIR folder the corpus.

    Args:
        sources: as the user names them.
        apart: a folder that is no source, wherever it is.

    Raises:
        DataError: one of them names no file.
    """
    files: dict[TextFile, TextFile] = {}
    for source in sources:
        found = _in_store(source) if is_url(source) else _here(Path(source).expanduser(), apart)
        if not found:
            known = ", ".join(_known())
            raise DataError(f"{source}: no file of documents in it; known: {known}, and .gz and .zst of text")
        for file in found:
            files.setdefault(file.resolve() if isinstance(file, Path) else file, file)
    return list(files.values())


def read_sources(files: Sequence[TextFile], options: SourceOptions) -> Iterator[SourceDocument]:
    """Yield the documents of ``files``, as `find_sources` gives them; those without a text are left out, and counted.

    Raises:
        DataError: a file is damaged or empty of documents, or an id comes twice.
    """
    places: dict[str, tuple[str, int]] = {}
    blank = 0
    for path, file in zip(files, opened_in_turn(files), strict=True):
        with file as raw:
            for document in _documents_of(path, raw, options) if size_of(path) else ():
                if not document.text.strip():
                    blank += 1
                    continue
                here = document.file, document.line
                if (first := places.setdefault(document.name, here)) != here:
                    raise DataError(
                        f"{here[0]}, line {here[1]}: the id {shown(document.name)} is that of {first[0]}, line "
                        f"{first[1]}, too; give one of the two another id, or leave it out"
                    )
                yield document
    if blank:
        logger.info("%s left out", counted(blank, "empty text"))


def _known() -> tuple[str, ...]:
    return tuple(dict.fromkeys((*TEXTS, *HTML, *suffixes())))


def _is_known(path: TextFile) -> bool:
    return suffix_of(path) in _known()


def _in_store(url: str) -> list[TextFile]:
    # A web server lists no folders, and a pattern is no folder.
    if url.startswith(_WEB) or any(sign in url for sign in "*?["):
        return [*listed(url)]
    files = [file for file in tree(url) if _is_known(file)]
    corpus = [file for file in files if file.url.removeprefix(url.rstrip("/")).startswith("/corpus.")]
    return [*(corpus or files)]


def _here(path: Path, apart: Path | None) -> list[TextFile]:
    if path.is_file():
        return [path]
    if path.is_dir():
        if (corpus := beir_file(path, "corpus")) is not None:
            return [corpus]
        below = sorted(each for each in path.rglob("*") if each.is_file() and _is_known(each))
        return [each for each in below if not _is_apart(each, path, apart)]
    matched = sorted(Path(each) for each in glob.glob(str(path), recursive=True))
    if not matched:
        raise DataError(why_missing(path))
    return [each for each in matched if each.is_file() and not _is_apart(each, path.parent, apart)]


def _is_apart(file: Path, folder: Path, apart: Path | None) -> bool:
    """Return whether a file below ``folder`` is hidden, or in the folder ``apart``."""
    below = file.parts[len(folder.parts) :]
    return any(part.startswith(".") for part in below) or (apart is not None and apart in file.resolve().parents)


def _documents_of(path: TextFile, raw: BufferedReader, options: SourceOptions) -> Iterator[SourceDocument]:
    name, suffix = str(path), suffix_of(path)
    if suffix in (*TEXTS, *HTML):
        lines = text_lines(path, raw)
        if options.lines and suffix in TEXTS:
            for number, line in lines:
                _require_text(name, number, line)
                yield SourceDocument(f"{name}:{number}", name, number, line.strip())
            return
        text = "".join(line for _, line in lines)
        _require_text(name, 1, text)
        yield SourceDocument(name, name, 1, html_text(text) if suffix in HTML else text)
        return
    for where, number, cells in format_of(path, (*TEXTS, *HTML)).rows(path, raw, ReadOptions(keys=(options.column,))):
        if options.column not in cells:
            has = ", ".join(shown(key, 40) for key in list(cells)[:10]) or "nothing"
            raise DataError(f'{where}: no "{options.column}"; name the column with the text (--text-column) of {has}')
        # A cell of null or of NaN, which is not itself, has no text, as a blank one.
        cell = cells[options.column]
        row = {**cells, options.column: ""} if cell is None or cell != cell else cells
        given, text = document_row(where, row, options.column)
        fields = {
            key: str(value).lower() if isinstance(value, bool) else str(value)  # as JSON has true and false
            for key, value in cells.items()
            if isinstance(value, str | int | float) and key not in (options.column, *DOCUMENT_IDS)
        }
        yield SourceDocument(given or f"{name}:{number}", name, number, text, fields, is_row=True)


def _require_text(name: str, line: int, text: str) -> None:
    if "\0" in text:
        raise DataError(f"{name}, line {line + text[: text.index(chr(0))].count(chr(10))}: binary, not text: NUL in it")


def html_text(source: str) -> str:
    """The text of a page of HTML, each part in the line that it has in the page."""
    parser = _Page()
    parser.feed(source)
    parser.close()
    return "".join(parser.parts)


class _Page(HTMLParser):
    """Collects the text of a page; line ends in the place of markup keep the numbers of the lines."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._line, self._hidden = 1, 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in _HIDDEN
        self._part(tag)

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in _HIDDEN))
        self._part(tag)

    def _part(self, tag: str) -> None:
        """Separate the words before and after a tag."""
        if tag not in _INLINE:
            self.parts.append(" ")

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        behind = self.getpos()[0] - self._line
        self.parts.append("\n" * behind + data)
        self._line += behind + data.count("\n")
