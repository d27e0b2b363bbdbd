"""Muon for the matrices of numbered layers, AdamW for all other parameters, as one optimizer at every ZeRO stage."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.engine.optim.optimizers import OwnOptimizer

Groups = list[dict[str, Any]]

_COEFFICIENTS, _STEPS = (3.4445, -4.7750, 2.0315), 5
"""The coefficients and the number of steps of the iteration, as published (Jordan 2024)."""
_AT_ONCE = 25_000_000
"""Elements of cut matrices that are put together at a time."""


_IN_A_LAYER = re.compile(r"layers?\.\d+\.")
_ADAPTER = ".lora_"


def muon_groups(module: nn.Module, weight_decay: float) -> tuple[Groups, Groups]:
    """The groups for Muon, which are the matrices of numbered layers, and those for AdamW: the rest.

    The rest are embeddings, heads and projections (Jordan 2024), adapters, vectors and tensors. As elsewhere, vectors
    do not decay.

    Raises:
        ConfigError: the module trains no matrix of a numbered layer.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    matrices = [
        p for name, p in named
        if len(_shape(p)) == 2 and id(p) not in tables and _IN_A_LAYER.search(name) and _ADAPTER not in name
    ]  # fmt: skip
    if not matrices:
        raise ConfigError(
            "optimizer.type muon: it is for matrices of numbered layers, and this model trains none; set "
            "optimizer.type=adamw"
        )
    taken = {id(p) for p in matrices}
    others = [
        {"params": [p for p in parameters if len(_shape(p)) > 1 and id(p) not in taken], "weight_decay": weight_decay},
        {"params": [p for p in parameters if len(_shape(p)) <= 1], "weight_decay": 0.0},
    ]
    return [{"params": matrices, "weight_decay": weight_decay}], [group for group in others if group["params"]]


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def orthogonalize(matrix: Float[Tensor, "a b"]) -> Float[Tensor, "a b"]:
    r"""Return about the nearest matrix with orthonormal rows or columns, by five Newton-Schulz steps (Jordan 2024).

    .. math::
        X \leftarrow a X + (b A + c A^2) X, \quad A = X X^\top, \quad X_0 = M / \|M\|

    Singular values end between about .7 and 1.2. Products are in bf16 on a GPU, in the matrix's type on a CPU.
    """
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    # The smaller of both Gram matrices.
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(_STEPS):
        gram = x @ x.T
        # b A + c A^2 in one product, then a X plus that times X.
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


def orthogonalize_flops(rows: int, columns: int) -> int:
    """Operations of `orthogonalize`, a multiply-add being 2: three products in each step."""
    a, b = sorted((rows, columns))
    return _STEPS * (4 * a * a * b + 2 * a**3)


@dataclass(frozen=True)
class MatrixPiece:
    """A run of ``numel`` elements, at ``offset`` in the flat tensor and at ``start`` in matrix ``number``."""

    number: int
    offset: int
    start: int
    numel: int


@dataclass(frozen=True)
class MuonLayout:
    """Matrices in a flat tensor of this rank, and the numbers of those of which no rank holds all elements."""

    pieces: Sequence[MatrixPiece]
    cut: Sequence[int]


