"""A small regression task for tests of the engine: two tied-weight layers, deterministic data, a sharded counter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import DataError
from capt.pretrain.engine.checkpoint.fragments import WEIGHT, fragments
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.run_folder import LOCK
from capt.pretrain.engine.task import Progress, Rows, SampleOrder, StepMetrics
from tests.toy.config import ToyJob


class ToyModel(nn.Module):
    """Odd sizes, so that ZeRO's partitions are padded and cut through parameters; one tied weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([nn.Linear(width, 7)])
        self.scale = nn.Parameter(torch.ones(1))
        self.tied = nn.Linear(7, width, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale * self.layers[0](torch.tanh(self.norm(self.first(x))))
        return self.tied(x)


def _flip(engine: Engine, *, master: bool) -> None:
    """Change the last bit of one number, of a parameter or of this rank's master weights."""
    kept = next(f.view for f in fragments(engine) if f.kind == WEIGHT and f.view.numel() > 3)
    tensor = kept if master else engine.module.get_parameter("norm.weight").detach()
    tensor.view(torch.int32)[3] ^= 1


EPOCH = 20
"""Samples of an epoch, in which sample g has the id g % EPOCH."""


class ToyTask:
    """Samples are numbered; sample g is drawn from its own generator, rank g % W takes it."""

    def __init__(self, job: ToyJob, run_dir: Path) -> None:
        self.job = job
        job.fault.strike(0)
        self.status = ""
        self.seen: list[int] = []
        self.validations = 0

    def build_modules(self) -> Mapping[str, nn.Module]:
        torch.manual_seed(self.job.run.seed)
        model = ToyModel(self.job.width)
        model.register_forward_pre_hook(lambda *_: self.job.fault.delay("slow_forward"))
        table = {"table": nn.Embedding(11, 3, sparse=True)} if self.job.table != "none" else {}
        return {"model": model, **table}

    def optimizers(self) -> Mapping[str, ModuleOptimizer]:
        """The table's, at a constant learning rate."""
        if self.job.table == "none":
            return {}
        changes = {"type": self.job.table, "lr": 0.1, "weight_decay": 0.0, "clip": 0.05}
        return {"table": ModuleOptimizer(self.job.optimizer.model_copy(update=changes), schedule=False)}

    def build_batches(self, progress: Progress) -> Iterator[list[list[int]]]:
        rank, world = distributed.rank(), distributed.world_size()
        start, size, share = progress.samples, self.job.batch.global_, self.job.micro_batch(world) * world
        while True:
            if self.job.avoid is not None and start == self.job.avoid[0]:
                start = self.job.avoid[1]
            self.job.fault.delay("slow_data")
            parts = [range(start + first, start + first + share) for first in range(0, size, share)]
            yield [[g for g in part if g % world == rank] for part in parts]
            start += size

    def sample_order(self) -> SampleOrder:
        return SampleOrder(EPOCH, 0, "toy", shuffle=False)

    def consumed(self, batch: list[list[int]]) -> list[Rows]:
        return [Rows(np.array(part) % EPOCH, [np.array(part)]) for part in batch]

    def step(self, engines: Mapping[str, Engine], batch: list[list[int]], progress: Progress) -> StepMetrics:
        engine, total = engines["model"], 0.0
        self.job.fault.strike(progress.step + 1)
        for kind in ("flip", "flip_master"):
            if self.job.fault.hits(kind, progress.step + 1):
                _flip(engine, master=kind == "flip_master")
        for part in batch:
            x = torch.from_numpy(np.stack([np.random.default_rng(g).normal(size=7) for g in part])).float()
            if self.job.engine.casts_weights:
                x = x.half() if self.job.engine.precision == "fp16" else x.bfloat16()
            loss = engine(x).float().square().mean()
            if any(g in self.job.bad_samples for g in part):
                loss = loss * self.job.badness
            if self.job.fault.hits("nan_gradient", progress.step + 1):
                loss = loss * float("nan")
            engine.backward(loss)
            engine.step(loss)
            if "table" in engines:
                looked_up = engines["table"](torch.tensor([[g % 11, g % 7] for g in part]))
                distance = (looked_up - 1).square().mean()
                engines["table"].backward(distance)
                engines["table"].step()
                total += float(distance.detach()) / len(batch)
            total += 0.0 if loss.isnan() else float(loss.detach()) / len(batch)
            self.seen += part
        if self.job.fault.hits("nan_update", progress.step + 1):
            next(f.view for f in fragments(engine) if f.kind == WEIGHT)[0] = float("nan")
        if self.job.fault.hits("prune", progress.step + 1):
            next(Path(self.job.exports).iterdir()).unlink()
        for kind in ("link_checkpoints", "replace_checkpoints"):
            if self.job.fault.hits(kind, progress.step + 1):
                folder, others = self.job.run.dir / "checkpoints", self.job.run.dir.with_name("others")
                folder.rename(folder.with_name("own"))
                if kind == "link_checkpoints":
                    folder.symlink_to(others)
                else:
                    others.rename(folder)
        for kind in ("move", "replace"):
            if self.job.fault.hits(kind, progress.step + 1):
                folder = self.job.run.dir
                folder.rename(folder.with_name("moved"))
                if kind == "replace":  # by somebody's new run
                    folder.mkdir()
                    (folder / LOCK).touch()
        progress.samples += self.job.batch.global_
        if self.job.fault.hits("nan", progress.step + 1):
            total = float("nan")
        return {"loss": total, "grad_norm": engine.gradient_norm()}

    def validate(self, engines: Mapping[str, Engine], progress: Progress) -> StepMetrics:
        if self.job.fault.kind == "validation_refused":
            raise DataError("nothing to compare")
        if self.job.fault.kind == "validation_crash":
            raise RuntimeError("a fault of the validation")
        self.validations += 1
        return {"loss": 1.0}

    def validation_fault(self) -> str:
        return "one sample; raise data.samples" if self.job.fault.kind == "unfit_validation" else ""

    def guidance(self) -> object:
        return self.validations if self.job.guided else None

    def save_state(self, folder: Path) -> dict[str, Any]:
        (folder / f"seen-{distributed.rank()}.json").write_text(json.dumps(self.seen))
        return {"width": self.job.width, "validations": self.validations}

    def load_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        assert state["width"] == self.job.width

    def flops_per_step(self) -> float:
        return 1.0

    def next_steps(self, run_dir: Path) -> list[str]:
        return [f"capt report {run_dir}"]

    def export_files(self) -> Mapping[str, Path]:
        return {"tokenizer": Path(self.job.exports)} if self.job.exports else {}


TASK = ToyTask
