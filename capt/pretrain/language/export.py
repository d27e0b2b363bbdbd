"""``capt convert`` of a pretrained encoder: a Hugging Face, sentence-transformers or ONNX folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from capt.pretrain.base.errors import ConfigError, did_you_mean
from capt.pretrain.bottleneck.config import POOLED
from capt.pretrain.bottleneck.folder import TENSORS, write_heads
from capt.pretrain.convert.card import About, CardFacts, caveats_of_family, cell, lookup, result, table
from capt.pretrain.convert.encoder import Form, export_encoder
from capt.pretrain.convert.onnx import require_packages
from capt.pretrain.convert.quantized import is_int8
from capt.pretrain.convert.reference import Pooling
from capt.pretrain.engine.evaluations import Section, sections_of
from capt.pretrain.language.load import LoadedLanguageModel, load_model
from capt.pretrain.models.architecture import encoder_class

logger = logging.getLogger(__name__)

TARGETS = ("hf", "sentence-transformers", "onnx")
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "head")
"""The first is the default of a checkpoint that was never evaluated at sentence similarity: the best of the three in
docs/results/language.md."""

_HEAD: dict[Form, dict[str, Any]] = {
    "hf": {"library_name": "transformers", "pipeline_tag": "fill-mask", "tags": []},
    "sentence-transformers": {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "feature-extraction"],
    },
    "onnx": {"library_name": "onnx", "pipeline_tag": "feature-extraction", "tags": ["onnx"]},
}

_USE: dict[Form, str] = {
    "hf": """\
```python
from transformers import AutoModelForMaskedLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForMaskedLM.from_pretrained("PATH")
text = f"A text with a {tokenizer.mask_token} in it."
logits = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits
```""",
    "sentence-transformers": """\
```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("PATH")
embeddings = model.encode(["one sentence", "another sentence"])  # unit rows: a dot product is a cosine
```""",
    "onnx": """\
