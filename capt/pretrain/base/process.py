"""Things that a process inherits: streams, variables, command line, open files; and the time when one began.

Python has None for a stream that is closed (``>&-``, some daemons), and its number goes to the next file that is
opened: what a library prints would be written into a checkpoint or a page of heartbeats. Such a stream becomes
``/dev/null``.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from io import TextIOBase
from pathlib import Path
from typing import TextIO

from capt.pretrain.base.errors import counted

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed_streams() -> None:
    """Open those of the descriptors 0 to 2 that are closed, for this process and all that it starts."""
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(null, True)
            if getattr(sys, name) is None:
                setattr(sys, name, open(null, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


SPIN_COUNT, WAIT_POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
"""Variables by which a user says how waiting threads of OpenMP wait."""
SPINS = "30000"
"""The count that `spin_briefly` sets."""


def spin_briefly() -> None:
    """Have OpenMP's waiting threads spin for about 0.1 ms before they sleep, unless a variable of the user's says more.

    Call it before torch is imported: libgomp reads the variable when it is loaded. Without it threads spin for some
    milliseconds, and where other programs have the cores, that is time in which the thread that they wait for does not
    run; where they never spin, each wake-up of an idle machine costs more than the wait.
    """
    if WAIT_POLICY not in os.environ:
        os.environ.setdefault(SPIN_COUNT, SPINS)
    elif os.environ.get(SPIN_COUNT) == SPINS:
        # The launcher set it for itself, and .deepspeed_env the policy for its ranks: libgomp would follow the count.
        del os.environ[SPIN_COUNT]


def takes_colours(stream: TextIO | TextIOBase) -> bool:
    """Return whether a stream is a terminal that shows colours, and the user allows them (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, code: str) -> str:
    """Return ``text`` in a colour or style of ANSI terminals: ``1`` is bold, ``36`` cyan, ``1;31`` bold red."""
    return f"\x1b[{code}m{text}\x1b[0m"


def error_line(text: str, stream: TextIO | TextIOBase) -> str:
    """Return the line that reports an error on ``stream``."""
    return f"{coloured('error:', '1;31') if takes_colours(stream) else 'error:'} {text}"


# What a process that was started for a job has from the one that started it: its variables, and its end.


LISTENS, SECRET = "CAPT_LISTENS", "CAPT_SECRET"
"""Variables of a rank: the socket of the rendezvous that rank 0 inherits, and what only ranks of this job know."""

_ALWAYS_OTHERS: tuple[str, ...] = (
    *("OMPI_", "PMIX_", "PRTE_"),  # Open MPI
    *("PMI_", "HYDRA_", "HYDI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "I_MPI_"),  # MPICH, Intel MPI
    *("MV2_", "MPISPAWN_"),  # MVAPICH2
    *("PALS_", "ALPS_", "JSM_", "FLUX_"),  # Cray, IBM, Flux
    *("AZUREML_EXPERIMENT_ID", "AZ_BATCH", "SM_"),  # Azure ML, SageMaker: DeepSpeed reads them as MPI's
)
_OF_RANKS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CROSS_RANK", "CROSS_SIZE", "NODE_RANK"),
)
_OF_TORCHRUN = (
    *("TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
)
_OF_SLURM = ("SLURM_", "SLURMD_")
_OF_SLURMS_COMMANDS = frozenset({"SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_TIME_FORMAT"})
_COUNTS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec", "MV2_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}  # fmt: skip
"""Variables in which other launchers say how many processes they have started."""


def without_launchers(variables: Mapping[str, str], *, within_slurm: bool = False) -> dict[str, str]:
    """Variables without those by which any launcher numbers its processes: what ranks that we start inherit.

    A shell may itself be a process of mpirun, torchrun or srun, and libraries believe what it has left there. What
    users set for Slurm's commands stays; ``within_slurm``, all that Slurm has set does.
    """
    others = (*_ALWAYS_OTHERS, *_OF_TORCHRUN, "PET_", *(() if within_slurm else _OF_SLURM))
    return {
        name: value
        for name, value in variables.items()
        if name in _OF_SLURMS_COMMANDS or not (name in _OF_RANKS or name.startswith(others))
    }


def leave_other_launchers(*, by_deepspeed: bool) -> str:
    """Take out of this rank's environment what launchers have left there that have not started it; return a warning.

    Without ``RANK`` nobody has started it as a rank. ``by_deepspeed``: DeepSpeed's launcher has; else it may be
    torchrun, whose variables then stay. What Slurm says stays in any case, for no library takes it for a rank's.
    """
    alone, others = "RANK" not in os.environ, _ALWAYS_OTHERS
    counts = [(name, os.environ[name]) for name in _COUNTS if os.environ.get(name, "1") != "1"] if alone else []
    if alone or by_deepspeed:
        others += _OF_TORCHRUN
    for name in [name for name in os.environ if name.startswith(others) or (alone and name in _OF_RANKS)]:
        del os.environ[name]
    if not counts:
        return ""
    name, count = counts[0]
    return (
        f"{name}={count} is of {_COUNTS[name]}, which gives no RANK: this process trains alone; `capt pretrain` starts "
        "ranks (--nproc, --hostfile, --launcher srun)"
    )


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have Linux send ``number`` to this process, a child of ``parent``, when the thread that forked it ends.

    To be called in the child. Where the parent has ended already, this process ends immediately.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before prctl took hold
        os._exit(1)


# How many files this process may have open.


_OWN = 256


