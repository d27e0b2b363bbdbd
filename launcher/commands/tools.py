"""``capt report``, ``capt doctor`` and ``capt bench``."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.commands import options as o

if TYPE_CHECKING:
    from launcher.doctor import Check


def register(app: typer.Typer) -> None:
    """Add ``report``, ``doctor`` and ``bench`` to the command line."""
    app.command(epilog="\b\nExample: capt report runs/first runs/second --out report")(report)
    app.command(epilog="\b\nExample: capt doctor --json")(doctor)
    app.command(
        epilog="\b\nExample: capt bench contrast --out docs/benchmarks\n"
        "Options of a benchmark follow two dashes: capt bench ace -- --files my.txt"
    )(bench)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or sweep folders.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html, curves and tables.")] = Path("report"),
) -> None:
    """Draw curves and tables of one run, or compare several, as a page that needs no network."""
    from pretrain.report import report as write_report

    typer.echo(write_report(runs, out))


def doctor(json: o.Json = False) -> int:
    """Examine this machine: versions, GPUs, fused optimizers, shared memory, disk, ssh.

    The exit code is 1 when a job cannot run.
    """
    from dataclasses import asdict

    from launcher.doctor import examine

    checks = examine(Path.cwd())
    if json:
        o.echo_json([asdict(check) for check in checks])
    else:
        _show_table(checks)
    return 1 if any(check.level == "fail" for check in checks) else 0


def _show_table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "finding", "advice"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(Text(check.level, colours[check.level]), check.name, Text(check.finding), Text(check.advice))
    if sys.stdout.isatty():
        Console().print(table)
        return
    console = Console(width=160, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]", help="Names of benchmarks (default: all); after -- options of the one named."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for NAME.json and NAME.md.")] = Path("docs/benchmarks"),
    show: Annotated[bool, typer.Option("--list", help="List the benchmarks and stop.")] = False,
) -> int:
    """Run the benchmarks of a source checkout and write their results with command, versions and hardware."""
    from launcher.bench import find_benchmarks, run_benchmarks

    words = names or []
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    benchmarks = find_benchmarks(words[:first])
    if show:
        typer.echo("\n".join(benchmarks))
        return 0
    return run_benchmarks(benchmarks, out, words[first:])
