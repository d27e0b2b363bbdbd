"""``capt ledger``: what the steps of a run have really used."""

from __future__ import annotations

from typing import Annotated

import typer

from capt.launcher.commands import options as o

app = typer.Typer(help="Check which samples the steps of a run have used.", rich_markup_mode=None)


@app.callback()
def _group() -> None: ...


@app.command(epilog="\b\nExample: capt ledger check runs/first --json")
def check(
    context: typer.Context,
    run: o.Run,
    since: Annotated[int, typer.Option(min=1, help="Take the steps before this one as they are.")] = 1,
    json: o.Json = False,
) -> int:
    """Prove that each id was used once an epoch, over all kills, resumes and numbers of ranks; else exit with 1."""
    o.quiet(context)
    from capt.pretrain.engine.run_folder import require_run
    from capt.pretrain.reliability.ledger.check import as_json, as_text
    from capt.pretrain.reliability.ledger.check import check as check_run

    if not (run / "ledger").is_dir():
        require_run(run)
    report = check_run(run, since)
    o.answer(as_json(report), lambda: as_text(report), json=json)
    return 1 if report.faults else 0
