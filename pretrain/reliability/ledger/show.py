"""A report on a ledger as text and as JSON."""

from __future__ import annotations

from typing import Any

from pretrain.base.errors import counted
from pretrain.reliability.ledger.check import Epochs, Report
from pretrain.reliability.ledger.history import Fault, Launch


def as_text(report: Report) -> str:
    """Tables of launches and epochs, notes, and the verdict with the first fault and its remedy."""
    lines = [f"{'launch':>6}  {'ranks':>5}  {'recorded':>17}  {'in the model':>17}"]
    for launch in report.launches:
        recorded = _steps(launch.head.step + 1, launch.recorded_to)
        kept = _steps(launch.head.step + 1, launch.head.step + launch.kept)
        lines.append(f"{launch.number:>6}  {launch.head.world:>5}  {recorded:>17}  {kept:>17}")
    lines += ["", f"{'epoch':>9}  {'ids':>13}  {'used':>13}"]
    for epochs in report.epochs:
        span = f"{epochs.first}" if epochs.first == epochs.last else f"{epochs.first}-{epochs.last}"
        lines.append(f"{span:>9}  {epochs.ids:>13,}  {epochs.used:>13,}")
    lines += ["", *report.notes]
    ahead = report.recorded_to - report.newest.step
    lines.append(
        f"steps up to {report.newest.step} are in a checkpoint"
        + (f", {ahead} more are recorded, which a restart does again" if ahead > 0 else "")
    )
    if not report.faults:
        left_out = f", but for {counted(report.left_out, 'sample')} left out by guard.spike" if report.left_out else ""
        lines.append(f"right: every step used the samples whose turn it was, each id once an epoch{left_out}")
        return "\n".join(lines)
    first = report.faults[0]
    more = f" ({len(report.faults) - 1} more)" if len(report.faults) > 1 else ""
    return "\n".join([*lines, f"WRONG{more}: {first.text}", f"  {first.remedy}"])


def as_json(report: Report) -> dict[str, Any]:
    """The same for programs; ``faults`` is empty where all is right."""
    return {
        "run": str(report.run),
        "right": not report.faults,
        "committed_to": report.newest.step,
        "recorded_to": report.recorded_to,
        "left_out": report.left_out,
        "launches": [_launch(launch) for launch in report.launches],
        "epochs": [_epochs(epochs) for epochs in report.epochs],
        "notes": report.notes,
        "faults": [_fault(fault) for fault in report.faults],
    }


def _steps(first: int, last: int) -> str:
    return f"{first}-{last}" if first <= last else "none"


def _launch(launch: Launch) -> dict[str, Any]:
    return {
        "launch": launch.number,
        "ranks": launch.head.world,
        "begins_after": launch.head.step,
        "recorded_to": launch.recorded_to,
        "in_the_model": launch.kept,
    }


def _epochs(epochs: Epochs) -> dict[str, int]:
    return {"first": epochs.first, "last": epochs.last, "used": epochs.used, "ids": epochs.ids}


def _fault(fault: Fault) -> dict[str, Any]:
    return {
        "kind": fault.kind,
        "text": fault.text,
        "remedy": fault.remedy,
        "step": fault.step,
        "id": fault.id,
        "rank": fault.rank,
        "file": None if fault.file is None else str(fault.file),
    }
