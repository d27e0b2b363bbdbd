"""The plan of a launch, worked out whole and checked before anything starts, and shown by ``--dry-run``."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import ConfigDict, Field, ValidationError

from capt.launcher.ssh import Address, Host, Port, Slots, read_hostfile
from capt.launcher.supervisor.activity import Crash
from capt.launcher.supervisor.remote import Left
from capt.pretrain.base.errors import ConfigError, UserError, counted
from capt.pretrain.base.files import read_bytes, read_text, write_text
from capt.pretrain.config.base import PathField, Section
from capt.pretrain.config.load import explain
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.engines.deepspeed_config import deepspeed_config
from capt.pretrain.engine.run_folder import PATIENCE, discard_refused, holds_run, is_active

# The files that a launch writes into a run folder, and their removal when its job was refused or never began.


class LaunchFiles:
    """Files of a launch, by path; all are private, because a job may hold paths and names of its user."""

    def __init__(self, folder: Path, files: Mapping[Path, str]) -> None:
        self._folder, self._files = folder, files
        self._new = [path for path in (folder, *folder.parents) if not path.exists()]
        self._before = {path: text for path in files if (text := _text(path)) is not None}
        self._others = frozenset(path for path, text in self._before.items() if text == files[path])

    def write(self) -> None:
        """Write the files and create their folders."""
        for path, text in self._files.items():
            write_text(path, text, private=True)

    def remove(self, *, refused: bool = False) -> None:
        """Remove the files and the new folders; nothing happens to a folder that holds a run.

        A file that was there already with the same text stays: a job of the same configuration, which waits in the
        queue of a cluster or whose ranks are starting, is going to read it. Where a job was ``refused`` because another
        one trains in the folder, that one's files are put back: ``capt resume`` launches it as they say.
        """
        if holds_run(self._folder):
            if refused and is_active(self._folder):
                with suppress(OSError):
                    for path in self._before.keys() - self._others:
                        write_text(path, self._before[path], private=True)
            return
        with suppress(OSError):  # what went wrong is another error, and somebody else's file keeps a folder
            for path in self._files.keys() - self._others:
                path.unlink(missing_ok=True)
            if not self._others:
                discard_refused(self._folder)
            for path in self._new:
                path.rmdir()


def _text(path: Path) -> str | None:
    with suppress(OSError, UserError):
        return read_text(path)
    return None


def job_file(folder: Path, text: str) -> Path:
    """Return the path of the merged job of a launch in its run folder.

    The name depends on the content, so that a second launch into the same folder, which is going to be refused, does
    not change the job of the first one before its ranks have read it.
    """
    return folder / f"job-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"


_MAX_BYTES = 1 << 16
DEFAULT_PORT = 29500
"""Port of the rendezvous on the first of several hosts."""

UNATTENDED = ("--skip-damaged", "--wait", f"{PATIENCE:g}")
"""For ranks that start again by themselves: nobody is there to name an older checkpoint."""

HostFilter = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:@,\[\]-]+$", max_length=100_000)]
"""Hosts of a hostfile, and slots of them, as DeepSpeed's ``--include`` names them."""

LauncherName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=100)]
"""A name of the registry `capt.launcher.backends`, which is asked when the job is planned."""


