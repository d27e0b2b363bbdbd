"""``model.init``: a pretrained encoder with its tokenizer, from a run or checkpoint of ours or a Hugging Face folder.

What a folder of somebody else says is not believed: ``config.json`` goes through the guards of
``pretrain.models.hf_folder``, only safetensors are opened, and the model is built only once the tensors are known to
have the sizes that it claims. A weight that the encoder lacks, or that it has no place for, is an error; heads and
poolers are what a fine-tuned model leaves behind.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.encoders import OURS, SentenceEncoder, build_encoder, family_of
from finetune.glue.config import GlueJob
from pretrain.base.errors import CheckpointError, DataError, shown
from pretrain.engine.checkpoint import find_best, read_job, read_weights, verify
from pretrain.language.config import LanguageJob
from pretrain.language.restore import load_model
from pretrain.models.hf_folder import is_hf, read_config, read_json, read_tensors
from pretrain.models.hf_map import joined, names
from pretrain.models.hub import local_folder
from tokenizer.encode import TextTokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_HEADS = re.compile(
    r"(cls|lm_head|mlm_head|mask_predictions|lm_predictions|generator_\w+|discriminator_predictions|classifier"
    r"|pre_classifier|predictions|sop_classifier|qa_outputs|vocab_\w+|activation|pooler|pooler_activation|score)(\..*|$)"
)
"""What classes of transformers put beside the encoder, or on it."""

_BUFFERS = re.compile(r"embeddings\.(position|token_type)_ids")
_OLD_NAMES = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
_NOT_OF_THE_ENCODER = (
    "architectures", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    "transformers_version", "_name_or_path", "torch_dtype", "dtype", "_num_labels",
)  # fmt: skip
_MAX_LAYERS = 1000


@dataclass(frozen=True)
class Backbone:
    """A pretrained encoder. ``described`` are the keys of a ``config.json`` from which it can be built again."""

    encoder: SentenceEncoder
    described: dict[str, Any]
    tokenizer: TextTokenizer


def load_backbone(
    path: Path, *, dropout: float = 0.1, attention_dropout: float = 0.1, allow_missing: bool = False
) -> Backbone:
    """Load the encoder in ``path``, with these dropouts.

    Args:
        path: a run (its best checkpoint, else the newest) or a checkpoint, of ``capt_language`` or of fine-tuning; or a
            Hugging Face folder or hub id of a masked-language model, a classifier or an encoder. Heads are left behind.
        dropout: of hidden layers.
        attention_dropout: of attention weights.
        allow_missing: warn of weights that are missing (they stay as initialised) or unknown, instead of refusing.

    Raises:
        CheckpointError: nothing usable there, no tokenizer, or weights are missing, unknown or of another shape.
    """
    source, path = str(path), local_folder(path)
    if is_hf(path):
        described, state, tokenizer = _read_hf(path)
    else:
        described, state, tokenizer = _read_ours(path)
    options: dict[str, Any] = {"dropout": dropout, "attention_dropout": attention_dropout, "source": source}
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in build_encoder(described, **options).state_dict().items()}
    _compare(shapes, state, source, allow_missing)
    encoder = build_encoder(described, **options)
    encoder.load_state_dict({name: state[name] for name in shapes if name in state}, strict=False)
    if tokenizer.vocab_size > encoder.rows:
        raise CheckpointError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} ids, the encoder {encoder.rows} rows"
        )
    return Backbone(encoder, described, tokenizer)


def _tokenizer_of(folder: Path, source: Path) -> TextTokenizer:
    try:
        return load_tokenizer(folder)
    except DataError as error:
        raise CheckpointError(f"{source}: its tokenizer cannot be read: {error}") from None


def _read_ours(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], TextTokenizer]:
    checkpoint = find_best(path)
    verify(checkpoint)
    job = read_job(checkpoint)
    tokenizer = _tokenizer_of(checkpoint / "tokenizer", checkpoint)
    if isinstance(job, LanguageJob):
        model = load_model(checkpoint).model
        described = model.config.to_hf(bos_id=tokenizer.special.bos, eos_id=tokenizer.special.eos)
        state = {f"model.{name}": tensor for name, tensor in model.encoder.state_dict().items()}
        return _encoder_keys(described), state, tokenizer
    if isinstance(job, GlueJob) and job.model.encoder is not None:
        weights = read_weights(checkpoint)
        prefix = "encoder."
        state = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
        return job.model.encoder, state, tokenizer
    raise CheckpointError(f"{checkpoint}: a checkpoint of task {job.task.type}; it has no text encoder to fine-tune")


def _read_hf(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], TextTokenizer]:
    described = read_json(folder / "config.json")
    family_of(described, str(folder / "config.json"))
    ours = described["model_type"] in OURS
    if ours:
        described = read_config(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            read_json(folder / name)
    tokenizer = _tokenizer_of(folder, folder)
    pad = described.get("pad_token_id")
    if pad not in (None, tokenizer.special.pad):
        raise CheckpointError(f"{folder}: the model pads with {shown(pad)}, its tokenizer with {tokenizer.special.pad}")
    described = {**_encoder_keys(described), "pad_token_id": tokenizer.special.pad}
    tensors = _encoder_tensors(read_tensors(folder))
    layers = described.get("num_hidden_layers", described.get("n_layers", 1))
    if not isinstance(layers, int) or not 0 < layers <= _MAX_LAYERS:
        raise CheckpointError(f"{folder / 'config.json'}: num_hidden_layers is {shown(layers)}")
    if ours:
        return described, _under_our_names(tensors, layers, str(folder)), tokenizer
    return described, {f"model.{name}": tensor for name, tensor in tensors.items()}, tokenizer


def _encoder_keys(described: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in described.items() if key not in _NOT_OF_THE_ENCODER}


def _encoder_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a bare encoder calls them: without the model's prefix, heads, pooler, old names and buffers."""
    found: dict[str, Tensor] = {}
    prefixes = {name.partition(".")[0] for name in tensors if re.match(r"\w+\.embeddings\.", name)}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        bare = rest if first in prefixes else name
        for old, new in _OLD_NAMES.items():
            bare = bare.replace(old, new)
        if not _HEADS.fullmatch(bare) and not _BUFFERS.fullmatch(bare):
            found[bare] = tensor
    return found


