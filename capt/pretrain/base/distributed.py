"""The few collectives the project needs, with one meaning whether there is one process or many.

Every function works without an initialised process group (then ``world_size() == 1``), so that library code and
notebooks need no launcher. Ranks are read from the environment that every launcher sets
(``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``): this file is the only one that does.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from capt.pretrain.base import errors
from capt.pretrain.base.errors import (
    ConfigError,
    MachineError,
    RunFailedError,
    UserError,
    is_outside,
    is_passing,
    shown,
    user_text,
)
from capt.pretrain.base.network import Announced, unreachable
from capt.pretrain.base.process import LISTENS, SECRET, allow_open_files, leave_other_launchers
from capt.pretrain.base.traits import traits

logger = logging.getLogger(__name__)

T = TypeVar("T")
Group = dist.ProcessGroup | None

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
"""The names of the collectives on one tensor: those since torch 2.13, and the ones that they replace."""

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
    getattr(dist, GATHER)(out, x.view(-1), group=group)
    return out.view(world, *x.shape)


def gather_ragged(rows: Tensor, group: Group = None) -> tuple[Tensor, slice]:
    """All ranks' rows in rank order, and where this rank's lie among them: ``(n_r, ...) -> (sum n_r, ...)``.

    Ranks may hold different numbers of rows, also none. No gradient.
    """
    if world_size(group) == 1:
        return rows.detach(), slice(0, len(rows))
    counts = all_gather(torch.tensor(len(rows), device=rows.device), group).tolist()
    # Collectives need equal shapes: what fills up is cut off again below.
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
    getattr(dist, REDUCE_SCATTER)(out, x.view(-1), group=group)
    return out.view(x.shape[1:])


def all_to_all(x: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
    """Send ``send[r]`` consecutive rows of ``x`` to each rank r; return the ``receive[r]`` rows of each, in rank order.

    No gradient.
    """
    x = x.detach().contiguous()
    if world_size() == 1:
        return x
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x, list(receive), list(send))
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
    """Return the value of rank ``src`` on every rank, as JSON brings it (`gather_objects`).

    Only that rank's bytes travel, once to each rank. In a gather all ranks' parts are as long as the longest: a list of
    a megabyte would be a gigabyte on each of a thousand ranks.
    """
    line = _packed(value) if rank() == src else b""
    if world_size() > 1:
        # The size first, so that the other ranks make room.
        size = torch.tensor(len(line))
        dist.broadcast(size, src, group=_control_group)
        content = (
            torch.frombuffer(bytearray(line), dtype=torch.uint8) if line else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(content, src, group=_control_group)
        line = content.numpy().tobytes()
    return json.loads(line, object_hook=_typed)  # type: ignore[no-any-return]


def broadcast_tensor(x: Tensor) -> None:
    """Overwrite ``x`` on every rank by that of rank 0."""
    if world_size() > 1:
        there = x.detach().to(device())  # the links between GPUs are tens of times faster than those of the hosts
        dist.broadcast(there, 0)
        x.detach().copy_(there)


def gather_objects(value: T) -> list[T]:
    """Return every rank's value, in rank order, on every rank, as JSON brings it: a tuple arrives as a list.

    Bytes, paths and arrays of numbers travel as well. Nothing that a rank sends is executed, as a pickle would be.
    """
    # JSON has no line break: one divides the values of the ranks.
    line = _packed(value) + b"\n"
    rows, _ = gather_ragged(torch.frombuffer(bytearray(line), dtype=torch.uint8), _control_group)
    return [json.loads(each, object_hook=_typed) for each in rows.numpy().tobytes().splitlines()]


def _packed(value: Any) -> bytes:
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    match value:
        case np.generic():
            return value.item()
        case bytes():
            return {"__bytes__": base64.b64encode(value).decode()}
        case Path():
            return {"__path__": str(value)}
        case np.ndarray() if value.dtype.kind in "biuf":
            return {"__array__": [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]}
    raise TypeError(f"a {type(value).__name__} does not travel between ranks")


def _typed(value: dict[str, Any]) -> Any:
    match value:
        case {"__bytes__": data}:
            return base64.b64decode(data)
        case {"__path__": path}:
            return Path(path)
        case {"__array__": [dtype, shape, data]}:
            return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()
    return value


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
    number, (kind, is_users, text, passing, outside) = failed[0]
    where = f"rank {number}: " if world_size() > 1 else ""
    if not is_users:
        raise RuntimeError(f"{where}{kind}: {text}") from error
    agreement: UserError = getattr(errors, kind)(f"{where}{text}")
    agreement.everywhere, agreement.passing, agreement.outside = True, passing, outside
    raise agreement from error


_LONGEST = 4000
"""Characters of an error that travel: all that a rank receives are as long as the longest of them."""


def _verdict(error: Exception) -> tuple[str, bool, str, bool, bool]:
    """The name of the error's class, whether a user can set it right, its text, `is_passing` and `is_outside`."""
    text = user_text(error)
    if text is None:
        return type(error).__name__, False, str(error)[:_LONGEST], False, False
    # Other ranks know the classes of `errors` alone: another one travels as the nearest of these.
    known = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return next(known, UserError.__name__), True, text[:_LONGEST], is_passing(error), is_outside(error)