class Options(Section):
    """The user's options for a launch; the backend decides those that are None. Kept in ``RUN/launch.json``."""

    model_config = ConfigDict(strict=True)

    launcher: LauncherName | None = None
    nproc: Slots | None = None
    hostfile: PathField | None = None
    include: HostFilter | None = None
    exclude: HostFilter | None = None
    nodes: Annotated[int, Field(ge=1, le=100_000)] | None = None
    master_addr: Address | None = None
    master_port: Port | None = None
    cluster: PathField | None = None

    @classmethod
    def given(cls, **options: Any) -> Options:
        """The options of a command line. Raises ``ConfigError`` naming the one that is not valid."""
        try:
            return cls(**options)
        except ValidationError as error:
            raise ConfigError(f"--{explain(error, cls).replace('_', '-', 1)}") from None

    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the hostfile, filtered. Raises ``ConfigError``, also where no hostfile is given."""
        if self.hostfile is None:
            raise ConfigError("no --hostfile is given")
        return read_hostfile(self.hostfile, self.include, self.exclude)

    def hosts_of_slots(self, launcher: str) -> tuple[Host, ...]:
        """Return the hosts of the hostfile that ``launcher`` needs; their slots are ranks. Raises ``ConfigError``."""
        if self.hostfile is None:
            raise ConfigError(f"--launcher {launcher} needs --hostfile FILE; for this host alone use --launcher local")
        if self.nproc is not None:
            raise ConfigError(
                f"--nproc does not go with --hostfile: the slots in {self.hostfile} say how many ranks run"
            )
        return self.hosts()

    def refuse(self, launcher: str, *names: str, because: str) -> None:
        """Raise ``ConfigError`` where one of these options is given, which ``launcher`` does not take."""
        for name in names:
            if getattr(self, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} does not go with --launcher {launcher}: {because}")

    def to_json(self) -> str:
        """The options that were given, as JSON with absolute paths."""
        files = {
            name: path.resolve() for name in ("hostfile", "cluster") if (path := getattr(self, name)) and path.exists()
        }
        return self.model_copy(update=files).model_dump_json(indent=1, exclude_none=True)

    def repeat(self, others: Options) -> bool:
        """Return true where each of these options is one of ``others`` too, so that nothing was typed anew."""
        return bool(json.loads(self.to_json()).items() <= json.loads(others.to_json()).items())

    @classmethod
    def read(cls, path: Path) -> Options:
        """The inverse of ``to_json``; no options where there is no file.

        A hostfile says on which hosts code runs, a cluster file may hold shell lines. So they are taken only from a
        file of this user, by absolute path, and not from inside the run folder, which may be somebody else's work.

        Raises:
            ConfigError: the file is damaged, or names a file as above.
        """
        remedy = "delete the file, or pass --nproc, --hostfile or --cluster"
        try:
            options = cls.model_validate_json(read_bytes(path, limit=_MAX_BYTES, error=ConfigError))
        except FileNotFoundError:
            return cls()
        except ValidationError as error:
            raise ConfigError(f"{path}: {explain(error, cls)} ({remedy})") from None
        for name, file in (("hostfile", options.hostfile), ("cluster", options.cluster)):
            if file is None or (name == "cluster" and not file.exists()):  # the name of a shipped one
                continue
            if path.stat().st_uid not in (0, os.geteuid()):
                raise ConfigError(f"{path}: {name}: written by another user; look at it and pass --{name} yourself")
            if not file.is_absolute() or file.resolve().is_relative_to(path.parent.resolve()):
                raise ConfigError(
                    f"{path}: {name}: {str(file)!r} is no absolute path outside the run folder; pass --{name} yourself"
                )
        return options


@dataclass(frozen=True)
class Launch:
    """A validated job, the arguments of its ranks, and the options."""

    module: str
    arguments: tuple[str, ...]
    job: Job
    options: Options
    inputs: tuple[str, ...] = ()
    """Descriptions of the job's inputs, a line each: corpus, tokenizer, initial model."""
    files: Mapping[Path, str] = field(default_factory=dict)
    """Files that the ranks read, by path: the merged job of a new run."""
    unmerged: tuple[str, ...] | None = None
    """The arguments as the user gave them, for commands that a user runs by hand; None where they are ``arguments``."""

    again: bool = False
    """True where it continues one that failed."""
    left: Mapping[str, Left] = field(default_factory=dict)
    """Processes of earlier starts that were not seen to end, by host."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self.job.run.dir


@dataclass(frozen=True)
class Command:
    """A process to start: its arguments, and the variables set on top of the environment it inherits."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        where = f"# on {self.host}:\n" if self.host else ""
        return where + " ".join([*settings, shlex.join(self.argv)])


