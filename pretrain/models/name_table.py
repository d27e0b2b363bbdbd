"""Tables of parameter names, ours and those of another library, and what every conversion by a table checks.

A row is our name and the names of its parts there: where several tensors represent one of ours, they are its rows in
that order. ``#`` is the number of a layer, ``*`` represents ``weight`` and ``bias``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pretrain.base.errors import CheckpointError
from pretrain.models.hf_config import list_names

Table = Mapping[str, tuple[str, ...]]


def expand(table: Table, layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every parameter that ``table`` means in a model of ``layers`` layers."""
    for ours, theirs in table.items():
        for layer in range(layers) if "#" in ours else (0,):
            for kind in ("weight", "bias") if "*" in ours else ("",):
                yield _fill(ours, layer, kind), tuple(_fill(name, layer, kind) for name in theirs)


def split(state: Mapping[str, Tensor], table: Table) -> dict[str, Tensor]:
    """The tensors of ``table`` in ``state`` under the other library's names, in memory of their own."""
    out: dict[str, Tensor] = {}
    for ours, theirs in table.items():
        for name, part in zip(theirs, state[ours].chunk(len(theirs)), strict=True):
            out[name] = part.detach().clone().contiguous()
    return out


def concatenate(state: Mapping[str, Tensor], parts: Sequence[str], source: str, what: str = "RoBERTa") -> Tensor:
    """The tensors ``parts`` of ``state`` as the rows of one. Raises ``CheckpointError`` where their shapes differ."""
    try:
        return torch.cat([state[name] for name in parts])
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(state[name].shape)}" for name in parts)
        raise CheckpointError(f"{source}: not the shapes of this {what}: {shapes}") from None


def check_names(given: set[str], wanted: set[str], source: str, what: str) -> None:
    """Raise ``CheckpointError`` unless both sets are equal; missing and unexpected names are listed."""
    missing, unexpected = sorted(wanted - given), sorted(given - wanted)
    if missing or unexpected:
        differences = {"missing": missing, "unexpected": unexpected}
        problem = "; ".join(f"{kind}: {list_names(names)}" for kind, names in differences.items() if names)
        raise CheckpointError(f"{source} does not have the tensors of this {what}: {problem}")


def with_first_names(state: Mapping[str, Tensor], ties: Mapping[str, str]) -> dict[str, Tensor]:
    """``state`` where a shared parameter that has only its second name gets its first one; ``ties``: second -> first.

    Of two names of a tensor ``safetensors.torch.save_model`` writes the one that sorts first, whichever that is.
    """
    return {ties[name] if name in ties and ties[name] not in state else name: x for name, x in state.items()}


def check_ties(state: Mapping[str, Tensor], ties: Mapping[str, str], source: str, what: str) -> None:
    """Raise ``CheckpointError`` where ``state`` has both names of a shared parameter with different values."""
    for name, other in ties.items():
        if name in state and other in state and not torch.equal(state[name], state[other]):
            raise CheckpointError(f"{source}: {name} differs from {other}; {what} ties them, so one of them is wrong")


def _fill(name: str, layer: int, kind: str) -> str:
    return name.replace("#", str(layer)).replace("*", kind)
