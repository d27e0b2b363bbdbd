"""Read a pretrained LXMERT that somebody else wrote as a Hugging Face folder.

Nothing in it is run or followed, and no size that it claims is believed: sizes are those of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.architecture import expand
from capt.pretrain.models.hf_config import list_names, local_folder
from capt.pretrain.models.hf_folder import (
    is_hf,
    open_tensors,
    read_json,
    read_tensor_file,
    read_tensors,
    read_tokenizer_configs,
)
from capt.pretrain.models.hf_map import HEAD_FILE, check_names, check_ties, concatenate, split, with_first_names
from capt.pretrain.models.lxmert.config import LxmertConfig
from capt.pretrain.models.lxmert.hf_config import parse_hf_config
from capt.pretrain.models.lxmert.layers import SEGMENTS
from capt.tokenizer.encode import TextTokenizer, load_tokenizer

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
"""Ours -> Hugging Face: the layers of regions alone."""

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
"""The second name there; transformers leaves it out of its files."""

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


_BARE = ("embeddings.", "encoder.", "pooler.")
"""Beginnings of the names of a bare ``LxmertModel``; its other classes have ``lxmert.`` in front."""


def hugging_face_names(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Name the tensors of a bare ``LxmertModel`` as its other classes do.

    Raises:
        CheckpointError: two tensors get the same name.
    """
    out: dict[str, Tensor] = {}
    for given, tensor in state.items():
        name = f"lxmert.{given}" if given.startswith(_BARE) else given
        if name in out:
            raise CheckpointError(f"{source}: two tensors mean {name}; {given} is one of them, remove one")
        out[name] = tensor
    return with_first_names(out, HF_TIED)


_STACKS = {
    "language_layers": re.compile(r"lxmert\.encoder\.layer\.(\d{1,4})\."),
    "vision_layers": re.compile(r"lxmert\.encoder\.r_layers\.(\d{1,4})\."),
    "cross_layers": re.compile(r"lxmert\.encoder\.x_layers\.(\d{1,4})\."),
}
_SIZES = {
    "vocab_size": ("lxmert.embeddings.word_embeddings.weight", 0),
    "hidden": ("lxmert.embeddings.word_embeddings.weight", 1),
    "max_positions": ("lxmert.embeddings.position_embeddings.weight", 0),
    "ffn": ("lxmert.encoder.layer.0.intermediate.dense.weight", 0),
    "feature_size": ("lxmert.encoder.visn_fc.visn_fc.weight", 1),
}
_CLASSES = {
    "object_classes": ("obj_predict_head.decoder_dict.obj.weight", 0),
    "attribute_classes": ("obj_predict_head.decoder_dict.attr.weight", 0),
    "answers": ("answer_head.logit_fc.3.weight", 0),
}
"""Field of `LxmertConfig` -> the tensor and the axis that have this size; those of heads may be missing."""


@dataclass(frozen=True)
class PretrainedLxmert:
    """The content of a source.

    Attributes:
        config: its sizes; 0 classes for a head that it lacks.
        state: its tensors under the names of `LxmertModel`; heads that it lacks are missing.
        tokenizer: None where the source has none.
        answers: of the answer head, in the order of its logits; None where the source does not name them.
    """

    config: LxmertConfig
    state: dict[str, Tensor]
    tokenizer: TextTokenizer | None
    answers: tuple[str, ...] | None


_REMEDY = (
    "give a Hugging Face folder (config.json, model.safetensors); this writes one of LXMERT's released weights: python "
    '-c "from transformers import AutoTokenizer as T, LxmertForPreTraining as M; '
    "[x.from_pretrained('unc-nlp/lxmert-base-uncased').save_pretrained('lxmert') for x in (T, M)]\""
)


def is_lxmert(source: Path) -> bool:
    """Return whether ``source`` is for `read_lxmert`, and not a run or checkpoint of ours: a folder, or any file."""
    return source.is_file() or is_hf(source)


