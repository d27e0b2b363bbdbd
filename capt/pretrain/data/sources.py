"""The sources of text: a protocol, and one class for each value of ``data.source``.

`capt.pretrain.data.config.SOURCES` is the registry. Other distributions add sources through the entry-point group
``capt.sources`` (name = the value of ``data.source``, value = ``module:Class``).

Readers are imported where they are used, so that a job without files is checked without numpy and pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast, runtime_checkable

from capt.pretrain.base.errors import ConfigError, DataError, counted
from capt.pretrain.base.parallel import ProgressCallback
from capt.pretrain.base.process import usable_cores
from capt.pretrain.base.verification import Verifier
from capt.pretrain.data.config import NO_TEXT, DataConfig, source_path
from capt.pretrain.data.corpus import Corpus
from capt.pretrain.registry import load_entry

if TYPE_CHECKING:
    from capt.pretrain.data.formats import TextFile

Split = Literal["train", "validation"]


@runtime_checkable
class Source(Protocol):
    """A kind of text. One is made without arguments for each use; all it needs is in the section ``data``.

    The corpus that it opens is iterated by passages. Its ``contents`` are the fingerprint of the text: shards in the
    cache are named by it, and a resumed run is refused other text.
    """

    def describe(self, data: DataConfig) -> list[str]:
        """Say what will be read, one line each, for a dry run. No text is read.

        Raises:
            ConfigError: the section names no text of this kind.
            DataError: the text is not there.
        """

    def open(self, data: DataConfig, split: Split, verifier: Verifier, progress: ProgressCallback | None) -> Corpus:
        """Open the text of a split. One without a split of its own gives all its text, of which a part is held out.

        Raises:
            DataError: the text is not there, or is not text.
        """


def source_of(data: DataConfig) -> Source:
    """The source that ``data.source`` names.

    Raises:
        ConfigError: no text is named, or the entry point of that name leads to nothing that can be imported.
    """
    if data.source is None:
        raise ConfigError(NO_TEXT)
    return cast(Source, load_entry(source_path(data.source), "capt.sources", f"data.source {data.source}")())


@contextmanager
def named(name: str) -> Iterator[None]:
    """Errors in here begin with the source of ``data.mixture`` that they are about; with an empty name they do not."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if not name:
            raise
        raise type(error)(f"data.mixture, source {name}: {error}") from error


class Files:
    """The files of ``data.files``."""

    def describe(self, data: DataConfig) -> list[str]:
        """The number and size of the files, and of those for validation."""
        from capt.pretrain.data.paths import held_out_files, resolve_files

        train = resolve_files(data.files, "data.files")
        lines = [_size("corpus", train, data)]
        if data.validation_files:
            lines.append(_size("validation", held_out_files(data.validation_files, train), data))
        return lines

    def open(self, data: DataConfig, split: Split, verifier: Verifier, progress: ProgressCallback | None) -> Corpus:
        """The text of the files."""
        from capt.pretrain.data.files import FileCorpus
        from capt.pretrain.data.paths import resolve_files

        if not data.files:
            raise DataError("data.files is empty: data.shards alone holds no text to train a tokenizer on")
        paths = resolve_files(data.files, "data.files", verifier.ranks)
        return FileCorpus(paths, data.text_column, data.document_start, verifier, missing=data.missing)


class Hub:
    """The dataset ``data.name`` of the hub, or a folder that the ``datasets`` library saved."""

    def describe(self, data: DataConfig) -> list[str]:
        """The name of the dataset and of its split."""
        name = str(data.name)
        folder = Path(name)
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            return [f"corpus: the saved dataset {name}, {data.split}"]
        # An id of the hub has at most one slash.
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise DataError(f"data.name: {name} is not a folder that datasets saved, and cannot be an id on the hub")
        return [f"corpus: the hub's dataset {name}, loaded at the start, {data.split}"]

    def open(self, data: DataConfig, split: Split, verifier: Verifier, progress: ProgressCallback | None) -> Corpus:
        """The rows of ``data.split``, or of ``data.validation_split``."""
        from capt.pretrain.data.hub import HubCorpus  # datasets takes a second to import

        assert data.name is not None, "DataConfig lets no hub source through without a name"
        rows = (data.validation_split if split == "validation" else None) or data.split
        return HubCorpus(data.name, data.subset, rows, data.text_column, data.document_start, missing=data.missing)


class Docstrings:
    """The docstrings of the installed Python packages."""

    def describe(self, data: DataConfig) -> list[str]:
        """Describe the default corpus in a line: nothing is named."""
        return ["corpus: the docstrings of the installed Python packages, a small one for trying things out"]

    def open(self, data: DataConfig, split: Split, verifier: Verifier, progress: ProgressCallback | None) -> Corpus:
        """The docstrings, collected once for a set of packages."""
        from capt.pretrain.data.docstrings import docstring_file
        from capt.pretrain.data.files import FileCorpus

        path = docstring_file(data.cache / "docstrings", data.workers or usable_cores(), progress=progress)
        return FileCorpus([path], data.text_column, data.document_start, verifier, missing=data.missing)


def _size(what: str, paths: list[TextFile], data: DataConfig) -> str:
    from capt.pretrain.data.files import FileCorpus

    size = FileCorpus(paths, data.text_column, data.document_start).size
    return f"{what}: {counted(len(paths), 'file')}, {counted(size, 'byte')}"
