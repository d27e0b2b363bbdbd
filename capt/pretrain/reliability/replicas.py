"""Compares what all ranks must hold alike, so that one which silently went astray is found and named."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import RunFailedError, counted, quoted
from capt.pretrain.engine.checkpoint.fragments import differing_masters, optimizer_step_count
from capt.pretrain.engine.engines.base import Engine
from capt.pretrain.engine.engines.places import is_row_sharded
from capt.pretrain.engine.loop import NEVER, Callback, Run
from capt.pretrain.engine.task import SharedNumbers

# Checksums of the bits of tensors: whether two ranks hold the same, in eight bytes a tensor.


_ROW = 512
"""Words of a row. The words of a tensor are summed by rows and by columns, which reads memory at its full speed."""
_WORD = 8


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    r"""Compute a number for each tensor, of its bits: two zeros of different signs differ, a NaN equals itself.

    A tensor is read as words $w_i$ of 64 bits; up to seven bytes that are left at its end are words of their own. The
    checksum is $\sum_i (2i+1)\,w_i \bmod 2^{64}$. The weights are odd, so any change within one word changes the
    checksum; that two words change places does too, unless the product of their distance and of their difference is a
    multiple of $2^{63}$.

    The host waits for the device once. All tensors are on one device.
    """
    if not tensors:
        return []
    weights = torch.arange(1, 2 * (_ROW + _WORD), 2, dtype=torch.int64, device=tensors[0].device)
    return [int(number) for number in torch.stack([_checksum(tensor, weights) for tensor in tensors]).tolist()]


def _checksum(tensor: Tensor, weights: Tensor) -> Tensor:
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.storage_offset() % _WORD:  # words of 64 bits begin at multiples of eight bytes
        data = data.clone()
    whole = len(data) // _WORD
    words = data[: _WORD * whole].view(torch.int64)
    count = whole // _ROW
    rest = torch.cat([words[_ROW * count :], data[_WORD * whole :].to(torch.int64)])
    total = (rest * (weights[: len(rest)] + 2 * _ROW * count)).sum()
    if count:  # word j of row r has the weight 2 j + 1 + 2 * 512 r
        rows = words[: _ROW * count].view(count, _ROW)
        numbers = torch.arange(count, device=data.device)
        total = total + (rows.sum(0) * weights[:_ROW]).sum() + 2 * _ROW * (rows.sum(1) * numbers).sum()
    return total


_SHOWN = 4


class ReplicasDifferError(RunFailedError):
    """Ranks do not hold the same parameters or counters."""

    passing = True


class Held(NamedTuple):
    """Values of a rank, by name: a checksum, or the value itself, of everything that must be alike.

    ``damaged`` names parameters whose master weights of this rank are not the weights that it uses.
    """

    host: str
    values: Mapping[str, Any]
    damaged: Sequence[str] = ()


class Replicas(Callback):
    """Every ``guard.checksum`` steps before the update, at the start and before each save: whether all ranks hold the
    same bits.

    Compared are all parameters that a rank holds whole, trained or not, of engines whose rows are not shared out over
    the ranks; the counters of the run; each engine's learning rate, applied updates and loss scale; and what the task
    names (:class:`capt.pretrain.engine.task.SharedNumbers`). At ZeRO 1 to 3 each rank also compares the master weights
    of its shard with the weights that it uses. One all-reduce of 16 bytes tells whether all is alike; only where it is
    not do the ranks tell each other more. The comparison comes before the update, because that of ZeRO 1 to 3 makes all
    copies equal again, when the gradient of a wrong one has gone into all weights.
    """

    follows = ("Agreement",)
    """A divergence, which all ranks share, is told before any difference between them."""

    def on_start(self, run: Run) -> None:
        self._last_comparison = -1
        self._compared_steps: dict[str, int] = {}
        self._every = run.job.guard.checksum if distributed.world_size() > 1 else 0
        if not self._every:
            return
        for engine in run.engines.values():
            engine.before_update(partial(self._before_update, run, engine))
        run.before_save.append(lambda: self._compare_all(run))
        self._compare_all(run)

    def next_due(self, run: Run) -> int:
        return NEVER  # engines call before each update

    def _before_update(self, run: Run, engine: Engine) -> None:
        """Compare once in each step that is due, before the engine's first update in it."""
        step = run.progress.step + 1
        if step % self._every == 0 and self._compared_steps.get(engine.name) != step:
            self._compared_steps[engine.name] = step
            _compare(run, [engine], f"in step {step}, before its update,")

    def _compare_all(self, run: Run) -> None:
        if self._last_comparison != run.progress.step:
            self._last_comparison = run.progress.step
            _compare(run, list(run.engines.values()), f"after step {run.progress.step}")


