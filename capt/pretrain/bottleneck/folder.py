"""The heads beside an export, which transformers does not read: ``bottleneck.safetensors`` and ``bottleneck.json``.

A job whose ``model.init`` is that folder continues them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.base.files import write_json
from capt.pretrain.base.records import Record, read_record
from capt.pretrain.bottleneck.config import BottleneckSection
from capt.pretrain.bottleneck.heads import Bottleneck
from capt.pretrain.engine.durable import write_tensors
from capt.pretrain.models.heads import MLMHead
from capt.pretrain.models.hf_config import list_names
from capt.pretrain.models.hf_folder import read_tensor_file
from capt.pretrain.models.hf_map import MLM

logger = logging.getLogger(__name__)

TENSORS, DESCRIPTION = "bottleneck.safetensors", "bottleneck.json"
_TIED = ("bow.weight", "decoder.weight")
"""Names under which the heads hold the word embedding again; with ``bow_matrix=own`` the bag's is its own."""
_OF_ROWS = ("bow.weight", "bow.bias")
"""Tensors with a row for each token id."""


class _Description(Record):
    head: Literal["bow", "decoder", "both"]
    pooling: Literal["cls", "mean"]
    bow_matrix: Literal["tied", "own"]
    decoder_rate: float


@dataclass(frozen=True)
class StoredHeads:
    """Heads as a folder has them.

    Attributes:
        source: the file.
        description: how they were trained.
        tensors: by their names in `Bottleneck`.
        mlm: of the language-model head, which the decoder needs and an encoder alone does not have.
    """

    source: Path
    description: _Description
    tensors: Mapping[str, Tensor]
    mlm: Mapping[str, Tensor]


def write_heads(folder: Path, heads: Bottleneck, section: BottleneckSection, mlm: MLMHead | None = None) -> None:
    """Write the ``heads`` of a job with this ``section`` into an export.

    Args:
        folder: of the export.
        heads: with rows for the ids of the export.
        section: the job's ``bottleneck``.
        mlm: the language-model head, for an export that has none.
    """
    given = {name: each for name, each in heads.state_dict().items() if name not in _tied(section)}
    tensors = {name: each[: heads.classes] if name in _OF_ROWS else each for name, each in given.items()}
    if mlm is not None:
        tensors |= {MLM + name: each for name, each in mlm.state_dict().items() if name != "weight"}
    write_tensors(folder / TENSORS, {name: each.contiguous() for name, each in tensors.items()}, {"format": "pt"})
    keys = section.model_dump(mode="json", include=set(_Description.model_fields))
    write_json(folder / DESCRIPTION, {**keys, "pooling": heads.pooling})


def read_heads(folder: Path) -> StoredHeads | None:
    """Read the heads of an export; None where it has none. Raises ``CheckpointError``: a file is damaged or missing."""
    path = folder / TENSORS
    if not path.exists():
        return None
    if not (folder / DESCRIPTION).is_file():
        raise CheckpointError(f"{folder / DESCRIPTION} is missing: it says how {TENSORS} was trained; copy it as well")
    description = read_record(_Description, folder / DESCRIPTION, error=CheckpointError)
    tensors = read_tensor_file(path)
    mlm = {name: each for name, each in tensors.items() if name.startswith(MLM)}
    return StoredHeads(path, description, {name: each for name, each in tensors.items() if name not in mlm}, mlm)


def pooling_of_heads(folder: Path) -> Literal["mean", "cls"] | None:
    """Read which vector the heads beside an export were trained on; None where it has none.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / DESCRIPTION
    return read_record(_Description, path, error=CheckpointError).pooling if path.is_file() else None


def start_heads(heads: Bottleneck, section: BottleneckSection, stored: StoredHeads | None, name: str) -> None:
    """Copy ``stored`` heads into those of a job that starts from the folder ``name``; the log says which are new.

    Raises:
        CheckpointError: a head there is of another form than the job's.
    """
    for kind in ("bow", "decoder"):
        head: nn.Module | None = getattr(heads, kind)
        if head is None:
            continue
        if stored is None or stored.description.head not in (kind, "both"):
            logger.warning("%s has no %s of a bottleneck: it starts from random weights", name, kind)
            continue
        if kind == "bow" and stored.description.bow_matrix != section.bow_matrix:
            there = stored.description.bow_matrix
            raise CheckpointError(
                f"{stored.source}: bottleneck.bow_matrix is {there} there but {section.bow_matrix} in this job; set it "
                f"to {there}"
            )
        given = {key.removeprefix(f"{kind}."): x for key, x in stored.tensors.items() if key.startswith(f"{kind}.")}
        _copy(head, kind, given, heads.classes, section, stored.source)
        logger.info("%s: the %s of its bottleneck is continued", name, kind)
    if stored is not None and stored.description.pooling != heads.pooling:
        logger.warning(
            "%s: its bottleneck was trained with pooling %s, and is continued with %s (bottleneck.pooling)",
            name, stored.description.pooling, heads.pooling,
        )  # fmt: skip


def _copy(
    head: nn.Module, kind: str, given: Mapping[str, Tensor], classes: int, section: BottleneckSection, source: Path
) -> None:
    expected = {name: x for name, x in head.state_dict().items() if f"{kind}.{name}" not in _tied(section)}
    shapes = {
        name: (classes, *x.shape[1:]) if f"{kind}.{name}" in _OF_ROWS else tuple(x.shape)
        for name, x in expected.items()
    }
    unequal = [
        name
        for name in expected.keys() | given.keys()
        if tuple(getattr(given.get(name), "shape", "?")) != shapes.get(name)
    ]
    if unequal:
        raise CheckpointError(
            f"{source}: {list_names([f'{kind}.{name}' for name in sorted(unequal)])}: missing, unknown, or of another "
            "shape than this job's encoder has it; the file belongs to another encoder"
        )
    # Rows that only fill the vocabulary up are no part of an export.
    whole = {name: F.pad(x, (0, 0) * (x.ndim - 1) + (0, len(expected[name]) - len(x))) for name, x in given.items()}
    head.load_state_dict(whole, strict=False)


def _tied(section: BottleneckSection) -> tuple[str, ...]:
    return _TIED if section.bow_matrix == "tied" else _TIED[1:]
