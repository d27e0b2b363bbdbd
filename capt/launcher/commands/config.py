"""``capt config``: show, check and compare jobs without running them."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Annotated, Any

import typer

from capt.launcher.commands import options as o

app = typer.Typer(help="Show, check and compare jobs.", rich_markup_mode=None)


@app.command(epilog="\b\nExample: capt config show capt_tiny optimizer.lr=1e-3")
def show(config: o.Config, overrides: o.Overrides = None, json: o.Json = False) -> None:
    """Print a job with its bases, overrides and defaults resolved."""
    import yaml

    resolved = _resolved(config, overrides)
    o.answer(resolved, lambda: yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True).rstrip(), json=json)


@app.command(epilog="\b\nExample: capt config validate my_job.yaml batch.micro=16 --nproc 8")
def validate(
    config: o.Config,
    overrides: o.Overrides = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Also check that the batch sizes fit this many ranks.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Check a job and that its inputs are there; the first thing wrong is one line, and the exit code is 2."""
    from capt.pretrain.config.load import load_job
    from capt.pretrain.engine.engines.deepspeed_config import deepspeed_config
    from capt.pretrain.engine.run_folder import check_folders, holds_run
    from capt.pretrain.registry import check_callbacks, require_tracker

    job = load_job(config, overrides or [])
    deepspeed_config(job, nproc or 1)
    check_callbacks(job.run.callbacks)
    for name in job.run.callbacks:
        require_tracker(name)
    check_folders(job)
    inputs = job.check_inputs()
    if holds_run(job.run.dir):
        inputs.append(f"run.dir: {job.run.dir} holds a run, which only run.resume=auto or capt resume continues")
    o.answer(
        {"config": config, "task": job.task.type, "inputs": inputs, "valid": True},
        lambda: "\n".join([f"{config}: a valid {job.task.type} job", *inputs]),
        json=json,
    )


@app.command("list", epilog="\b\nExample: capt config list")
def list_jobs(json: o.Json = False) -> None:
    """List the shipped jobs and sweeps by the names that CONFIG takes, with a line on each."""
    from capt.pretrain.config.load import shipped_jobs

    jobs = shipped_jobs()
    o.answer(jobs, lambda: _table(jobs, shutil.get_terminal_size().columns if sys.stdout.isatty() else None), json=json)


@app.command(epilog="\b\nExample: capt config schema capt_language > schema.json")
def schema(
    task: Annotated[str, typer.Argument(metavar="TASK", help="The type of a task, such as glue.")] = "capt_language",
) -> None:
    """Print the JSON schema of a task's jobs, for editors and for reading every key's meaning."""
    from capt.pretrain.registry import job_class

    o.echo_json(job_class(task).model_json_schema(by_alias=True))


@app.command(epilog="\b\nExample: capt config diff capt_tiny runs/first/config.yaml")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A job.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The job to compare it with.")],
    json: o.Json = False,
) -> None:
    """Print the keys in which two resolved jobs differ."""
    from capt.pretrain.config import flatten

    first, second = flatten(_resolved(a)), flatten(_resolved(b))
    keys = [key for key in sorted(first.keys() | second.keys()) if first.get(key) != second.get(key)]
    if json:
        o.echo_json({key: [first.get(key), second.get(key)] for key in keys})
        return
    for key in keys:
        typer.echo(f"{key}: {_as_yaml(first, key)} -> {_as_yaml(second, key)}")


def _table(jobs: dict[str, str], columns: int | None) -> str:
    """A line for each job; with the ``columns`` of a terminal, what does not fit is continued below its beginning."""
    width = max(map(len, jobs)) + 2
    lines = [f"{name:<{width}}{line}" for name, line in jobs.items()]
    if columns is not None:
        wrap = textwrap.TextWrapper(
            max(columns, width + 20), subsequent_indent=" " * width, break_on_hyphens=False, break_long_words=False
        )
        lines = [wrap.fill(line) for line in lines]
    return "\n".join(lines)


def _as_yaml(job: dict[str, Any], key: str) -> str:
    """A value as an override would set it; ``(absent)`` where the job's task has no such key."""
    import yaml

    text = yaml.safe_dump(job[key], default_flow_style=True, allow_unicode=True, width=1 << 20) if key in job else ""
    return text.removesuffix("\n").removesuffix("\n...") or "(absent)"


def _resolved(config: str, overrides: list[str] | None = None) -> dict[str, Any]:
    from capt.pretrain.config.load import load_job

    resolved: dict[str, Any] = load_job(config, overrides or []).model_dump(mode="json", by_alias=True)
    return resolved