def _compare(run: Run, engines: Sequence[Engine], when: str) -> None:
    """Raise `ReplicasDifferError` on all ranks where they differ. Collective."""
    own = held(run, engines)
    if _all_alike(own):
        return
    # None of the states is to be saved.
    run.diverged = True
    listed: Any = tuple(own)  # JSON brings a list
    everyone = [Held(*each) for each in distributed.gather_objects(listed)]
    raise ReplicasDifferError(
        f"{when} {describe_difference(everyone)}; a rank computed, stored or received something wrong. What is saved "
        f"was compared before: capt resume {quoted(run.dir)} continues from there; if it happens again, test the "
        "memory of that host, or leave it out"
    )


def held(run: Run, engines: Sequence[Engine]) -> Held:
    """Checksums of the parameters that every rank holds whole, then the counters, by name."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    counters: dict[str, Any] = {}
    damaged: list[str] = []
    for engine in engines:
        name = engine.name
        if is_row_sharded(engine.module):
            continue
        for parameter_name, parameter in engine.module.named_parameters():
            if engine.zero_stage < 3 or _is_kept_whole(parameter):
                names.append(f"{name}.{parameter_name}")
                tensors.append(parameter)
        damaged += [f"{name}.{parameter_name}" for parameter_name in differing_masters(engine)]
        counters[f"optimizer steps of {name}"] = optimizer_step_count(engine)
        counters[f"learning rate of {name}"] = engine.learning_rate()
        counters[f"loss scale of {name}"] = engine.loss_scale_state()
    task = run.task.shared_numbers() if isinstance(run.task, SharedNumbers) else {}
    values = {**dict(zip(names, checksums(tensors), strict=True)), **run.progress.to_json(), **counters, **task}
    return Held(socket.gethostname(), values, damaged)


def _is_kept_whole(parameter: Any) -> bool:
    """Return whether ZeRO 3 keeps a small parameter whole on every rank between two passes."""
    return bool(getattr(parameter, "ds_persist", False)) and parameter.numel() == parameter.ds_numel


def _all_alike(own: Held) -> bool:
    text = json.dumps(list(own.values.items())).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 2
    # The largest negative is minus the smallest: one all-reduce finds both.
    both = torch.tensor([digest, -digest], device=distributed.device())
    if own.damaged:  # digests are below 2^62, so this one is equal to none
        both.fill_(1 << 62)
    largest, smallest = distributed.all_reduce_max(both).tolist()
    return bool(largest == -smallest)


def describe_difference(everyone: Sequence[Held]) -> str:
    """Say which ranks differ from most, on which host, and in what first; without a majority, which differ from rank 0.

    A rank whose master weights are not the weights that it uses is wrong whatever the others hold.
    """
    if any(each.damaged for each in everyone):
        damaged = [(rank, each) for rank, each in enumerate(everyone) if each.damaged]
        listed = [f"rank {rank} ({each.host}) differs in {_first(each.damaged)}" for rank, each in damaged[:_SHOWN]]
        wrong = _with_others(listed, [rank for rank, _ in damaged])
        return f"{wrong}: its master weights are not the weights that it uses"
    contents = [json.dumps(each.values, sort_keys=True) for each in everyone]
    common, times = Counter(contents).most_common(1)[0]
    known = 2 * times > len(everyone)
    reference = contents.index(common) if known else 0
    odd = [rank for rank, content in enumerate(contents) if content != contents[reference]]
    listed = [_describe(rank, everyone[rank], everyone[reference]) for rank in odd[:_SHOWN]]
    others = "all others" if known else f"rank 0 ({everyone[0].host}), and no value is that of most ranks"
    return f"{_with_others(listed, odd)}: not as {others}"


def _describe(rank: int, own: Held, reference: Held) -> str:
    different = [name for name, value in reference.values.items() if own.values.get(name) != value]
    first = different[0]
    values = "" if "." in first else f" ({own.values.get(first)}, not {reference.values[first]})"
    return f"rank {rank} ({own.host}) differs in {_first(different, values)}"


def _first(names: Sequence[str], values: str = "") -> str:
    return f"{names[0]}{values}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _with_others(listed: list[str], odd: Sequence[int]) -> str:
    """Join the descriptions of the first ranks, and the numbers of the others that differ."""
    if len(odd) > _SHOWN:
        listed.append(f"{counted(len(odd) - _SHOWN, 'further rank')}: {', '.join(map(str, odd[_SHOWN : _SHOWN + 50]))}")
    return "; ".join(listed)
