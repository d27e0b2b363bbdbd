"""``python -m tests.kills --kills 1000``: processes of supervised jobs are killed at random, and nothing may be lost.

Each job is ``capt pretrain`` of a very small model with a checkpoint every few steps and a local one in between.
A killer takes one of its processes (``capt``, a rank, a data worker) at a random moment of a start, a step or a save
and sends SIGKILL. Where ``capt`` has died, or has given up because no step was made in between, ``capt resume``
continues. Checked after each kill: what was reported as saved is there and whole, and what has to die is gone. At the
end of a job: exit code 0; each step's loss is that of an undisturbed run, bit for bit; ``capt ledger check`` passes; no
process and no file is left. A failure names the seed of its job, which repeats the draws (moments depend on the
machine).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from capt.launcher.supervisor.processes import descendants
from capt.pretrain.base.process import born
from tests import runs, small_job
from tests.support import run_capt, start_capt

STEPS = 60
KILLS_OF_A_JOB = 13
_GONE = 10.0
_PATIENCE = 90.0
_SAVED = re.compile(r"checkpoint \S*step-(\d{8})$", re.MULTILINE)
_ROOT = Path(__file__).parents[1]


def write_job(folder: Path) -> Path:
    """Write a text and a job into a folder."""
    small_job.write_job(
        folder,
        data={"files": ["text.txt"], "sequence_length": 16, "cache": str(folder / "cache"), "workers": 1},
        model={"layers": 1, "hidden": 16, "heads": 2, "ffn": 32},
        batch={"global": 8, "micro": 4},
        schedule={"max_steps": STEPS, "warmup_steps": 2},
        checkpoint={"every": 4, "keep": 2, "local": {"every": 3, "dir": str(folder / "memory")}},
        supervise={"restarts": 1000},
    )
    (folder / "memory").mkdir()
    return folder


@dataclass
class Job:
    """A run that is killed again and again."""

    folder: Path
    seed: int
    world: int
    kills: int
    history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run = self.folder / f"run-{self.seed}"
        self.log = self.folder / f"run-{self.seed}.log"
        self.temporary = self.folder / f"tmp-{self.seed}"
        self.draw = random.Random(self.seed)

    def environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": str(_ROOT)}

    def carry_out(self, losses: dict[int, float], count: Callable[[str], None]) -> None:
        """Kill until it has been done often enough, let the job end, and check what is left."""
        self.temporary.mkdir()
        process = self._start()
        until = time.monotonic() + _PATIENCE * (1 + self.kills)
        while True:
            assert time.monotonic() < until, self._told("the job does not end")
            if self.kills and process.is_alive() and self._wait(process):
                victim, kind = self._strike(process)
                count(kind)
                self.kills -= 1
                if victim == process.pid:
                    process.join()
            process.join(0.05 if self.kills else 1.0)
            if process.exitcode is None:
                continue
            if process.exitcode == 0:
                break
            assert process.exitcode in (1, -signal.SIGKILL), self._told(f"exit code {process.exitcode}")
            process = self._start()
        assert runs.step(self.run) == STEPS, self._told("ended with 0 before its last step")
        self._check_end(losses)

    def _start(self) -> Any:
        begun = (self.run / "config.yaml").exists()
        words = ["resume", str(self.run)] if begun else ["pretrain", "job.yaml", f"run.dir={self.run}"]
        options = ["--no-preflight", *([] if begun else ["--nproc", str(self.world)])]
        return start_capt(*words, *options, cwd=self.folder, env=self.environment(), log=self.log)

    def _wait(self, process: Any) -> bool:
        """Wait for a moment of a start, a step or a save; False where the job ends before."""
        kind, until = self.draw.choice(("start", "step", "save", "save")), time.monotonic() + 20
        checkpoints, memory, begun = self.run / "checkpoints", self.folder / "memory", runs.step(self.run)
        pause = self.draw.uniform(0, {"start": 1.5, "step": 0.1, "save": 0.01}[kind])
        while kind != "start" and time.monotonic() < until and process.is_alive():
            if kind == "step" and runs.step(self.run) != begun:
                break
            places = (checkpoints, *_found(memory, "*/check*")) if kind == "save" else ()
            if any(_names(place, ".partial") for place in places):
                break
            time.sleep(0.004)
        time.sleep(pause)
        self.history.append(f"{kind} {pause:.4f}")
        return process.is_alive()

    def _strike(self, process: Any) -> tuple[int, str]:
        """Kill one process; what has to die with it is gone soon, and what was reported as saved is there."""
        below = descendants(process.pid)
        ranks = [pid for pid in below if parent_of(pid) == process.pid]
        others = [pid for pid in below if pid not in ranks]
        kind = self.draw.choice(["capt", "rank", "rank", *["worker"] * bool(others)]) if ranks else "capt"
        victim = process.pid if kind == "capt" else self.draw.choice(ranks if kind == "rank" else others)
        everything = {pid: born(pid) for pid in (process.pid, *below)}
        saved = max(map(int, _SAVED.findall(_text(self.log))), default=0)
        self.history.append(f"{kind} at step {runs.step(self.run)}, {saved} saved")
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        if kind == "capt":
            self._see_gone(everything)
        newest = _newest_whole(self.run)
        assert newest >= saved, self._told(f"step {saved} was reported as saved, the newest whole one is {newest}")
        return victim, kind

    def _see_gone(self, processes: dict[int, int | None]) -> None:
        until = time.monotonic() + _GONE
        while left := [pid for pid, begun in processes.items() if begun is not None and born(pid) == begun]:
            assert time.monotonic() < until, self._told(f"{len(left)} processes outlive capt by {_GONE:g} s")
            time.sleep(0.02)

    def _check_end(self, losses: dict[int, float]) -> None:
        assert runs.losses(self.run) == losses, self._told("other losses than the undisturbed run")
        checked = run_capt("ledger", "check", str(self.run), cwd=self.folder, env=self.environment())
        assert checked.returncode == 0, self._told(checked.stdout + checked.stderr)
        name = self.run.name
        records = map(_text, _found(self.folder / "memory", "*/owner.json"))
        owners = [json.loads(record)["run"] for record in records if record]
        assert not [owner for owner in owners if owner.endswith(name)], self._told("a local checkpoint is left")
        left = os.listdir(self.temporary)
        assert left == [], self._told(f"files are left: {left}")

    def _told(self, what: str) -> str:
        said = _text(self.log)[-6000:]
        return f"{what}\nseed {self.seed}, {self.world} ranks: {'; '.join(self.history)}\n{said}"


def parent_of(pid: int) -> int | None:
    """The parent of a process; None where there is none."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _newest_whole(run: Path) -> int:
    """The step of the newest checkpoint whose files all have the size and digest of its manifest."""
    from capt.pretrain.base.errors import CheckpointError
    from capt.pretrain.engine.checkpoint.layout import verify
    from capt.pretrain.engine.step_folders import checkpoints_of

    listed = checkpoints_of(run)
    for path in reversed(listed):
        with suppress(CheckpointError, OSError):
            verify(path)
            return int(path.name[5:])
        if checkpoints_of(run) != listed:  # the job continues: it has saved another, and removed this one
            return _newest_whole(run)
    return 0


