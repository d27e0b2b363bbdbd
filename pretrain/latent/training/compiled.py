"""The updates of a step as one compiled graph, for modules whose operators are cheaper than their dispatch: clusters'.

What is compiled is ``update``, with a ``TracedEngine`` for each
engine: five updates of the critics, decoder, contrast and encoder, forwards, backwards and AdamW. On one CPU core that
halves a step.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pretrain.base.errors import ConfigError
from pretrain.engine import distributed
from pretrain.engine.engines.base import Engine
from pretrain.engine.engines.compiled import TracedEngine
from pretrain.engine.optim.build import Moments
from pretrain.latent.config import LatentJob
from pretrain.latent.data.inputs import Inputs
from pretrain.latent.training.steps import Updates, update

logger = logging.getLogger(__name__)
_State: TypeAlias = tuple[nn.Module, Moments]


class CompiledUpdate:
    """``update`` as a graph; the first update of all, which makes the moments, without one.

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
        how: dict[str, Any] = {
            "fullgraph": True,
            "dynamic": False,
            "isolate_recompiles": True,  # another job's graph is not this one's
            "options": {
                "cpp_wrapper": True,  # a graph's kernels are not called from Python
                "cpp.vec_isa_ok": True,  # a compiler of C++20 knows this CPU's vectors: not tried for 10 seconds
                "guard_filter_fn": _guards,
            },
        }
        self._run = torch.compile(_update, **how)
        self._job: LatentJob | None = None

    def __call__(self, job: LatentJob, engines: Mapping[str, Engine], inputs: Inputs, beta: float) -> Updates:
        """The same as the function that it compiles, once for each shape of a batch; of one job with its engines."""
        if self._job is not None and job is not self._job:
            raise ValueError("the graph is another job's: make a CompiledUpdate for this one")
        states: dict[str, _State] = {}
        for name, engine in engines.items():
            groups = engine.moments()
            if not groups:
                return update(job, engines, inputs, beta)
            (moments,) = groups
            states[name] = engine.module, moments
        # as numbers they would be constants of the graph
        numbers = torch.tensor([beta, *(engine.learning_rate() for engine in engines.values())])
        if self._job is None:
            logger.info("compiling the step, which takes about a minute (model.compile=false leaves it as it is)")
        done: Updates = self._run(job, states, inputs, numbers)
        if self._job is None:
            gc.freeze()  # the compiler leaves a million objects, which each full collection would walk through
            self._job = job
        return done


def _guards(found: Sequence[Any]) -> list[bool]:
    """What is looked at before each call: the shapes of a batch. A graph serves one job and the modules built for it.

    To look at all that the graph was traced from would take a fifteenth of the step.
    """
    return [guard.name.startswith("L['inputs']") for guard in found]


def _update(job: LatentJob, states: Mapping[str, _State], inputs: Inputs, numbers: Tensor) -> Updates:
    beta, *rates = numbers.unbind()
    engines = {name: TracedEngine(*state, rate) for (name, state), rate in zip(states.items(), rates, strict=True)}
    return update(job, engines, inputs, beta)
