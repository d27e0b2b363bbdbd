"""Compares what all ranks must hold alike, so that one which silently went astray is found and named."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pretrain.base.errors import RunFailedError, counted
from pretrain.engine import distributed
from pretrain.engine.checkpoint.fragments import optimizer_step_count
from pretrain.engine.checksums import checksums
from pretrain.engine.loop import NEVER, Callback, Run
from pretrain.engine.row_shard import is_row_sharded
from pretrain.engine.task import SharedNumbers, StepMetrics, is_logged

_SHOWN = 4


class ReplicasDifferError(RunFailedError):
    """Ranks do not hold the same parameters or counters."""

    passing = True


class Held(NamedTuple):
    """What a rank holds: a checksum, or the value itself, of everything that must be alike, by name."""

    host: str
    values: Mapping[str, Any]


class Replicas(Callback):
    """Every ``guard.checksum`` steps (in the next one that is logged), at the start and before each save: whether all
    ranks hold the same bits.

    Compared are all parameters, trained or not, of engines at ZeRO 0 to 2 whose rows are not shared out over the ranks;
    the counters of the run; each engine's learning rate, applied updates and loss scale; and what the task names
    (:class:`pretrain.engine.task.SharedNumbers`). One all-reduce of 16 bytes tells whether all is alike; only where it
    is not do the ranks tell each other more. Moments are not compared: one that differs shows in the parameters of the
    next update. What ZeRO shards has no second copy to be compared with.
    """

    def on_start(self, run: Run) -> None:
        self._compared = -1
        self._every = run.job.guard.checksum if distributed.world_size() > 1 else 0
        if not self._every:
            return
        settle = run.settle

        def settle_and_compare() -> None:
            settle()
            self._compare(run)

        run.settle = settle_and_compare
        self._compare(run)

    def after_step(self, run: Run, report: StepMetrics) -> None:
        step = run.progress.step
        if self._every and is_logged(run.job, step) and step // self._every > self._compared // self._every:
            self._compare(run)

    def next_due(self, run: Run) -> int:
        return NEVER  # logged steps are due by themselves

    def _compare(self, run: Run) -> None:
        """Raise `ReplicasDifferError` on all ranks where they differ. Collective."""
        if self._compared == run.progress.step:
            return
        self._compared = run.progress.step
        values = held(run)
        if not _all_alike(values):
            run.diverged = True
            everyone = [Held(*each) for each in distributed.gather_objects((socket.gethostname(), values))]
            raise ReplicasDifferError(
                f"at step {run.progress.step} {describe_difference(everyone)}; a rank computed, stored or received "
                f"something wrong. What is saved was compared before: capt resume {run.dir} goes on from there; if it "
                "happens again, test the memory of that host, or leave it out"
            )


def held(run: Run) -> dict[str, Any]:
    """Checksums of the parameters that every rank holds whole, then the counters, by name."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    counters: dict[str, Any] = {}
    for name, engine in run.engines.items():
        if is_row_sharded(engine.module):
            continue
        if engine.zero_stage < 3:
            for parameter_name, parameter in engine.module.named_parameters():
                names.append(f"{name}.{parameter_name}")
                tensors.append(parameter)
        counters[f"optimizer steps of {name}"] = optimizer_step_count(engine)
        counters[f"learning rate of {name}"] = engine.learning_rate()
        counters[f"loss scale of {name}"] = engine.loss_scale_state()
    task = run.task.shared_numbers() if isinstance(run.task, SharedNumbers) else {}
    return {**dict(zip(names, checksums(tensors), strict=True)), **run.progress.to_json(), **counters, **task}


def _all_alike(values: Mapping[str, Any]) -> bool:
    text = json.dumps(list(values.items())).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 2
    both = torch.tensor([digest, -digest], device=distributed.device())
    largest, smallest = distributed.all_reduce_max(both).tolist()
    return bool(largest == -smallest)


def describe_difference(everyone: Sequence[Held]) -> str:
    """Who differs from most ranks, on which host, and in what first; where none are most, who differs from rank 0."""
    contents = [json.dumps(each.values, sort_keys=True) for each in everyone]
    common, times = Counter(contents).most_common(1)[0]
    known = 2 * times > len(everyone)
    reference = contents.index(common) if known else 0
    odd = [rank for rank, content in enumerate(contents) if content != contents[reference]]
    told = [_describe(rank, everyone[rank], everyone[reference]) for rank in odd[:_SHOWN]]
    if len(odd) > _SHOWN:
        told.append(f"{counted(len(odd) - _SHOWN, 'further rank')}: {', '.join(map(str, odd[_SHOWN : _SHOWN + 50]))}")
    others = "all others" if known else f"rank 0 ({everyone[0].host}), and no value is that of most ranks"
    return f"{'; '.join(told)}: not as {others}"


def _describe(rank: int, own: Held, reference: Held) -> str:
    different = [name for name, value in reference.values.items() if own.values.get(name) != value]
    first = different[0]
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    values = "" if "." in first else f" ({own.values.get(first)}, not {reference.values[first]})"
    return f"rank {rank} ({own.host}) differs in {first}{values}{more}"
