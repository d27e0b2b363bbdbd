"""Counts what a training step sends: each collective as torch's dispatcher sees it, on gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.task import Progress
from capt.pretrain.plan.simulated import Sent, Wire
from capt.pretrain.registry import task_class

RANKS = {
    "adapt": 1, "tiny": 2, "text": 2, "small": 8, "continue": 8, "base": 64, "large": 128,
    "17m": 16, "32m": 16, "68m": 16, "150m": 72, "400m": 144,
}  # fmt: skip
"""GPUs at which each size is looked at: these decide the accumulation."""
_PAIR_RANKS = 2
"""GPUs at which the vision-language jobs are looked at."""

_SMALL_MODEL = (
    "model.size=custom", "model.layers=2", "model.hidden=32", "model.heads=2", "model.ffn=48", "model.max_positions=32",
    "data.sequence_length=32", "tokenizer.vocab_size=420", "tokenizer.type=bpe", "loader.workers=0",
    "data.validation_fraction=0.1", "data.workers=1",
)  # fmt: skip
_SMALL_LATENT = (
    "model.embedding=12", "model.hidden=16", "model.latent=4", "model.noise=4", "critic.hidden=16", "critic.updates=2",
    "schedule.epochs=null", "validate.per_epoch=null", "checkpoint.best=null", "data.format=text",
)  # fmt: skip
_SMALL_PAIRS = (
    "model.size=custom", "model.language_layers=1", "model.vision_layers=1", "model.cross_layers=1", "model.hidden=32",
    "model.heads=2", "model.ffn=48", "model.max_positions=16", "data.source=files", "data.sequence_length=12",
    "data.minimum_answers=1", "tokenizer.vocab_size=380", "tokenizer.type=bpe", "loader.workers=0", "batch.micro=2",
)  # fmt: skip
_SMALL_CLUSTERS = ("model.compile=false", "data.repeats=4")


@dataclass
class Traffic:
    """A step's collectives; ``parameters`` counts those of each engine once an update.

    ``updating`` holds the numbers of the collectives in backward passes and updates.
    """

    sent: list[Sent]
    parameters: int
    accumulation: int
    updating: set[int] = field(default_factory=set)

    def updates(self) -> list[Sent]:
        """Collectives of backward passes and updates: gradients, norms and weights."""
        return [sent for number, sent in enumerate(self.sent) if number in self.updating]


def ranks_of(path: Path) -> int:
    """The ranks that a shipped job is meant for."""
    return RANKS[path.stem.removesuffix("_paper").split("_")[-1]]


def small_job(path: Path, folder: Path, world: int) -> Job:
    """A shipped job in small, on ``world`` ranks with the accumulation that it has at :data:`RANKS`."""
    without = (
        ["model.init=null", "mlm.head=random", "model.max_positions=1024"]
        if path.stem.endswith(("_adapt", "_continue"))
        else []
    )
    shipped = load_job(path, without)
    common = [f"run.dir={folder / 'run'}", "run.tensorboard=false", "run.threads=1", "schedule.warmup_steps=0",
              "schedule.max_steps=4"]  # fmt: skip
    if shipped.task.type == "capt_language":
        steps = shipped.accumulation(ranks_of(path))
        own = [*_SMALL_MODEL, f"data.files=[{folder / 'text.txt'}]", f"data.cache={folder / 'cache'}",
               "batch.micro=2", f"batch.global={2 * steps * world}"]  # fmt: skip
        own += without
        own += ["contrast.queue=41"] if shipped.contrast.queue else []  # type: ignore[attr-defined]
    elif shipped.task.type == "capt_vl":
        steps = shipped.accumulation(_PAIR_RANKS)
        own = [*_SMALL_PAIRS, f"data.regions={folder / 'store'}", f"data.train=[{folder / 'pairs.json'}]",
               f"data.cache={folder / 'cache'}", f"batch.global={2 * steps * world}"]  # fmt: skip
        own += ["contrast.queue=41"] if shipped.contrast.queue else []  # type: ignore[attr-defined]
    elif path.stem.startswith("clusters"):
        rows = 4 * shipped.data.clusters  # type: ignore[attr-defined]
        own = [*_SMALL_CLUSTERS, f"batch.global={rows}", f"batch.micro={rows // world}"]
    else:
        own = [*_SMALL_LATENT, f"data.path={folder}", "batch.global=8", f"batch.micro={8 // world}"]
    return load_job(path, [*common, *own])


def traffic(job: Job) -> Traffic:
    """Traffic of the first step of a job."""
    quiet_libraries(debug=False)
    distributed.initialize(1)
    task = task_class(job.task.type)(job, job.run.dir)
    engines = build_engines(task.build_modules(), task.job, task.optimizers())
    progress = Progress()
    batch = next(task.build_batches(progress))
    found = Traffic([], 0, task.job.accumulation(distributed.world_size()))
    with Wire() as wire:
        for engine in engines.values():
            _watch(engine, wire, found)
        task.step(engines, batch, progress)
    found.sent = wire.sent
    return found


def _watch(engine: Engine, wire: Wire, found: Traffic) -> None:
    size = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())

    def tagged(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _updating(wire, found):
                return method(*args, **kwargs)

        return call

    update = engine.step

    def step(loss: Tensor | None = None) -> None:
        found.parameters += size * engine.at_boundary
        update(loss)

    named: Any = engine
    named.backward = tagged(engine.backward)
    named.step = tagged(step)


@contextmanager
def _updating(wire: Wire, found: Traffic) -> Iterator[None]:
    begin = len(wire.sent)
    yield
    found.updating.update(range(begin, len(wire.sent)))
