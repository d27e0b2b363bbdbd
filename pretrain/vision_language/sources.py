"""Where a job's data lie, the content that names what is made of them, and the examples, read once if need be."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pretrain.base.errors import DataError
from pretrain.base.verification import Ranks, Verifier
from pretrain.vision_language.data.examples import Example
from pretrain.vision_language.data.read import read_examples
from pretrain.vision_language.inputs import require, require_own_files
from pretrain.vision_language.microworld.ensure import ensure_microworld
from pretrain.vision_language.microworld.generate import World
from pretrain.vision_language.sections import VisionLanguageData

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataFiles:
    """The files of a job, as named or as the microworld made them.

    Attributes:
        regions: the region store.
        train: files to train on.
        validation: files to validate on, maybe none.
        answers: answer table, None where it is built from the training data.
    """

    regions: Path
    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    answers: Path | None


def data_files(data: VisionLanguageData, ranks: Ranks) -> DataFiles:
    """The files that ``data`` names. All ``ranks`` call this.

    Raises:
        ConfigError: store or training files are not named.
    """
    with ranks.synchronize_errors():
        data = located(data)
        return DataFiles(require(data), tuple(data.train), tuple(data.validation), data.answers)


_D = TypeVar("_D", bound=VisionLanguageData)


def located(data: _D, use: str | None = None) -> _D:
    """``data`` with the files that ``data.source=microworld`` represents, which are made if they are not there yet.

    Args:
        data: of a job.
        use: the files of which task are wanted; None = those that pretraining reads.

    Raises:
        ConfigError: files are named beside the microworld.
    """
    if data.source == "files":
        return data
    require_own_files(data)
    asked = data.microworld
    world = World(pictures=asked.size, seed=asked.seed, feature_size=asked.feature_size, noise=asked.noise)
    logger.warning("data.source=microworld: the data are synthetic; no figure of this run is about real pictures")
    files = ensure_microworld(world, data.cache).of(use or "pretraining")
    answers = data.answers if use == "nlvr2" else data.answers or files.answers
    update = {"regions": files.regions, "train": list(files.train), "validation": list(files.validation)}
    return data.model_copy(update={**update, "answers": answers})


class Split:
    """The examples of some files: their content's name immediately, and themselves when somebody needs them.

    Args:
        paths: the files.
        what: the configuration key that names them.
        verifier: hashes the files, all its ranks together.
    """

    def __init__(self, paths: tuple[Path, ...], what: str, verifier: Verifier) -> None:
        self.paths, self.what = paths, what
        with verifier.ranks.synchronize_errors():
            for path in paths:
                if not path.is_file():
                    raise DataError(f"{what}: no file {path}")
        self.content = [[path.name, digest] for path, digest in zip(paths, verifier.digests(paths), strict=True)]
        """Name and SHA-256 of each file; the name says of which part of COCO a picture is."""

    @property
    def key(self) -> str:
        """A digest of the content."""
        return digest_of(self.content)

    @cached_property
    def examples(self) -> list[Example]:
        """The examples, each about one picture. Raises ``DataError`` for a file that cannot be read, or none."""
        examples = read_examples(self.paths, what=self.what)
        if not examples:
            raise DataError(f"{self.what}: {self.paths[0]} holds no sentence")
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
        self.__dict__.pop("examples", None)


def digest_of(content: Any) -> str:
    """32 hexadecimal digits that represent a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
