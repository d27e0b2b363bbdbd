"""``capt evaluate`` of a pretrained LXMERT on held-out pairs; every metric is given with its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt

from capt.pretrain.base.distributed import device, rank
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.base.verification import Verifier
from capt.pretrain.contrast.metrics import PairAccumulator
from capt.pretrain.contrastive.metrics import noise_metrics
from capt.pretrain.contrastive.task import HeldOut
from capt.pretrain.engine.evaluations import Section, keep_sections, sections_as_text, write_result
from capt.pretrain.engine.provenance import provenance
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.batches import MaskingVocabulary, VisionLanguageAssembler, VisionLanguageBatch
from capt.pretrain.vision_language.config import VisionLanguageJob
from capt.pretrain.vision_language.data.answers import AnswerTable
from capt.pretrain.vision_language.load import LoadedVisionLanguageModel, load_model, open_store
from capt.pretrain.vision_language.module import VisionLanguageModule, VisionLanguageOutput
from capt.pretrain.vision_language.pairs import EncodedPairs, ExampleSplit, located
from capt.pretrain.vision_language.prepare import encoded_pairs
from capt.pretrain.vision_language.validation import validate, validation_batches

TEMPERATURE = 0.05
"""Fixed, so that checkpoints trained under different temperatures compare."""


def evaluate(
    checkpoint: Path | LoadedVisionLanguageModel,
    *,
    data: Sequence[Path] = (),
    regions: Path | None = None,
    out: Path | None = None,
    batch: int = 32,
    seed: int = 1,
    samples: int = 512,
) -> dict[str, Any]:
    """Evaluate an LXMERT on pairs of a sentence and a picture.

    Losses and accuracies of all its objectives (``matching``: telling a picture's own sentence from that of another);
    with an aggregation head the metrics of the contrast; and how far corruption moves the state of ``[CLS]`` that
    fine-tuning reads (``noise/cls/*``, `noise_metrics`), which compares models with and without contrast.

    Args:
        checkpoint: checkpoint folder, run folder, or a model that is loaded already.
        data: files of any kind that pretraining reads, together one set; unset = those the run validated on.
        regions: the region store; unset = the run's.
        out: JSON file to write the result to as well.
        batch: pairs a forward pass.
        seed: decides which pairs are chosen, mismatched and corrupted.
        samples: how many pairs at most.

    Returns:
        ``checkpoint``, ``versions`` and ``sections`` (each `Section` as a mapping); `as_text` is for people.

    Raises:
        ConfigError: nothing to evaluate on.
        CheckpointError: as `load_model`; or the store's features are of another kind than the model was trained on.
        DataError: files or the store cannot be used, or pictures are not in the store.
    """
    trained = checkpoint if isinstance(checkpoint, LoadedVisionLanguageModel) else load_model(checkpoint)
    job = trained.job
    # Files that are named here take the place of all that the run was configured with.
    changed = {"source": "files", "train": list(data), "mixture": []} if data else {}
    files = located(job.data.model_copy(update=changed | ({"regions": regions} if regions else {})))
    files.require_files()
    paths = list(chain.from_iterable(files.named("train" if data else "validation")))
    if not paths:
        raise ConfigError("nothing to evaluate on: the run had no data.validation; give --data FILE")
    verifier = Verifier(job.data.cache)
    store = open_store(trained.checkpoint, files, regions, verifier)
    _require_classes(store, job)
    split = ExampleSplit([paths], "--data" if data else "data.validation", verifier)
    table = None if trained.answers is None else AnswerTable(trained.answers)
    job = _measured(job, store, split, batch, samples)
    pairs = encoded_pairs(split, job, store, trained.tokenizer, table)
    section = _section(trained, job, pairs, store, ", ".join(path.name for path in paths), seed)
    result = {
        "checkpoint": str(trained.checkpoint),
        "versions": provenance(),
        "sections": [section.model_dump()],
    }
    if out is not None and rank() == 0:
        write_result(out, result)
    return result


def command(
    checkpoint: Path,
    *,
    data: Sequence[Path] = (),
    regions: Path | None = None,
    out: Path | None = None,
    samples: PositiveInt = 512,
    batch: PositiveInt = 32,
    seed: int = 1,
) -> dict[str, Any]:
    """`evaluate` with the options of the command line; the result is kept in the run, beside earlier ones."""
    paths = [data] if isinstance(data, Path) else list(data)
    result = evaluate(checkpoint, data=paths, regions=regions, out=out, batch=batch, seed=seed, samples=samples)
    keep_sections(Path(result["checkpoint"]), result)
    return result


def as_text(result: dict[str, Any]) -> str:
    """The result of `evaluate` for people."""
    return sections_as_text(result)


class _Module:
    """A module as validation calls it."""

    def __init__(self, module: VisionLanguageModule) -> None:
        self.device = device()
        self.module = module.to(self.device)

    def __call__(self, batch: VisionLanguageBatch, *, step: int) -> VisionLanguageOutput:
        return self.module(batch, step=step)  # type: ignore[no-any-return]


def _require_classes(store: RegionStore, job: VisionLanguageJob) -> None:
    """Raise ``DataError`` for a store with classes of objects or attributes that the model has no logit for."""
    for kind, weight in (("object", job.objectives.objects), ("attribute", job.objectives.attributes)):
        name = f"{kind}_classes"
        there, known = getattr(store.manifest, name), getattr(job.model, name)
        if weight and there > known:
            raise DataError(
                f"{store.folder}: {kind} classes 0 to {there - 1}, and the model tells {known} apart: its store had "
                "fewer, so name a store with the labels of the same detector and no other classes"
            )


def _measured(
    job: VisionLanguageJob, store: RegionStore, split: ExampleSplit, batch: int, samples: int
) -> VisionLanguageJob:
    """The job with the sizes of this evaluation, and without losses for which these data have no labels."""
    absent = {
        "objects": not store.manifest.object_classes,
        "attributes": not store.manifest.attribute_classes,
        "answers": not any(example.answers for example in split.examples),
    }
    objectives = job.objectives.model_copy(update={name: 0.0 for name, none in absent.items() if none})
    validation = job.validate_.model_copy(update={"samples": samples, "temperature": TEMPERATURE})
    sizes = job.batch.model_copy(update={"micro": batch})
    return job.model_copy(update={"objectives": objectives, "validate_": validation, "batch": sizes})


def _section(
    trained: LoadedVisionLanguageModel,
    job: VisionLanguageJob,
    pairs: EncodedPairs,
    store: RegionStore,
    name: str,
    seed: int,
) -> Section:
    assembler = VisionLanguageAssembler(
        pairs, store, MaskingVocabulary.of(trained.tokenizer), job.objectives, job.contrast,
        length=job.data.sequence_length, seed=seed, stream="pairs/evaluation",
    )  # fmt: skip
    module = _Module(trained.module)
    measured = validate(module, [HeldOut("", assembler, min(job.validate_.samples, len(pairs)))], job)
    metrics = {key: float(value) for key, value in measured.items() if not callable(value)}
    samples = int(metrics.pop("validation_samples"))
    # The noise is measured by the distances between texts, of which one text has none.
    if samples > 1:
        metrics |= _noise(module, assembler, samples, job.micro_batch(1))
    rates, versions = job.objectives, provenance()
    protocol = (
        f"{samples} of {len(pairs)} pairs, seed {seed}, {rates.word_rate:.0%} of words and {rates.region_rate:.0%} of "
        f"regions masked, {rates.mismatched:.0%} mismatched, classes of {rates.region_scope} regions; contrast at "
        f"temperature {TEMPERATURE}; noise: [CLS] without the head; {str(torch.get_default_dtype())[6:]} on "
        f"{device().type}; capt-pretraining {versions['capt-pretraining']}, torch {versions['torch']}"
    )
    return Section(name=name, protocol=protocol, metrics=dict(metrics))


@torch.no_grad()
def _noise(module: _Module, assembler: VisionLanguageAssembler, samples: int, micro: int) -> dict[str, float]:
    """`noise_metrics` of the encoder's state of ``[CLS]`` under the corruption of training."""
    encoder, found = module.module.lxmert.encoder, PairAccumulator()
    for batch, valid in validation_batches(assembler, samples, micro):
        batch = batch.to(module.device)
        present = batch.present if batch.missing else None
        views = ((batch.tokens, batch.features), (batch.corrupted, batch.corrupted_features()))
        x, x_hat = (
            encoder.first(tokens, features.float(), batch.boxes, padded=batch.padded, present=present)
            for tokens, features in views
        )
        found.update(x[:valid], x_hat[:valid])
    return {f"noise/cls/{key}": value for key, value in noise_metrics(*found.gather()).items()}