```python
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
session = onnxruntime.InferenceSession("PATH/model.onnx")
inputs = tokenizer(["one sentence", "another one"], padding=True, truncation=True, return_tensors="np")
embeddings = session.run(["sentence_embedding"], dict(inputs))[0]  # unit rows: a dot product is a cosine
```""",
}

_CAVEATS: dict[Form, tuple[str, ...]] = {
    "hf": (
        "A `pooler_output` is not trained (transformers initialises the pooler at random): do not use it.",
        "The contrastive aggregation head is in `capt_head.safetensors`, which transformers does not read; "
        "the sentence-transformers export carries it.",
    ),
    "sentence-transformers": ("Inputs longer than the trained length are cut.",),
    "onnx": ("Pass `input_ids` and `attention_mask` as int64; padding goes on the right.",),
}

_COMMON_CAVEATS = (
    "The model repeats the biases and errors of its training text; it was evaluated only on what is listed here.",
)

_KEYS = (
    ("model.init", "started from"),
    ("data.source", "data source"),
    ("data.name", "data set"),
    ("data.files", "data files"),
    ("data.mixture", "data sources"),
    ("data.sequence_length", "sequence length"),
    ("corruption.type", "corruption"),
    ("batch.global", "sequences a step"),
    ("schedule.max_steps", "scheduled steps"),
    ("schedule.warmup_steps", "warmup steps"),
    ("optimizer.type", "optimizer"),
    ("optimizer.lr", "peak learning rate"),
    ("optimizer.betas", "Adam betas"),
    ("optimizer.weight_decay", "weight decay"),
    ("engine.precision", "precision"),
    ("contrast.weight", "weight of the contrastive loss"),
    ("contrast.queue", "queue (rows, all ranks)"),
    ("contrast.queue_start", "queue in the loss from step"),
    ("contrast.drift", "queued rows follow the encoder"),
    ("contrast.queue_share", "weight of the queue, at most (1: as the live rows)"),
    ("contrast.in_batch", "in-batch negatives"),
    ("contrast.temperature.type", "temperature schedule"),
    ("run.seed", "seed"),
)

_COUNTED = {"step": "steps taken", "samples": "sequences seen", "tokens": "tokens seen (once a sequence)"}


def model_card(
    form: Form,
    facts: CardFacts,
    model: Mapping[str, Any],
    *,
    evaluations: Sequence[Section] = (),
    pooling: str = "mean",
) -> str:
    """Return the text of a ``README.md``.

    Args:
        form: the kind of folder, which decides the head, the loading example and the caveats.
        facts: what the checkpoint and its run tell; only known keys of the job are shown, paths by name only.
        model: facts of the architecture, such as layers and hidden size.
        evaluations: what ``capt evaluate`` has measured; also the head's ``model-index``.
        pooling: whose sentence vectors ``evaluations`` are shown for.
    """
    trained = bool(facts.progress.get("step"))
    hf = encoder_class(lookup(facts.job, "model.arch") or "roberta").hf
    return facts.card(
        {**_HEAD[form], "tags": ["capt", hf.types[0], *_HEAD[form]["tags"]]},
        _summary(facts.job, hf.encoder, trained),
        _USE[form],
        model=model,
        training=facts.training(_KEYS, _COUNTED) if trained else {},
        # An encoder without a pooler needs no warning of one.
        caveats=(
            *(text for text in _CAVEATS[form] if hf.pooler or "pooler" not in text),
            *(caveats_of_family(hf.types[0]) if form == "sentence-transformers" else ()),
            *_COMMON_CAVEATS,
        ),
        results=_results(evaluations, pooling),
        evaluations=[_evaluation(section, pooling) for section in evaluations],
    )


def _results(evaluations: Sequence[Section], pooling: str) -> list[dict[str, Any]]:
    """Return the head's results: masked-language-model figures of text, Spearman's rho of ``pooling`` of STS sets."""
    results = []
    for section in evaluations:
        spearman = section.systems.get(pooling, {}).get("spearman")
        if spearman is not None:
            metrics: dict[str, float | None] = {"spearman": spearman}
            results.append(result("sentence-similarity", section.name, metrics))
        elif section.metrics:
            results.append(result("fill-mask", section.name, section.metrics))
    return results


def _evaluation(section: Section, pooling: str) -> str:
    vectors = {f"{name} ({pooling})": value for name, value in section.systems.get(pooling, {}).items()}
    rows = {name: value for name, value in {**section.metrics, **vectors}.items() if value is not None}
    return f"{cell(section.name)}: {cell(section.protocol)}\n\n{table(rows)}"


def _summary(job: Mapping[str, Any], encoder: str, trained: bool) -> str:
    what = f"An encoder (`{encoder}`)"
    if not trained:
        return f"{what} with the weights it was started from: no training step has been taken on them."
    capt = "CAPT (contrastive pretraining on corrupted views of each sequence)"
    masked = lookup(job, "mlm.weight") != 0.0
    losses = [*(["masked language modelling"] if masked else []), *([capt] if lookup(job, "contrast.weight") else [])]
    if (head := lookup(job, "bottleneck.head")) not in (None, "none"):
        heads = {"bow": "a bag of words", "decoder": "a decoder", "both": "a bag of words and a decoder"}[head]
        losses.append(f"a bottleneck ({heads} of the pooled vector, as RetroMAE and DupMAE)")
    return f"{what} pretrained with {' and '.join(losses)}."


def command(
    checkpoint: Path,
    out: Path,
    *,
    to: str,
    pooling: str | None = None,
    quantize: str | None = None,
    overwrite: bool = False,
    about: About | None = None,
) -> Path:
    """Write an encoder for another library; see `capt.pretrain.commands`.

    Args:
        checkpoint: a checkpoint or a run.
        out: the folder.
        to: ``hf`` (a masked-language model of transformers), ``sentence-transformers`` or ``onnx``.
        pooling: ``mean``, ``cls`` or ``head`` (the aggregation head), of sentence-transformers and ONNX; None: the best
            at sentence similarity, as ``capt evaluate`` has measured this checkpoint, or else ``mean``.
        quantize: ``int8``: of ONNX, a second graph whose matrix products are in int8; what it loses is logged.

    Raises:
        UserError: an argument, the checkpoint or ``out`` is wrong, or an export differs from our model.
    """
    if pooling is not None and pooling not in POOLINGS:
        raise ConfigError(f"--pooling {pooling!r} is unknown; {did_you_mean(pooling, POOLINGS, 'valid:')}")
    if pooling is not None and to == "hf":
        raise ConfigError(f"--pooling {pooling} has no meaning with --to hf")
    int8 = is_int8(quantize, to)
    if to == "onnx":
        require_packages()
    trained = load_model(checkpoint)
    evaluations = sections_of(trained.checkpoint)
    chosen, reason = pooling or POOLINGS[0], ""
    if pooling is None and to != "hf":
        chosen, reason = chosen_pooling(evaluations, None if trained.bottleneck is None else trained.bottleneck.pooling)
        logger.info("--pooling %s: %s", chosen, reason)
    config, job, form, beside = trained.model.config, trained.job, cast(Form, to), None
    if trained.bottleneck is not None and form != "onnx":
        # An encoder alone leaves the language-model head behind, which its decoder needs.
        mlm = trained.model.mlm if form == "sentence-transformers" else None
        beside = partial(write_heads, heads=trained.bottleneck, section=job.bottleneck, mlm=mlm)
    export_encoder(
        form, trained.model.state_dict(), config, trained.tokenizer, out,
        _card(trained, form, chosen, reason, evaluations, about), pooling=chosen,
        # Position rows beyond the windows of training are random still, but for a model that came with more.
        max_length=config.max_positions if job.model.init else job.data.sequence_length, overwrite=overwrite,
        beside=beside, int8=int8,
    )  # fmt: skip
    logger.info("%s written from %s", out, trained.checkpoint)
    return out


def chosen_pooling(evaluations: Sequence[Section], trained: Pooling | None = None) -> tuple[Pooling, str]:
    """Choose the pooling to export; say in a sentence for the log and the card on which figures the choice rests.

    It is the one with the best mean Spearman correlation over the stored STS sets that all poolings were measured on:
    over development sets where there are any, so that the test sets stay measurements.

    Args:
        evaluations: what ``capt evaluate`` has stored about the checkpoint.
        trained: the vector that a bottleneck has trained, which is taken where nothing is measured.
    """
    sets = [each for each in evaluations if any("spearman" in figures for figures in each.systems.values())]
    known = [name for name in POOLINGS if sets and any(name in each.systems for each in sets)]
    # Means compare only over sets on which every pooling was measured.
    whole = [each for each in sets if all(each.systems.get(name, {}).get("spearman") is not None for name in known)]
    used = [each for each in whole if each.name.endswith(" dev")] or whole
    if trained is not None and (not used or len(known) < 2):
        return trained, "it is the vector that the bottleneck was trained on (bottleneck.pooling of the run)"
    if not used or len(known) < 2:
        return "mean", (
            "capt evaluate RUN --sts FOLDER has not compared the poolings of this checkpoint; mean was the best of "
            "three at sentence similarity in docs/results/language.md"
        )
    means = {name: fmean(float(each.systems[name]["spearman"] or 0.0) for each in used) for name in known}
    best = max(known, key=lambda name: means[name])
    others = ", ".join(f"{name} {means[name]:.4g}" for name in known if name != best)
    measured = ", ".join(each.name for each in used)
    return best, f"Spearman {means[best]:.4g} on {measured} ({others}), as capt evaluate has stored"


def _card(
    trained: LoadedLanguageModel,
    form: Form,
    pooling: Pooling,
    reason: str,
    evaluations: Sequence[Section],
    about: About | None,
) -> str:
    config, heads = trained.model.config, trained.bottleneck
    model: dict[str, Any] = {
        "layers": config.layers,
        "hidden size": config.hidden,
        "attention heads": config.heads,
        "feed-forward size": config.ffn,
        "vocabulary rows": config.classes,
        "positions": config.max_positions,
        "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
    }
    if heads is not None and form != "onnx":
        model["bottleneck"] = (
            f"{trained.job.bottleneck.head}, trained on {POOLED[heads.pooling]}; {TENSORS} has its heads"
        )
    # The hf folder is a masked-language model, which has no sentence embedding.
    if form != "hf":
        model["sentence embedding"] = f"{config.pooling}, aggregation head" if pooling == "head" else pooling
        model |= {"chosen because": reason} if reason else {}
    facts = CardFacts.read(trained.checkpoint, trained.job, trained.job.model.init, about)
    return model_card(form, facts, model, evaluations=evaluations, pooling=pooling)
