"""Multilayer perceptrons: the critics, and the networks of the synthetic clusters."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


def mlp(*widths: int, activation: type[nn.Module] = nn.LeakyReLU) -> nn.Sequential:
    """Linear layers from ``widths[0]`` inputs to ``widths[-1]`` outputs with an activation between each two."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])
