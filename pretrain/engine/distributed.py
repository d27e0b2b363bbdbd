"""The few collectives the project needs, with one meaning whether there is one process or many.

Every function works without an initialised process group (then ``world_size() == 1``), so that library code and
notebooks need no launcher. Ranks are read from the environment that every launcher sets
(``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``): this file is the only one that does.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.base.errors import UserError, is_passing, user_text
from pretrain.base.open_files import allow_open_files

logger = logging.getLogger(__name__)

T = TypeVar("T")
Group = dist.ProcessGroup | None

_control_group: Group = None
"""Over which ranks agree on verdicts: a CPU group, so that no GPU waits (None: the default group)."""


def is_distributed() -> bool:
    """True when a process group is up."""
    return dist.is_available() and dist.is_initialized()


def rank(group: Group = None) -> int:
    """Return this process's rank in ``group`` (0 without a process group)."""
    return dist.get_rank(group) if is_distributed() else 0


def world_size(group: Group = None) -> int:
    """Return the number of processes in ``group`` (1 without a process group)."""
    known = dist.group.WORLD if group is None else group  # get_world_size() in a third of its time: steps ask often
    return 1 if known is None else int(known.size())


def local_rank() -> int:
    """Return this process's index on its host, as the launcher gave it (0 alone)."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Return the number of processes on this host, as the launcher gave it (torchrun's name, then DeepSpeed's)."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE", "1"))


def all_gather(x: Tensor, group: Group = None) -> Tensor:
    """Stack every rank's ``x`` (same shape on all ranks) along a new first axis: ``(...) -> (W, ...)``. No gradient."""
    x = x.detach().contiguous()
    world = world_size(group)
    if world == 1:
        return x.unsqueeze(0)
    out = x.new_empty((world * x.numel(),))
    dist.all_gather_single(out, x.view(-1), group=group)
    return out.view(world, *x.shape)


def gather_ragged(rows: Tensor, group: Group = None) -> tuple[Tensor, slice]:
    """All ranks' rows in rank order, and where this rank's lie among them: ``(n_r, ...) -> (sum n_r, ...)``.

    Ranks may hold different numbers of rows, also none. No gradient.
    """
    if world_size(group) == 1:
        return rows.detach(), slice(0, len(rows))
    counts = all_gather(torch.tensor(len(rows), device=rows.device), group).tolist()
    padded = torch.cat([rows.detach(), rows.new_zeros(max(counts) - len(rows), *rows.shape[1:])])
    parts = zip(all_gather(padded, group), counts, strict=True)
    start = sum(counts[: rank(group)])
    return torch.cat([part[:count] for part, count in parts]), slice(start, start + len(rows))


def reduce_scatter_sum(x: Tensor, group: Group = None) -> Tensor:
    """Sum ``x`` of shape ``(W, ...)`` over the ranks and return this rank's slice ``(...)``. No gradient."""
    x = x.detach().contiguous()
    world = world_size(group)
    if x.shape[0] != world:
        raise AssertionError(f"the first axis must be the world size {world}, got shape {tuple(x.shape)}")
    if world == 1:
        return x[0]
    out = x.new_empty(x.shape[1:].numel())
    dist.reduce_scatter_single(out, x.view(-1), group=group)
    return out.view(x.shape[1:])


def all_to_all(x: Tensor, receive: Sequence[int], send: Sequence[int], group: Group = None) -> Tensor:
    """Send ``send[r]`` consecutive rows of ``x`` to each rank r; return the ``receive[r]`` rows of each, in rank order.

    No gradient.
    """
    x = x.detach().contiguous()
    if world_size(group) == 1:
        return x
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x, list(receive), list(send), group=group)
    return out


