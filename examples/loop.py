"""Use the contrastive loss in a training loop of your own; it needs torch and no other part of CAPT.

Two noisy copies of a row are a positive pair, and every other row of the step is a negative.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import normalize

from capt import info_nce


def main(arguments: Sequence[str]) -> list[float]:
    """Train a layer, print the first loss and the last, and return all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args(arguments)
    torch.manual_seed(1)
    rows = torch.randn(256, 32)
    layer = nn.Linear(32, 16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(given.steps):
        first, second = (normalize(layer(rows + 0.5 * torch.randn_like(rows)), dim=-1) for _ in range(2))
        loss = info_nce(first, second, temperature=0.05, directions="symmetric")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sys.stdout.write(f"loss {losses[0]:.3f}, after {given.steps} steps {losses[-1]:.3f}\n")
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
