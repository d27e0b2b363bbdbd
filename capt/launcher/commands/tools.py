"""``capt report``, ``capt check``, ``capt doctor``, ``capt clean`` and ``capt bench``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from capt.launcher.commands import options as o


def register(app: typer.Typer) -> None:
    """Add ``report``, ``check``, ``doctor``, ``clean`` and ``bench`` to the command line."""
    app.command(epilog="\b\nExample: capt report runs/first runs/second --out report")(report)
    app.command(epilog="\b\nExample: capt check exported-st")(check)
    app.command(epilog="\b\nExample: capt doctor capt_tiny --hostfile hosts --json")(doctor)
    app.command(epilog="\b\nExample: capt clean")(clean)
    app.command(
        epilog="\b\nExample: capt bench contrast --out docs/benchmarks\n"
        "Options of a benchmark follow two dashes: capt bench ace -- --files my.txt"
    )(bench)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or sweep folders.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html, curves and tables.")] = Path("report"),
) -> None:
    """Draw curves and tables of one run or several. The page needs no network."""
    from capt.pretrain.report.write import report as write_report

    o.say(write_report(runs, out))


def check(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            parser=o.source_path,
            help="A Hugging Face, sentence-transformers or ONNX folder, USER/NAME of the hub, or a run of ours.",
        ),
    ],
    json: o.Json = False,
) -> int:
    """Check a model of vectors. A text alone and among others, padded and packed, prompts, lengths, bf16, ONNX.

    The exit code is 1 for a fault.
    """
    from capt.pretrain.retrieval.check import check as check_model

    o.quiet(context)
    found = check_model(model)
    o.answer(
        [asdict(each) for each in found],
        lambda: "\n".join(f"{each.verdict:<9} {each.name:<13} {each.text}" for each in found),
        json=json,
    )
    return 1 if any(each.verdict == "fault" for each in found) else 0


def doctor(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="A job, whose run folder and checkpoints must fit.")
    ] = None,
    overrides: o.Overrides = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Lines 'host slots=N': examine all of these hosts over ssh as well.")
    ] = None,
    master_addr: o.MasterAddr = None,
    master_port: o.MasterPort = None,
    json: o.Json = False,
) -> int:
    """Examine this machine, or all hosts of a cluster. Versions, GPUs, optimizers, memory, disk and ssh.

    The exit code is 1 when a job cannot run.
    """
    from capt.launcher.doctor import examine
    from capt.launcher.plan import Options
    from capt.launcher.preflight.report import table
    from capt.launcher.preflight.run import examine_for

    options = Options.given(hostfile=hostfile, master_addr=master_addr, master_port=master_port)
    checks = [*examine_for(config, overrides or [], options), *examine(Path.cwd())]
    o.answer([asdict(check) for check in checks], lambda: table(checks), json=json)
    return 1 if any(check.level == "fail" for check in checks) else 0


def clean(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN...]", help="Runs whose checkpoints in memory are given up.")
    ] = None,
) -> None:
    """Remove local checkpoints from this host's memory. All those of the runs named, else those of no more use.

    Never those of a run that is training.
    """
    from capt.pretrain.reliability.local.storage import clean as remove

    removed = 0
    for folder, reason in remove(runs or []):
        removed += 1
        typer.echo(f"{folder}: removed: {reason}")
    if not removed:
        typer.echo("nothing to remove: no such checkpoints in the memory of this host")


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
    """Run the benchmarks of a source checkout. Results are written with command, versions and hardware."""
    from capt.launcher.bench import find_benchmarks, run_benchmarks

    words = names or []
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    benchmarks = find_benchmarks(words[:first])
    if show:
        typer.echo("\n".join(benchmarks))
        return 0
    return run_benchmarks(benchmarks, out, words[first:])
