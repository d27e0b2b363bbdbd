"""``capt plan --calibrate``: rates are found in runs, and a run that tells none is refused with what would help."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config.load import load_job
from capt.pretrain.plan.calibrate import Measured, calibrated, measured
from capt.pretrain.plan.devices import CENTRAL, cluster
from capt.pretrain.plan.predict import StepTime, predict
from capt.pretrain.report.runs import read_run
from tests.support import Capt
from tests.unit.plan.test_plan import SMALL, tiny_encoder

HERE = "AMD EPYC, 2 cores"
ONE = [*SMALL, "batch.global=8", "engine.zero_stage=0"]


def _measured(job: Any, products: float, between: float, launches: float) -> Measured:
    run = Measured("run", job, cluster("cpu"), 1.0)
    time = run.prediction.times["central"]
    seconds = products * time.products + between * (time.between + time.update) + launches * time.launches
    return replace(run, seconds=seconds)


JOBS = [
    load_job("capt_tiny", [*ONE, *more])
    for more in ([], ["model.hidden=64"], ["model.layers=4"], ["batch.micro=2"])
]  # fmt: skip


def test_rates_are_found_in_runs() -> None:
    given = calibrated([_measured(job, 3.0, 2.0, 5.0) for job in JOBS], "cpu", "capt_language")["central"]
    rates = (CENTRAL.products / given.products, CENTRAL.memory / given.memory, given.launch / CENTRAL.launch)
    assert rates == pytest.approx((3.0, 2.0, 5.0), rel=1e-3)


@pytest.mark.parametrize("number", [1, 3], ids=["one run", "three of one job"])
def test_runs_that_do_not_tell_the_rates_apart_give_one_factor(number: int) -> None:
    one = calibrated([_measured(JOBS[0], 4.0, 4.0, 4.0)] * number, "cpu", "capt_language")["central"]
    slower = predict(JOBS[1], cluster("cpu"), {"central": one, "slow": one, "fast": one}).seconds
    assert slower == pytest.approx(4 * predict(JOBS[1], cluster("cpu")).seconds, rel=1e-6)


class _Given(Measured):
    """A run on a GPU whose predicted parts are given: seconds of products, of other operators, and of the host."""

    parts: tuple[float, float, float]

    @property
    def prediction(self) -> Any:
        time = StepTime(*self.parts, update=0.0, zero=0.0, contrast=0.0, overlaps=True)
        return SimpleNamespace(step=SimpleNamespace(longest=False), times={"central": time})


def _given(parts: tuple[float, float, float], seconds: float) -> Measured:
    run = _Given("run", JOBS[0], cluster("h100"), seconds)
    object.__setattr__(run, "parts", parts)
    return run


PARTS = [(0.5, 0.3, 0.2), (0.9, 0.2, 0.4), (0.1, 0.1, 0.3), (0.2, 0.2, 0.9)]


@pytest.mark.parametrize("factors", [(1.5, 1.2, 0.5), (1.5, 1.2, 2.0), (0.1, 0.1, 3.0), (2.0, 3.0, 0.001)])
def test_on_a_gpu_the_host_counts_where_it_sets_the_time(factors: tuple[float, float, float]) -> None:
    times = [max(p * factors[0] + b * factors[1], h * factors[2]) for p, b, h in PARTS]
    given = calibrated(list(map(_given, PARTS, times)), "h100", "capt_language")["central"]
    found = CENTRAL.products / given.products, CENTRAL.memory / given.memory, given.launch / CENTRAL.launch
    for (p, b, h), seconds in zip(PARTS, times, strict=True):
        assert max(p * found[0] + b * found[1], h * found[2]) == pytest.approx(seconds, rel=1e-6)


def test_the_bracket_of_a_gpu_holds_the_runs() -> None:
    """No factor explains two times of one job."""
    given = calibrated([_given(PARTS[0], 1.0), _given(PARTS[0], 2.0)], "h100", "capt_language")
    device, (least, most) = 0.5 + 0.3, (given[case].scale for case in ("fast", "slow"))
    factor = CENTRAL.products / given["central"].products
    assert least * factor * device <= 1.0
    assert most * factor * device >= 2.0


def _write(folder: Path, overrides: list[str], config: str = "capt_tiny") -> None:
    """A run of 9 logged rows, of which 5 are behind its newest checkpoint, which another number of ranks went on from.

    The rows of 2 ranks took 4 seconds, those of one rank 1 (10 the first, which compiles), the others 7.
    """
    folder.mkdir()
    job = load_job(config, [*overrides, "run.dir=run"])
    (folder / "config.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json", by_alias=True)))
    seconds = {10: 9.0, 20: 4.0, 30: 10.0, 40: 1.0, 50: 7.0, 60: 7.0, 70: 7.0, 80: 7.0, 90: 7.0}
    rows = [{"step": n, "samples": n, "tokens": n, "loss": 1.0, "seconds_per_step": s} for n, s in seconds.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, world in ((20, 2), (40, 1)):
        _save(folder, step, world)


def _save(folder: Path, step: int, world: int, provenance: Mapping[str, str] | None = None) -> None:
    files = {name: {"size": 1, "sha256": 64 * "0"} for name in ("config.yaml", "state.json")}
    manifest = {
        "format_version": 1, "progress": {"step": step, "samples": step, "tokens": step}, "task": "capt_language",
        "world_size": world, "zero_stage": 0, "modules": {}, "files": files,
        "provenance": {"hardware": HERE} if provenance is None else provenance,
    }  # fmt: skip
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def _plan(capt: Capt, *words: str) -> tuple[int, str, str]:
    return capt("plan", "capt_tiny", *SMALL, "--gpus", "1xcpu", "--no-advice", *words)


def test_a_run_that_was_cut_tells_the_time_of_the_ranks_that_saved_it(tmp_path: Path, capt: Capt) -> None:
    """A torn last row is none, and rows of other numbers of ranks are not of these devices."""
    run = tmp_path / "run"
    _write(run, ONE)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 100, "seconds_per_st')
    found = measured(run)
    assert (found.seconds, found.rows, str(found.cluster)) == (1.0, 1, "1 x cpu")
    code, out, _ = _plan(capt, "--calibrate", str(run))
    assert code == 0
    assert f"rates from {run}: capt_language on 1 x cpu ('{HERE}'), 1 seconds a step, the median of 1 row\n" in out
    assert "are a guess" not in out
    code, out, _ = _plan(capt, "--calibrate", str(run), "--json")
    assert json.loads(out)["rates_from"] == [str(found)]


def test_a_run_of_another_encoder_tells_the_rates_of_its_devices(tmp_path: Path) -> None:
    _write(tmp_path / "run", ["batch.global=8", "batch.micro=8", "data.sequence_length=16"], "modernbert_tiny")
    run = measured(tmp_path / "run")
    given = calibrated([run], "cpu", "capt_language")
    assert predict(run.job, run.cluster, given).seconds == pytest.approx(run.seconds, rel=1e-6)


def _no_metrics(run: Path) -> None:
    (run / "metrics.jsonl").unlink()


def _no_rows(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")


def _one_row(run: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[: text.index("\n") + 1])


def _no_times(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"seconds_per_step": 1.0', '"seconds_per_step": null'))


def _no_checkpoint(run: Path) -> None:
    for path in run.glob("checkpoints/*/manifest.json"):
        path.unlink()


def _damaged_checkpoint(run: Path) -> None:
    (run / "checkpoints" / "step-00000040" / "manifest.json").write_text("{")


def _no_hardware(run: Path) -> None:
    _save(run, 40, 1, {})


def _no_config(run: Path) -> None:
    (run / "config.yaml").unlink()


def _torn_config(run: Path) -> None:
    (run / "config.yaml").write_text("task: {type: capt_lang")


NO_ROW = (
    "metrics.jsonl: no row with seconds_per_step after the first one, after batch.ramp and up to the checkpoint of "
)


@pytest.mark.parametrize(
    ("damage", "said", "remedy"),
    [
        (_no_metrics, "metrics.jsonl: no such file", "train it to its third logged step (run.log_every)"),
        (_no_rows, "metrics.jsonl: no line is a JSON object", "train it to its third logged step (run.log_every)"),
        (_one_row, f"{NO_ROW}step 40", "lower run.log_every, or train for more steps"),
        (_no_times, f"{NO_ROW}step 40", "lower run.log_every, or train for more steps"),
        (_no_checkpoint, ": no checkpoint, which would say", "(checkpoint.every): capt resume "),
        (_damaged_checkpoint, "step-00000040/manifest.json: not valid JSON", "remove this checkpoint, or name another"),
        (_no_hardware, ": the run does not say on what it was", "name runs on a100"),
        (_no_config, " is not a run folder: it has no config.yaml", "name a folder that a job wrote (run.dir)"),
        (_torn_config, "config.yaml", "line 1"),
    ],
)
def test_a_run_that_tells_no_rates_is_refused(
    damage: Callable[[Path], None], said: str, remedy: str, tmp_path: Path, capt: Capt
) -> None:
    _write(tmp_path / "run", ONE)
    damage(tmp_path / "run")
    code, out, err = _plan(capt, "--calibrate", str(tmp_path / "run"))
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert f"{tmp_path / 'run'}" in err
    assert said in err
    assert remedy in err


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        ("skipgram", ["data.files=[none]"], "cannot be planned"),
        ("rte", ["data.path=none", "model.init=none", "batch.micro=4"], "a run of glue, whose rows are planned"),
    ],
)  # fmt: skip
def test_a_run_whose_step_is_not_known_is_refused(
    config: str, overrides: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capt: Capt,
) -> None:  # fmt: skip
    monkeypatch.setattr("capt.finetune.plan.described_encoder", tiny_encoder)
    _write(tmp_path / "run", overrides, config)
    code, _, err = _plan(capt, "--calibrate", str(tmp_path / "run"))
    assert code == 2
    assert f"--calibrate {tmp_path / 'run'}: " in err
    assert said in err


def test_runs_on_other_devices_are_refused(tmp_path: Path) -> None:
    run = Measured("run", JOBS[0], cluster("cpu"), 1.0, hardware=HERE)
    with pytest.raises(ConfigError, match=r"a run on cpu, not on h100; name runs on h100, or plan with --gpus 1xcpu"):
        calibrated([run], "h100", "capt_language")
    with pytest.raises(ConfigError, match=r"--calibrate other: a run on 'Xeon, 8 cores', and run was on 'AMD EPYC"):
        calibrated([run, replace(run, name="other", hardware="Xeon, 8 cores")], "cpu", "capt_language")


@pytest.mark.parametrize(
    ("hardware", "kind"), [("NVIDIA H200", "h200"), ("AMD EPYC, 2 cores", "cpu"), ("NVIDIA L40S", None)]
)
def test_a_run_on_a_gpu_without_peaks_is_no_run_on_a_processor(tmp_path: Path, hardware: str, kind: str | None) -> None:
    _write(tmp_path / "run", ONE)
    _save(tmp_path / "run", 40, 1, {"hardware": hardware})
    if kind is None:
        with pytest.raises(ConfigError, match=r"the run was on 'NVIDIA L40S', which .* no peaks of; name runs on a100"):
            measured(tmp_path / "run")
    else:
        assert str(measured(tmp_path / "run").cluster) == f"1 x {kind}"


def test_steps_of_a_ramp_are_no_measure(tmp_path: Path) -> None:
    """10 steps of 16 sequences, and then of 64: the row of step 12 holds both."""
    run = tmp_path / "run"
    _write(run, [*SMALL, f"batch.ramp=[[{10 * 16 * 16},16]]"])
    _save(run, 20, 1)
    seconds = {4: 1.0, 8: 1.0, 12: 3.0, 16: 4.0, 20: 4.0}
    rows = [{"step": n, "samples": n, "tokens": n, "seconds_per_step": s} for n, s in seconds.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(run).of_whole_steps("seconds_per_step") == [4.0, 4.0]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    with pytest.raises(DataError, match=r"no row .* after batch\.ramp"):
        measured(run)
