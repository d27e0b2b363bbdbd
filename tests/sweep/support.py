"""A user's folder with a sweep in it, and ``capt`` run there as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CAPT = (sys.executable, "-P", "-m", "tests.sweep.capt")
HIJACK = "raise SystemExit('a module of the working folder was run')\n"
JOB = {
    "task": {"type": "sweep_toy"},
    "schedule": {"max_steps": 20},
    "validate": {"every": 5},
    "checkpoint": {"every": 5},
}
GRID = {"optimizer.lr": {"grid": [0.1, 0.01]}}


class Folder:
    """A folder with ``job.yaml`` and ``sweep.yaml``; the sweep lives in ``out``."""

    def __init__(self, path: Path, env: Mapping[str, str] | None = None, address: str | None = None) -> None:
        self.path = path
        self.out = path / "out"
        self.address = ["--address", address] if address else []
        for name in ("pretrain.py", "launcher.py", "tokenizer.py", "finetune.py", "configs/__init__.py"):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(HIJACK)
        (path / "job.yaml").write_text(yaml.safe_dump(JOB))
        plugin = path / "plugin" / "toys-1.dist-info"  # what 'pip install' of a task's distribution would leave
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1\n")
        (plugin / "entry_points.txt").write_text("[capt.tasks]\nsweep_toy = tests.sweep.toy\ntoy = tests.toy\n")
        python_path = os.pathsep.join([str(ROOT), str(plugin.parent)])
        self.env = {**os.environ, **(env or {}), "PYTHONPATH": python_path, "CUDA_VISIBLE_DEVICES": ""}

    def sweep(self, **parts: Any) -> None:
        """Write ``sweep.yaml``."""
        common = {
            "sweep": {"dir": str(self.out), "seeds": [1, 2]},
            "studies": {"toy": {"base": "job.yaml", "metric": "accuracy"}},
            "space": GRID,
            "trial": {"gpus": 0},
        }
        (self.path / "sweep.yaml").write_text(yaml.safe_dump({**common, **parts}))

    def start(self, *arguments: str, capt: tuple[str, ...] = CAPT) -> subprocess.Popen[str]:
        """Start ``capt sweep sweep.yaml ...``."""
        argv = [*capt, "sweep", "sweep.yaml", *self.address, *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, cwd=self.path, env=self.env, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str, code: int = 0, capt: tuple[str, ...] = CAPT) -> str:
        """Run it, check how it ends, and return what it said."""
        process = self.start(*arguments, capt=capt)
        out, err = process.communicate(timeout=150)
        assert process.returncode == code, out + err
        return out + err

    def lines(self) -> list[dict[str, Any]]:
        """The trials on record."""
        path = self.out / "trials.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def hold(self, rate: float) -> str:
        """Let runs of at most this learning rate wait at their first checkpoint; the override that tells them so."""
        (self.path / "hold").write_text(str(rate))
        return f"hold={self.path / 'hold'}"

    def let_go(self) -> None:
        """Let them continue."""
        (self.path / "hold").unlink()

    def held(self) -> list[Path]:
        """Run folders of runs that wait at their first checkpoint."""
        running = (path.parent for path in self.out.glob("trials/*/*/status.json") if "running" in path.read_text())
        return [
            run
            for run in running
            if [path.parent.name for path in run.glob("checkpoints/step-*/manifest.json")] == ["step-00000005"]
        ]

    def starts(self, rank: int = 0) -> dict[str, list[dict[str, Any]]]:
        """Findings of the processes of each trial at their start, by run folder."""
        found = sorted(self.out.glob(f"trials/*/*/starts-{rank}"))
        return {path.parent.name: [json.loads(line) for line in path.read_text().splitlines()] for path in found}


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)
