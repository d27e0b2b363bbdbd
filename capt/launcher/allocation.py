"""The place of this process in Slurm: its job, its task of an array, and the nodes and tasks of its allocation.

Nothing else of the launcher reads ``SLURM_*``. What a variable means is said in the manuals of sbatch, salloc and srun:
some are set only where an option was given (``SLURM_NTASKS``, ``SLURM_NTASKS_PER_NODE``); a job step replaces others
by its own (``SLURM_TASKS_PER_NODE``, ``SLURM_NTASKS``) and leaves the job's list of nodes; and without any option about
tasks ``SLURM_TASKS_PER_NODE`` counts processors.
"""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from capt.launcher import environment
from capt.launcher.ssh import MAX_SLOTS, Host
from capt.pretrain.base.errors import ConfigError, MachineError, counted

log = logging.getLogger(__name__)

ARRAY_NUMBER = '"$SLURM_ARRAY_TASK_ID"'
"""The number of this task in its array, in a batch script."""
OWN_ID = '"${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"'
"""`Allocation.own_id` in a batch script."""

_COUNT = re.compile(r"([0-9]{1,5})(?:\(x([0-9]{1,6})\))?", re.ASCII)
_MOST_NODES = 100_000
_OF_A_STEP = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_DISTRIBUTION", "SLURM_ARBITRARY_NODELIST"),
    *(f"SLURM_NTASKS_PER_{what}" for what in ("NODE", "SOCKET", "CORE", "GPU", "TRES")),
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_GPU"),
)
"""Variables that would shape a step of srun: they are meant for the job's tasks, and our step is none of these."""