_waited = 0
_TELL = 600.0
"""Seconds between two lines that say that ranks are waited for: for a dead file system it never ends."""


def _wait_for_all() -> None:
    """Wait for all ranks without a time-out, asking the store that they met at; Python hears signals meanwhile."""
    if world_size() == 1:
        return
    global _waited
    _waited += 1
    store, key, pause = dist.distributed_c10d._get_default_store(), f"capt/waited/{_waited}", 0.01
    begin = logged = time.monotonic()
    # The last one to come sets the key that all look for.
    if store.add(key, 1) == world_size():
        store.set(f"{key}/all", "")
    while not store.check([f"{key}/all"]):
        time.sleep(pause)
        pause = min(1.5 * pause, 1.0)
        if rank() == 0 and time.monotonic() - logged > _TELL and (missing := world_size() - store.add(key, 0)):
            logged = time.monotonic()
            logger.warning("waiting for %d of %d ranks since %.0f s", missing, world_size(), logged - begin)


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
    return torch.device("cuda", local_rank()) if traits().gpu_is_here() else torch.device("cpu")


def wait_for_device() -> None:
    """Wait until the device of this process has finished all work that was given to it; a CPU always has."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def shutdown() -> None:
    """Leave the process group together, so that no rank sees another's connection close in the middle of work."""
    if is_distributed():
        barrier()
        dist.destroy_process_group()


def prepare_gpus(traces: Path) -> dict[str, str]:
    """Set what torch reads from the environment when it first uses a GPU, and return what was set; nothing on CPUs.

    The allocator grows its segments, so that batches of many shapes leave no gaps. NCCL's flight recorder writes the
    last collectives of a rank, the number of the rank after ``traces``, when one of them takes longer than
    ``engine.timeout_minutes``. What the user has set stays.
    """
    if not torch.cuda.is_available():
        return {}
    # The name that newer releases of torch read, then the one that older ones read, which the user may have set.
    wanted = {
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"): "expandable_segments:True",
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(traces),
    }
    chosen = {names[0]: value for names, value in wanted.items() if not any(name in os.environ for name in names)}
    os.environ.update(chosen)
    return chosen


_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def initialize(timeout_minutes: float, *, by_deepspeed: bool = False) -> None:
    """Join the process group that the launcher describes (NCCL on GPUs, gloo on CPUs); alone, make a group of one.

    A group of one is made for a lone process as well, because DeepSpeed's engine asks for one. Ranks that are all on
    this host listen on the loopback interface alone. ``by_deepspeed``: DeepSpeed's launcher has started this rank.

    Raises:
        ConfigError: the launcher has left out one of the variables of a rank, or this host lets a process open too
            few files.
    """
    if is_distributed():
        return
    if warning := leave_other_launchers(by_deepspeed=by_deepspeed):
        logger.warning("%s", warning)
    if os.environ.get("WORLD_SIZE", "1") == "1" and os.environ.get("RANK", "0") == "0":
        for name, value in zip(_NEEDED, ("0", "1", "0", "127.0.0.1", "0"), strict=True):
            os.environ.setdefault(name, value)
    if missing := [name for name in _NEEDED if not os.environ.get(name)]:
        raise ConfigError(
            f"RANK is set and {', '.join(missing)} not: a launcher gives every rank {', '.join(_NEEDED)}; for one "
            "process alone: unset RANK"
        )
    world = int(os.environ["WORLD_SIZE"])
    files = allow_open_files(world)
    # Rank 0, where all meet, has a connection of each rank; over gloo each of two has one of the other.
    meets_all = os.environ["RANK"] == "0" or not torch.cuda.is_available()
    needed = _FILES + (max(0, world - 2) if meets_all else 0)
    if files < needed:
        raise MachineError(
            f"{socket.gethostname()} lets a process have {files} files open (ulimit -n), rank {os.environ['RANK']} of "
            f"{world} needs {needed} at least: ulimit -n {1024 if needed <= 1024 else 65536}"
        )
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    one_host = world == 1 or bool(here and int(here) == world)
    if one_host:
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if torch.cuda.is_available():
        global _control_group
        torch.cuda.set_device(local_rank())
        _join("nccl", world, timeout, one_host=one_host)
        # A mesh of all ranks would be a descriptor a peer in every process; so those that talk connect when they do.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        _control_group = dist.new_group(backend="gloo", timeout=timeout)
    else:
        _join("gloo", world, timeout, one_host=one_host)


