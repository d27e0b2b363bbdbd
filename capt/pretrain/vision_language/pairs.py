"""Sentences about pictures as flat arrays of numbers in files, which all processes of a host map and share."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Int32, Int64
from pydantic import Field

from capt.pretrain.base.arrays import ArrayFile, map_array, write_array
from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.files import write_json
from capt.pretrain.base.records import Count, Record, read_record
from capt.pretrain.base.verification import Verifier, digest_of
from capt.pretrain.vision_language.config import VisionLanguageData
from capt.pretrain.vision_language.data.examples import Example
from capt.pretrain.vision_language.data.read import read_examples
from capt.pretrain.vision_language.microworld.generate import World, ensure_microworld

logger = logging.getLogger(__name__)


_D = TypeVar("_D", bound=VisionLanguageData)


def located(data: _D, use: str | None = None) -> _D:
    """Fill in the files that ``data.source=microworld`` represents, which are made if they are not there yet.

    Args:
        data: of a job.
        use: the files of which task are wanted; None = those that pretraining reads.

    Raises:
        ConfigError: files are named beside the microworld.
    """
    if data.source == "files":
        return data
    data.require_no_files()
    asked = data.microworld
    world = World(pictures=asked.size, seed=asked.seed, feature_size=asked.feature_size, noise=asked.noise)
    logger.warning("data.source=microworld: the data are synthetic; no figure of this run is about real pictures")
    files = ensure_microworld(world, data.cache).of(use or "pretraining")
    # Statements have no answers.
    answers = data.answers if use == "nlvr2" else data.answers or files.answers
    update = {"regions": files.regions, "train": list(files.train), "validation": list(files.validation)}
    return data.model_copy(update={**update, "answers": answers})


class ExampleSplit:
    """The examples of some files: the digest of their content first, the examples themselves when they are needed.

    Args:
        sources: the files of each source.
        what: the configuration key that names them.
        verifier: hashes the files, all its ranks together.
    """

    def __init__(self, sources: Sequence[Sequence[Path]], what: str, verifier: Verifier) -> None:
        paths = tuple(chain.from_iterable(sources))
        self.sources, self.paths, self.what = sources, paths, what
        with verifier.ranks.synchronize_errors():
            for path in paths:
                if not path.is_file():
                    raise DataError(f"{what}: no file {path}")
        digests = zip(paths, verifier.digests(paths), strict=True)
        self.content: list[list[Any]] = [[path.name, digest] for path, digest in digests]
        """Name and SHA-256 of each file; the name says of which part of COCO a picture is."""
        # The same files in other sources are other parts of the pairs.
        if len(sources) > 1:
            self.content.append([len(files) for files in sources])

    @property
    def key(self) -> str:
        """A digest of the content."""
        return digest_of(self.content)

    @cached_property
    def examples(self) -> list[Example]:
        """The examples of all sources, one after another."""
        return list(chain.from_iterable(self.parts))

    @cached_property
    def parts(self) -> list[list[Example]]:
        """The examples of each source, each about one picture.

        Raises:
            DataError: a file cannot be read, or the files of a source hold no sentence.
        """
        return [self._read(paths) if paths else [] for paths in self.sources]

    def _read(self, paths: Sequence[Path]) -> list[Example]:
        examples = read_examples(paths, what=self.what)
        if not examples:
            raise DataError(f"{self.what}: {paths[0]} holds no sentence")
        for example in examples:
            if len(example.pictures) != 1:
                raise DataError(
                    f"{self.what}: {example.id} is about {len(example.pictures)} pictures; pretraining takes sentences "
                    "about one (NLVR2 is for capt finetune nlvr2)"
                )
        return examples

    def texts(self) -> Iterator[str]:
        """The sentences."""
        return (example.text for example in self.examples)

    def forget(self) -> None:
        """Free the memory of the examples."""
        for name in ("examples", "parts"):
            self.__dict__.pop(name, None)


_RECORD = "pairs.json"
_LISTED = 1000
"""Missing pictures that are listed."""


class PairsRecord(Record):
    """The sizes of the arrays, and figures about their origin for people.

    Attributes:
        pairs: sentences with their pictures.
        parts: the same of each source of a mixture, one after another.
        tokens: of all sentences, special tokens apart.
        answers: scored answers of all questions.
        cut: sentences that were longer than allowed.
        missing: sentences that were left out, since their pictures are not in the store.
        missing_pictures: the first of these pictures.
    """

    pairs: Count
    parts: list[Count] = Field(default=[])
    tokens: Count
    answers: Count
    cut: Count
    missing: Count = 0
    missing_pictures: list[str] = Field(default=[])

    def arrays(self) -> dict[str, ArrayFile]:
        """The arrays by name; each is the file ``NAME.npy``."""
        pairs, answers = self.pairs, self.answers
        lengths = {
            "tokens": ("<i4", self.tokens), "token_starts": ("<i8", pairs + 1), "pictures": ("<i8", pairs),
            "answer_ids": ("<i4", answers), "answer_scores": ("<f4", answers),
            "answer_starts": ("<i8", pairs + 1),
        }  # fmt: skip
        return {name: ArrayFile(dtype, (length,)) for name, (dtype, length) in lengths.items()}


class EncodedPairs:
    """Pairs of a sentence and a picture, by number. Sending them to another process sends the folder's name.

    Tokens of sentence ``i`` are ``tokens[token_starts[i] : token_starts[i + 1]]``, without special ones; answers alike.

    Attributes:
        pictures: row of each sentence's picture in the region store.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = read_record(PairsRecord, folder / _RECORD, error=DataError)
        remedy = f"; remove {folder}, it is made again"
        arrays = {
            name: map_array(folder / f"{name}.npy", layout, remedy) for name, layout in self.record.arrays().items()
        }
        self._tokens: Int32[np.ndarray, " tokens"] = arrays["tokens"]
        self._token_starts: Int64[np.ndarray, " n1"] = arrays["token_starts"]
        self.pictures: Int64[np.ndarray, " n"] = arrays["pictures"]
        self._answer_ids: Int32[np.ndarray, " answers"] = arrays["answer_ids"]
        self._answer_scores: Float32[np.ndarray, " answers"] = arrays["answer_scores"]
        self._answer_starts: Int64[np.ndarray, " n1"] = arrays["answer_starts"]

    def __len__(self) -> int:
        return self.record.pairs

    @property
    def parts(self) -> list[int]:
        """Number of pairs of each source; they are one after another."""
        return self.record.parts or [len(self)]

    def __reduce__(self) -> tuple[Callable[[Path], EncodedPairs], tuple[Path]]:
        return EncodedPairs, (self.folder,)

    def words(self, number: int) -> Int32[np.ndarray, " length"]:
        """The tokens of a sentence."""
        return self._tokens[self._token_starts[number] : self._token_starts[number + 1]]

    def answers(self, number: int) -> tuple[Int32[np.ndarray, " k"], Float32[np.ndarray, " k"]]:
        """The answers of a question and the score of each; none where it has none in the table."""
        part = slice(self._answer_starts[number], self._answer_starts[number + 1])
        return self._answer_ids[part], self._answer_scores[part]

    def require_within(self, *, pictures: int, ids: int, answers: int) -> None:
        """Refuse pairs that lead out of what they were made for; one pass over the numbers.

        Args:
            pictures: of the region store.
            ids: of the tokenizer.
            answers: of the answer table.

        Raises:
            DataError: a number is out of bounds, as a damaged disk or another hand may leave it.
        """
        limits = {"pictures": (self.pictures, pictures), "tokens": (self._tokens, ids)}
        limits["answer_ids"] = (self._answer_ids, answers)
        good = {name: not len(x) or (x.min() >= 0 and x.max() < most) for name, (x, most) in limits.items()}
        for name, starts, count in (
            ("token_starts", self._token_starts, self.record.tokens),
            ("answer_starts", self._answer_starts, self.record.answers),
        ):
            good[name] = starts[0] == 0 and starts[-1] == count and bool((starts[1:] >= starts[:-1]).all())
        for name, fine in good.items():
            if not fine:
                raise DataError(f"{self.folder / name}.npy: damaged: remove {self.folder}, it is made again")