def read_lxmert(source: Path) -> PretrainedLxmert:
    """Read a Hugging Face folder (or hub id) of any class of LXMERT.

    Raises:
        CheckpointError: it is none, is damaged or hostile, tensors are missing, unknown or of the wrong shape, or
            the hub has no such model.
        DataError: its tokenizer cannot be read.
    """
    if source.is_file():
        raise CheckpointError(f"{source}: a file, such as a pickle, which could run code when it is opened; {_REMEDY}")
    folder = local_folder(source)
    if not is_hf(folder):
        raise CheckpointError(f"{source}: no LXMERT here; give a Hugging Face folder (config.json, model.safetensors)")
    path = folder / "config.json"
    claimed, answers = parse_hf_config(read_json(path), str(path))
    tensors = hugging_face_names(read_tensors(folder), str(folder))
    shown = _sizes(tensors, str(folder))
    for name, size in shown.items():
        # A head that its configuration announces may be missing from the file.
        if getattr(claimed, name) != size and not (name in _CLASSES and size == 0):
            raise CheckpointError(f"{path}: says {name} {getattr(claimed, name)}, but the tensors have {size}")
    # Classes are those of the tensors, 0 for a head that is not there.
    config = claimed.model_copy(update={name: shown[name] for name in _CLASSES})
    state = from_hf(tensors, config, str(folder))
    if (folder / HEAD_FILE).exists():
        state |= {AGGREGATION + name: tensor for name, tensor in read_tensor_file(folder / HEAD_FILE).items()}
        config = config.model_copy(update={"pooling": _pooling(folder / HEAD_FILE)})
    return PretrainedLxmert(config, state, _tokenizer(folder, config), answers if config.answers else None)


def _sizes(tensors: Mapping[str, Tensor], source: str) -> dict[str, int]:
    """Fields of `LxmertConfig` as the tensors show them; 0 classes for heads that are missing."""
    missing = [name for name, _ in _SIZES.values() if name not in tensors]
    if missing:
        raise CheckpointError(f"{source} does not have the tensors of this LXMERT: missing: {list_names(missing)}")
    sizes = {field: _size(tensors[name], name, axis, source) for field, (name, axis) in _SIZES.items()}
    for field, (name, axis) in _CLASSES.items():
        sizes[field] = _size(tensors[name], name, axis, source) if name in tensors else 0
    for field, pattern in _STACKS.items():
        # Numbers of layers may have gaps in a damaged file: the names are compared later.
        sizes[field] = len({match[1] for name in tensors if (match := pattern.match(name))})
        if not 1 <= sizes[field] <= 1000:
            raise CheckpointError(f"{source}: {sizes[field]} {field.replace('_', ' ')}; LXMERT has 1 to 1,000")
    types = "lxmert.embeddings.token_type_embeddings.weight"
    if types in tensors and len(tensors[types]) != SEGMENTS:
        raise CheckpointError(f"{source}: {types} has {len(tensors[types])} rows; LXMERT has {SEGMENTS}")
    return sizes


def _size(tensor: Tensor, name: str, axis: int, source: str) -> int:
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise CheckpointError(f"{source}: {name} has shape {tuple(tensor.shape)}; a matrix is expected")
    return tensor.shape[axis]


def _pooling(path: Path) -> str:
    with open_tensors(path) as file:
        pooling = (file.metadata() or {}).get("pooling", "cls")
    if pooling not in ("cls", "pooled"):
        raise CheckpointError(f"{path}: pooling is {pooling!r} in its metadata; cls or pooled is possible")
    return str(pooling)


def _tokenizer(folder: Path, config: LxmertConfig) -> TextTokenizer | None:
    if not any((folder / name).exists() for name in ("tokenizer.json", "vocab.txt", "vocab.json")):
        return None
    read_tokenizer_configs(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.known("vocab_size") or tokenizer.special.pad != config.pad_id:
        raise CheckpointError(
            f"{folder}: the tokenizer ({tokenizer.vocab_size} ids, padding {tokenizer.special.pad}) is not the model's "
            f"({config.vocab_size} rows, padding {config.pad_id})"
        )
    return tokenizer
