"""``capt plan``: what a job needs and how long it takes on given devices, before it is run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capt.launcher.commands import options as o
from capt.pretrain.base.files import write_json

if TYPE_CHECKING:
    from capt.pretrain.plan.advice import Change
    from capt.pretrain.plan.predict import Prediction

_GIB = 2**30
_UNITS = {"days": 86_400, "hours": 3600, "minutes": 60, "seconds": 1}


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(
        epilog="\b\nExample: capt plan capt_large --gpus 8xh100\n"
        "capt plan capt_large batch.micro=8 --gpus 64xh100 --json"
    )(plan)


def plan(
    context: typer.Context,
    config: o.Config,
    overrides: o.Overrides = None,
    gpus: Annotated[
        str, typer.Option(metavar="NxKIND", help="The devices: a100, h100, h200, b200 or cpu, such as 8xh100.")
    ] = "8xh100",
    save: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Keep the prediction in this run folder, for capt report to compare."),
    ] = None,
    advice: Annotated[
        bool, typer.Option("--advice/--no-advice", help="Also try changes of the job that would fit or be faster.")
    ] = True,
    json: o.Json = False,
) -> int:
    """Predict memory, time and cost of a job on given devices. It needs neither data nor the devices.

    A step of one rank is simulated on tensors without data. The exit code is 2 for a job that does not fit.
    """
    from capt.pretrain.config.load import load_job
    from capt.pretrain.engine.run_folder import require_run
    from capt.pretrain.plan.devices import cluster

    devices = cluster(gpus)
    job = load_job(config, overrides or [])
    if save is not None:
        require_run(save)
    silent = nullcontext() if o.debug(context) else _errors_alone()
    with silent, o.explained(f"simulating a step of one rank on {devices}"):
        o.quiet(context)
        from capt.pretrain.plan.advice import changes
        from capt.pretrain.plan.predict import PLAN, predict, require_fit

        found = predict(job, devices)
    tried = []
    if advice:
        silent = nullcontext() if o.debug(context) else _errors_alone()
        with silent, o.explained("simulating changes of the job (--no-advice leaves them out)"):
            tried = changes(job, found)
    require_fit(found, job, [" ".join(change.keys) for change in tried])
    values = found.to_json()
    if save is not None:
        write_json(save / PLAN, values)
    o.answer(
        {**values, "changes": [change.to_json() for change in tried]},
        lambda: "\n".join(_lines(config, found, tried)),
        json=json,
    )
    return 0


@contextmanager
def _errors_alone() -> Iterator[None]:
    """Leave out what every start logs of a queue and of sizes."""
    logger = logging.getLogger("capt.pretrain")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _lines(config: str, found: Prediction, tried: Sequence[Change]) -> Iterator[str]:
    step, memory, device = found.step, found.memory, found.cluster.device
    least, most = found.bracket
    yield f"{config} on {found.cluster}: {step.weights:,} parameters, {found.samples:,} samples a step"
    graphs = f", {found.kept} of them encoded once (contrast.keep)" if found.kept else ""
    yield f"  in {step.parts} micro-batch{'es' if step.parts > 1 else ''} a rank{graphs}; predicted, not measured"
    yield ""
    yield f"memory of a rank, GiB   {memory.total / _GIB:9.4g} of {device.memory / _GIB:.1f}"
    for name in ("weights", "gradients", "optimizer", "buckets", "queue", "activations", "reserve"):
        if getattr(memory, name):
            yield f"  {name:<20} {getattr(memory, name) / _GIB:11.4g}"
    if found.wire:
        yield "received by a rank in a step, MB"
        yield from (f"  {name:<24} {received / 1e6:9.1f}" for name, received in found.wire.items() if received >= 1e5)
    yield f"step, seconds           {_three(found.seconds, least, most)}"
    time = found.times["central"]
    parts = {
        "products": time.products, "other operators": time.between, "starts by the host": time.launches,
        "update": time.update, "ZeRO": time.zero, "contrast's wire": time.contrast,
    }  # fmt: skip
    yield from (f"  {name:<20} {seconds:11.4g}" for name, seconds in parts.items() if seconds)
    if found.tokens:
        yield f"tokens per second       {_three(*(found.tokens / seconds for seconds in (found.seconds, most, least)))}"
    if device.is_gpu:
        yield f"MFU, %                  {_three(*(100 * found.mfu(case) for case in ('central', 'slow', 'fast')))}"
    if found.steps is None or found.whole_steps is None:
        yield "time, GPU hours         the number of steps follows from the data (schedule.epochs)"
    else:
        whole, hours = found.whole_steps * found.seconds, found.whole_steps / 3600 * found.cluster.count
        length = next((length for length in _UNITS if whole >= _UNITS[length]), "seconds")
        times = (found.whole_steps * seconds / _UNITS[length] for seconds in (found.seconds, least, most))
        yield f"{f'{length}, {found.steps:,} steps':<23} {_three(*times)}"
        unit = "GPU hours" if device.is_gpu else "process hours"
        yield f"{unit:<23} {_three(*(hours * s for s in (found.seconds, least, most)))}"
    if step.assumed:
        yield f"assumed: {'; '.join(step.assumed)}"
    if not device.is_gpu:
        yield "the rates of a CPU are a guess: compare with seconds_per_step of a short run"
        if "bfloat16" in step.encoder.flops_of:
            yield "  bf16 counts as fast as fp32: a CPU without units for it (avx512_bf16, AMX) is many times slower"
    if tried:
        yield ""
        yield "changes that fit and are faster"
        for change in tried[:6]:
            need = f"{change.prediction.memory.total / _GIB:.1f} GiB"
            yield f"  {change.speed:5.2f} x  {need:>10}  {' '.join(change.keys)}"


def _three(central: float, least: float, most: float) -> str:
    return f"{central:11.4g} ({least:.4g} to {most:.4g})"