def _join(backend: str, world: int, timeout: datetime.timedelta, *, one_host: bool) -> None:
    """Make the process group. Ranks that torchrun has started again must not find addresses of the dead ones.

    torchrun (``--max-restarts``) keeps one store for all attempts on a host; agents of several hosts make a new one for
    each attempt, and may count their attempts differently.
    """
    store = _own_store(world, timeout)
    if store is None:
        shared, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]  # public, not marked
        shared.set_timeout(timeout)
        attempt, alone = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("GROUP_WORLD_SIZE") == "1"
        store = PrefixStore(f"attempt-{attempt}" if alone else "default_pg", shared)
    number = int(os.environ["RANK"])
    _require_one_backend(store, backend, number)
    if not one_host:
        _require_reachable(store, number, world)
    dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=timeout)


def _require_one_backend(store: dist.Store, backend: str, number: int) -> None:
    """Refuse to be a rank on a host whose GPUs are gone where rank 0 has one, and the other way round.

    The ranks would wait for each other, in two kinds of process groups, until their time is over.

    Raises:
        RunFailedError: both hosts are named.
    """
    key, here = "capt/backend", socket.gethostname()
    if number == 0:
        store.set(key, f"{backend} {here}")
        return
    theirs, _, there = store.get(key).decode().partition(" ")
    if theirs == backend:
        return
    without, having = (here, there) if backend == "gloo" else (there, here)
    error = RunFailedError(
        f"rank {number} on {here} and rank 0 on {there} cannot train together: CUDA finds no GPU on {without}, and one "
        f"on {having}; nvidia-smi on {without} says more: mend its driver, or leave the host out"
    )
    error.everywhere, error.passing = False, True
    raise error


def _require_reachable(store: dist.Store, number: int, world: int) -> None:
    """Refuse hosts that gloo cannot join: some would wait for the others until their time is over. On GPUs as well,
    where the ranks agree over gloo.

    Raises:
        RunFailedError: on every rank, with what is to be written where.
    """
    said = Announced.here(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set(f"capt/address/{number}", said.to_json())
    if number == 0:
        everyone = [Announced.from_json(store.get(f"capt/address/{each}")) for each in range(world)]
        store.set("capt/unreachable", f"{unreachable(everyone)}\n")  # an empty value would be none
    if problem := store.get("capt/unreachable").decode().strip():
        store.set(f"capt/heard/{number}", "1")
        if number == 0:  # the store ends with this process
            with suppress(RuntimeError):
                store.wait([f"capt/heard/{each}" for each in range(world)], _HEARING)
        error = RunFailedError(problem)
        error.everywhere = True
        raise error


_HEARING = datetime.timedelta(seconds=30)
_FILES = 66
"""Files that one of two ranks has open, with a data worker."""
_secret = b""
"""Secret that this job's launcher has told its ranks and nobody else; empty under other launchers."""


def _own_store(world: int, timeout: datetime.timedelta) -> dist.Store | None:
    """Make the store where ranks find each other: in this process, or at the socket that our launcher gave rank 0.

    None under other launchers, which have ways of their own.
    """
    global _secret
    # Taken out of the environment, which child processes inherit.
    _secret = os.environ.pop(SECRET, "").encode()
    listens = os.environ.pop(LISTENS, "")
    if world == 1:
        if listens:
            os.close(int(listens))
        return HashStore()
    if not _secret:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world, bool(listens), timeout, master_listen_fd=int(listens) if listens else None)
    # Under a name that only this job's ranks know: another process finds nothing there.
    return PrefixStore(hashlib.sha256(_secret).hexdigest(), store)


def require_alike(facts: Mapping[str, Any]) -> None:
    """Refuse ranks of another job, or of another program, than rank 0's. Collective.

    ``facts`` is everything that must be alike, by name. Each rank signs its digest with the job's secret, so that a
    process which is none of this job's cannot take the place of a rank.

    Raises:
        ConfigError: a fact of a rank differs; host and fact are named.
        RunFailedError: a rank does not know the secret.
    """
    if world_size() == 1:
        return
    # A new number each time, so that no signature of an earlier start is of use.
    nonce, host = broadcast_object(secrets.token_hex(16)), socket.gethostname()
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    said = gather_objects((digest, _signature(nonce, rank(), digest)))
    for number, (theirs, signature) in enumerate(said):
        if not hmac.compare_digest(_signature(nonce, number, theirs), signature):
            raise RunFailedError(f"a process that is none of this job's has taken the place of rank {number}")
    if len({theirs for theirs, _ in said}) == 1:
        return
    other, of_rank_0 = broadcast_object((host, dict(facts)))
    with synchronize_errors():
        odd = [key for key in sorted({*facts, *of_rank_0}) if facts.get(key) != of_rank_0.get(key)]
        if odd:
            key, more = odd[0], f" (and {len(odd) - 1} more)" if odd[1:] else ""
            mine, theirs = shown(facts.get(key)), shown(of_rank_0.get(key))
            raise ConfigError(
                f"on {host} {key} is {mine}, on rank 0 ({other}) it is {theirs}{more}; "
                "start all ranks with one configuration, and the same installation on every host"
            )


def _signature(nonce: str, number: int, digest: str) -> str:
    return hmac.new(_secret, f"{nonce} {number} {digest}".encode(), "sha256").hexdigest()
