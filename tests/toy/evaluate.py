"""``capt evaluate`` of the toy task."""

from pathlib import Path

import torch

from tests.toy.export import load


def command(checkpoint: Path, *, seed: int = 1, scale: float = 1.0) -> dict[str, float]:
    x = torch.randn(64, 7, generator=torch.Generator().manual_seed(seed))
    return {"loss": scale * load(checkpoint)(x).square().mean().item()}


def as_text(result: dict[str, float]) -> str:
    return f"loss {result['loss']:.6f}"
