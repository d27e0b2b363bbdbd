"""Fill in what the data decide: sizes of the model, and losses that are off because the store has no labels."""

from __future__ import annotations

import logging
from typing import Any

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.models.lxmert.config import PRESETS, LxmertConfig
from capt.pretrain.regions.manifest import StoreManifest
from capt.pretrain.vision_language.config import VisionLanguageJob
from capt.pretrain.vision_language.data.answers import AnswerTable
from capt.tokenizer.encode import TextTokenizer

logger = logging.getLogger(__name__)

_OF_INIT = (*PRESETS["base"], "vocab_size", "max_positions", "layer_norm_eps", "feature_size")
"""Fields that a pretrained model decides."""


def completed(
    job: VisionLanguageJob,
    store: StoreManifest,
    tokenizer: TextTokenizer,
    answers: AnswerTable | None,
    init: LxmertConfig | None,
) -> VisionLanguageJob:
    """The job as it runs: with all sizes of its model, and without losses that the store has no labels for.

    Args:
        job: as given. One that has been through this stays as it is, so that a resumed run has the same model.
        store: of the pictures.
        tokenizer: of the sentences.
        answers: the answer table of a job with ``objectives.answers``.
        init: sizes of the model that ``model.init`` names.

    Raises:
        ConfigError: the job asks for a loss without labels, or a size that it sets does not fit the data.
        DataError: the features have another size than those that ``model.init`` was trained on.
    """
    job = _without_absent_labels(job, store)
    model = job.model if init is None else _with_sizes_of(job.model, init)
    sizes: dict[str, Any] = {
        "vocab_size": _at_least(model.vocab_size, tokenizer.vocab_size, "vocab_size", "ids of the tokenizer"),
        "pad_id": _exactly(model.pad_id, tokenizer.special.pad, "pad_id", "padding id of the tokenizer"),
        "feature_size": _exactly(model.feature_size, store.feature_size, "feature_size", "feature size of the store"),
        "answers": 0 if answers is None else _exactly(
            model.answers or None, len(answers), "answers", "number of answers of the table"
        ),
    }  # fmt: skip
    for kind, weight, classes in _labels(job, store):
        name = f"{kind}_classes"
        sizes[name] = _at_least(getattr(model, name) or None, classes, name, "classes of the store") if weight else 0
    model = model.model_copy(update=sizes)
    if job.data.sequence_length > model.max_positions:
        raise ConfigError(
            f"data.sequence_length {job.data.sequence_length} is longer than the position table of {model.init}: "
            f"at most {model.max_positions}"
        )
    return job.model_copy(update={"model": model})


def _labels(job: VisionLanguageJob, store: StoreManifest) -> list[tuple[str, float, int]]:
    """Kind of label, weight of its loss, classes in the store."""
    return [
        ("object", job.objectives.objects, store.object_classes),
        ("attribute", job.objectives.attributes, store.attribute_classes),
    ]


def _without_absent_labels(job: VisionLanguageJob, store: StoreManifest) -> VisionLanguageJob:
    off = {}
    for kind, weight, classes in _labels(job, store):
        key = f"{kind}s"
        if not weight or classes:
            continue
        if key in job.objectives.model_fields_set:
            raise ConfigError(
                f"objectives.{key} is {weight:g}, but the region store has no {kind} labels: set objectives.{key}=0, "
                "or import regions with labels"
            )
        logger.info("the region store has no %s labels: the loss of %s is off", kind, key)
        off[key] = 0.0
    objectives = job.objectives.model_copy(update=off)
    if not any(objectives.weights().values()) and not job.contrast.weight:
        raise ConfigError("the region store has no labels, and no other loss has a weight: nothing would be learnt")
    return job.model_copy(update={"objectives": objectives})


def _with_sizes_of(model: LxmertConfig, init: LxmertConfig) -> LxmertConfig:
    sizes = {name: getattr(init, name) for name in _OF_INIT}
    heads = {name: getattr(init, name) for name in ("object_classes", "attribute_classes") if getattr(init, name)}
    return model.model_copy(update={**sizes, **heads, "size": "custom"})


def _exactly(given: int | None, found: int, name: str, what: str) -> int:
    if given not in (None, found):
        error = DataError if name == "feature_size" else ConfigError
        raise error(f"model.{name} is {given}, but the {what} is {found}: leave model.{name} out, or use other data")
    return found


def _at_least(given: int | None, found: int, name: str, what: str) -> int:
    if given is not None and given < found:
        raise ConfigError(f"model.{name} {given} is smaller than the {found} {what}: leave it unset or raise it")
    return given or found
