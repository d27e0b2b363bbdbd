"""What ``capt convert`` does, as a function of folders."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pretrain.base.errors import ConfigError
from pretrain.convert.output import refuse_existing

if TYPE_CHECKING:
    from pretrain.convert.about import About
    from pretrain.convert.reference import Pooling
    from pretrain.language.restore import Restored

logger = logging.getLogger(__name__)

TARGETS = ("hf", "sentence-transformers", "onnx")
SOURCES = ("hf",)
POOLINGS = ("mean", "cls", "head")
"""The first is the default: the best of the three at sentence similarity (docs/results/language.md)."""


def convert(
    source: Path,
    out: Path,
    *,
    to: str | None = None,
    from_: str | None = None,
    pooling: str | None = None,
    overwrite: bool = False,
    about: About | None = None,
) -> Path:
    """Write the folder ``out``, checked against our own model, and return it.

    Args:
        source: a checkpoint, or a run (its newest checkpoint) with ``to``; a foreign folder or hub id with ``from_``.
        out: a folder that does not exist or is empty.
        to: ``hf`` (``RobertaForMaskedLM``), ``sentence-transformers`` or ``onnx``.
        from_: ``hf`` (a RoBERTa or XLM-R folder becomes a run at step 0).
        pooling: ``mean`` (also if None), ``cls`` or ``head`` (the aggregation head); of sentence-transformers and ONNX.
        overwrite: replace ``out`` if it is an older export.
        about: for the model card.

    Raises:
        UserError: one line saying what is wrong with the arguments, ``source`` or ``out``; nothing is written then.
    """
    if (to is None) == (from_ is None):
        raise ConfigError("give either --to (what to make of a checkpoint) or --from (what to make a checkpoint of)")
    _require("--to", to, TARGETS)
    _require("--from", from_, SOURCES)
    _require("--pooling", pooling, POOLINGS)
    if pooling is not None and to not in ("sentence-transformers", "onnx"):
        raise ConfigError(f"--pooling {pooling} has no meaning with {f'--to {to}' if to else f'--from {from_}'}")
    if source.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{out}: the source {source} lies in it; give another folder")
    refuse_existing(out, overwrite=overwrite)
    if from_ is not None:
        from pretrain.convert.import_hf import import_hf

        import_hf(source, out, overwrite=overwrite)
        logger.info("train on it with: capt resume %s data.files=FILE", out)
    else:
        _export(source, out, cast(str, to), pooling or POOLINGS[0], overwrite, about)
    return out


def _require(option: str, value: str | None, valid: Sequence[str]) -> None:
    if value is not None and value not in valid:
        near = difflib.get_close_matches(value, valid, n=1)
        hint = f"did you mean {near[0]}?" if near else f"valid: {', '.join(valid)}"
        raise ConfigError(f"{option} {value!r} is unknown; {hint}")


def _export(source: Path, out: Path, to: str, pooling: str, overwrite: bool, about: About | None) -> None:
    if to == "onnx":
        from pretrain.convert.onnx import require_packages

        require_packages()
    from pretrain.language.restore import load_model

    restored = load_model(source)
    config, job = restored.model.config, restored.job
    # Position rows beyond the windows of training are as random as they started, but for a model that came with more.
    length = config.max_positions if job.model.init else job.data.sequence_length
    card = _card(restored, to, pooling, about)
    arguments: tuple[Any, ...] = (restored.model.state_dict(), config, restored.tokenizer, out, card)
    options: dict[str, Any] = {"max_length": length, "overwrite": overwrite}
    if to == "hf":
        from pretrain.convert.huggingface import export_hf

        export_hf(*arguments, **options)
    elif to == "onnx":
        from pretrain.convert.onnx import export_onnx

        export_onnx(*arguments, pooling=cast("Pooling", pooling), **options)
    else:
        from pretrain.convert.sentence_transformers import export_sentence_transformers

        export_sentence_transformers(*arguments, pooling=cast("Pooling", pooling), **options)
    logger.info("%s written from %s", out, restored.checkpoint)


def _card(restored: Restored, to: str, pooling: str, about: About | None) -> str:
    from pretrain.convert.about import About
    from pretrain.convert.card import final_metrics, model_card
    from pretrain.engine.checkpoint import read_metadata
    from pretrain.language.evaluations import sections_of

    config, run = restored.model.config, restored.checkpoint.resolve().parent.parent
    progress = read_metadata(restored.checkpoint).progress.model_dump()
    facts: dict[str, Any] = {
        "layers": config.layers,
        "hidden size": config.hidden,
        "attention heads": config.heads,
        "feed-forward size": config.ffn,
        "vocabulary rows": config.classes,
        "positions": config.max_positions,
        "parameters": sum(parameter.numel() for parameter in restored.model.parameters()),
    }
    if to != "hf":
        facts["sentence embedding"] = f"{config.pooling}, aggregation head" if pooling == "head" else pooling
    return model_card(
        cast(Any, to),
        name=run.name,
        model=facts,
        job=restored.job.model_dump(mode="json", by_alias=True),
        progress=progress,
        metrics=final_metrics(run, progress["step"]),
        about=(about or About()).started_from(restored.job.model.init, run),
        evaluations=sections_of(restored.checkpoint),
        pooling=pooling,
    )