def all_reduce_sum(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of ``x`` over the ranks as a new tensor. No gradient."""
    x = x.detach().clone()
    if world_size(group) > 1:
        dist.all_reduce(x, group=group)
    return x


def all_reduce_max(x: Tensor, group: Group = None) -> Tensor:
    """Return the elementwise maximum of ``x`` over the ranks as a new tensor. No gradient."""
    x = x.detach().clone()
    if world_size(group) > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return x


def broadcast_object(value: T, src: int = 0) -> T:
    """Return the value of rank ``src`` on every rank (small picklable objects: verdicts, names, steps)."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=src, group=_control_group)
    return box[0]


def broadcast_tensor(x: Tensor) -> None:
    """Overwrite ``x`` on every rank by that of rank 0."""
    if world_size() > 1:
        dist.broadcast(x.detach(), 0, group=None if x.is_cuda else _control_group)


def gather_objects(value: T) -> list[T]:
    """Return every rank's value, in rank order, on every rank (small picklable objects)."""
    if world_size() == 1:
        return [value]
    out: list[T | None] = [None] * world_size()
    dist.all_gather_object(out, value, group=_control_group)
    return out  # type: ignore[return-value]


@contextmanager
def synchronize_errors(*, patient: bool = False) -> Iterator[None]:
    """Run a block on every rank; if it fails on any rank, it fails on all of them.

    Without this a rank whose disk is full raises while the others wait in their next collective. The block itself must
    not hold collectives, but for blocks that are agreed on themselves. What the user can set right is a user error
    (exit code 2) on every rank, names its rank, and is marked as raised ``everywhere``.

    With ``patient`` the ranks wait for each other as long as it takes (one prepares the corpus for hours), not only
    for the time-out of the collectives.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        if isinstance(caught, UserError) and caught.everywhere:  # agreed on within the block
            raise
        error = caught
    if patient:
        _wait_for_all()
    verdicts = gather_objects(None if error is None else _verdict(error))
    failed = [(number, verdict) for number, verdict in enumerate(verdicts) if verdict is not None]
    if not failed:
        return
    number, (kind, text, passing) = failed[0]
    where = f"rank {number}: " if world_size() > 1 else ""
    if not issubclass(kind, UserError):
        raise RuntimeError(f"{where}{kind.__name__}: {text}") from error
    agreement = kind(f"{where}{text}")
    agreement.everywhere, agreement.passing = True, passing
    raise agreement from error


def _verdict(error: Exception) -> tuple[type[Exception], str, bool]:
    text = user_text(error)
    if text is None:
        return type(error), str(error), False
    return type(error) if isinstance(error, UserError) else UserError, text, is_passing(error)


_waited = 0
_TELL = 600.0
"""Seconds between two lines that say that ranks are waited for: for a dead file system it is for ever."""


def _wait_for_all() -> None:
    """Wait for all ranks without a time-out, asking the store that they met at; Python hears signals meanwhile."""
    if world_size() == 1:
        return
    global _waited
    _waited += 1
    store, key, pause = dist.distributed_c10d._get_default_store(), f"capt/waited/{_waited}", 0.01
    begin = told = time.monotonic()
    if store.add(key, 1) == world_size():
        store.set(f"{key}/all", "")
    while not store.check([f"{key}/all"]):
        time.sleep(pause)
        pause = min(1.5 * pause, 1.0)
        if rank() == 0 and time.monotonic() - told > _TELL and (missing := world_size() - store.add(key, 0)):
            told = time.monotonic()
            logger.warning("waiting for %d of %d ranks since %.0f s", missing, world_size(), told - begin)


def exchange(send: Sequence[tuple[int, Tensor]], receive: Sequence[tuple[int, Tensor]]) -> None:
    """Send each of some CPU tensors to a rank, and fill others by what ranks send, all at the same time.

    Only the ranks that are named take part. What a rank sends to another arrives in the order in which it was sent.
    """
    work = [dist.isend(x, rank, group=_control_group) for rank, x in send]
    work += [dist.irecv(x, rank, group=_control_group) for rank, x in receive]
    for each in work:
        if each is not None:
            each.wait()


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier(group=_control_group)


def device() -> torch.device:
    """Return the device of this process: ``cuda:LOCAL_RANK`` where a GPU is present, else the CPU."""
    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def shutdown() -> None:
    """Leave the process group together, so that no rank sees another's connection close in the middle of work."""
    if is_distributed():
        barrier()
        dist.destroy_process_group()


def initialize(timeout_minutes: float) -> None:
    """Join the process group that the launcher describes (NCCL on GPUs, gloo on CPUs); alone, make a group of one.

    A group of one is made for a lone process as well, because DeepSpeed's engine asks for one.
    """
    if is_distributed():
        return
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    allow_open_files(int(os.environ["WORLD_SIZE"]))  # rank 0, where all meet, has a connection of each
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if torch.cuda.is_available():
        global _control_group
        torch.cuda.set_device(local_rank())
        dist.init_process_group("nccl", timeout=timeout)
        # A mesh of all ranks would be a descriptor a peer in every process; so those that talk connect when they do.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        _control_group = dist.new_group(backend="gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