def _under_our_names(tensors: Mapping[str, Tensor], layers: int, source: str) -> dict[str, Tensor]:
    """RoBERTa's encoder under the names of `RobertaSentences`; what is not in the table keeps its own name."""
    left, found = dict(tensors), {}
    for ours, theirs in names(layers):
        parts = [name.removeprefix("roberta.") for name in theirs]
        if ours.startswith("encoder.") and all(part in left for part in parts):
            found[f"model.{ours.removeprefix('encoder.')}"] = joined(left, parts, source)
            for part in parts:
                del left[part]
    return found | left


def _compare(shapes: Mapping[str, torch.Size], state: Mapping[str, Tensor], source: str, allow_missing: bool) -> None:
    other = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(shape)}"
        for name, shape in shapes.items()
        if name in state and state[name].shape != shape
    ]
    if other:
        raise CheckpointError(f"{source}: config.json and tensors disagree: {_some(other)}")
    odd = {"missing": sorted(shapes.keys() - state.keys()), "unexpected": sorted(state.keys() - shapes.keys())}
    if not any(odd.values()):
        return
    problem = "; ".join(f"{kind}: {_some(found)}" for kind, found in odd.items() if found)
    if not allow_missing:
        raise CheckpointError(f"{source}: not the weights of its encoder ({problem}); model.allow_missing=true goes on")
    logger.warning("%s: missing weights stay as initialised, unexpected ones are left out: %s", source, problem)


def _some(found: list[str]) -> str:
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
