"""Parameter names of LXMERT: ours, Hugging Face's, and those of airsplay's code; conversions in both directions.

Hugging Face's ``LxmertForPreTraining`` and ``LxmertForQuestionAnswering`` share their names. airsplay's files say
``bert.`` where Hugging Face says ``lxmert.``, and put ``module.`` in front after training on several GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import Tensor

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.architecture import expand
from capt.pretrain.models.hf_map import check_names, check_ties, concatenate, split, with_first_names
from capt.pretrain.models.lxmert.config import LxmertConfig

WHAT = "LXMERT"

_LAYER = {
    "attention.query.*": ("{attention}.self.query.*",),
    "attention.key_value.*": ("{attention}.self.key.*", "{attention}.self.value.*"),
    "attention.output.*": ("{attention}.output.dense.*",),
    "attention_norm.*": ("{attention}.output.LayerNorm.*",),
    "ffn_in.*": ("{inter}.dense.*",),
    "ffn_out.*": ("{output}.dense.*",),
    "ffn_norm.*": ("{output}.LayerNorm.*",),
}
"""A Transformer layer. Its three modules have names of their own in the cross-modality layers."""


def _layer(ours: str, theirs: str, **modules: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{ours}.{name}": tuple(f"{theirs}.{part.format(**modules)}" for part in parts)
        for name, parts in _LAYER.items()
    }


_BERT = {"attention": "attention", "inter": "intermediate", "output": "output"}
_X = "lxmert.encoder.x_layers.#"

WORDS: dict[str, tuple[str, ...]] = {
    "encoder.words.word.weight": ("lxmert.embeddings.word_embeddings.weight",),
    "encoder.words.position.weight": ("lxmert.embeddings.position_embeddings.weight",),
    "encoder.words.token_type.weight": ("lxmert.embeddings.token_type_embeddings.weight",),
    "encoder.words.norm.*": ("lxmert.embeddings.LayerNorm.*",),
    **_layer("encoder.word_layers.#", "lxmert.encoder.layer.#", **_BERT),
}
"""Ours -> Hugging Face: what only words go through. ``#`` is the layer, ``*`` represents ``weight`` and ``bias``."""

REGIONS: dict[str, tuple[str, ...]] = {
    "encoder.regions.feature.*": ("lxmert.encoder.visn_fc.visn_fc.*",),
    "encoder.regions.feature_norm.*": ("lxmert.encoder.visn_fc.visn_layer_norm.*",),
    "encoder.regions.box.*": ("lxmert.encoder.visn_fc.box_fc.*",),
    "encoder.regions.box_norm.*": ("lxmert.encoder.visn_fc.box_layer_norm.*",),
    **_layer("encoder.region_layers.#", "lxmert.encoder.r_layers.#", **_BERT),
}
"""What only regions go through."""

CROSS: dict[str, tuple[str, ...]] = {
    "encoder.cross_layers.#.cross.query.*": (f"{_X}.visual_attention.att.query.*",),
    "encoder.cross_layers.#.cross.key_value.*": (
        f"{_X}.visual_attention.att.key.*",
        f"{_X}.visual_attention.att.value.*",
    ),
    "encoder.cross_layers.#.cross.output.*": (f"{_X}.visual_attention.output.dense.*",),
    "encoder.cross_layers.#.cross_norm.*": (f"{_X}.visual_attention.output.LayerNorm.*",),
    **_layer("encoder.cross_layers.#.words", _X, attention="lang_self_att", inter="lang_inter", output="lang_output"),
    **_layer("encoder.cross_layers.#.regions", _X, attention="visn_self_att", inter="visn_inter", output="visn_output"),
}
"""The cross-modality layers; their one ``visual_attention`` serves both directions."""

HEADS: dict[str, dict[str, tuple[str, ...]]] = {
    "pooler": {"pooler.dense.*": ("lxmert.pooler.dense.*",)},
    "mlm": {
        "mlm.dense.*": ("cls.predictions.transform.dense.*",),
        "mlm.norm.*": ("cls.predictions.transform.LayerNorm.*",),
        "mlm.bias": ("cls.predictions.bias",),
        "matching.*": ("cls.seq_relationship.*",),
    },
    "region_heads": {
        "region_heads.dense.*": ("obj_predict_head.transform.dense.*",),
        "region_heads.norm.*": ("obj_predict_head.transform.LayerNorm.*",),
    },
    "region_heads.objects": {"region_heads.objects.*": ("obj_predict_head.decoder_dict.obj.*",)},
    "region_heads.attributes": {"region_heads.attributes.*": ("obj_predict_head.decoder_dict.attr.*",)},
    "region_heads.features": {"region_heads.features.*": ("obj_predict_head.decoder_dict.feat.*",)},
    "answer_head": {
        "answer_head.inner.*": ("answer_head.logit_fc.0.*",),
        "answer_head.norm.*": ("answer_head.logit_fc.2.*",),
        "answer_head.outer.*": ("answer_head.logit_fc.3.*",),
    },
}
"""The heads of the encoder, in the groups that a model has or lacks as a whole."""

