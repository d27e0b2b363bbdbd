"""Sweep folders as ``capt sweep`` leaves them, written without running a trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def write_sweep(folder: Path, seeds: list[int]) -> Path:
    """An empty sweep over ``seeds``."""
    folder.mkdir(parents=True)
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"sweep": {"dir": str(folder), "seeds": seeds}}))
    return folder


def add_trial(
    sweep: Path,
    study: str,
    params: dict[str, Any],
    seed: int,
    curve: list[float] | None = None,
    *,
    metric: str = "accuracy",
    mode: str = "max",
    state: str = "done",
    every: int = 10,
    error: str = "",
    config: dict[str, Any] | None = None,
    **metrics: float,
) -> Path:
    """A trial and its run folder; ``curve`` holds the metric at each validation, ``metrics`` what else those report."""
    name = "-".join([*(f"{key}={value}" for key, value in params.items()), f"s{seed}"]) or f"s{seed}"
    run = sweep / "trials" / study / name
    rows = [
        {"step": every * number, "samples": 8, "split": "validation", metric: value, **metrics}
        for number, value in enumerate(curve or [], start=1)
    ]
    choose = max if mode == "max" else min
    best = choose(rows, key=lambda row: float(row[metric])) if rows else None
    if rows:
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "config.yaml").write_text(yaml.safe_dump(config or {"task": {"type": "toy"}, "run": {"seed": seed}}))
        (run / "status.json").write_text(json.dumps({"state": state}))
    line = {
        "study": study,
        "params": params,
        "seed": seed,
        "state": state,
        "metric": metric,
        "mode": mode,
        "score": best[metric] if best else None,
        "best_step": best["step"] if best else None,
        "metrics": {k: v for k, v in best.items() if k not in ("step", "samples", "split")} if best else {},
        "run": str(run.relative_to(sweep)),
        "node": "here",
        "seconds": 36.0,
        "attempts": 1,
        "error": error,
    }
    with (sweep / "trials.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return run
