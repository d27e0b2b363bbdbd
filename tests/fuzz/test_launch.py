"""Inputs of a launch: hostfiles, launch.json, .deepspeed_env, cluster files, command lines."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest
import yaml

from capt.launcher.backends.slurm import load_cluster
from capt.launcher.environment import forwarded_to_hosts
from capt.launcher.plan import Options
from capt.launcher.requeue import main
from capt.launcher.ssh import read_hostfile
from capt.pretrain.config.load import load_mapping
from tests.fuzz.harness import HOSTILE, check, command, inputs, library, mutated, snapshot

PLAIN = re.compile(r"[A-Za-z0-9_.:-]+")
WORDS = (
    *(
        "node-1",
        "10.0.0.3",
        "localhost",
        "-oProxyCommand=touch X",
        "a;touch X",
        "$(touch X)",
        "`touch X`",
        "a b",
        "::1",
    ),
    *(
        "slots=2",
        "slots=0",
        "slots=99999999999999999999",
        "slots=\u0663",
        "#",
        "\r",
        "\t",
        "=",
        "\0",
        "\n",
        "",
        "a" * 300,
    ),
    *(
        "../../x",
        "/etc/passwd",
        "fe80::1%eth0",
        "user@host",
        "a,b",
        "*",
        "~",
        "\u202e",
        "h\u00f6st",
        "|",
        "&",
        "'",
        '"',
    ),
)
NAMES = (
    *("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "CAPT_X", "OMP_NUM_THREADS", "LD_PRELOAD", "PATH", "BASH_ENV", "PYTHONPATH"),
    *("PYTHONSTARTUP", "NCCL_NET_PLUGIN", "UCX_MODULE_DIR", "HF_TOKEN", "CAPT_DB_PASS", "1A", "A;B", "", "IFS", "\0"),
)
OPTIONS = ("--launcher", "--nproc", "--hostfile", "--master-addr", "--master-port", "--cluster", "--checkpoint")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a run and a hostfile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "hosts").write_text("node-1 slots=2\nnode-2 slots=2\n")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text(
        yaml.safe_dump(load_mapping("capt_tiny", ["run.dir=r", "batch.micro=4"]))
    )
    return tmp_path


def plant(rng: random.Random, path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``, or now and then something that is no small file."""
    path.unlink(missing_ok=True)
    match rng.randrange(12):
        case 0:
            os.mkfifo(path)
        case 1:
            with path.open("wb") as file:
                file.truncate(8 << 30)
        case 2:
            path.symlink_to(path.name)
        case 3:
            path.symlink_to("/dev/zero")
        case _:
            path.write_bytes(content)


def text(rng: random.Random) -> str:
    """A few hostile words."""
    return "".join(rng.choice(WORDS) + rng.choice((" ", "", "\n")) for _ in range(rng.randint(0, 5)))


def test_hostfiles(folder: Path) -> None:
    for number, rng in inputs("hostfile"):
        content = mutated(rng, b"node-1 slots=2\n# x\nnode-2 slots=8\r\n") if rng.random() < 0.5 else text(rng).encode()
        plant(rng, folder / "hosts", content)
        before = snapshot(folder)
        found: list[str] = []
        outcome = library(lambda: found.extend(host.name for host in read_hostfile(folder / "hosts")))  # noqa: B023
        check(outcome, f"hostfile:{number}")
        assert all(PLAIN.fullmatch(name) and not name.startswith("-") for name in found), found
        assert snapshot(folder) == before


def test_launch_files(folder: Path) -> None:
    fields = [*Options.model_fields, "nprocs", ""]
    good = {"launcher": "deepspeed", "hostfile": str(folder / "hosts"), "master_addr": "node-1", "master_port": 1234}
    for number, rng in inputs("launch"):
        values = {**good, **{rng.choice(fields): rng.choice((*HOSTILE, *WORDS)) for _ in range(rng.randint(0, 3))}}
        content = json.dumps(values).encode()
        plant(rng, folder / "r" / "launch.json", mutated(rng, content) if rng.random() < 0.5 else content)
        before = snapshot(folder)
        # A hostfile that a run had at its start and that is not there now is the machine's fault.
        check(command("resume", "r", "--dry-run"), f"launch:{number}", codes=(0, 1, 2))
        assert snapshot(folder) == before


def test_environment_files(folder: Path) -> None:
    for number, rng in inputs("environment"):
        lines = [f"{rng.choice(NAMES)}{rng.choice(('=', ' = ', ''))}{text(rng)}" for _ in range(rng.randint(0, 3))]
        content = "\n".join(lines).encode()
        plant(rng, folder / ".deepspeed_env", mutated(rng, content) if rng.random() < 0.3 else content)
        found: dict[str, str] = {}
        outcome = library(lambda: found.update(forwarded_to_hosts({}, (folder,))))  # noqa: B023
        check(outcome, f"environment:{number}")
        for name, value in found.items():
            assert name.startswith(("NCCL_", "GLOO_", "CAPT_", "UCX_", "TORCH_", "OMP_", "HF_")), name
            assert not re.search(r"""[^ -~]|["'`$\\;&|<>()*?!#~/]""", value), value


def test_cluster_files(folder: Path) -> None:
    good = load_mapping("slurm")
    for number, rng in inputs("cluster"):
        values = {
            **good,
            **{rng.choice([*good, "nodez"]): rng.choice((*HOSTILE, *WORDS)) for _ in range(rng.randint(1, 3))},
        }
        content = yaml.safe_dump(values).encode()
        plant(rng, folder / "cluster.yaml", mutated(rng, content) if rng.random() < 0.5 else content)
        before = snapshot(folder)
        check(library(lambda: load_cluster(Path("cluster.yaml"))), f"cluster:{number}")
        if number % 4 == 0:
            outcome = command(
                *(
                    "pretrain",
                    "capt_tiny",
                    "batch.micro=1",
                    "--launcher",
                    "slurm",
                    "--cluster",
                    "cluster.yaml",
                    "--dry-run",
                )
            )
            check(outcome, f"cluster:{number}")
        assert snapshot(folder) == before


def test_records_of_restarts(folder: Path) -> None:
    for number, rng in inputs("restarts"):
        values = {
            "job": "7",
            "failures": 1,
            "step": 3,
            rng.choice(("job", "failures", "step", "x")): rng.choice(HOSTILE),
        }
        content = json.dumps(values).encode()
        plant(rng, folder / "r" / "restarts.json", mutated(rng, content) if rng.random() < 0.5 else content)
        assert main([str(folder / "r"), "1", "3"]) in (0, 1), f"restarts:{number}"
        assert sorted(path.name for path in (folder / "r").iterdir()) == ["config.yaml", "restarts.json"]


def test_command_lines(folder: Path) -> None:
    for number, rng in inputs("options"):
        words = [rng.choice(("pretrain", "resume", "finetune")), rng.choice(("capt_tiny", "r", "rte", *WORDS[:8]))]
        for _ in range(rng.randint(0, 3)):
            value = str(rng.choice((*HOSTILE, *WORDS, "local", "slurm", "torchrun", "hosts", "2")))
            words += [rng.choice(OPTIONS), value] if rng.random() < 0.8 else [f"run.dir={value}"]
        words = [word.replace("\0", "") for word in words]  # no argument holds one
        before = snapshot(folder)
        check(command(*words, "batch.micro=1", "--dry-run"), f"options:{number}: {words}")
        assert snapshot(folder) == before
