"""Parameter names of ``RobertaForMaskedLM`` (and XLM-R, the same) and ours, as a table; conversions in both directions.

Where several Hugging Face tensors represent one of ours, they are its rows in that order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.hf_config import list_names

# Tables of parameter names, ours and those of another library, and what every conversion by a table checks.
#
# A row is our name and the names of its parts there: where several tensors represent one of ours, they are its rows in
# that order. ``#`` is the number of a layer, ``*`` represents ``weight`` and ``bias``.


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


WHAT = "RoBERTa"

ROBERTA: dict[str, tuple[str, ...]] = {
    "encoder.embeddings.word.weight": ("roberta.embeddings.word_embeddings.weight",),
    "encoder.embeddings.position.weight": ("roberta.embeddings.position_embeddings.weight",),
    "encoder.embeddings.token_type.weight": ("roberta.embeddings.token_type_embeddings.weight",),
    "encoder.embeddings.norm.*": ("roberta.embeddings.LayerNorm.*",),
    "encoder.layers.#.attention.query.*": ("roberta.encoder.layer.#.attention.self.query.*",),
    "encoder.layers.#.attention.key_value.*": (
        "roberta.encoder.layer.#.attention.self.key.*",
        "roberta.encoder.layer.#.attention.self.value.*",
    ),
    "encoder.layers.#.attention.output.*": ("roberta.encoder.layer.#.attention.output.dense.*",),
    "encoder.layers.#.attention_norm.*": ("roberta.encoder.layer.#.attention.output.LayerNorm.*",),
    "encoder.layers.#.ffn_in.*": ("roberta.encoder.layer.#.intermediate.dense.*",),
    "encoder.layers.#.ffn_out.*": ("roberta.encoder.layer.#.output.dense.*",),
    "encoder.layers.#.ffn_norm.*": ("roberta.encoder.layer.#.output.LayerNorm.*",),
    "mlm.dense.*": ("lm_head.dense.*",),
    "mlm.norm.*": ("lm_head.layer_norm.*",),
    "mlm.bias": ("lm_head.bias",),
}
"""Ours -> Hugging Face. ``#`` is the layer, ``*`` represents ``weight`` and ``bias``."""

TIED = {"mlm.weight": "encoder.embeddings.word.weight"}
"""Our second name of a shared parameter -> the first."""

HF_TIED = {
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
"""The second names of transformers, which leaves them out of its files; other tools write them beside the first names,
or instead of them."""

HF_UNUSED = re.compile(r"roberta\.(embeddings\.(position|token_type)_ids|pooler\.dense\.(weight|bias))")
"""Buffers of old releases, and the pooler, which masked-language modelling never trains."""

HEAD = "aggregation."
"""Prefix of the aggregation head: Hugging Face's RoBERTa has no place for it, so it travels in a file of its own."""

HEAD_FILE = "capt_head.safetensors"
"""The aggregation head A(h) = outer(gelu(inner(h))); its metadata ``pooling`` says what h is: ``cls`` or ``mean``."""


MLM = "mlm."
"""Prefix of the masked-language-model head, which a bare encoder lacks."""


def parameter_names(layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every parameter of a model of ``layers`` layers: our name and the Hugging Face names of its parts."""
    return expand(ROBERTA, layers)


def to_hf(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Our state dict as that of ``RobertaForMaskedLM``: no tied duplicates, no aggregation head, no shared memory.

    Raises:
        CheckpointError: names are missing or unexpected, or a tied pair differs.
    """
    check_ties(state, TIED, "the checkpoint", WHAT)
    table = dict(parameter_names(layers))
    mine = {name for name in state if name not in TIED and not name.startswith(HEAD)}
    check_names(mine, set(table), "the checkpoint", WHAT)
    return split(state, table)


def from_hf(state: Mapping[str, Tensor], layers: int, source: str = "the Hugging Face model") -> dict[str, Tensor]:
    """The state dict of ``RobertaForMaskedLM`` or ``XLMRobertaForMaskedLM`` under our names, tied names included.

    One without any tensor of ``lm_head`` (a bare ``RobertaModel``) gives one without ``mlm.*`` but for the tied name.

    Raises:
        CheckpointError: names are missing or unexpected, or a tied pair differs (such a model is not RoBERTa: newer
            releases of transformers load it untied, with only a warning).
    """
    check_ties(state, HF_TIED, source, WHAT)
    state = with_first_names(state, HF_TIED)
    headless = not any(name.startswith("lm_head.") for name in state)
    table = {ours: parts for ours, parts in parameter_names(layers) if not (headless and ours.startswith(MLM))}
    theirs = {name for name in state if name not in HF_TIED and not HF_UNUSED.fullmatch(name)}
    check_names(theirs, {name for parts in table.values() for name in parts}, source, WHAT)
    out = {ours: concatenate(state, parts, source, WHAT) for ours, parts in table.items()}
    return out | {name: out[other] for name, other in TIED.items()}


def with_roberta_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` under the names of ``RobertaForMaskedLM``: a bare ``RobertaModel`` writes them without ``roberta.``."""
    if any(name.startswith("roberta.") for name in state):
        return dict(state)
    return {name if name.startswith("lm_head.") else f"roberta.{name}": tensor for name, tensor in state.items()}