def allow_open_files(more: int) -> int:
    """Raise this process's limit (usually 1,024) to what it needs with ``more`` connections, as far as it may.

    Returns the limit as it is then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OWN + more if hard == resource.RLIM_INFINITY else min(_OWN + more, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def born(pid: int) -> int | None:
    """Return when a process began, in ticks since its host was started; None where there is none, or only its remains.

    A number of a process is given again. Together with this one it means one process, until the host is started again.
    A process whose first thread has ended holds its files and locks until the last one has, which may be in a write.
    """
    try:
        # The name before the last bracket may hold brackets; then come the fields of proc(5) from the third on.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, threads, begun = fields[0], int(fields[17]), int(fields[19])
        return None if state in "ZX" and threads < 2 else begun
    except (OSError, IndexError, ValueError):
        return None


def boot_id() -> str:
    """Return an id that is new with every start of this host; empty if the kernel has none. Its containers share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def with_value_of_resume(words: Sequence[str]) -> list[str]:
    """A command line in which ``--resume`` has a value: ``auto`` where that follows it, else ``always``."""
    result: list[str] = []
    for word in words:
        if word == "auto" and result[-1:] == ["--resume=always"]:
            result[-1] = "--resume=auto"
        else:
            result.append("--resume=always" if word == "--resume" else word)
    return result


SCRATCH = "CAPT_SCRATCH"
"""Variable that names the folder which the launcher hands down (`capt.launcher.supervisor.ranks`)."""


def use_scratch() -> None:
    """Have a rank and its data workers keep the sockets by which they exchange tensors in the launcher's folder.

    A rank that is killed does not remove them; the launcher removes the folder. Other temporary files stay where they
    are: what torch has compiled, and local checkpoints, are for the next start.
    """
    import tempfile
    from multiprocessing import util

    folder = os.environ.pop(SCRATCH, "")
    if not folder or not Path(folder).is_dir():
        return
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        util.get_temp_dir()  # made at the first call, and kept
    finally:
        tempfile.tempdir = before


def host_memory() -> int:
    """Bytes of main memory that processes of this host, or of this container, may have."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups of version 2, then 1
        with suppress(OSError, ValueError):  # no such limit, which is then the word "max"
            have = min(have, int((Path("/sys/fs/cgroup") / limit).read_text()))
    return have


def usable_cores() -> int:
    """Cores that this process may use: those of its affinity mask, as far as the container's CPU quota lasts."""
    quota = cpu_quota()
    cores = len(affinity())
    return cores if quota is None else max(1, min(cores, int(quota)))


def affinity() -> set[int]:
    """The numbers of the cores on which this process may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_quota(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the cores whose time this process may take: the least quota of its control group and those above it.

    Quotas of cgroups of version 2 (``cpu.max``) and 1 (``cpu.cfs_quota_us``) are read. None = no quota.
    """
    found: list[float] = []
    lines = own.read_text().splitlines() if own.is_file() else []
    for line in lines:
        _, names, place = line.split(":", 2)
        if names and "cpu" not in names.split(","):
            continue
        for root in [groups, groups / "unified"] if not names else [groups / names, groups / "cpu"]:
            # In a container the path may be that of the host, of which only the root is there.
            folder = root / place.lstrip("/")
            for group in (folder, *(above for above in folder.parents if above.is_relative_to(root))):
                with suppress(OSError, ValueError):  # no quota: no such file, or the word "max"
                    quota, period = _quota_and_period(group, version=1 if names else 2)
                    found += [quota / period] if quota > 0 < period else []
    return min(found, default=None)


def _quota_and_period(group: Path, version: int) -> tuple[int, int]:
    if version == 2:
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota), int(period)
    return int((group / "cpu.cfs_quota_us").read_text()), int((group / "cpu.cfs_period_us").read_text())


def thread_share(mine: Collection[int], masks: Sequence[Collection[int]], quota: float | None) -> int:
    """Return the threads of one of the processes that share a host.

    Each core is shared by the processes that may run on it, so that ranks which are bound to cores of their own have
    all of these, and ranks with the same mask an equal part.

    Args:
        mine: the cores of this process.
        masks: those of each process of the job on this host, this one among them.
        quota: the cores whose time all of them may take; None = all.
    """
    share = sum(1 / sum(core in mask for mask in masks) for core in mine)
    # The sum of thirds may be a hair below a whole number.
    share = share if quota is None else min(share, quota / len(masks))
    return max(1, int(share + 1e-6))


_BUSY = 0.5
"""Cores that others may take before it is said."""


def notes_on_cores(
    threads: int, processes: int, quota: float | None, usable: int, load: float, cores: int
) -> Iterator[str]:
    """Say where a quota or the load of others leaves a job fewer cores than it has threads or could have.

    Args:
        threads: of each process of the job.
        processes: of the job on this host.
        quota: the cores whose time the container may take; None = all.
        usable: the cores of a process's affinity mask.
        load: of the host over the last minute.
        cores: of the host.
    """
    taken = threads * processes
    if quota is not None and quota < max(taken, usable):
        more = f", and {taken} threads wait for each other: set run.threads={max(1, int(quota) // processes)}"
        yield f"the container may take the time of {quota:g} of {usable} cores{more if taken > quota else ''}"
    if load >= _BUSY and load + taken > cores + _BUSY:
        room = max(1, int(cores - load) // processes)
        remedy = f"run.threads={room} leaves them their cores" if room < threads else "steps take longer"
        yield (
            f"the load of this host was {load:.1f} on {cores} cores in the last minute, and this job has "
            f"{counted(taken, 'thread')} (run.threads): if that is the work of others, {remedy}"
        )