def write_pairs(
    folder: Path,
    *,
    sentences: Iterable[Int32[np.ndarray, " _"]],
    pictures: Int64[np.ndarray, " n"],
    answers: Iterable[Mapping[int, float]],
    longest: int,
    missing: Sequence[str] = (),
    parts: Sequence[int] = (),
) -> EncodedPairs:
    """Write pairs to the new folder ``folder``.

    Args:
        folder: appears whole or not at all.
        sentences: tokens of each, special ones apart; read once, one at a time.
        pictures: row of each one's picture in the region store.
        answers: score of each class of answers to each sentence.
        longest: the number of tokens of a sentence that are kept.
        missing: the picture of each sentence that was left out.
        parts: sentences of each source of a mixture.
    """
    # Flat arrays that grow: millions of sentences are never an object each.
    tokens, lengths, cut = array("i"), array("q"), 0
    for words in sentences:
        tokens.frombytes(words[:longest].astype(np.int32, copy=False).tobytes())
        lengths.append(min(len(words), longest))
        cut += len(words) > longest
    # Ragged lists become flat arrays and the places where each begins: ranks map them without a copy.
    known = [{class_: score for class_, score in each.items() if score > 0} for each in answers]
    arrays = {
        "tokens": np.array(tokens, dtype=np.int32),
        "token_starts": _starts(lengths),
        "pictures": pictures.astype(np.int64),
        "answer_ids": np.array([class_ for each in known for class_ in each], dtype=np.int32),
        "answer_scores": np.array([score for each in known for score in each.values()], dtype=np.float32),
        "answer_starts": _starts([len(each) for each in known]),
    }
    record = PairsRecord(
        pairs=len(lengths),
        parts=list(parts),
        tokens=len(arrays["tokens"]),
        answers=len(arrays["answer_ids"]),
        cut=cut,
        missing=len(missing),
        missing_pictures=list(dict.fromkeys(missing))[:_LISTED],
    )
    with new_folder(folder) as partial:
        for name, layout in record.arrays().items():
            write_array(partial / f"{name}.npy", layout, arrays[name])
        write_json(partial / _RECORD, record.model_dump())
    return EncodedPairs(folder)


def _starts(lengths: Sequence[int]) -> Int64[np.ndarray, " n1"]:
    starts: np.ndarray = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    return starts
