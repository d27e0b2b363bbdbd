"""``capt convert`` of a model of pairs: its representation says how; a vector is written as a sentence-transformers
folder with its prompts, pooling and length.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import write_json
from capt.pretrain.convert.card import About, CardFacts, caveats_of_family, plain_text, result, table
from capt.pretrain.convert.huggingface import encoder_tensors
from capt.pretrain.convert.output import write_export
from capt.pretrain.convert.quantized import is_int8
from capt.pretrain.convert.sentence_transformers import IDENTITY, check_vectors, write_modules
from capt.pretrain.engine.checkpoint import find_best, read_job
from capt.pretrain.engine.durable import write_tensors
from capt.pretrain.engine.judgement import error_of
from capt.pretrain.engine.metrics_file import METRICS, read_metrics
from capt.pretrain.pairs.load import LoadedPairModel, load_model
from capt.pretrain.pairs.metric_names import RECALLS, RETRIEVAL, at_width
from capt.pretrain.pairs.representations import GROUP, find_representation
from capt.pretrain.pairs.texts import PaddedTexts
from capt.pretrain.registry import load_entry

logger = logging.getLogger(__name__)


_USE = """\
```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("PATH")
queries = model.encode_query(["what is asked"])
documents = model.encode_document(["one text", "another text"])
print(queries @ documents.T)  # unit rows: a dot product is a cosine
```"""

_KEYS = (
    ("model.init", "started from"),
    ("data.files", "data files"),
    ("data.negatives", "hard negatives a query"),
    ("batch.global", "pairs a step"),
    ("schedule.max_steps", "scheduled steps"),
    ("schedule.warmup_steps", "warmup steps"),
    ("optimizer.type", "optimizer"),
    ("optimizer.lr", "peak learning rate"),
    ("engine.precision", "precision"),
    ("contrast.queue", "queue (documents, all ranks)"),
    ("contrast.temperature.type", "temperature schedule"),
    ("contrast.temperature.value", "temperature"),
    ("contrast.matryoshka", "widths of Matryoshka"),
    ("contrast.precisions", "precisions of the vectors in the loss"),
    ("mlm.weight", "weight of masked language modelling"),
    ("distillation.weight", "weight of distillation"),
    ("distillation.cosine", "weight of the cosine to the teacher's vectors"),
    ("distillation.mse", "weight of the distance to the teacher's vectors"),
    ("distillation.listwise", "weight of the teacher's cosines in a step"),
    ("distillation.projection", "map to a teacher of another width"),
    ("distillation.teacher.name", "teacher"),
    ("distillation.teacher.model", "teacher's fingerprint"),
    ("distillation.teacher.dimension", "teacher's dimensions"),
    ("distillation.teacher.pooling", "teacher's pooling"),
    ("distillation.teacher.length", "teacher's longest input"),
    ("distillation.teacher.prompt", "teacher's prompt of a document"),
    ("distillation.teacher.query_prompt", "teacher's prompt of a query"),
    ("run.seed", "seed"),
)
TO_TEACHER = "to_teacher.safetensors"
"""The file beside an export with the map from its vectors, before they are normalised, to the teacher's."""
_COUNTED = {"step": "steps taken", "samples": "pairs seen", "tokens": "tokens seen"}
_CAVEATS = (
    "Inputs longer than the trained length are cut.",
    "The model repeats the biases and errors of its training text; it was evaluated only on what is listed here.",
)


def targets(checkpoint: Path) -> tuple[str, ...]:
    """The values of ``capt convert --to`` that the representation of a checkpoint has. Raises ``ConfigError``: none."""
    job: Any = read_job(find_best(checkpoint))
    name = job.model.representation
    row = find_representation(name)
    if row.export is None:
        raise ConfigError(f"{checkpoint}: has model.representation={name}, which has no export")
    return (row.target, *(["onnx"] if row.graph is not None else []))