def _names(folder: Path, end: str) -> bool:
    with suppress(OSError):
        return any(name.endswith(end) for name in os.listdir(folder))
    return False


def _found(folder: Path, pattern: str) -> list[Path]:
    """List paths, while another job may remove a folder of its own."""
    while True:
        with suppress(FileNotFoundError):
            return list(folder.glob(pattern))


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def undisturbed(folder: Path, world: int) -> dict[int, float]:
    """The losses of a run that nobody disturbs."""
    run = folder / f"undisturbed-{world}"
    words = ("pretrain", "job.yaml", f"run.dir={run}", "--no-preflight", "--nproc", str(world))
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    start = start_capt(*words, cwd=folder, env=environment, log=folder / f"{run.name}.log")
    start.join()
    assert start.exitcode == 0, _text(folder / f"{run.name}.log")
    return runs.losses(run)


def kill_at_random(
    folder: Path, kills: int, seed: int, parallel: int, show: Callable[[Counter[str]], None] = lambda _: None
) -> Counter[str]:
    """Kill processes of jobs so often, some jobs at a time. Raises ``AssertionError`` at the first thing lost."""
    write_job(folder)
    with ThreadPoolExecutor(parallel) as pool:
        losses = dict(zip((1, 2), pool.map(partial(undisturbed, folder), (1, 2)), strict=True))
    done: Counter[str] = Counter()

    def count(kind: str) -> None:
        done[kind] += 1
        show(done)

    def job(number: int) -> None:
        world = 1 + number % 2
        share = min(KILLS_OF_A_JOB, -(-kills // parallel))
        Job(folder, 1000 * seed + number, world, share).carry_out(losses[world], count)

    with ThreadPoolExecutor(parallel) as pool:
        number = 0
        while done.total() < kills:
            list(pool.map(job, range(number, number + parallel)))
            number += parallel
    return done


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=2, help="jobs at a time")
    options = parser.parse_args()
    from rich.progress import Progress

    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="capt-kills-") as folder, Progress() as bar:
        task = bar.add_task("kills", total=options.kills)
        done = kill_at_random(
            Path(folder), options.kills, options.seed, options.parallel,
            lambda done: bar.update(task, completed=done.total()),
        )  # fmt: skip
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(done.items()))
    sys.stdout.write(f"{done.total()} kills ({told}) in {time.monotonic() - begun:.0f} s: nothing lost\n")
    return 0


if __name__ == "__main__":
    multiprocessing.current_process().name = "kills"
    sys.exit(main())