class MuonWithAdamW(OwnOptimizer):
    r"""Muon (Jordan 2024; Liu et al. 2025, arXiv 2502.16982) with AdamW beside it.

    .. math::
        m \leftarrow \mu m + (1-\mu) g, \quad u = (1-\mu) g + \mu m, \quad
        W \leftarrow W - \eta \lambda W - 0.2\,\eta \sqrt{\max(A, B)}\; \mathrm{orthogonalize}(u)

    for a matrix of shape (A, B): it moves as far as AdamW would with the same learning rate :math:`\eta`, so that one
    learning rate and one weight decay serve both.

    Under ZeRO the ranks put the momentum of a matrix together where it is cut, and each updates its part (`lay_out`).

    Args:
        matrices: parameter groups of matrices.
        others: parameter groups of the rest.
    """

    def __init__(
        self, matrices: Groups, others: Groups, *, lr: float, momentum: float, betas: tuple[float, float], eps: float
    ) -> None:
        self._adam = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps) if others else None
        rest: Groups = [] if self._adam is None else self._adam.param_groups
        own = [{**group, "lr": lr, "momentum": momentum, "muon": True} for group in matrices if group["params"]]
        super().__init__([*own, *rest], {"muon": False})
        if self._adam is not None:  # the groups are shared as they are: a learning rate set here is theirs
            self._adam.state = self.state
        self._shapes: Sequence[tuple[int, ...]] = ()
        self._layouts: Mapping[Tensor, MuonLayout] = {}

    def lay_out(self, shapes: Sequence[tuple[int, ...]], layouts: Mapping[Tensor, MuonLayout]) -> None:
        """Update flat tensors from now on, which hold parts of parameters of these ``shapes``.

        Every rank then calls ``step`` together with all others, with the same flat tensors.
        """
        self._shapes, self._layouts = shapes, layouts

    def update(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if group["muon"]:
                for p in group["params"]:
                    if p.grad is not None:
                        self._update_matrix(group, p, p.grad)
        if self._adam is not None:  # ZeRO 1 and 2 have only one group here at a time
            self._adam.param_groups = [group for group in self.param_groups if not group["muon"]]
            self._adam.step()

    def _update_matrix(self, group: dict[str, Any], p: Tensor, gradient: Tensor) -> None:
        """Update a matrix, or this rank's flat tensor with parts of several."""
        state, momentum = self.state[p], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        ahead = gradient.lerp(state["momentum_buffer"], momentum)
        # The weight decays before the step, as in AdamW.
        p.mul_(1 - group["lr"] * group["weight_decay"])
        layout = self._layouts.get(p)
        if p.ndim == 2:
            p.add_(_direction(ahead), alpha=-group["lr"])
        elif layout is not None:  # ZeRO 3 makes an update without a gradient before it is laid out
            for piece, direction in self._directions(layout, ahead):
                p[piece.offset : piece.offset + piece.numel].add_(direction, alpha=-group["lr"])

    def _directions(self, layout: MuonLayout, ahead: Tensor) -> Iterator[tuple[MatrixPiece, Tensor]]:
        """The direction of each piece of a flat tensor. Collective where matrices are cut."""
        cut = set(layout.cut)
        own = {piece.number: piece for piece in layout.pieces}
        # Whole matrices first, which need no other rank.
        for number, piece in own.items():
            if number not in cut:
                matrix = ahead[piece.offset : piece.offset + piece.numel].view(self._shapes[number])
                yield piece, _direction(matrix).flatten()
        # Cut ones are put together by a sum, a list at a time; each rank orthogonalizes those of which it holds a part.
        for numbers in self._chunks(layout.cut):
            sizes = [math.prod(self._shapes[number]) for number in numbers]
            whole = torch.zeros(sum(sizes), dtype=ahead.dtype, device=ahead.device)
            places = dict(zip(numbers, whole.split(sizes), strict=True))
            for number in numbers:
                if (part := own.get(number)) is not None:
                    mine = ahead[part.offset : part.offset + part.numel]
                    places[number][part.start : part.start + part.numel] = mine
            whole = distributed.all_reduce_sum(whole.to(distributed.device())).to(ahead.device)
            for number, matrix in zip(numbers, whole.split(sizes), strict=True):
                if (part := own.get(number)) is not None:
                    direction = _direction(matrix.view(self._shapes[number])).flatten()
                    yield part, direction[part.start : part.start + part.numel]

    def _chunks(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """The numbers in lists of matrices of about `_AT_ONCE` elements together."""
        chunk, elements = list[int](), 0
        for number in numbers:
            chunk.append(number)
            elements += math.prod(self._shapes[number])
            if elements >= _AT_ONCE:
                yield chunk
                chunk, elements = [], 0
        if chunk:
            yield chunk


def _direction(ahead: Float[Tensor, "a b"]) -> Float[Tensor, "a b"]:
    """The orthogonal matrix, as long as AdamW's step: the entries of that have a root mean square of about .2."""
    matrix = ahead.to(distributed.device()) if distributed.device().type == "cuda" else ahead
    return 0.2 * math.sqrt(max(ahead.shape)) * orthogonalize(matrix).to(ahead.device)
