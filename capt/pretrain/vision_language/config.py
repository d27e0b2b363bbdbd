"""The configuration of the ``capt_vl`` job: LXMERT under its own objectives and the CAPT loss. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from capt.pretrain.base.cache import default_cache
from capt.pretrain.base.errors import ConfigError, DataError, MissingModelError, counted
from capt.pretrain.config.base import PathField, PositiveInt, Section, StorePlace
from capt.pretrain.config.contrast import ContrastSection, check_validation_samples
from capt.pretrain.config.schema import Job, LoaderSection, ValidateSection
from capt.pretrain.contrastive.metrics import names_of
from capt.pretrain.data.config import Weighted, check_mixture
from capt.pretrain.models.hf_config import hub_id
from capt.pretrain.models.hf_folder import is_hf, read_json
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.hf_config import parse_hf_config
from capt.pretrain.models.tokenizer import TokenizerSection

OBJECTIVES = ("mlm", "matching", "objects", "attributes", "features", "answers")
"""The losses beside the contrast."""

_SENTENCES = ("train", "validation", "mixture", "temperature")
_FILES = ("regions", "train", "mixture")
"""The keys of ``data`` that replace the microworld."""

MICROWORLD_TASKS = ("vqa", "gqa", "nlvr2")
"""The fine-tuning tasks that the microworld has files for."""


def _as_list(value: Any) -> Any:
    """Let ``data.train=my.json`` on the command line mean a list of one."""
    return value if isinstance(value, list | tuple) else [value]


class SentenceTokenizer(TokenizerSection):
    """A tokenizer to use (``path``), or how to train one on the sentences when there is none (cached by content)."""

    lower_case: bool = Field(
        True, description="train on lower-cased text, as LXMERT's vocabulary is: adds _cf to tokenizer.normalization"
    )

    @model_validator(mode="after")
    def _case_fits_normalization(self) -> SentenceTokenizer:
        if self.lower_case and self.normalization == "identity":
            raise ValueError("tokenizer.normalization=identity changes no case: set tokenizer.lower_case=false")
        return self


Files = Annotated[list[PathField], BeforeValidator(_as_list)]


class MicroworldSection(Section):
    """The world of ``data.source=microworld``: a synthetic one whose every answer is known (cached by this section)."""

    removed: ClassVar = {"kind": "pictures"}

    size: int = Field(2000, ge=20, le=10_000_000, description="pictures of all splits together")
    seed: int = Field(1, ge=0, lt=1 << 32, description="another seed is another world of the same kind")
    feature_size: PositiveInt = Field(64, description="numbers that describe a region of a picture")
    noise: NonNegativeFloat = Field(0.5, description="standard deviation of the noise of these numbers")


class VisionLanguageData(Section):
    """Sentences and questions about pictures, and the region store that holds these pictures.

    ``microworld`` makes both; it gives way to files that are named later.
    """

    source: Literal["files", "microworld"] = Field(
        "files", description="files: regions and train; microworld: a synthetic world, made at the first start"
    )
    microworld: MicroworldSection = MicroworldSection()
    regions: StorePlace | None = Field(
        None, description="the region store, as capt regions import or extract writes it; one at an address "
        "(s3://...) is copied into the cache of each host",
    )  # fmt: skip
    train: Files = Field(
        [], description="files to train on, of any kind: LXMERT's, COCO captions, VQA v2 (questions and annotations), "
        "GQA, NLVR2, or rows of image and caption (JSON lines, CSV)",
    )  # fmt: skip
    validation: Files = Field([], description="files to validate on; none = no validation")
    answers: PathField | None = Field(
        None, description="answer table: all_ans.json, a list of answers or answer -> number; if unset it is built"
    )
    minimum_answers: PositiveInt = Field(9, description="of a built table: how often an answer must occur to be in it")
    missing_pictures: Literal["refuse", "skip"] = Field(
        "refuse", description="rows whose picture is not in the store: refuse the data, or skip and count these rows"
    )
    sequence_length: int = Field(20, ge=4, le=4096, description="tokens of a sentence, special ones included")
    cache: PathField = Field(default_factory=default_cache, description="where encoded sentences are kept")
    allow_change: bool = Field(False, description="a resumed run may continue with other data than it began with")

    def named(self, split: Literal["train", "validation"]) -> list[list[Path]]:
        """The files of each source; one without a mixture."""
        return [getattr(self, split)]

    def require_files(self) -> Path | str:
        """Return the region store. Raises ``ConfigError`` where it or the files to train on are not named."""
        if self.regions is None or not any(self.named("train")):
            key = "regions" if self.regions is None else "train"
            raise ConfigError(
                f"data.{key} is missing: name the region store (data.regions) and the files to train on (data.train), "
                "or take data.source=microworld, a synthetic world for trying things out"
            )
        return self.regions

    def require_no_files(self) -> None:
        """Raise ``ConfigError`` where files are named beside the microworld."""
        if self.regions is not None or any(self.named("train")) or any(self.named("validation")):
            raise ConfigError(
                "data.source=microworld makes its own files: leave out data.regions, train and validation, or set "
                "data.source=files"
            )


class PairPart(Weighted):
    """A source of sentences of a mixture."""

    train: Files = Field(description="files to train on, as data.train")
    validation: Files = Field([], description="files to validate on, as data.validation; none = none of this source")


class PretrainingData(VisionLanguageData):
    """The data of pretraining, which may have several sources of sentences about the pictures of one store."""

    mixture: list[PairPart] = Field(
        [], description="several sources of sentences, each with name, train, validation, weight and epochs"
    )
    temperature: float | None = Field(
        None, ge=0.0, le=1.0, description="exponent of the sizes of the sources of data.mixture: the weight of each is "
        "times its number of sentences to this power (0.3 = XLM-R's for languages); null = 0, weights alone"
    )  # fmt: skip

    @model_validator(mode="after")
    def _names_files_once(self) -> PretrainingData:
        if self.temperature is not None and not self.mixture:
            raise ValueError("data.temperature is given without data.mixture: name the sources there")
        if self.mixture and (self.train or self.validation):
            raise ValueError("data.mixture and data.train or data.validation are both given: name all in data.mixture")
        if self.mixture and self.source != "files":
            raise ValueError(f"data.mixture is given, but data.source is {self.source}: set data.source=files")
        if empty := [part.name for part in self.mixture if not part.train]:
            raise ValueError(f"data.mixture: source {empty[0]} names no file in train")
        check_mixture(self.mixture)
        return self

    def named(self, split: Literal["train", "validation"]) -> list[list[Path]]:
        """The files of each source."""
        return [getattr(part, split) for part in self.mixture] or super().named(split)


def without_microworld(below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping of a job without the microworld, where a later mapping names files (`Job.replaced_by`)."""
    old, new = below.get("data"), above.get("data")
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or not any(map(new.get, _FILES)):
        return below
    if new.get("mixture") or (new.get("train") and old.get("mixture")):
        old = {key: value for key, value in old.items() if key not in _SENTENCES}
    if old.get("source") != "microworld":
        return {**below, "data": old}
    return {**below, "data": {key: value for key, value in old.items() if key not in ("source", "microworld")}}


