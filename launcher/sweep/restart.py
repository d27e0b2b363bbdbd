"""How a trial's run begins: anew, from its newest checkpoint, or from a copy of another member's."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from capt.launcher.supervisor.processes import signal_name
from capt.launcher.sweep.trial_log import remove_checkpoints
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.engine.metrics_file import METRICS, drop_rows_after
from capt.pretrain.engine.run_folder import read_status

_OF_A_RUN = ("config.yaml", METRICS, "status.json", "best.json")


def checkpoint(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def is_complete(path: Path) -> bool:
    """Whether a checkpoint has been written whole (its manifest comes last)."""
    return (path / "manifest.json").is_file()


def prepare_restart(run_dir: Path, source: Mapping[str, Any] | None) -> tuple[tuple[str, ...], int]:
    """Make a run folder ready to start.

    Args:
        run_dir: the run folder.
        source: ``{"checkpoint", "step"}`` to continue from, or None for the newest of the run itself.

    Returns:
        The arguments that make the job continue (none for a new run), and the step it continues from.
    """
    if source is not None:
        _adopt(run_dir, Path(source["checkpoint"]), int(source["step"]))
    steps = [step for step in _steps(run_dir) if is_complete(checkpoint(run_dir, step))]
    if not steps:
        _clear(run_dir)
        return (), 0
    step = steps[-1]
    drop_rows_after(run_dir / METRICS, step)
    (run_dir / "status.json").unlink(missing_ok=True)
    return ("--resume", "--checkpoint", checkpoint(run_dir, step).name), step


def what_went_wrong(run_dir: Path, code: int) -> str:
    """One line on why the ranks ended with ``code``: what rank 0 noted, or the last thing that was said."""
    with suppress(ConfigError):
        status = read_status(run_dir)
        if status is not None and status.state == "failed" and status.reason:
            return status.reason
    log = run_dir / "log" / "trial.log"
    said = [line for line in _tail(log).splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("error: ")]
    text = (errors or said or [""])[-1].removeprefix("error: ").strip()
    how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
    return f"{text[:400]} ({how}; {log})" if text else f"{how}; {log}"


def _adopt(run_dir: Path, source: Path, step: int) -> None:
    """Make ``source`` the newest checkpoint of the run."""
    own = checkpoint(run_dir, step)
    later = [s for s in _steps(run_dir) if s > step or (s == step and own != source)]
    remove_checkpoints(run_dir, [checkpoint(run_dir, s).name for s in later])
    for link in ("latest", "best"):
        path = run_dir / "checkpoints" / link
        if path.is_symlink() and not path.exists():
            path.unlink()
            if link == "best":
                (run_dir / "best.json").unlink(missing_ok=True)
    if own == source:
        return
    partial = own.with_name(f".{own.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    partial.rename(own)


def _steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*") if path.name[5:].isdecimal())


def _clear(run_dir: Path) -> None:
    for name in _OF_A_RUN:
        (run_dir / name).unlink(missing_ok=True)
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(run_dir / name, ignore_errors=True)


def _tail(path: Path, size: int = 20_000) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as f:
        f.seek(max(0, path.stat().st_size - size))
        return f.read().decode(errors="replace")