@dataclass(frozen=True)
class Plan:
    """Commands, files (path -> text) and environment of a launch on ``world`` processes."""

    launcher: str
    hosts: tuple[Host, ...]
    commands: tuple[Command, ...]
    files: Mapping[Path, str] = field(default_factory=dict)
    forwarded_env: Mapping[str, str] = field(default_factory=dict)
    master_port: int | None = None
    spares: tuple[Host, ...] = ()
    """Hosts that can take the place of one that is lost."""
    examined: Literal["", "here", "ssh"] = ""
    """Hosts that are checked before the start: this one, those over ssh, or none, since they are not known yet."""
    manifest: str = ""
    """Description for a cluster; where there is one, ``--dry-run`` shows nothing else, so that it can be applied."""
    blocked_reason: str = ""
    """Reason why this launch can be shown but not started from here; empty when it can be started."""

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return sum(host.slots for host in self.hosts)


@dataclass(frozen=True)
class End:
    """The end of a launch: the job's exit code, and what ended it where it cannot have said so itself."""

    code: int
    reason: str = ""
    crash: Crash | None = None
    """Facts about a process that died or hung."""
    left: Mapping[str, Left] = field(default_factory=dict)
    """Processes that were not seen to end, by host."""
    unreached: bool = False
    """True where no rank was started, because too few hosts could be reached."""
    lost_host: bool = False
    """True where a host was lost, which says nothing of the program."""
    slow_files: bool = False
    """True where a rank waited too long for a file system, or to have written, which is no fault of the program."""


class Backend(Protocol):
    """The functions of the module of a launcher."""

    def plan(self, launch: Launch) -> Plan:
        """Work out and check a launch without starting anything. Raises ``ConfigError``."""

    def start(self, launch: Launch, plan: Plan) -> End:
        """Carry the plan out; the job's exit code is 0, 1, 2 or 75."""


def _ramp(job: Job) -> Iterator[str]:
    """The stages of ``batch.ramp``: their sequences, and the steps and tokens at which they end."""
    stages = job.batch_sizes.stages
    for stage, then in pairwise(stages):
        tokens = then.samples * (job.sample_tokens or 0)
        yield f"{stage.batch} sequences a step up to step {then.step:,}, {tokens:,} tokens"


def describe(launch: Launch, plan: Plan) -> str:
    """The text of ``--dry-run``: batch arithmetic, inputs, environment, files with their content, commands.

    Raises:
        ConfigError: ``engine.deepspeed_extra`` is not valid, or the batch sizes do not fit the world size.
    """
    generated = deepspeed_config(launch.job, plan.world)
    if plan.manifest:
        return plan.manifest.rstrip()
    batch = launch.job.batch
    hosts = ", ".join(f"{host.name} x {host.slots}" for host in plan.hosts)
    hosts += "".join(f"; spare: {host.name}" for host in plan.spares)
    blocks = [
        f"# {plan.launcher}: {counted(plan.world, 'rank')} ({hosts})\n"
        f"# batch.global {batch.global_} {'=' if batch.global_ == generated['train_batch_size'] else '<'} "
        f"batch.micro {launch.job.micro_batch(plan.world)} x accumulation "
        f"{generated['gradient_accumulation_steps']} x {counted(plan.world, 'rank')}\n"
        + "".join(f"# batch.ramp {line}\n" for line in _ramp(launch.job))
        + f"# run.dir {launch.run_dir}"
        + "".join(f"\n# {line}" for line in launch.inputs)
    ]
    if plan.forwarded_env:
        blocks.append(
            "# environment that is forwarded to every host\n"
            + "\n".join(f"{k}={v}" for k, v in plan.forwarded_env.items())
        )
    blocks.append(
        "# DeepSpeed configuration that every rank generates\n" + json.dumps(generated, indent=1, sort_keys=True)
    )
    blocks += [f"# file that would be written: {path}\n{text.rstrip()}" for path, text in plan.files.items()]
    blocks.append("# commands\n" + "\n".join(map(str, plan.commands)))
    if plan.blocked_reason:
        blocks.append(f"# cannot be started from here: {plan.blocked_reason}")
    return "\n\n".join(blocks)