def command(
    checkpoint: Path,
    out: Path,
    *,
    to: str,
    source: str | None = None,
    truncate_dim: int | None = None,
    quantize: str | None = None,
    overwrite: bool = False,
    about: About | None = None,
) -> Path:
    """Write the export of the model's representation; see `capt.pretrain.commands`.

    Args:
        checkpoint: a checkpoint or a run.
        out: the folder.
        to: one of `targets`: ``sentence-transformers`` or ``onnx`` of vectors.
        source: the source of pairs whose prompts and lengths the folder has; None = the one with the largest weight.
        truncate_dim: first columns of the vectors, which the folder alone has, as unit rows; None = all.
        quantize: ``int8``: of ONNX, a second graph in int8; what it loses is logged.

    Raises:
        UserError: an argument, the checkpoint or ``out`` is wrong, or the export differs from our model.
    """
    is_int8(quantize, to)
    trained = load_model(checkpoint)
    name = trained.job.model.representation
    row = find_representation(name)
    given: dict[str, Any] = {"source": source, "truncate_dim": truncate_dim, "overwrite": overwrite, "about": about}
    export = row.export
    if to == "onnx":
        export, given = row.graph, {**given, "quantize": quantize}
    assert export is not None, "`targets` has seen it"
    write = load_entry(export, GROUP, f"model.representation {name}", "MODULE:FUNCTION")
    return write(trained, out, **given)  # type: ignore[no-any-return]


def sentence_transformers(
    trained: LoadedPairModel,
    out: Path,
    *,
    source: str | None,
    truncate_dim: int | None,
    overwrite: bool,
    about: About | None,
) -> Path:
    """Write a model of vectors as the sentence-transformers folder ``out``; see `command`."""
    require_width(trained, truncate_dim)
    prompts, *lengths = trained.reading(source)
    named = {"query": prompts.query, "document": prompts.document}
    encoder, length = trained.model.encoder, one_limit(*lengths)

    def write(folder: Path) -> None:
        _write_encoder(trained, folder, length)
        linears = projections(trained.model.projection, encoder.model.hidden_size, truncate_dim)
        dense = [(linear, IDENTITY) for linear in linears]
        write_modules(
            folder,
            hidden=encoder.model.hidden_size,
            mode=encoder.pooling,
            dense=dense,
            max_length=length,
            prompts=named,
        )
        to_teacher = trained.model.to_teacher
        if to_teacher is not None and trained.job.distillation.projection == "beside":
            write_tensors(folder / TO_TEACHER, dict(to_teacher.state_dict()), {"format": "pt"})

    def vectors(tokens: Int[Tensor, "n L"]) -> Float[Tensor, "n d"]:
        return normalize(model.embed(PaddedTexts(tokens, True))[:, :truncate_dim], dim=1)

    model = trained.model.cpu().eval()
    return write_export(
        out,
        write=write,
        check=lambda folder: check_vectors(folder, vectors, trained.tokenizer, length, named.items()),
        card=pair_card(trained, about, named, length, truncate_dim),
        agrees="sentence-transformers gives our vectors",
        overwrite=overwrite,
    )


def one_limit(query: int, document: int) -> int:
    """Return the tokens of the longer side, which an export has for both, and warn where they differ."""
    if query != document:
        logger.warning(
            "queries were cut to %d tokens and documents to %d, prompts included; the folder has one limit, %d",
            query, document, max(query, document),
        )  # fmt: skip
    return max(query, document)


def require_width(trained: LoadedPairModel, columns: int | None) -> None:
    """Raise ``ConfigError`` where vectors do not have the ``columns`` that are to be kept."""
    width = trained.model.width
    if columns is not None and not 0 < columns <= width:
        raise ConfigError(f"truncate_dim {columns}: the vectors have {width} columns; give 1 to {width}")


def projections(whole: torch.nn.Linear | None, hidden: int, width: int | None) -> list[torch.nn.Linear]:
    """Return the linear map behind the pooling that leaves the first ``width`` columns; none where all stay as pooled.

    sentence-transformers cuts vectors after all modules (``truncate_dim``), so that they are no unit rows. A map in
    front of its Normalize cuts them before, in every tool that reads such folders.

    Args:
        whole: the projection of the model, if it has one.
        hidden: columns of what is pooled.
        width: columns that are kept; None = all.
    """
    if width is None:
        return [] if whole is None else [whole]
    cut = torch.nn.Linear(hidden, width, bias=whole is not None and whole.bias is not None)
    with torch.no_grad():
        cut.weight.copy_((torch.eye(hidden) if whole is None else whole.weight.cpu())[:width])
        if whole is not None and whole.bias is not None:
            cut.bias.copy_(whole.bias.cpu()[:width])
    return [cut]


