"""Optimizers that PyTorch lacks (Adagrad for ZeRO, LAMB, BERT's Adam, StableAdamW), and the average of the weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from capt.pretrain.base import distributed


class OwnOptimizer(torch.optim.Optimizer):
    """An optimizer with PyTorch's ``step``: the closure is called with gradients on, the update made without them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure``, if any, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """Update every parameter that has a gradient. Called without autograd."""


# Adagrad (Duchi et al. 2011, JMLR 12), dense and sparse.


class Adagrad(OwnOptimizer):
    r"""PyTorch's Adagrad with its state made at the first update.

    .. math::
        s \leftarrow s + g^2, \quad w \leftarrow w - \eta\, g \big/ (\sqrt{s} + \epsilon)

    ``torch.optim.Adagrad`` makes its state when it is built, and DeepSpeed's ZeRO therefore builds it again: with one
    group for all parameters, so that vectors would decay as well.

    Weight decay is added to the gradient. A sparse gradient updates the rows it holds, and takes no weight decay.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def update(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients: list[Tensor] = [p.grad for p in parameters]
            for p in parameters:
                if not self.state[p]:
                    self.state[p] = {"step": torch.zeros(()), "sum": torch.zeros_like(p)}
            adagrad(
                parameters,
                gradients,
                [self.state[p]["sum"] for p in parameters],
                [self.state[p]["step"] for p in parameters],
                has_sparse_grad=any(gradient.is_sparse for gradient in gradients),
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                lr_decay=0.0,
                eps=group["eps"],
                maximize=False,
            )


# LAMB, and BERT's Adam, with which LXMERT was trained.


class _Adam(OwnOptimizer):
    """An optimizer that makes its update of Adam's moments, on PyTorch's foreach operators."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update_group(group, parameters)

    @abstractmethod
    def _update_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update ``parameters``, which have gradients."""

    def _moments(self, group: dict[str, Any], parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Both moments of each parameter, after its gradient has entered them."""
        beta1, beta2 = group["betas"]
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
            self.state[p]["step"] += 1
        grads = [p.grad for p in parameters if p.grad is not None]
        m = [self.state[p]["exp_avg"] for p in parameters]
        v = [self.state[p]["exp_avg_sq"] for p in parameters]
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        return m, v


class Lamb(_Adam):
    r"""LAMB: Adam's direction with a trust ratio per parameter tensor (You et al. 2020, Algorithm 2).

    .. math::
        m &= \beta_1 m + (1-\beta_1) g, \quad v = \beta_2 v + (1-\beta_2) g^2 \\
        r &= \hat m / (\sqrt{\hat v} + \epsilon) + \lambda w, \quad
        w \leftarrow w - \eta \, \frac{\|w\|}{\|r\|} \, r

    with the ratio 1 where either norm is 0, and for tensors that do not decay (biases, LayerNorm), as in the authors'
    release. Needs whole parameters, therefore ZeRO stage 0.
    """

    def _update_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        m, v = self._moments(group, parameters)
        steps = [float(self.state[p]["step"]) for p in parameters]  # one that was frozen has taken fewer
        denominator = torch._foreach_sqrt(torch._foreach_div(v, [1 - beta2**step for step in steps]))
        torch._foreach_add_(denominator, group["eps"])
        unbiased = torch._foreach_div(m, [1 - beta1**step for step in steps])
        direction = list(torch._foreach_div(unbiased, denominator))
        if group["weight_decay"]:
            torch._foreach_add_(direction, parameters, alpha=group["weight_decay"])
            weight_norm = torch.stack(torch._foreach_norm(parameters))
            direction_norm = torch.stack(torch._foreach_norm(direction))
            both = (weight_norm > 0) & (direction_norm > 0)
            ratio = torch.where(both, weight_norm / direction_norm.clamp_min(1e-38), torch.ones_like(weight_norm))
            torch._foreach_mul_(direction, list(ratio.unbind()))
        torch._foreach_add_(parameters, direction, alpha=-group["lr"])


class BertAdam(_Adam):
    r"""Adam without bias correction and with decoupled weight decay (Devlin et al. 2019, as released).

    .. math::
        m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \quad
        w \leftarrow w - \eta \left( \frac{m}{\sqrt{v} + \epsilon} + \lambda w \right)

    In the first updates it goes up to :math:`(1-\beta_1) / \sqrt{1-\beta_2}` as far as Adam: 3.2 times with .9, .999.
    """

    def _update_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        m, v = self._moments(group, parameters)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_add_(denominator, group["eps"])
        direction = list(torch._foreach_div(m, denominator))
        if group["weight_decay"]:
            torch._foreach_add_(direction, parameters, alpha=group["weight_decay"])
        torch._foreach_add_(parameters, direction, alpha=-group["lr"])


# StableAdamW, with which ModernBERT and Ettin were trained.


@dataclass(frozen=True)
class ParameterPart:
    """Elements ``begin : end`` of a flat tensor of the optimizer: a part of the parameter with this ``number``."""

    number: int
    begin: int
    end: int


