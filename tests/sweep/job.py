"""``python -m tests.sweep.job RUN/job.yaml --merged [--resume --checkpoint NAME]``: a run folder, as pretrain has it.

One number is trained: it approaches 1 at a speed that is best at ``optimizer.lr`` 0.1. Starts leave a line in
``starts-RANK`` of the run folder, so that tests can tell which trials were run, where, and how often.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from capt.pretrain.config.load import load_mapping
from tests.sweep.toy.config import SweepToyJob


def main() -> int:
    arguments = sys.argv[1:]
    mapping = load_mapping(arguments[0], resolved=True)
    job = SweepToyJob.model_validate(mapping)
    rank, run = int(os.environ["RANK"]), job.run.dir
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    facts = {name: os.environ[name] for name in names} | {"pid": os.getpid(), "resume": arguments[2:]}
    facts |= {"secrets": "HF_TOKEN" in os.environ, "travelled": os.environ.get("CAPT_TRAVELLED")}
    with (run / f"starts-{rank}").open("a") as f:
        f.write(json.dumps(facts) + "\n")
    starts = len((run / f"starts-{rank}").read_text().splitlines())
    if job.run.seed == job.fail_seed or (job.run.seed == job.flaky_seed and starts == 1):
        sys.stderr.write("error: the toy breaks\n")
        return 1
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    if "--resume" in arguments:
        state = json.loads((run / "checkpoints" / arguments[-1] / "manifest.json").read_text())
    else:
        state = {"step": 0, "value": 0.0}
    if rank != 0:
        return wait_for_rank_0(run, stop)
    (run / "config.yaml").write_text(json.dumps(job.model_dump(mode="json", by_alias=True)))
    write_status(run, "running", state["step"])
    speed = math.exp(-((math.log10(job.optimizer.lr) + 1) ** 2)) * (1 + 0.01 * job.run.seed)
    with (run / "metrics.jsonl").open("a", buffering=1) as metrics:
        while state["step"] < job.schedule.max_steps:
            while is_held(job, state["step"]) and not stop:
                time.sleep(0.02)
            time.sleep(job.pace)
            state["step"] += 1
            state["value"] += 0.1 * speed * (1 - state["value"])
            if state["step"] % job.validate_.every == 0:
                row = {"step": state["step"], "split": "validation", job.reports: state["value"], "loss": 1.0}
                metrics.write(json.dumps(row) + "\n")
            if state["step"] % job.checkpoint.every == 0 or stop:
                save(run, state)
            if stop:
                write_status(run, "stopped", state["step"])
                return 75
    save(run, state)
    write_status(run, "done", state["step"])
    return 0


def is_held(job: SweepToyJob, step: float) -> bool:
    try:
        return step == job.checkpoint.every and job.optimizer.lr <= float(Path(job.hold or "nowhere").read_text())
    except FileNotFoundError:
        return False


def save(run: Path, state: dict[str, float]) -> None:
    folder = run / "checkpoints" / f"step-{int(state['step']):08d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(state))


def write_status(run: Path, state: str, step: float) -> None:
    temporary = run / ".status.tmp"
    temporary.write_text(json.dumps({"state": state, "step": step, "exit_code": None, "reason": ""}))
    temporary.replace(run / "status.json")


def wait_for_rank_0(run: Path, stop: list[int]) -> int:
    while True:
        time.sleep(0.05)
        try:
            state = json.loads((run / "status.json").read_text())["state"]
        except (OSError, ValueError):
            continue
        if state in ("done", "stopped"):
            return 0 if state == "done" else 75


if __name__ == "__main__":
    sys.exit(main())
