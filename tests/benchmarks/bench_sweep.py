"""Cost of a sweep beside its trials: 12 short ones, 2 at a time, through ``capt sweep``.

``python -m tests.benchmarks.bench_sweep`` starts the command as a user does, with a Ray of its own, on a small
regression job under DeepSpeed. A trial's time is that of its processes, from their start to their end, so everything
else counts as cost: start of the command and of Ray, planning, Tune, the wait between two trials, the end of it all.
The row is wall time / (sum of trial times / 2); the exit code is 1 when it exceeds the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from tests.sweep.support import Folder

TRIALS, AT_A_TIME, BOUND = 12, 2, 1.25


def measure(steps: int) -> dict[str, object]:
    """Run the sweep and compare."""
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        job = {
            "task": {"type": "toy"},
            "run": {"tensorboard": False, "log_every": 100},
            "batch": {"global": 64, "micro": 16},
            "schedule": {"max_steps": steps},
            "validate": {"every": 0},
            "checkpoint": {"every": 0},
        }
        (folder.path / "job.yaml").write_text(yaml.safe_dump(job))
        folder.sweep(
            studies={"toy": {"base": "job.yaml", "metric": "loss", "mode": "min"}},
            sweep={"dir": str(folder.out), "seeds": [1, 2, 3]},
            space={"optimizer.lr": {"grid": [1e-3, 2e-3, 3e-3, 4e-3]}},
            trial={"gpus": 0, "concurrent": AT_A_TIME},
        )
        begin = time.monotonic()
        capt = (sys.executable, "-m", "capt.launcher.cli")
        done = subprocess.run([*capt, "sweep", "sweep.yaml"], cwd=folder.path, env=folder.env, check=False)
        wall = time.monotonic() - begin
        lines = folder.lines()
    if done.returncode or len(lines) != TRIALS:
        raise SystemExit(f"the sweep ended with {done.returncode} after {len(lines)} trials")
    seconds = [line["seconds"] for line in lines]
    ratio = wall / (sum(seconds) / AT_A_TIME)
    return {
        "name": f"sweep of {TRIALS} trials, {AT_A_TIME} at a time: wall / (sum of trials / {AT_A_TIME})",
        "value": round(ratio, 3),
        "bound": BOUND,
        "ok": ratio <= BOUND,
        "wall s": round(wall, 1),
        "mean trial s": round(sum(seconds) / TRIALS, 1),
        "load before": round(os.getloadavg()[2], 2),
    }


def main() -> int:
    """Measure, print, and say whether the bound is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="of a trial")
    row = measure(parser.parse_args().steps)
    print(json.dumps({"rows": [row]}))
    return 0 if row["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
