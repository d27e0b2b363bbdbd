"""The configuration of the ``capt_vl`` job: LXMERT under its own objectives and the CAPT loss. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from capt.pretrain.config.contrast import check_validation_samples
from capt.pretrain.config.schema import Job, LoaderSection
from capt.pretrain.contrastive.metrics import names_of
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.vision_language.sections import (
    ObjectivesSection,
    PairContrastSection,
    PretrainingData,
    SentenceTokenizer,
    VisionLanguageValidate,
    without_microworld,
)

ACCURACIES = ("mlm", "matching", "answers")
"""The objectives whose accuracy is reported beside their loss."""
_WORLD = "microworld.json"
"""What ``capt regions microworld`` writes beside its files."""


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
        """Describe the inputs; see `capt.pretrain.vision_language.inputs.describe_inputs`."""
        from capt.pretrain.vision_language.inputs import describe_inputs

        if self.contrast.weight > 0:
            check_validation_samples(self.validate_.samples)
        return describe_inputs(self.data, self.model.init, self.tokenizer)


JOB = VisionLanguageJob
