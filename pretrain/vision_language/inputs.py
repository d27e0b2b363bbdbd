"""Check that the inputs of a job exist, without torch: for dry runs and ``capt config validate``."""

from __future__ import annotations

from pathlib import Path

from pretrain.base.errors import ConfigError, DataError, counted
from pretrain.models.hub import hub_id
from pretrain.vision_language.config import VisionLanguageData, VisionLanguageJob

NO_DATA = (
    "data.{key} is missing: name the region store (data.regions) and the files to train on (data.train), or take "
    "data.source=microworld, a synthetic world for trying things out"
)
"""The error of a job without data; the missing key stands in it."""


def describe_inputs(job: VisionLanguageJob) -> list[str]:
    """One line for each of the store, the files, the tokenizer and ``model.init``. No sentence is read.

    Raises:
        ConfigError: nothing to train on is named.
        DataError: the store, a file or the tokenizer is missing, or cannot be what it is said to be.
        CheckpointError: ``model.init`` is not there.
    """
    data, tokenizer = job.data, job.tokenizer.path or job.model.init
    lines = ["data: the microworld, a synthetic one"] if data.source == "microworld" else _files(data)
    if job.tokenizer.path is None and job.model.init is None:
        size = job.tokenizer.vocab_size
        lines.append(f"tokenizer: {job.tokenizer.type} of {size} ids, trained on the sentences")
    elif job.tokenizer.path is not None and hub_id(job.tokenizer.path) is None:
        from tokenizer.encode import load_tokenizer

        lines.append(f"tokenizer: {tokenizer}, {load_tokenizer(job.tokenizer.path).vocab_size} ids")
    else:
        lines.append(f"tokenizer: that of {tokenizer}")
    if job.model.init is not None:
        if hub_id(job.model.init) is None and not job.model.init.exists():
            raise ConfigError(f"model.init: no file or folder {job.model.init}")
        lines.append(f"model.init: {job.model.init}")
    return lines


def _files(data: VisionLanguageData) -> list[str]:
    store = require(data)
    for what in ("train", "validation"):
        for path in getattr(data, what):
            if not path.is_file():
                raise DataError(f"data.{what}: no file {path}")
    if data.answers is not None and not data.answers.is_file():
        raise DataError(f"data.answers: no file {data.answers}")
    from pretrain.regions.store import RegionStore

    manifest = RegionStore.open(store).manifest
    size = sum(path.stat().st_size for path in data.train)
    return [
        f"regions: {store}, {counted(manifest.pictures, 'picture')}, {counted(manifest.regions, 'region')} of "
        f"{manifest.feature_size} features",
        f"sentences: {counted(len(data.train), 'file')}, {counted(size, 'byte')}",
        *([f"validation: {counted(len(data.validation), 'file')}"] if data.validation else []),
    ]


def require(data: VisionLanguageData) -> Path:
    """The region store of a job on files. Raises ``ConfigError`` where it or the files to train on are not named."""
    if data.regions is None:
        raise ConfigError(NO_DATA.format(key="regions"))
    if not data.train:
        raise ConfigError(NO_DATA.format(key="train"))
    return data.regions
