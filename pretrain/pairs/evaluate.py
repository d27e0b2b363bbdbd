"""``capt evaluate`` of a model of pairs: retrieval on held-out files of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import write_json
from capt.pretrain.pairs.forms import read_pairs
from capt.pretrain.pairs.restore import load_model
from capt.pretrain.pairs.sources import encode_source
from capt.pretrain.pairs.validation import pool_of, validate


def command(
    checkpoint: Path,
    *,
    data: Sequence[Path] = (),
    source: str | None = None,
    samples: int = 1000,
    batch: int = 64,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure a checkpoint, or the best or newest one of a run, and return the figures of each file.

    Args:
        checkpoint: a checkpoint or a run.
        data: files of pairs, each a pool of its own.
        source: the source of the job whose prompts and lengths the texts get; None = the first one.
        samples: the most pairs of a pool.
        batch: texts of a forward pass.
        out: JSON file to write the result to as well.

    Raises:
        UserError: no file is named, a file holds no pairs, or the checkpoint is not one of pairs.
    """
    if not data:
        raise ConfigError("nothing to measure on: give --data FILE with held-out pairs")
    restored = load_model(checkpoint)
    sources = {each.name: each for each in restored.job.data.each()}
    name = source or next(iter(sources))
    if name not in sources:
        raise ConfigError(f"--option source={name}: no such source; there are {', '.join(sources)}")
    model, encoder = restored.model.to(distributed.device()), restored.model.encoder.model
    sections = []
    for path in data:
        held_out = sources[name].model_copy(update={"negatives": 0, "in_batch": True, "name": path.name})
        options: dict[str, Any] = {"corpus": held_out.corpus, "columns": held_out.columns}
        pairs = read_pairs([path], form=held_out.form, **options)
        rows = encode_source(held_out, pairs, restored.tokenizer, encoder.max_positions)
        temperature = restored.job.validate_.temperature
        figures = validate(model, pool_of([rows], samples), temperature, batch, encoder.pad_id)
        sections.append({"file": str(path), "source": name, "metrics": figures})
    result = {"checkpoint": str(restored.checkpoint), "sections": sections}
    if out is not None:
        write_json(out, result)
    return result


def as_text(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [f"checkpoint: {result['checkpoint']}"]
    for section in result["sections"]:
        lines += ["", f"{section['file']} (prompts and lengths of source {section['source']})"]
        lines += [f"  {name:<24}{value:>12.4g}" for name, value in section["metrics"].items()]
    return "\n".join(lines)
