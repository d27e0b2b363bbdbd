"""Text of a ``latent`` job: the ``data`` section, and the file of each split. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from capt.pretrain.base.errors import DataError
from capt.pretrain.config.base import PathField, PositiveInt, Section

_SPLITS = {"train": r"train", "validation": r"validation|valid|dev|val", "test": r"test"}


class DataSection(Section):
    """Files with one sentence per line, words split at blanks; or the synthetic clusters."""

    path: PathField | None = Field(
        None,
        description="folder with one .txt or .txt.gz file per split, whose name holds train, valid (dev, val) or test",
    )
    train: PathField | None = Field(None, description="a file, instead of the one in data.path")
    validation: PathField | None = Field(None, description="a file, instead of the one in data.path")
    test: PathField | None = Field(None, description="a file, instead of the one in data.path")
    format: Literal["text", "labelled"] = Field("text", description="labelled: `label TAB text`, as Yelp's files")
    max_words: PositiveInt = Field(200, description="longer sentences are left out; the log counts them")
    vocabulary: PositiveInt = Field(
        70_000, le=2**24, description="the most frequent words of the training text, at most"
    )
    min_count: PositiveInt | None = Field(
        None,
        description="words that occur less often in the training text are unknown; null = 2, but 1 where that text has"
        " the word data.unknown already, as PTB's",
    )
    vocabulary_file: PathField | None = Field(
        None, description="use these words instead, one per line, such as vocabulary.txt of a run"
    )
    allow_change: bool = Field(False, description="a resumed run may continue with other text than it began with")
    unknown: str = Field("<unk>", description="the ordinary word that represents an unknown one: Yahoo's is _UNK")
    clusters: PositiveInt | None = Field(
        None, ge=2, le=65_536, description="K, for one-hot vectors of K classes instead of text (section 4.4)"
    )
    repeats: PositiveInt = Field(64, le=65_536, description="clusters: rows of each of the K drawn classes in a batch")

    @field_validator("unknown")
    @classmethod
    def _is_a_word(cls, unknown: str) -> str:
        if unknown.split() != [unknown] or unknown in ("<pad>", "<s>", "</s>"):
            raise ValueError(f"{unknown!r} is not an ordinary word, such as <unk>, _UNK")
        return unknown

    @model_validator(mode="after")
    def _has_a_source(self) -> DataSection:
        if self.clusters is None and self.path is None and (self.train is None or self.validation is None):
            raise ValueError(
                "data.path is missing: name the folder that holds the train, valid and test text (or data.train and "
                "data.validation)"
            )
        return self

    def read_from(self, folder: Path | None) -> DataSection:
        """The same section with its texts in another folder; None leaves them where they are."""
        moved = {"path": folder, "train": None, "validation": None, "test": None}
        return self if folder is None else self.model_copy(update=moved)


def file_of(data: DataSection, split: str) -> Path | None:
    """The file of a split (``train``, ``validation`` or ``test``); None where the job names none and none is found.

    Raises:
        DataError: a file named in the job is missing, or several fit.
    """
    named: Path | None = getattr(data, split)
    if named is not None:
        if not named.is_file():
            raise DataError(f"data.{split}: no file {named}")
        return named
    if data.path is None:
        return None
    if not data.path.is_dir():
        raise DataError(f"data.path: no folder {data.path}")
    # A word of its own: constraints.txt does not say train.
    fits = re.compile(rf"(?:^|[^a-z])(?:{_SPLITS[split]})(?:[^a-z]|$)")
    files = sorted(p for p in data.path.iterdir() if p.name.endswith((".txt", ".txt.gz")) and fits.search(p.name))
    if len(files) > 1:
        raise DataError(f"data.path {data.path}: {files[0].name} and {files[1].name} both fit; set data.{split}")
    return files[0] if files else None


def describe_files(data: DataSection) -> list[str]:
    """Describe the file of each split in one line.

    Raises:
        DataError: training or validation text, or the vocabulary file, is missing.
    """
    lines = []
    for split in _SPLITS:
        path = file_of(data, split)
        if path is None and split != "test":
            raise DataError(f"data.path {data.path}: no .txt file whose name says {split}; set data.{split}")
        if path is not None:
            lines.append(f"{split}: {path}, {path.stat().st_size:,} bytes")
    if data.vocabulary_file is not None and not data.vocabulary_file.is_file():
        raise DataError(f"data.vocabulary_file: no file {data.vocabulary_file}")
    return lines
