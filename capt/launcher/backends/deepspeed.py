"""Several hosts through ``deepspeed --hostfile``, which starts one process a slot over pdsh and ssh.

What DeepSpeed does silently is said or prevented here: without a hostfile it runs on this host only; with one host
in it, it runs on this host whatever the name (hence ``--force_multi``); it quotes nothing but spaces for the remote
shell; its first ssh may stop for a question; its SIGTERM handler kills every DeepSpeed job of the user on those hosts.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from capt.launcher import environment
from capt.launcher.backends.torchrun import run_launcher
from capt.launcher.plan import DEFAULT_PORT, Command, End, Launch, Plan
from capt.launcher.ssh import USERS_OPTIONS, Host, ssh_options
from capt.pretrain.base.errors import ConfigError

_DEEPSPEED = Path(sys.executable).with_name("deepspeed")
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
# DeepSpeed sends these on by itself, whatever they hold (deepspeed.launcher.runner.EXPORT_ENVS and NCCL).
_SENT_BY_DEEPSPEED = ("MLFLOW", "MV2", "NCCL", "PYTHON", "UCX")


def plan(launch: Launch) -> Plan:
    """The ``deepspeed`` command, and the environment file it reads.

    Raises:
        ConfigError: the hostfile is missing or wrong; ``--nproc`` is given (the slots say it); something cannot pass
            through a remote shell.
    """
    options = launch.options
    hosts = options.hosts_of_slots("deepspeed")
    assert options.hostfile is not None
    if addresses := [host.name for host in hosts if ":" in host.name]:
        raise ConfigError(
            f"{options.hostfile}: pdsh takes no IPv6 address ({addresses[0]}): use --launcher ssh, or a name"
        )
    inherited = environment.inherited()
    forwarded = environment.forwarded_to_hosts(inherited, (Path.home(), Path()), through_shell=True)
    unquoted = {
        "working folder": str(Path.cwd()),
        "Python": sys.executable,
        "PYTHONPATH": forwarded.get("PYTHONPATH", "/"),
    }
    for what, text in unquoted.items():
        if not _PLAIN.fullmatch(text):
            raise ConfigError(
                f"{what} {text!r} holds a special character, and DeepSpeed sends it unquoted: use another path"
            )
    env_file = (launch.run_dir / "launch.env").resolve()
    port = options.master_port or DEFAULT_PORT
    argv = (
        str(_DEEPSPEED),
        *("--hostfile", str(options.hostfile.resolve())),
        *(("--include", options.include) if options.include else ()),
        *(("--exclude", options.exclude) if options.exclude else ()),
        *("--master_addr", options.master_addr or hosts[0].name),
        *("--master_port", str(port)),
        *("--force_multi", "--no_ssh_check", "--module", launch.module),
        *map(remote_word, launch.arguments),
    )
    # The file comes last in DeepSpeed, which else puts the working folder of this host first.
    sent = {"PYTHONPATH": "", **forwarded}
    # pdsh replaces %h and the like, unless the % is doubled.
    lines = [f"{name}={value.replace('%', '%%')}" for name, value in sent.items()]
    return Plan(
        "deepspeed",
        hosts,
        (Command(argv, {"DS_ENV_FILE": str(env_file), USERS_OPTIONS: ssh_options(inherited)}),),
        files={**launch.files, env_file: "".join(f"{line}\n" for line in lines)},
        forwarded_env=forwarded,
        master_port=port,
        examined="ssh",
        blocked_reason=_blocked_reason(),
    )


def _blocked_reason() -> str:
    if not _DEEPSPEED.is_file():
        return f"there is no {_DEEPSPEED}; install deepspeed into this Python environment"
    if shutil.which("pdsh") is None:
        return "pdsh is not installed (Debian and Ubuntu: apt-get install pdsh); --hostfile needs it"
    return ""


def start(launch: Launch, plan: Plan) -> End:
    """Run the job on all hosts; SIGTERM, SIGUSR1 and Ctrl-C reach every rank."""
    (command,) = plan.commands
    inherited = {
        name: value
        for name, value in environment.of_ranks().items()
        if name in plan.forwarded_env or not name.startswith(_SENT_BY_DEEPSPEED)
    }
    ssh = command.env[USERS_OPTIONS]

    def signal_ranks(number: signal.Signals) -> bool:
        done = subprocess.run(
            signal_command(plan.hosts, plan.master_port or DEFAULT_PORT, number),
            env={**inherited, "PDSH_RCMD_TYPE": "ssh", USERS_OPTIONS: ssh},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        return done.returncode == 0

    return run_launcher(command, inherited, launch.run_dir, signal_ranks=signal_ranks)


def remote_word(word: str) -> str:
    """Quote one argument so that it arrives as it is through DeepSpeed, pdsh and a remote shell.

    DeepSpeed puts a word that holds a space between double quotes and escapes double quotes in it; other words it
    leaves alone. pdsh replaces ``%h``, ``%n`` and ``%u``.

    Raises:
        ConfigError: the word holds a line break or another control character.
    """
    if not word.isprintable():
        raise ConfigError(f"argument {word!r} holds a control character and cannot be sent to another host")
    word = word.replace("%", "%%")
    if " " in word:
        return re.sub(r"([\\$`])", r"\\\1", word)
    return shlex.quote(word)


def signal_command(hosts: tuple[Host, ...], port: int, number: signal.Signals) -> list[str]:
    """The command that signals the ranks of this job on every host, and no other job's.

    The ranks are the children of DeepSpeed's node launcher, of which there is one a host and master port; the shells
    that carry its command line or this one do not begin with ``python -u -m``.
    """
    pattern = f"^[^ ]+ -u -m deepspeed.launcher.launch .*--master_port={port} "
    launchers = f'p=$(pgrep -d, -f "{pattern}")'
    # what is stopped hears nothing until it is woken
    remote = f'{launchers}; pkill -{number.name.removeprefix("SIG")} -P "$p"; code=$?; pkill -CONT -P "$p"; exit $code'
    return ["pdsh", "-S", "-f", "1024", "-w", ",".join(host.name for host in hosts), remote]
