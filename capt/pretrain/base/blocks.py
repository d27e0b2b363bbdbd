"""Blocks of rows that a loop takes one after another, so that no tensor is larger than a block."""

from __future__ import annotations

from collections.abc import Iterator

from capt.pretrain.base.traits import traits


def blocks(length: int, size: int) -> Iterator[slice]:
    """Cut ``length`` rows into blocks of ``size``; the last one may have fewer.

    ``capt plan`` runs only some of the blocks (`capt.pretrain.plan.simulated`): what a loop over them computes and
    holds may depend on the size of a block, not on its place.
    """
    return traits().blocks(length, size)
