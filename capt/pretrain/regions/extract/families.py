"""The families of vision models whose output is understood here, by ``model_type`` of ``config.json``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capt.pretrain.base.errors import CheckpointError, shown


@dataclass(frozen=True)
class Family:
    """The names of a family in transformers, and the reader of its output.

    Attributes:
        model: the class of transformers.
        processors: its image processors; the first is taken where the folder names none.
        prefix: what names of tensors may begin with, to be dropped.
        part: the key of ``config.json`` that holds the vision model's own keys, in a folder of a larger model.
        part_type: its ``model_type``.
        tokens_before: tokens before the patches (a classifier's, a distillation's), without registers.
        interpolates: ``forward`` wants to be told that pictures may have another size than in pretraining.
        sigmoid: a detector's classes are independent; otherwise they share a softmax whose last class is "nothing".
        arguments: further arguments of the class.
        stride: pixels of the side of a patch, where ``config.json`` does not say.
        flexible: pictures keep their proportions, and the model takes patches and how many rows there are.
    """

    model: str
    processors: tuple[str, ...]
    prefix: str = ""
    part: str | None = None
    part_type: str = ""
    tokens_before: int = 0
    interpolates: bool = False
    sigmoid: bool = False
    arguments: tuple[tuple[str, Any], ...] = ()
    stride: int = 0
    flexible: bool = False


_ANY = (
    "ConvNextImageProcessor", "BitImageProcessor", "CLIPImageProcessor", "SiglipImageProcessor", "ViTImageProcessor",
    "DeiTImageProcessor", "EfficientNetImageProcessor", "DINOv3ViTImageProcessor",
)  # fmt: skip


def _processors(first: str) -> tuple[str, ...]:
    return (first, *(name for name in _ANY if name != first))


_CONVNEXT, _BIT = _processors("ConvNextImageProcessor"), _processors("BitImageProcessor")
_NO_POOLER = (("add_pooling_layer", False),)
_CLIP = Family(
    "CLIPVisionModel", _processors("CLIPImageProcessor"), "vision_model.", tokens_before=1, interpolates=True
)
_SIGLIP = Family("SiglipVisionModel", _processors("SiglipImageProcessor"), "vision_model.", interpolates=True)
_SIGLIP2 = Family("Siglip2VisionModel", ("Siglip2ImageProcessor",), "vision_model.", flexible=True)
_VIT = Family(
    "ViTModel", _processors("ViTImageProcessor"), tokens_before=1, interpolates=True, arguments=_NO_POOLER
)  # fmt: skip

FAMILIES: dict[str, dict[str, Family]] = {
    "grid": {
        "resnet": Family("ResNetModel", _CONVNEXT),
        "regnet": Family("RegNetModel", _CONVNEXT),
        "convnext": Family("ConvNextModel", _CONVNEXT),
        "convnextv2": Family("ConvNextV2Model", _CONVNEXT),
        "bit": Family("BitModel", _BIT),
        "dinov3_convnext": Family(
            "DINOv3ConvNextModel", _processors("DINOv3ViTImageProcessor"), tokens_before=1, stride=32
        ),
        "efficientnet": Family("EfficientNetModel", _processors("EfficientNetImageProcessor")),
    },
    "vit": {
        "vit": _VIT,
        "deit": Family(
            "DeiTModel", _processors("DeiTImageProcessor"), tokens_before=2, interpolates=True, arguments=_NO_POOLER
        ),
        "dinov2": Family("Dinov2Model", _BIT, tokens_before=1),
        "dinov2_with_registers": Family("Dinov2WithRegistersModel", _BIT, tokens_before=1),
        "dinov3_vit": Family("DINOv3ViTModel", _processors("DINOv3ViTImageProcessor"), tokens_before=1),
        "clip_vision_model": _CLIP,
        "clip": Family(**{**vars(_CLIP), "part": "vision_config", "part_type": "clip_vision_model"}),
        "siglip_vision_model": _SIGLIP,
        "siglip": Family(**{**vars(_SIGLIP), "part": "vision_config", "part_type": "siglip_vision_model"}),
        "siglip2_vision_model": _SIGLIP2,
        "siglip2": Family(**{**vars(_SIGLIP2), "part": "vision_config", "part_type": "siglip2_vision_model"}),
    },
    "detr": {
        "detr": Family("DetrForObjectDetection", ("DetrImageProcessor",)),
        "table-transformer": Family("TableTransformerForObjectDetection", ("DetrImageProcessor",)),
        "conditional_detr": Family(
            "ConditionalDetrForObjectDetection", ("ConditionalDetrImageProcessor", "DetrImageProcessor"), sigmoid=True
        ),
        "deformable_detr": Family(
            "DeformableDetrForObjectDetection", ("DeformableDetrImageProcessor", "DetrImageProcessor"), sigmoid=True
        ),
        "rt_detr": Family("RTDetrForObjectDetection", ("RTDetrImageProcessor",), sigmoid=True),
        "rt_detr_v2": Family("RTDetrV2ForObjectDetection", ("RTDetrImageProcessor",), sigmoid=True),
    },
}
"""Backend -> ``model_type`` -> family."""

BACKBONES = ("resnet", "rt_detr_resnet", "convnext", "convnextv2")
"""``model_type`` of the backbones of detectors that need no further package."""


def family_of(backend: str, config: Mapping[str, Any], source: object) -> Family:
    """The family that the keys of a ``config.json`` name.

    Raises:
        CheckpointError: the family is not one of the backend's; the backend that reads it is named if there is one.
    """
    kind = config.get("model_type")
    known = FAMILIES[backend]
    if isinstance(kind, str) and kind in known:
        return known[kind]
    other = [name for name, families in FAMILIES.items() if kind in families] if isinstance(kind, str) else []
    remedy = f"--backend {other[0]} reads it" if other else f"--backend {backend} reads {', '.join(known)}"
    raise CheckpointError(f"{source}: model_type is {shown(kind)}; {remedy}")
