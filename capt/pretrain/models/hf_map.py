"""Weights of a model that can be pretrained under the names of transformers, and back; `HuggingFace` has the tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.architecture import EncoderConfig, Table
from capt.pretrain.models.hf_config import list_names


def split(state: Mapping[str, Tensor], table: Table) -> dict[str, Tensor]:
    """The tensors of ``table`` in ``state`` under the other library's names, in memory of their own."""
    out: dict[str, Tensor] = {}
    for ours, theirs in table.items():
        for name, part in zip(theirs, state[ours].chunk(len(theirs)), strict=True):
            # A copy: safetensors does not write tensors that share memory.
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


TIED = frozenset({"mlm.weight"})
"""Our second names of shared parameters."""


def ties(config: EncoderConfig) -> dict[str, str]:
    """The second names of shared parameters -> the first ones."""
    return dict.fromkeys(TIED, f"encoder.{config.word}.weight")


HEAD = "aggregation."
"""Prefix of the aggregation head: Hugging Face's classes have no place for it, so it travels in a file of its own."""

HEAD_FILE = "capt_head.safetensors"
"""The aggregation head A(h) = outer(gelu(inner(h))); its metadata ``pooling`` says what h is: ``cls`` or ``mean``."""


OLD_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""Names that old releases of transformers wrote."""

MLM = "mlm."
"""Prefix of the masked-language-model head, which a bare encoder lacks."""


def to_hf(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Our state dict as that of transformers: no tied duplicates, no aggregation head, no shared memory.

    Raises:
        CheckpointError: names are missing or unexpected, or a tied pair differs.
    """
    what = config.hf.what
    check_ties(state, ties(config), "the checkpoint", what)
    table = config.hf_names()
    mine = {name for name in state if name not in TIED and not name.startswith(HEAD)}
    check_names(mine, set(table), "the checkpoint", what)
    return split(config.to_hf_tensors(state), table)


def from_hf(
    state: Mapping[str, Tensor], config: EncoderConfig, source: str = "the Hugging Face model"
) -> dict[str, Tensor]:
    """The state dict of a masked-language model of transformers under our names, tied names included.

    One without any tensor of the language-model head gives one without ``mlm.*`` but for the tied name.

    Raises:
        CheckpointError: names are missing or unexpected, or a tied pair differs (such a model is another one: newer
            releases of transformers load it untied, with only a warning).
    """
    hf = config.hf
    check_ties(state, hf.tied, source, hf.what)
    state = with_first_names(state, hf.tied)
    # A bare encoder has no tensor of the head, and none of it is missing then.
    headless = not any(name.startswith(hf.heads) for name in state)
    table = {ours: parts for ours, parts in config.hf_names().items() if not (headless and ours.startswith(MLM))}
    theirs = {name for name in state if name not in hf.tied and not re.fullmatch(hf.unused, name)}
    check_names(theirs, {name for parts in table.values() for name in parts}, source, hf.what)
    out = {ours: concatenate(state, parts, source, hf.what) for ours, parts in table.items()}
    out = config.from_hf_tensors(out)
    return out | {name: out[other] for name, other in ties(config).items()}


def with_prefix(state: Mapping[str, Tensor], config: EncoderConfig, source: str) -> dict[str, Tensor]:
    """``state`` under the names of the class with a language-model head: a bare encoder writes them without prefix.

    Names of old releases and of the authors' own files are those of today.

    Raises:
        CheckpointError: two tensors have one name then, and differ.
    """
    hf = config.hf
    state = under({name: renamed(name, {**OLD_NAMES, **hf.renamed}) for name in state}, state, source)
    if any(name.startswith(hf.prefix) for name in state):
        return state
    return {name if name.startswith(hf.heads) else hf.prefix + name: tensor for name, tensor in state.items()}


def under(names: Mapping[str, str], state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The tensors of ``state`` that ``names`` has (old -> new), under their new names.

    Raises:
        CheckpointError: two of them get one name, and differ.
    """
    first: dict[str, str] = {}
    for old, new in names.items():
        other = first.setdefault(new, old)
        if other != old and not torch.equal(state[other].float(), state[old].float()):
            raise CheckpointError(
                f"{source}: {list_names([other, old])} are two names of one tensor, with different values; remove one"
            )
    return {new: state[old] for new, old in first.items()}


def renamed(name: str, names: Mapping[str, str]) -> str:
    """``name`` with each part that is a key of ``names`` replaced."""
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def layers_in(state: Mapping[str, Tensor], config: EncoderConfig) -> int | None:
    """The number of layers that the names of transformers in ``state`` have; None where no table numbers them."""
    name = next((part for parts in config.hf.names.values() for part in parts if "#" in part), None)
    if name is None:
        return None
    number = re.compile(re.escape(name.partition("#")[0]) + r"(\d+)\.")
    return len({match[1] for name in state if (match := number.match(name))})
