"""The updates of a step as one compiled graph, for modules whose operators are cheaper than their dispatch: clusters'.

What is compiled is :func:`pretrain.latent.steps.update`, with a :class:`~pretrain.engine.traced.TracedEngine` for each
engine: five updates of the critics, decoder, contrast and encoder, forwards, backwards and AdamW. On one CPU core that
halves a step.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pretrain.engine import distributed
from pretrain.engine.engines import Engine
from pretrain.engine.optimizers import Moments
from pretrain.engine.traced import TracedEngine
from pretrain.latent.config import LatentJob
from pretrain.latent.inputs import Inputs
from pretrain.latent.steps import Updates, update
from tokenizer.errors import ConfigError

logger = logging.getLogger(__name__)


class _State(NamedTuple):
    module: nn.Module
    moments: Moments
    rate: Tensor


class CompiledUpdate:
    """:func:`~pretrain.latent.steps.update` as a graph; the first update of all, which makes the moments, without one.

    Raises:
        ConfigError: several ranks, whose sums are no part of a graph; or no compiler is here.
    """

    def __init__(self) -> None:
        if distributed.world_size() > 1:
            raise ConfigError("model.compile is of one process: set model.compile=false, or start one (--nproc 1)")
        compiler = os.environ.get("CXX", "g++")
        if not torch.cuda.is_available() and shutil.which(compiler) is None:
            raise ConfigError(
                f"model.compile: no C++ compiler ({compiler}) is here; install one (apt-get install g++), or set "
                "model.compile=false, which takes twice the time"
            )
        from torch._dynamo import config  # seconds to import, and only needed here

        config.trace_autograd_ops = True  # backward passes are part of the graph
        options: dict[str, str | int | bool | Callable[..., Any]] = {
            "cpp_wrapper": True,  # a graph's kernels are not called from Python
            "guard_filter_fn": _guards,
        }
        self._run = torch.compile(_update, fullgraph=True, dynamic=False, options=options)
        self._compiled = False

    def __call__(self, job: LatentJob, engines: Mapping[str, Engine], inputs: Inputs, beta: float) -> Updates:
        """The same as the function that it compiles; each kind of batch and job is compiled once."""
        states: dict[str, _State] = {}
        for name, engine in engines.items():
            groups = engine.moments()
            if not groups:
                return update(job, engines, inputs, beta)
            (moments,) = groups
            states[name] = _State(engine.module, moments, torch.tensor(engine.learning_rate()))
        if not self._compiled:
            logger.info("compiling the step, which takes about a minute (model.compile=false leaves it as it is)")
        done: Updates = self._run(job, states, inputs, torch.tensor(beta))
        if not self._compiled:
            gc.freeze()  # the compiler leaves a million objects, which each full collection would walk through
            self._compiled = True
        return done


def _guards(found: Sequence[Any]) -> list[bool]:
    """What is looked at before each call: the job and all tensors, but not modules and globals, which stay as they are.

    To look at all that the graph was traced from would take a twentieth of the step.
    """
    return [not (guard.name.startswith("G[") or ".module" in guard.name) for guard in found]


def _update(job: LatentJob, states: Mapping[str, _State], inputs: Inputs, beta: Tensor) -> Updates:
    return update(job, {name: TracedEngine(*state) for name, state in states.items()}, inputs, beta)