class ObjectivesSection(Section):
    """Weights of the losses (0 = off) and how words, regions and pairs are corrupted.

    In a store without labels the losses of objects and attributes are off by themselves, unless a job asks for them.
    """

    mlm: NonNegativeFloat = Field(1.0, description="weight of the masked words")
    matching: NonNegativeFloat = Field(1.0, description="weight of telling matched from mismatched pairs")
    objects: NonNegativeFloat = Field(1.0, description="weight of the object classes of regions")
    attributes: NonNegativeFloat = Field(1.0, description="weight of the attribute classes of regions")
    features: NonNegativeFloat = Field(1.0, description="weight of the features of masked regions")
    answers: NonNegativeFloat = Field(0.0, description="weight of answering questions; 0 = without an answer head")
    region_scope: Literal["all", "masked"] = Field(
        "all", description="regions whose objects and attributes are predicted: all (LXMERT's code), or the masked"
    )
    word_rate: float = Field(0.15, gt=0, lt=1, description="chance of each word to be masked")
    region_rate: float = Field(0.15, gt=0, lt=1, description="chance of each region to be masked")
    mismatched: float = Field(0.5, ge=0, lt=1, description="share of pairs that get the sentence of another picture")

    def weights(self) -> dict[str, float]:
        """The weight of each loss by its name, as in ``loss/NAME``."""
        return {name: getattr(self, name) for name in OBJECTIVES}


class PairContrastSection(ContrastSection):
    """The CAPT loss of pairs of a sentence and a picture. ``weight`` 0 is LXMERT: one view, no queue."""

    duplicates: Literal["pair", "image"] = Field(
        "pair", description="what is no negative of itself: the same sentence and picture, or any of the same picture"
    )
    mismatched: bool = Field(
        True,
        description="false: mismatched pairs are neither anchors nor negatives (they keep their places in the queue)",
    )


class VisionLanguageValidate(ValidateSection):
    """Validation on held-out pairs, the same samples, noise and temperature at every step and for every run."""

    samples: PositiveInt = Field(512, description="held-out pairs")
    temperature: PositiveFloat = Field(
        0.05, description="temperature of the validation loss, the same at every step so that runs compare"
    )


ACCURACIES = ("mlm", "matching", "answers")
"""The objectives whose accuracy is reported beside their loss."""
_WORLD = "microworld.json"
"""The file that ``capt regions microworld`` writes beside the others."""


