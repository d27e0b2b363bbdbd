"""The data card of prepared text: what it was made of and how, as ``card.json`` and to be read as ``card.md``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from capt.pretrain.base.arrays import map_whole
from capt.pretrain.base.files import printable, write_json, write_text
from capt.pretrain.base.records import Record
from capt.pretrain.data.parts import PartRecord, excerpt
from capt.pretrain.data.shards import token_dtype
from capt.pretrain.data.sources import Split
from capt.pretrain.data.units import PreparationPlan

CARD = ("card.json", "card.md")
_SHOWN = 20


class StepCount(Record, extra="forbid"):
    """The documents that a step has left out, and an example: a document, and for duplicates the one that stays."""

    name: str
    setting: Any
    removed: int
    left: int
    example: list[str] = Field(default_factory=list)


class Card(Record, extra="forbid"):
    """A data card. ``documents`` and ``characters`` are those of the sources, ``bytes`` is their size."""

    format: Literal["capt-data-card"] = "capt-data-card"
    version: Literal[1] = 1
    sources: list[dict[str, str | int]]
    license: str | None
    tokenizer: str
    documents: int
    characters: int
    steps: list[StepCount]
    splits: dict[str, dict[str, int]]
    bytes: int | None
    processor_seconds: float


def card_of(
    plan: PreparationPlan,
    parts: Sequence[Path],
    records: Sequence[PartRecord],
    sources: list[dict[str, str | int]],
    counts: dict[Split, tuple[int, int]],
    *,
    removed: int,
    pair: Sequence[int],
) -> Card:
    """The card of a plan that was carried out.

    Args:
        plan: what was to be done.
        parts: the folders of the parts.
        records: what is known of them.
        sources: the records of the sources.
        counts: documents and tokens of each split.
        removed: the number of documents that equal an earlier one.
        pair: the first one of these, and the one that stays in its place, by their numbers over all parts.
    """
    left = sum(record.documents for record in records)
    steps = []
    # Equal documents are counted over all parts, those of a filter within each.
    for name in plan.filters.names:
        count = removed if name == "exact" else sum(record.removed.get(name, 0) for record in records)
        left -= count
        found = (record.examples[name].text for record in records if name in record.examples)
        compared = [_compared_text(plan, parts, records, number) for number in pair] if name == "exact" else []
        example = compared or list(islice(found, 1))
        setting = plan.filters.model_dump(mode="json")[name]
        steps.append(StepCount(name=name, setting=setting, removed=count, left=left, example=example))
    return Card(
        sources=sources,
        license=plan.license,
        tokenizer=plan.tokenizer.fingerprint,
        documents=sum(record.documents for record in records),
        characters=sum(record.characters for record in records),
        steps=steps,
        splits={split: {"documents": documents, "tokens": tokens} for split, (documents, tokens) in counts.items()},
        bytes=plan.size or None,
        processor_seconds=round(sum(record.seconds for record in records), 3),
    )


def _compared_text(plan: PreparationPlan, parts: Sequence[Path], records: Sequence[PartRecord], number: int) -> str:
    """The beginning of a document that was compared, as its tokens say it."""
    # The document is numbered over all parts; find its part, then its file.
    ends = np.cumsum([record.kept for record in records])
    part = int(np.searchsorted(ends, number, side="right"))
    document = number - int(ends[part] - records[part].kept)
    folder = parts[part]
    where = "unit 0"
    if plan.units:
        of_files = np.cumsum([source.kept for source in records[part].sources])
        where = str(plan.units[part].sources[int(np.searchsorted(of_files, document, side="right"))].file)
    for split in plan.splits:
        found = np.flatnonzero(map_whole(folder / f"{split}.of", "<i8") == document)
        if len(found):
            edges = map_whole(folder / f"{split}.ends", "<i8")
            begin = int(edges[found[0] - 1]) if found[0] else 0
            stored = map_whole(folder / f"{split}.tokens", token_dtype(plan.tokenizer.vocab_size))
            decode = getattr(plan.tokenizer, "decode", lambda ids: " ".join(map(str, ids)))
            return f"{where}: {excerpt(decode(stored[begin : min(begin + 100, int(edges[found[0]]))]))}"
    return where


def write_card(out: Path, card: Card) -> None:
    """Write the files `CARD` into a folder."""
    write_json(out / CARD[0], card.model_dump(mode="json"))
    write_text(out / CARD[1], as_markdown(card))


def as_markdown(card: Card) -> str:
    """The card as a page."""
    lines = ["# Data card", "", f"- Licence: {card.license or 'not stated'}", f"- Tokenizer: `{card.tokenizer}`"]
    lines.append(f"- Read: {card.documents:,} documents of {card.characters:,} characters")
    if card.bytes and card.processor_seconds:
        rate = card.bytes / card.processor_seconds / 1e6
        lines.append(f"- Rate: {rate:.2f} MB/s per processor core ({card.processor_seconds:,.0f} s of a core)")
    lines += ["", "| split | documents | tokens |", "|---|---|---|"]
    lines += [f"| {split} | {n['documents']:,} | {n['tokens']:,} |" for split, n in card.splits.items()]
    lines += ["", "## Steps", ""]
    if card.steps:
        lines += ["| step | setting | left out | documents left |", "|---|---|---|---|"]
        lines += [f"| {step.name} | `{step.setting}` | {step.removed:,} | {step.left:,} |" for step in card.steps]
        for step in card.steps:
            if step.example:
                lines += ["", f"Left out by {step.name}:", "", *_quoted(step.example[0])]
            if len(step.example) > 1:
                lines += ["", "because it is like", "", *_quoted(step.example[1])]
    else:
        lines.append("None: every document is kept.")
    lines += ["", "## Sources", "", "| file | bytes | SHA-256 |", "|---|---|---|"]
    lines += [
        f"| {_cell(part['name'])} | {part.get('bytes', '')} | `{part['sha256']}` |" for part in card.sources[:_SHOWN]
    ]
    if (more := len(card.sources) - _SHOWN) > 0:
        lines += ["", f"and {more:,} more, which `card.json` lists."]
    return "\n".join(lines) + "\n"


def _cell(name: object) -> str:
    """A file's name, which may hold anything but a slash, in one cell of a table."""
    return printable(str(name)).replace("|", r"\|")


def _quoted(text: str) -> list[str]:
    return [f"    {text}"]
