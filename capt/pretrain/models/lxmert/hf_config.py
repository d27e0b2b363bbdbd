"""The ``config.json`` of Hugging Face's LXMERT, in both directions. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from capt.pretrain.base.errors import CheckpointError, shown
from capt.pretrain.models.lxmert.config import LxmertConfig

Architecture = Literal["LxmertForPreTraining", "LxmertForQuestionAnswering"]
"""transformers' classes with heads."""

VISUAL_LOSS_NORMALIZER = 1 / 0.15
"""The mean over all regions, divided by the rate of masked ones. transformers' default is 6.67."""

LAYER_NORM_EPS = 1e-12
"""Written into transformers' code; its configuration has no key for it."""

_FIELDS = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "language_layers": "l_layers",
    "vision_layers": "r_layers",
    "cross_layers": "x_layers",
    "feature_size": "visual_feat_dim",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
}
"""Fields of ours that have one key there."""

_SWITCHES = ("visual_obj_loss", "visual_attr_loss", "visual_feat_loss", "task_obj_predict", "task_qa")
_Rate = Annotated[float, Field(ge=0, lt=1)]
_Layers = Annotated[int, Field(ge=1, le=1000)]
_Classes = Annotated[int, Field(ge=0, le=1 << 24)]


class _HFConfig(BaseModel):
    """The keys that decide a model. Those with a default here may be missing, as in the released file."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    model_type: Literal["lxmert"]
    hidden_act: Literal["gelu"] = "gelu"
    vocab_size: int = Field(ge=1, le=1 << 24)
    hidden_size: int = Field(ge=1, le=1 << 16)
    num_attention_heads: int = Field(ge=1, le=1 << 12)
    intermediate_size: int = Field(ge=1, le=1 << 20)
    max_position_embeddings: int = Field(ge=1, le=1 << 20)
    type_vocab_size: Literal[2] = 2
    l_layers: _Layers
    r_layers: _Layers
    x_layers: _Layers
    visual_feat_dim: int = Field(ge=1, le=1 << 20)
    visual_pos_dim: Literal[4] = 4
    num_qa_labels: _Classes = 9500
    num_object_labels: _Classes = 1600
    num_attr_labels: _Classes = 400
    hidden_dropout_prob: _Rate = 0.1
    attention_probs_dropout_prob: _Rate = 0.1
    initializer_range: float = Field(0.02, gt=0, le=100)
    pad_token_id: int | None = Field(None, ge=0, lt=1 << 24)
    tie_word_embeddings: Literal[True] | None = True
    quantization_config: None = None
    id2label: dict[str, Annotated[str, Field(max_length=10_000)]] | None = None


def parse_hf_config(keys: Mapping[str, Any], source: str) -> tuple[LxmertConfig, tuple[str, ...] | None]:
    """Read the sizes, and the answers where they are named, from ``keys``, the ``config.json`` of ``source``.

    Raises:
        CheckpointError: a key is missing, of another type, out of bounds or of another model; the message names it.
    """
    try:
        hf = _HFConfig.model_validate(dict(keys))
        fields = {ours: getattr(hf, theirs) for ours, theirs in _FIELDS.items()}
        config = LxmertConfig(
            size="custom", pad_id=hf.pad_token_id or 0, layer_norm_eps=LAYER_NORM_EPS, answers=hf.num_qa_labels,
            object_classes=hf.num_object_labels, attribute_classes=hf.num_attr_labels, **fields,
        )  # fmt: skip
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        got = f"{key} is {shown(keys[key])}" if key in keys else f"{key} is missing" if key else "sizes do not fit"
        message = first["msg"][0].lower() + first["msg"][1:]
        raise CheckpointError(f"{source}: {got}, which describes no LXMERT: {message}") from None
    return config, _answers(hf)


def _answers(hf: _HFConfig) -> tuple[str, ...] | None:
    if hf.id2label is None or len(hf.id2label) != hf.num_qa_labels:
        return None
    numbers = [str(i) for i in range(hf.num_qa_labels)]
    if not all(number in hf.id2label for number in numbers):
        return None
    answers = tuple(hf.id2label[number] for number in numbers)
    # Names that transformers makes up where nobody gave any.
    return None if all(answer.startswith("LABEL_") for answer in answers) else answers


def hf_keys(
    config: LxmertConfig, *, architecture: Architecture, bos_id: int, eos_id: int, answers: Sequence[str] | None
) -> dict[str, Any]:
    """The ``config.json`` of the stock class ``architecture`` that computes what a model of ``config`` does.

    Losses whose heads the model lacks are switched off. ``answers`` become the labels.

    Raises:
        CheckpointError: transformers' class cannot compute this model, or the numbers of answers and logits differ.
    """
    if config.layer_norm_eps != LAYER_NORM_EPS:
        raise CheckpointError(
            f"model.layer_norm_eps is {config.layer_norm_eps:g}, and transformers' LXMERT computes with "
            f"{LAYER_NORM_EPS:g}: this model cannot be exported"
        )
    count = config.known("answers")
    if answers is not None and len(answers) != count:
        raise CheckpointError(f"{len(answers):,} answers are given for an answer head of {count:,}")
    objects, attributes = config.known("object_classes"), config.known("attribute_classes")
    on = {
        "visual_obj_loss": objects > 0,
        "visual_attr_loss": attributes > 0,
        "visual_feat_loss": True,
        "task_obj_predict": True,
        "task_qa": count > 0,
    }
    # transformers keeps the three numbers together under this key too.
    layers = {"vision": config.vision_layers, "cross_encoder": config.cross_layers, "language": config.language_layers}
    keys: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "lxmert",
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "num_hidden_layers": layers,
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "visual_pos_dim": 4,
        "visual_loss_normalizer": VISUAL_LOSS_NORMALIZER,
        "num_qa_labels": count,
        "num_object_labels": objects,
        "num_attr_labels": attributes,
        # Matching and masked words have a head in every model of ours; the switches follow the other heads.
        "task_matched": True,
        "task_mask_lm": True,
        **{name: on[name] for name in _SWITCHES},
        "pad_token_id": config.known("pad_id"),
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    if answers:
        keys["id2label"] = {str(i): answer for i, answer in enumerate(answers)}
        keys["label2id"] = {answer: i for i, answer in enumerate(answers)}
    return keys