def is_synthetic(config: Mapping[str, Any]) -> bool:
    """Tell whether data of a job (its flat keys) come from a microworld: a number from them is called synthetic.

    Files of one are beside or below its ``microworld.json``; of files that have moved nothing is known.
    """
    if config.get("data.source") == "microworld":
        return True
    train = config.get("data.train")
    named = [config.get("data.regions"), *(train if isinstance(train, list | tuple) else [train])]
    paths = [Path(str(name)) for name in named if name]
    return any((folder / _WORLD).is_file() for path in paths for folder in (path.parent, path.parent.parent))


class VisionLanguageJob(Job):
    """The configuration of an LXMERT encoder trained with LXMERT's objectives and the CAPT loss."""

    pretrains: ClassVar[bool] = True
    shares_unevenly: ClassVar[bool] = True

    data: PretrainingData = PretrainingData()
    objectives: ObjectivesSection = ObjectivesSection()
    tokenizer: SentenceTokenizer = SentenceTokenizer()
    model: LxmertConfig = LxmertConfig()
    contrast: PairContrastSection = PairContrastSection()
    loader: LoaderSection = LoaderSection()
    validate_: VisionLanguageValidate = Field(VisionLanguageValidate(), alias="validate")

    @model_validator(mode="after")
    def _positions_suffice(self) -> VisionLanguageJob:
        open_ = self.model.init is not None and "max_positions" not in self.model.model_fields_set
        if not open_ and self.data.sequence_length > self.model.max_positions:
            raise ValueError(
                f"data.sequence_length {self.data.sequence_length} is longer than the position table: "
                f"model.max_positions is {self.model.max_positions}"
            )
        return self

    @model_validator(mode="after")
    def _something_is_learnt(self) -> VisionLanguageJob:
        if not any(self.objectives.weights().values()) and not self.contrast.weight:
            raise ValueError("every weight of objectives and contrast.weight are 0: nothing would be learnt")
        return self

    def queue_bytes(self) -> int | None:
        """Bytes of the queue, whose rows are as wide as the encoder; None for one that ``init`` brings."""
        if self.model.init is not None or not self.contrast.weight:
            return None
        return self.contrast.queue_bytes(self.model.hidden)

    @classmethod
    def replaced_by(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """Files that are named later take the place of the microworld."""
        return without_microworld(below, above)

    def metric_names(self) -> frozenset[str]:
        """Losses and accuracies of the objectives that have a weight, and those of the contrast where it is trained."""
        on = [name for name, weight in self.objectives.weights().items() if weight]
        names = ["loss", "validation_samples", *(f"loss/{name}" for name in on)]
        names += [f"accuracy/{name}" for name in on if name in ACCURACIES]
        names += [f"{name}/{part.name}" for name in names[2:] for part in self.data.mixture]
        return frozenset([*names, *(names_of("pairs") if self.contrast.weight > 0 else ())])

    def check_inputs(self) -> list[str]:
        """Describe the inputs (`describe_inputs`)."""
        if self.contrast.weight > 0:
            check_validation_samples(self.validate_.samples)
        return describe_inputs(self.data, self.model.init, self.tokenizer)


def describe_inputs(data: VisionLanguageData, init: Path | None, tokenizer: TokenizerSection) -> list[str]:
    """Return one line for each of the store, the files, the tokenizer and ``model.init``. No sentence is read.

    Raises:
        ConfigError: nothing to train on is named, or files beside the microworld.
        DataError: the store, a file or the tokenizer is missing, or cannot be what it is said to be.
        CheckpointError: ``model.init`` is not there.
    """
    if data.source == "microworld":
        data.require_no_files()
        lines = ["data: the microworld, a synthetic one"]
    else:
        lines = _describe_files(data)
    lines.append(f"tokenizer: {_describe_tokenizer(init, tokenizer)}")
    if init is not None:
        if hub_id(init) is None and not init.exists():
            raise MissingModelError(f"model.init: no file or folder {init}")
        if hub_id(init) is None and is_hf(init):
            parse_hf_config(read_json(init / "config.json"), str(init / "config.json"))
        lines.append(f"model.init: {init}")
    return lines


def _describe_tokenizer(init: Path | None, section: TokenizerSection) -> str:
    if section.path is not None and hub_id(section.path) is None:
        from capt.tokenizer.encode import load_tokenizer

        return f"{section.path}, {load_tokenizer(section.path).vocab_size} ids"
    source = section.path or init
    if source is not None:
        return f"that of {source}"
    return f"{section.type} of {section.vocab_size} ids, trained on the sentences"


def _describe_files(data: VisionLanguageData) -> list[str]:
    store = data.require_files()
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


JOB = VisionLanguageJob