class StableAdamW(_Adam):
    r"""AdamW with shorter steps of tensors whose gradient surprises it (Wortsman et al. 2023, arXiv 2304.13013).

    .. math::
        m &= \beta_1 m + (1-\beta_1) g, \quad v = \beta_2 v + (1-\beta_2) g^2, \quad
        \rho = \sqrt{\operatorname{mean}\left(g^2 / \max(\hat v, \epsilon^2)\right)} \\
        w &\leftarrow w - \frac{\eta}{\max(1, \rho)} \left( \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w \right)

    The mean is over a whole parameter: under ZeRO the ranks add their parts of it, which `lay_out` tells them of.
    """

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        self._sizes: Tensor | None = None
        self._parts: Mapping[Tensor, Sequence[ParameterPart]] = {}

    def lay_out(self, sizes: Sequence[int], parts: Mapping[Tensor, Sequence[ParameterPart]]) -> None:
        """Update flat tensors from now on, in which ranks keep ``parts`` of parameters of these ``sizes``.

        Every rank then calls ``step`` together with all others.
        """
        self._sizes, self._parts = torch.tensor(sizes, dtype=torch.float64), parts

    def _update_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        m, v = self._moments(group, parameters)
        steps = [float(self.state[p]["step"]) for p in parameters]  # one that was frozen has taken fewer
        # Both divisors come from one root: clamped for the surprise, plus eps for the direction.
        root = torch._foreach_sqrt(torch._foreach_div(v, [1 - beta2**step for step in steps]))
        surprise = torch._foreach_clamp_min(root, group["eps"])
        surprise = torch._foreach_div([p.grad for p in parameters if p.grad is not None], surprise)
        torch._foreach_add_(root, group["eps"])
        direction = torch._foreach_div(torch._foreach_div(m, [1 - beta1**step for step in steps]), root)
        if group["weight_decay"]:
            torch._foreach_add_(direction, parameters, alpha=group["weight_decay"])
        parts, divisors = self._divisors(parameters, surprise, direction)
        if parts:
            torch._foreach_div_(parts, divisors)
        torch._foreach_add_(parameters, direction, alpha=-group["lr"])

    def _divisors(
        self, parameters: list[Tensor], surprise: Sequence[Tensor], direction: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The parts of ``direction`` that belong to one parameter each, and what each is divided by."""
        # No parameter is cut: every mean is at hand.
        if self._sizes is None:
            squares = torch.stack(torch._foreach_norm(list(surprise))).double().square()
            sizes = torch.tensor([p.numel() for p in parameters], dtype=torch.float64, device=squares.device)
            return list(direction), list((squares / sizes).sqrt().clamp_min(1.0).to(direction[0]).unbind())
        # Squares are added by the number of the parameter, over the parts of this rank and then over the ranks.
        parts = [(place, part) for place, p in enumerate(parameters) for part in self._parts.get(p, ())]
        sums = torch.zeros_like(self._sizes, device=parameters[0].device)
        numbers = torch.tensor([part.number for _, part in parts], dtype=torch.long, device=sums.device)
        if parts:
            norms = torch._foreach_norm([surprise[place][part.begin : part.end] for place, part in parts])
            sums.index_add_(0, numbers, torch.stack(norms).double().square())
        # A rank without a part takes part in the sum all the same.
        sums = distributed.all_reduce_sum(sums.to(distributed.device())).to(sums.device)
        divisors = (sums / self._sizes.to(sums.device)).sqrt().clamp_min(1.0).to(direction[0])[numbers]
        return [direction[place][part.begin : part.end] for place, part in parts], list(divisors.unbind())


AVERAGE = "average"
"""Its name in the optimizer's state, and in checkpoints."""


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    r"""Make ``optimizer`` keep an exponential moving average of the weights that it updates, from its next update on.

    After update :math:`t` the average of every weight that is trained is

    .. math::
        a_t = \beta a_{t-1} + (1 - \beta) w_t, \qquad a_0 = w_0,

    in fp32: in bf16 an average of decay .9995 would not move. It is part of the optimizer's state beside the moments,
    sharded as they are, so that a checkpoint holds it for any number of ranks and any ZeRO stage. Updates that the
    optimizer did not make (fp16 that overflowed) do not count. `averaged_weights` of an
    engine's base runs a module with it.
    """
    first: dict[Tensor, Tensor] = {}

    def weights(averaged: bool) -> list[Tensor]:
        every = (p for group in optimizer.param_groups for p in group["params"])
        return [p for p in every if (AVERAGE in optimizer.state.get(p, {})) == averaged]

    @torch.no_grad()
    def before(*_: Any) -> None:
        # Kept aside: an optimizer whose state is not empty would not make its moments.
        first.update({p: p.clone() for p in weights(averaged=False) if p.grad is not None})

    @torch.no_grad()
    def after(*_: Any) -> None:
        for p, start in first.items():
            optimizer.state[p][AVERAGE] = start
        first.clear()
        if live := weights(averaged=True):
            torch._foreach_lerp_([optimizer.state[p][AVERAGE] for p in live], live, 1 - decay)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
