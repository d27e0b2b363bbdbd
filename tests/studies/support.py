"""Shared parts of studies: commands that finish what they began, some at a time, and files of trials."""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.runs import rows_of

STOPPED = 75
"""The exit code of a run that may be resumed, as at ``schedule.stop_after``."""


def capt(*words: str | Path, stops: bool = False) -> None:
    """Run the command line, and stop the study where it fails; ``stops`` lets a run end before its last step."""
    command = [sys.executable, "-m", "capt.launcher", *map(str, words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode and not (stops and done.returncode == STOPPED):
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def finish(folder: Path, *words: str | Path, stops: bool = False) -> None:
    """Start a run, resume it, or leave it as it is when it is done; see `capt` for ``stops``."""
    status = folder / "status.json"
    state = json.loads(status.read_text())["state"] if status.exists() else "new"
    if state == "new":
        capt(*words, "--nproc", "1", f"run.dir={folder}", stops=stops)
    elif state != "done":
        capt("resume", folder, stops=stops)


def same_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Note what a study is made with, and refuse to continue with something else in a folder that holds its runs."""
    note = out / "study.json"
    out.mkdir(parents=True, exist_ok=True)
    if not note.exists():
        note.write_text(json.dumps(dict(settings), indent=1) + "\n")
    began = json.loads(note.read_text())
    now = json.loads(json.dumps(dict(settings)))
    for key in began.keys() | now.keys():
        if began.get(key) != now.get(key):
            raise SystemExit(
                f"{out} was begun with {key} {began.get(key)}, this command has {now.get(key)}: finished runs would "
                "not be made again; name another --out, or give what it was begun with"
            )


def together(jobs: Iterable[Callable[[], None]], parallel: int) -> None:
    """Do the jobs, ``parallel`` at a time."""
    with ThreadPoolExecutor(parallel) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def usual(run: Path, metric: str) -> float:
    """The median of a metric over the logged steps, without the first, which warms up."""
    values = [row[metric] for row in rows_of(run) if metric in row]
    return statistics.median(values[1:] or values)


def steps_of_equal_compute(note: Path, steps: int, runs: Mapping[str, Path]) -> int:
    """Steps of the second of two runs that take as long as ``steps`` of the first, which ran beside it.

    The ratio is that of the medians of the seconds a step. It is measured once and kept in ``note``, so that all seeds
    and a resumed study have the same steps.
    """
    if not note.exists():
        seconds = {name: usual(run, "seconds_per_step") for name, run in runs.items()}
        first, second = seconds.values()
        measured = {"seconds_per_step": seconds, "steps": round(steps * first / second)}
        note.write_text(json.dumps(measured, indent=1) + "\n")
    return int(json.loads(note.read_text())["steps"])


def newest_checkpoint(run: Path) -> Path:
    """The last checkpoint of a finished run."""
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; empty without rows."""
    lines = ["| " + " | ".join(line) + " |" for line in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]]) if lines[1:] else ""


def write_trials(trials: Sequence[NamedTuple], path: Path) -> None:
    """Write a CSV file with a row for each trial."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(trials[0]._fields)
        writer.writerows(trials)
