"""Cost of local checkpoints, and how soon a job that lost a rank is back at work with them.

``python -m tests.benchmarks.bench_recovery`` measures two things on two gloo ranks of one thread each, prints one JSON
object and exits with 1 when a bound is missed.

- *Cost*, CAPT-small (6 layers x 256, vocabulary 50,265), ZeRO 1, in processor seconds of a rank, which another load on
  the machine does not change: turns of a step without and a step with a checkpoint in memory, the median of the
  differences over the median of the steps. A step has 16 of the 1,024 sequences that a rank of two has in the shipped
  job. The row has the distance that ``checkpoint.local.every: auto`` would choose and what remains of the cost.
- *Recovery*, capt_tiny: from SIGKILL of a rank to the first new row of ``metrics.jsonl``, in seconds, and in processor
  seconds of the rank that used most.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.benchmarks import bench_step
from tests.support import run_ranks

MOST_SHARE, MOST_SECONDS = 0.02, 20.0
RANKS, TICK = 2, os.sysconf("SC_CLK_TCK")


def _used() -> float:
    """Processor seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rank(folder: str, turns: int) -> tuple[list[float], list[float], int]:
    """Processor seconds of steps without and with a checkpoint in memory, and the bytes that a host then holds."""
    torch.set_num_threads(1)
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.config.schema import Job
    from capt.pretrain.contrast import capt_loss
    from capt.pretrain.engine.engines.build import build_engines
    from capt.pretrain.engine.loop import Run
    from capt.pretrain.engine.rank import keep_freed_memory
    from capt.pretrain.engine.task import Progress
    from capt.pretrain.models.capt import CaptModel
    from capt.pretrain.models.config import RobertaConfig
    from capt.pretrain.reliability.local.checkpointer import LocalCheckpointer

    keep_freed_memory()
    quiet_libraries(debug=False)
    run_dir = Path(folder) / "run"
    run_dir.mkdir(exist_ok=True)
    job = Job.model_validate(
        {
            "task": {"type": "capt_language"},
            "run": {"dir": str(run_dir)},
            "batch": {"global": RANKS * bench_step.BATCH, "micro": bench_step.BATCH},
            "optimizer": {**bench_step.ADAM, "clip": bench_step.CLIP},
            "engine": {"precision": "fp32", "zero_stage": 1},
            "checkpoint": {"every": 0, "local": {"every": 2, "dir": str(Path(folder) / "memory")}},
        }
    )
    size = RobertaConfig(size="small", vocab_size=bench_step.VOCABULARY)
    engines = build_engines({"model": CaptModel(size)}, job)
    task: Any = SimpleNamespace(save_state=lambda folder: {}, export_files=dict)
    run = Run(job, run_dir, task, engines, Progress())
    callback = LocalCheckpointer()
    callback.on_start(run)
    seconds: tuple[list[float], list[float]] = [], []
    for turn in range(2 * turns + 2):
        begin = _used()
        rows = [bench_step.sample(turn * bench_step.BATCH + i) for i in range(bench_step.BATCH)]
        tokens, corrupted, positions = (torch.stack(column) for column in zip(*rows, strict=True))
        out = engines["model"](tokens, corrupted, positions, tokens.gather(1, positions))
        contrast = capt_loss(out.s, out.s_hat, temperature=bench_step.TAU)
        engines["model"].backward(out.mlm_loss_sum / out.mlm_count + contrast)
        engines["model"].step()
        run.progress.step += 1
        callback.after_step(run, {})
        if turn >= 2:  # the first step and the first save allocate
            seconds[turn % 2].append(_used() - begin)
    held = callback.held
    callback.on_end(run)
    return (*seconds, held)


def cost(turns: int) -> dict[str, Any]:
    """The row of the cost."""
    from capt.pretrain.engine.callbacks.checkpointer import distance

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        of_ranks = run_ranks(rank, RANKS, folder, turns, timeout=3600)
    without, with_save, held = max(of_ranks, key=lambda each: sum(each[1]))
    step = statistics.median(without)
    extra = statistics.median(b - a for a, b in zip(without, with_save, strict=True))
    every = distance(extra, step, 1 << 40)
    return {
        "name": "CAPT-small: share of local checkpoints in the processor time of a step, every=auto",
        "value": round(extra / (every * step), 4),
        "bound": MOST_SHARE,
        "ok": extra / (every * step) <= MOST_SHARE,
        "CPU s a save": round(extra, 3),
        "CPU s a step of 16 sequences": round(step, 3),
        "steps between": every,
        "bytes in memory": held,
    }


def _ranks_of(launcher: int) -> list[int]:
    """The rank processes of a launcher."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"pretrain" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _seconds_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def _last_step(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _await(condition: Any, process: subprocess.Popen[bytes], seconds: float = 3600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the job ended, or took too long")
        time.sleep(0.02)


def recovery() -> dict[str, Any]:
    """The row of the recovery."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        keys = [
            f"run.dir={run}", "run.log_every=1", "run.threads=1", "run.tensorboard=false", "schedule.max_steps=100000",
            "checkpoint.every=0", "validate.every=0", "checkpoint.local.every=5",
            f"checkpoint.local.dir={folder}/memory",
        ]  # fmt: skip
        command = [sys.executable, "-m", "capt.launcher", "pretrain", "capt_tiny", *keys, "--nproc", str(RANKS)]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _await(lambda: _last_step(run) >= 7, process)
            before = _ranks_of(process.pid)
            killed = time.monotonic()
            os.kill(before[1], signal.SIGKILL)
            _await(lambda: (now := _ranks_of(process.pid)) and not set(now) & set(before), process)
            gone = _last_step(run)
            ranks = _ranks_of(process.pid)
            _await(lambda: _last_step(run) > gone, process)
            seconds, used = time.monotonic() - killed, max(_seconds_of(pid) for pid in ranks)
        finally:
            process.terminate()
            process.wait()
        said = [line for line in (Path(folder) / "log").read_text().splitlines() if "resuming from" in line]
    return {
        "name": "capt_tiny: kill -9 of a rank to the first new step, seconds",
        "value": round(seconds, 1),
        "bound": MOST_SECONDS,
        "ok": seconds <= MOST_SECONDS,
        "CPU s of the slowest rank": round(used, 1),
        "step before": gone,
        "resumed at": int(said[-1].split()[-1]) if said else None,
    }


def main() -> int:
    """Measure, print, and say whether every bound is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    rows = [cost(arguments.turns), recovery()]
    print(json.dumps({"rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
