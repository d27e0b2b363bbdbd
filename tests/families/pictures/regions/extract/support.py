"""Small random vision models, written as Hugging Face folders, and pictures to look at."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from capt.pretrain.base.quiet import quiet_transformers

_VIT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_CONVOLUTIONS = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 24], "depths": [1, 1, 1, 1], "layer_type": "basic"}
_MEAN = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3], "resample": 3}
_SQUARE = {"size": {"height": 32, "width": 32}, **_MEAN}
_CROP = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True, **_MEAN}
_DETECTOR = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 12, "num_labels": 5,
}  # fmt: skip


def write_model(folder: Path, kind: str) -> Any:
    """Write a random model of a kind (a key of the table below) with its preprocessing; the model itself."""
    torch.manual_seed(0)
    model, processor, keys = _model(kind)
    for module in model.modules():  # or a fresh network says nearly the same of every picture
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
            torch.nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
    with quiet_transformers():
        model.eval().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": processor, **keys}))
    return model


def _model(kind: str) -> tuple[Any, str, dict[str, Any]]:
    t = transformers
    match kind:
        case "resnet":
            keys = {"size": {"shortest_edge": 56}, "crop_pct": 0.875, **_MEAN}
            return t.ResNetForImageClassification(t.ResNetConfig(**_CONVOLUTIONS)), "ConvNextFeatureExtractor", keys
        case "convnext":
            config = t.ConvNextConfig(hidden_sizes=[8, 8, 16, 24], depths=[1, 1, 1, 1])
            keys = {"size": {"shortest_edge": 384}, "crop_pct": 0.875, **_MEAN}
            return t.ConvNextModel(config), "ConvNextImageProcessor", keys
        case "vit":
            return t.ViTForImageClassification(t.ViTConfig(**_VIT)), "ViTImageProcessorFast", _SQUARE
        case "clip":
            text = {**_VIT, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
            config = t.CLIPConfig(vision_config=_VIT, text_config=text, projection_dim=8)
            return t.CLIPModel(config), "CLIPImageProcessor", _CROP
        case "dinov2":
            config = t.Dinov2WithRegistersConfig(**_VIT, num_register_tokens=3)
            return t.Dinov2WithRegistersModel(config), "BitImageProcessor", _CROP
        case "siglip":
            return t.SiglipVisionModel(t.SiglipVisionConfig(**_VIT)), "SiglipImageProcessor", _SQUARE
        case "siglip2":
            config = t.Siglip2VisionConfig(**{**_VIT, "num_patches": 16})
            keys = {**_MEAN, "patch_size": 8, "max_num_patches": 20}
            return t.Siglip2VisionModel(config), "Siglip2ImageProcessorFast", keys
        case "dinov3":
            return (
                t.DINOv3ViTModel(t.DINOv3ViTConfig(**_VIT, num_register_tokens=2)),
                "DINOv3ViTImageProcessorFast",
                _SQUARE,
            )
        case "dinov3_convnext":
            config = t.DINOv3ConvNextConfig(hidden_sizes=[8, 8, 16, 24], depths=[1, 1, 1, 1])
            keys = {"size": {"height": 64, "width": 64}, **_MEAN}
            return t.DINOv3ConvNextModel(config), "DINOv3ViTImageProcessorFast", keys
        case "detr":
            backbone = t.ResNetConfig(**_CONVOLUTIONS, out_features=["stage4"])
            config = t.DetrConfig(use_timm_backbone=False, backbone_config=backbone, **_DETECTOR)
            return t.DetrForObjectDetection(config), "DetrImageProcessor", _shortest(48)
        case "conditional_detr":
            backbone = t.ResNetConfig(**_CONVOLUTIONS, out_features=["stage4"])
            config = t.ConditionalDetrConfig(use_timm_backbone=False, backbone_config=backbone, **_DETECTOR)
            return t.ConditionalDetrForObjectDetection(config), "ConditionalDetrImageProcessor", _shortest(48)
    raise AssertionError(kind)


def _shortest(size: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": size, "longest_edge": 2 * size}, "do_pad": True, **_MEAN}


def picture(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    """A picture of coarse noise, which resizing does not level out."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def as_bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A picture as the content of a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each kind of model."""
    folder = tmp_path_factory.mktemp("vision-models")
    for kind in (
        *("resnet", "convnext", "dinov3_convnext", "vit", "clip", "dinov2", "dinov3", "siglip", "siglip2"),
        *("detr", "conditional_detr"),
    ):
        write_model(folder / kind, kind)
    return folder
