"""``capt evaluate`` of a model of pairs: retrieval on held-out files of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.base.files import write_json
from capt.pretrain.engine.provenance import used_versions
from capt.pretrain.pairs.data_config import PairSource
from capt.pretrain.pairs.load import LoadedPairModel, load_model
from capt.pretrain.pairs.prepare import HELD_OUT, encode_source, pairs_of
from capt.pretrain.pairs.representations import similarity_of
from capt.pretrain.pairs.sources import longest_text
from capt.pretrain.pairs.validation import Pools, pools_of, validate


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

    Each file of ``data`` is a pool of its own, of ``samples`` pairs at most; its texts get the prompts and lengths of
    ``source``, by default the job's first. Raises ``UserError`` where there are no pairs, or no model of them.
    """
    if not data:
        raise ConfigError(
            "nothing to measure on: give --data FILE with held-out pairs, or --retrieval with a BEIR folder or a file"
        )
    trained = load_model(checkpoint)
    sources = {each.name: each for each in trained.job.data.each()}
    name = source or next(iter(sources))
    if name not in sources:
        raise ConfigError(f"--option source={name}: no such source; there are {', '.join(sources)}")
    model, encoder = trained.model.to(distributed.device()), trained.model.encoder.model
    sections = []
    for path in data:
        # Rows are scored or not as the file has them, whatever loss and view the source trained with.
        held_out = sources[name].model_copy(update={**HELD_OUT, "loss": "auto", "view": "dropout", "name": path.name})
        rows = encode_source(held_out, pairs_of(held_out, [path]), trained.tokenizer, encoder.max_positions)
        temperature = trained.job.validate_.temperature
        pools, widths = pools_of([rows], samples), trained.job.contrast.matryoshka
        figures = validate(model, pools, temperature, batch, encoder.pad_id, widths, similarity_of(trained.job))
        # The protocol travels with the figures: those of other pools or lengths do not compare.
        protocol = _protocol(trained, held_out, pools, len(rows))
        sections.append({"file": str(path), "source": name, "protocol": protocol, "metrics": figures})
    result = {"checkpoint": str(trained.checkpoint), "sections": sections}
    if out is not None:
        write_json(out, result)
    return result


def _protocol(trained: LoadedPairModel, source: PairSource, pools: Pools, rows: int) -> str:
    """Describe how the figures were computed, in one line; figures compare where these lines are the same."""
    encoder, parts = trained.model.encoder, []
    if pools.pairs is not None:
        parts += [
            f"{len(pools.pairs)} of {rows} pairs, each query against the first documents of all, and the reverse",
            "known positives of a query are not candidates",
            "equal cosines share their ranks",
            f"loss at temperature {trained.job.validate_.temperature:g}",
        ]
    if pools.scored is not None:
        compared = "cosine" if similarity_of(trained.job) is None else "similarity"
        parts.append(f"{len(pools.scored)} of {rows} scored pairs, Spearman's rho of {compared} and score")
    for side, prompt, length in (
        ("queries", source.prompts.query, source.query_length),
        ("documents", source.prompts.document, source.document_length),
    ):
        longest = longest_text(trained.tokenizer, prompt, length, encoder.model.max_positions, side, source.own_length)
        parts.append(f"{side} {repr(prompt) + ' and ' if prompt else ''}up to {longest} tokens")
    name, has_vectors = trained.job.model.representation, similarity_of(trained.job) is None
    parts.append(f"{encoder.pooling} pooling" if has_vectors else f"representation {name}")
    parts.append(used_versions())
    return "; ".join(parts)


def as_text(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [f"checkpoint: {result['checkpoint']}"]
    for section in result["sections"]:
        lines += ["", f"{section['file']} (prompts and lengths of source {section['source']})"]
        lines += [f"  protocol: {section['protocol']}"]
        lines += [f"  {name:<24}{value:>12.4g}" for name, value in section["metrics"].items()]
    return "\n".join(lines)