FOR_QUESTION_ANSWERING = ("pooler", "answer_head")
"""The groups of ``LxmertForQuestionAnswering``; ``LxmertForPreTraining`` has all that its configuration switches on."""

TIED = {"mlm.weight": "encoder.words.word.weight"}
"""Our second name of a shared parameter -> the first."""

HF_TIED = {"cls.predictions.decoder.weight": "lxmert.embeddings.word_embeddings.weight"}
"""The second name there; transformers leaves it out of its files, airsplay writes it."""

AGGREGATION = "aggregation."
"""Prefix of CAPT's head, for which the other libraries have no place."""

_BUFFER = re.compile(r"lxmert\.embeddings\.(position|token_type)_ids")


def parameter_names(config: LxmertConfig, groups: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Every parameter of an encoder of ``config`` with the heads ``groups``: our name, and those of its parts."""
    table = dict(expand(WORDS, config.language_layers))
    table |= dict(expand(REGIONS, config.vision_layers))
    table |= dict(expand(CROSS, config.cross_layers))
    for group in groups:
        table |= dict(expand(HEADS[group], 1))
    return table


def groups_in(names: Collection[str]) -> list[str]:
    """The heads of which there is at least one tensor under Hugging Face's ``names``."""
    return [
        group for group, table in HEADS.items() if any(part in names for _, parts in expand(table, 1) for part in parts)
    ]


def to_hf(state: Mapping[str, Tensor], config: LxmertConfig, groups: Collection[str]) -> dict[str, Tensor]:
    """The encoder and the heads ``groups`` of our state dict under Hugging Face's names, without tied duplicates.

    Raises:
        CheckpointError: a parameter is missing, or a tied pair differs.
    """
    check_ties(state, TIED, "the checkpoint", WHAT)
    table = parameter_names(config, groups)
    check_names(set(table) & set(state), set(table), "the checkpoint", WHAT)
    return split(state, table)


def from_hf(state: Mapping[str, Tensor], config: LxmertConfig, source: str) -> dict[str, Tensor]:
    """Tensors under Hugging Face's names (see `hugging_face_names`) under ours, tied names included.

    Heads that ``state`` lacks as a whole are left out; of those that it has, no part may be missing.

    Raises:
        CheckpointError: names are missing or unexpected, or a tied pair differs.
    """
    check_ties(state, HF_TIED, source, WHAT)
    groups = groups_in(state)
    if "pooler" not in groups:  # a model without it is no LXMERT, and no group can say that it is missing
        groups.append("pooler")
    table = parameter_names(config, groups)
    given = {name for name in state if name not in HF_TIED and not _BUFFER.fullmatch(name)}
    check_names(given, {name for parts in table.values() for name in parts}, source, WHAT)
    out = {ours: concatenate(state, parts, source, WHAT) for ours, parts in table.items()}
    return out | {name: out[other] for name, other in TIED.items() if "mlm" in groups}


_PREFIXES = (
    ("bert.", "lxmert."),
    ("lxrt_encoder.model.bert.", "lxmert."),  # airsplay's fine-tuned models
    ("logit_fc.", "answer_head.logit_fc."),
    *((name, f"lxmert.{name}") for name in ("embeddings.", "encoder.", "pooler.")),  # a bare LxmertModel
)
_THEIRS = ("lxmert.", "cls.", "obj_predict_head.", "answer_head.")


def hugging_face_names(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """``state`` of airsplay's code, of a bare ``LxmertModel`` or of any of its classes, under one set of names.

    Raises:
        CheckpointError: two tensors get the same name.
    """
    out: dict[str, Tensor] = {}
    for given, tensor in state.items():
        name = _hugging_face_name(given.removeprefix("module."))
        if name in out:
            raise CheckpointError(f"{source}: two tensors mean {name}; {given} is one of them, remove one")
        out[name] = tensor
    return with_first_names(out, HF_TIED)


def _hugging_face_name(name: str) -> str:
    if name.startswith(_THEIRS):
        return name
    for theirs, ours in _PREFIXES:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