def _write_encoder(trained: LoadedPairModel, folder: Path, max_length: int) -> None:
    """Write the encoder as transformers' bare model of its family, and the tokenizer.

    Some of these models have a pooler that ours do not have and that transformers would fill at random, with a warning
    to every user: zeros keep it silent. Nothing reads its output.
    """
    from transformers import AutoConfig, AutoModel

    hf_config = trained.job.model.encoder
    assert hf_config is not None, "load_model has seen it"
    keys = {key: value for key, value in hf_config.items() if key != "model_type"}
    # Names and shapes alone are asked for.
    with torch.device("meta"):
        empty = AutoModel.from_config(AutoConfig.for_model(hf_config["model_type"], **keys))
    encoder = trained.model.encoder.model
    tensors = encoder_tensors(encoder, hf_config)
    poolers = {
        name: torch.zeros(parameter.shape)
        for name, parameter in empty.named_parameters()
        if name not in tensors and name.startswith("pooler")
    }
    write_json(folder / "config.json", {**hf_config, "architectures": [type(empty).__name__]})
    write_tensors(folder / "model.safetensors", tensors | poolers, {"format": "pt"})
    trained.tokenizer.save(folder, model_max_length=max_length, types=encoder.reads_types)


def pair_card(
    trained: LoadedPairModel, about: About | None, prompts: Mapping[str, str], max_length: int,
    truncate_dim: int | None, *, library: str = "sentence-transformers", use: str = _USE,
) -> str:  # fmt: skip
    """The model card of an export that ``library`` reads, with the code of its ``use``."""
    model, job = trained.model, trained.job
    facts = CardFacts.read(trained.checkpoint, job, job.model.init, about)
    taught = job.distillation.vectors is not None
    keys = [
        each for each in _KEYS if taught or each[0] == "distillation.weight" or not each[0].startswith("distillation")
    ]
    # The head of the card, where a hub reads results, takes figures of retrieval and similarity alone.
    widths = job.contrast.matryoshka
    names = [*RETRIEVAL, "spearman", *(at_width(name, width) for width in widths for name in RETRIEVAL)]
    scores = {name: facts.metrics[f"validation/{name}"] for name in names if f"validation/{name}" in facts.metrics}
    errors = {
        name: facts.metrics[f"validation/{error_of(name)}"]
        for name in RECALLS
        if f"validation/{error_of(name)}" in facts.metrics
    }
    return facts.card(
        {
            "library_name": library,
            "pipeline_tag": "sentence-similarity",
            "tags": ["capt", library, "feature-extraction"],
        },
        "An embedding model that has learnt a larger one's vectors of texts."
        if taught
        else "An embedding model trained on pairs of texts: queries and the documents that belong to them.",
        use,
        model={
            "sentence embedding": model.encoder.pooling + ("" if model.projection is None else ", linear projection"),
            "columns": model.width if truncate_dim is None else f"the first {truncate_dim} of {model.width}",
            "longest input": max_length,
            **{f"prompt of a {name}": repr(prompt) for name, prompt in prompts.items() if prompt},
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        },
        training=facts.training(keys, _COUNTED),
        caveats=(*_CAVEATS[:1], *caveats_of_family(str((job.model.encoder or {}).get("model_type"))), *_CAVEATS[1:]),
        results=[result("sentence-similarity", "held-out pairs", scores)] if scores else [],
        evaluations=[_comparison(trained.checkpoint.resolve().parent.parent, scores, errors)] if scores else [],
    )


def _comparison(run: Path, scores: Mapping[str, float], errors: Mapping[str, float]) -> str:
    """Describe retrieval on the held-out pairs, with standard errors, and what it was before the first step."""
    rows = read_metrics(run / METRICS).validation if (run / METRICS).exists() else []
    first = next((row.figures for row in rows if row.step == 0), {})
    shown = {
        name: f"{value:.4f}"
        + (f" ± {errors[name]:.4f}" if name in errors else "")
        + (f" (before training {first[name]:.4f})" if name in first else "")
        for name, value in scores.items()
    }
    return f"{plain_text('Held-out pairs of the training data')}\n\n{table(shown)}"
