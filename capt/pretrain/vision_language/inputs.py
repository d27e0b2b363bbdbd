"""Check that the inputs of a job exist, without torch: for dry runs and ``capt config validate``."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from capt.pretrain.base.errors import ConfigError, DataError, MissingModelError, counted
from capt.pretrain.models.hf_config import hub_id
from capt.pretrain.models.hf_folder import is_hf, read_json
from capt.pretrain.models.lxmert.hf_config import parse_hf_config
from capt.pretrain.models.tokenizer import TokenizerSection
from capt.pretrain.vision_language.sections import VisionLanguageData

NO_DATA = (
    "data.{key} is missing: name the region store (data.regions) and the files to train on (data.train), or take "
    "data.source=microworld, a synthetic world for trying things out"
)
"""The error of a job without data; it names the missing key."""


def describe_inputs(data: VisionLanguageData, init: Path | None, tokenizer: TokenizerSection) -> list[str]:
    """One line for each of the store, the files, the tokenizer and ``model.init``. No sentence is read.

    Raises:
        ConfigError: nothing to train on is named, or files beside the microworld.
        DataError: the store, a file or the tokenizer is missing, or cannot be what it is said to be.
        CheckpointError: ``model.init`` is not there.
    """
    if data.source == "microworld":
        require_own_files(data)
        lines = ["data: the microworld, a synthetic one"]
    else:
        lines = _files(data)
    lines.append(f"tokenizer: {_tokenizer(init, tokenizer)}")
    if init is not None:
        if hub_id(init) is None and not init.exists():
            raise MissingModelError(f"model.init: no file or folder {init}")
        if hub_id(init) is None and is_hf(init):
            parse_hf_config(read_json(init / "config.json"), str(init / "config.json"))
        lines.append(f"model.init: {init}")
    return lines


def require_own_files(data: VisionLanguageData) -> None:
    """Raise ``ConfigError`` where files are named beside the microworld."""
    if data.regions is not None or any(data.named("train")) or any(data.named("validation")):
        raise ConfigError(
            "data.source=microworld makes its own files: leave out data.regions, train and validation, or set "
            "data.source=files"
        )


def _tokenizer(init: Path | None, section: TokenizerSection) -> str:
    if section.path is not None and hub_id(section.path) is None:
        from capt.tokenizer.encode import load_tokenizer

        return f"{section.path}, {load_tokenizer(section.path).vocab_size} ids"
    source = section.path or init
    if source is not None:
        return f"that of {source}"
    return f"{section.type} of {section.vocab_size} ids, trained on the sentences"


def _files(data: VisionLanguageData) -> list[str]:
    store = require(data)
    train, validation = (list(chain.from_iterable(data.named(split))) for split in ("train", "validation"))
    for what, paths in (("train", train), ("validation", validation)):
        for path in paths:
            if not path.is_file():
                raise DataError(f"data.{what}: no file {path}")
    if data.answers is not None:
        if not data.answers.is_file():
            raise DataError(f"data.answers: no file {data.answers}")
        from capt.pretrain.vision_language.data.answers import load_table

        load_table(data.answers)
    from capt.pretrain.regions.store import RegionStore

    manifest = RegionStore.open(store, cache=data.cache).manifest
    size = sum(path.stat().st_size for path in train)
    return [
        f"regions: {store}, {counted(manifest.pictures, 'picture')}, {counted(manifest.regions, 'region')} of "
        f"{manifest.feature_size} features",
        f"sentences: {counted(len(train), 'file')}, {counted(size, 'byte')}",
        *([f"validation: {counted(len(validation), 'file')}"] if validation else []),
    ]


def require(data: VisionLanguageData) -> Path | str:
    """The region store of a job on files. Raises ``ConfigError`` where it or the files to train on are not named."""
    if data.regions is None:
        raise ConfigError(NO_DATA.format(key="regions"))
    if not any(data.named("train")):
        raise ConfigError(NO_DATA.format(key="train"))
    return data.regions


def require_store(regions: Path | str) -> Path | str:
    """The store of a run that is evaluated.

    Raises:
        DataError: it is not there: it has moved, or the run names it from another folder than this one.
    """
    if isinstance(regions, Path) and not regions.exists():
        raise DataError(f"the run's data.regions {regions} is not there, as seen from {Path.cwd()}: -o regions=STORE")
    return regions
