"""What ``capt tokenizer train|encode|export`` do, as functions of files. Each imports what it needs when called."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizer.files import new_file, new_folder, read_lines

if TYPE_CHECKING:
    from tokenizer.train import TrainReport

Progress = Callable[[int], None]
"""Called with the number of bytes of the input files read since the last call."""

_LINES_AT_ONCE = 4096


@dataclass(frozen=True)
class EncodeReport:
    """What was encoded."""

    lines: int
    tokens: int
    unknown: int


@dataclass(frozen=True)
class ExportReport:
    """On how many lines the export gave the ids of SentencePiece, and ``transformers`` the ids of the export."""

    sentencepiece_lines: int
    transformers_lines: int


def train_command(files: Sequence[Path], out: Path, *, progress: Progress | None = None, **options: Any) -> TrainReport:
    """Train on text files (``.gz`` is unpacked), a paragraph a line. ``options`` are those of `train.train`.

    Raises:
        ConfigError, DataError: as `files.read_lines` and `train.train` do.
    """
    from tokenizer.train import train

    return train(read_lines(files, progress), out, **options)


def encode_command(
    tokenizer: Path,
    files: Sequence[Path],
    out: Path | None = None,
    *,
    wrap: bool = False,
    add_missing: bool = False,
    progress: Progress | None = None,
) -> EncodeReport:
    """Write the ids of every line as a JSON array a line, to ``out`` (whole or not at all) or to standard output.

    ``wrap`` puts the special tokens around: ``<s> ... </s>``. ``tokenizer`` is a folder that `load_tokenizer` takes.

    Raises:
        DataError: as `files.read_lines` and `encode.load_tokenizer` do.
    """
    from tokenizer.encode import load_tokenizer

    encoder = load_tokenizer(tokenizer, add_missing=add_missing)
    special = encoder.special
    lines = tokens = unknown = 0
    with new_file(out) if out is not None else nullcontext(sys.stdout) as sink:
        for batch in _batches(read_lines(files, progress)):
            for ids in encoder.encode_batch(batch):
                row = [special.bos, *ids.tolist(), special.eos] if wrap else ids.tolist()
                sink.write(json.dumps(row, separators=(",", ":")) + "\n")
                tokens += len(row)
                unknown += int((ids == special.unk).sum())
            lines += len(batch)
    return EncodeReport(lines, tokens, unknown)


def export_command(
    source: Path,
    out: Path,
    *,
    files: Sequence[Path] = (),
    model_max_length: int | None = None,
    add_missing: bool = False,
) -> ExportReport:
    """Make ``out`` a folder that ``transformers`` loads, from a SentencePiece model or from any tokenizer folder.

    Its ids are compared with SentencePiece's (where ``source`` is a SentencePiece model), and with those that
    ``transformers.AutoTokenizer`` gives after loading it, on up to 2,000 lines of ``files`` and on awkward texts.

    Raises:
        DataError: as `export`, `load_tokenizer` and `check_with_transformers` do; nothing is written then.
    """
    from tokenizer.check import LINES, check_with_transformers
    from tokenizer.encode import load_tokenizer
    from tokenizer.export import export, is_sentencepiece

    texts = list(islice(read_lines(files), 2 * LINES))
    with new_folder(out) as folder:
        compared = 0
        if is_sentencepiece(source):
            longest = model_max_length or 512
            compared = export(source, folder, texts=texts, model_max_length=longest, add_missing=add_missing)
        else:
            load_tokenizer(source, add_missing=add_missing).save(folder, model_max_length=model_max_length)
        return ExportReport(compared, check_with_transformers(folder, texts))


def _batches(lines: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(lines)
    while batch := list(islice(iterator, _LINES_AT_ONCE)):
        yield batch