@dataclass(frozen=True)
class Allocation:
    """A job of Slurm as its variables describe it to a process."""

    variables: Mapping[str, str]

    @classmethod
    def here(cls) -> Allocation:
        """The allocation of this process, if it has one."""
        return cls(environment.inherited())

    @property
    def job(self) -> str:
        """The number of the job, which no other job or task of an array has; empty outside an allocation."""
        return self.variables.get("SLURM_JOB_ID") or self.variables.get("SLURM_JOBID", "")

    @property
    def own_id(self) -> str:
        """The name by which Slurm's commands take this job alone: ``100``, or ``100_3`` for a task of an array.

        The last task of an array to start has the number of the array itself, and a command that is given that number
        is carried out for every task.
        """
        task = self.variables.get("SLURM_ARRAY_TASK_ID")
        return f"{self.variables.get('SLURM_ARRAY_JOB_ID', '')}_{task}" if task else self.job

    @property
    def restarts(self) -> int:
        """The number of times that Slurm has queued the job again."""
        return self._number("SLURM_RESTART_COUNT") or 0

    def hosts(self) -> tuple[Host, ...]:
        """The nodes in Slurm's order, each with its ranks: the tasks that were asked for, else its GPUs, else one.

        Raises:
            ConfigError: the job is heterogeneous, its nodes differ in their tasks, this process is one of several
                tasks, or a step of a part of the allocation; or a node has fewer GPUs than tasks.
        """
        if (parts := self._number("SLURM_HET_SIZE") or 1) > 1:
            raise ConfigError(
                f"SLURM_HET_SIZE={parts}: the parts of a heterogeneous job are not joined; ask for nodes of one kind, "
                "without ':' or #SBATCH hetjob"
            )
        if self._number("SLURM_PROCID"):
            raise ConfigError(
                f"SLURM_PROCID={self.variables['SLURM_PROCID']}: srun has started several tasks, and each would start "
                "the whole job; run one, by srun --nodes=1 --ntasks=1 --preserve-env, or without srun"
            )
        nodes = self._nodes()
        slots = self._slots(nodes)
        gpus = self._number("SLURM_GPUS_ON_NODE") or 0
        if gpus and slots > gpus and self.variables.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"):
            raise ConfigError(
                f"Slurm gives {counted(slots, 'task')} and {counted(gpus, 'GPU')} of a node, and a rank needs a GPU of "
                f"its own: --ntasks-per-node={gpus}"
            )
        if slots < gpus:
            idle = counted(gpus - slots, "GPU")
            log.warning("%s of %d on each node stay idle: --ntasks-per-node=%d", idle, gpus, gpus)
        return tuple(Host(node, slots) for node in nodes)

    def step_options(self, slots: int) -> list[str]:
        """The options by which a step of one task has what ``slots`` tasks of the job have on a node."""
        # since Slurm 22.05 srun does not take this from the batch job
        cpus = (self._number("SLURM_CPUS_PER_TASK") or 0) * slots
        # GPUs that were asked for as a total or by task would be counted for the step's one task.
        total = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET")
        by_task = any(map(self.variables.get, total)) or "gpu" in self.variables.get("SLURM_TRES_PER_TASK", "")
        return [*[f"--cpus-per-task={cpus}"] * bool(cpus), *[f"--gpus-per-node={slots}"] * by_task]

    def step_environment(self) -> dict[str, str]:
        """The variables with which srun starts a step that is not made of the job's tasks."""
        return {name: value for name, value in self.variables.items() if name not in _OF_A_STEP}

    def _slots(self, nodes: Sequence[str]) -> int:
        """The ranks of every node.

        One task a node says nothing of ranks, unless it was asked for by ``--ntasks-per-node``: a shell under
        ``srun --pty`` is one task, and may have eight GPUs.
        """
        layout, per_node = self._layout(nodes), self._number("SLURM_NTASKS_PER_NODE")
        total = self._number("SLURM_NTASKS") or self._number("SLURM_NPROCS") or 0
        if per_node is None and total <= len(nodes):
            return self._number("SLURM_GPUS_ON_NODE") or 1
        if layout is None and per_node is None and total % len(nodes):
            raise ConfigError(f"SLURM_NTASKS={total}: not the same number for each of {len(nodes)} nodes: {_SAME}")
        counts = layout or [per_node or total // len(nodes)] * len(nodes)
        if len(set(counts)) > 1:
            odd = next(index for index, count in enumerate(counts) if count != counts[0])
            raise ConfigError(
                f"SLURM_TASKS_PER_NODE={self.variables['SLURM_TASKS_PER_NODE']}: {nodes[0]} has "
                f"{counted(counts[0], 'task')}, {nodes[odd]} has {counts[odd]}: {_SAME}"
            )
        if not 1 <= counts[0] <= MAX_SLOTS:
            raise ConfigError(f"Slurm gives {counts[0]} tasks a node: 1 to {MAX_SLOTS} ranks can run on one")
        return counts[0]

    def _layout(self, nodes: Sequence[str]) -> list[int] | None:
        """The tasks of each node as Slurm has laid them out; None where it does not say.

        Within a step that was not started with ``--preserve-env`` the variables are the step's.
        """
        of_step = self.variables.get("SLURM_STEP_TASKS_PER_NODE", "")
        text = self.variables.get("SLURM_TASKS_PER_NODE") or of_step
        if not text:
            return None
        counts, per_node = _expanded(text), self._number("SLURM_NTASKS_PER_NODE")
        if text == of_step and per_node is not None and set(counts) != {per_node}:
            return None  # what the job was asked for is left by srun, and counts
        if len(counts) == len(nodes):
            return counts
        step = f"a job step of {counted(len(counts), 'node')}" if text == of_step else "SLURM_TASKS_PER_NODE"
        raise ConfigError(
            f"SLURM_TASKS_PER_NODE={text}: {step}, in an allocation of {counted(len(nodes), 'node')} "
            f"({self.variables['SLURM_JOB_NODELIST']}); leave the step, or start it by srun --preserve-env"
        )

    def _nodes(self) -> list[str]:
        """The names of the nodes of the allocation."""
        listed = self.variables.get("SLURM_JOB_NODELIST") or self.variables.get("SLURM_NODELIST")
        if not listed:
            raise ConfigError(
                f"SLURM_JOB_NODELIST is not set in job {self.job}: run it after salloc or in a batch script"
            )
        command = ["scontrol", "show", "hostnames", listed]
        try:
            names = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise MachineError(f"scontrol cannot be started: {error.strerror}") from None
        if names.returncode != 0 or not names.stdout.split():
            raise MachineError(f"scontrol show hostnames {listed}: {names.stderr.strip() or 'no names'}")
        return names.stdout.split()

    def _number(self, name: str) -> int | None:
        text = self.variables.get(name, "")
        if not text:
            return None
        if not re.fullmatch(r"[0-9]{1,10}", text, re.ASCII):
            raise ConfigError(f"{name}={text[:80]!r}: Slurm sets it to a number; unset it")
        return int(text)


_SAME = "every node runs the same number of ranks, by --ntasks-per-node=N"


def _expanded(text: str) -> list[int]:
    """The numbers of ``2(x3),1``: 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        if found is None or len(counts) + int(found[2] or 1) > _MOST_NODES:
            raise ConfigError(f"SLURM_TASKS_PER_NODE={text[:80]!r}: not of the form 8(x2) or 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts
