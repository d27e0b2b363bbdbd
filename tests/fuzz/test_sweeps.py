"""Hostile ``metrics.jsonl``, run and sweep folders under reports and ``capt sweep --resume``; GLUE's files and zips."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from capt.finetune.glue.files import read_split
from capt.finetune.glue.tasks import GLUE
from capt.launcher.sweep.run import check_base_jobs
from capt.launcher.sweep.trial import prepare_restart, what_went_wrong
from capt.launcher.sweep.trial_log import TrialLog, TrialState, best_row, started_trials, validations, write_spec
from capt.launcher.sweep.trials import StudyPlan, SweepPlan, TrialSpec
from capt.pretrain.engine.metrics_file import read_metrics
from capt.pretrain.report.runs import read_run
from capt.pretrain.report.sweeps import read_sweep
from capt.pretrain.report.write import report
from tests.finetune import write_task
from tests.fuzz.harness import HOSTILE, check, inputs, library, mutated, snapshot
from tests.sweep_folders import add_trial, write_sweep

pytestmark = pytest.mark.timeout(0)
_CONFIG = {"task": {"type": "toy"}, "run": {"seed": 1}, "optimizer": {"lr": 0.1}}
_ROWS = [
    {"step": 1, "samples": 8, "tokens": 64, "loss": 2.5, "lr": 0.1, "loss/mlm": None},
    {"step": 2, "samples": 16, "tokens": 128, "loss": 2.25, "lr": 0.1, "loss/mlm": 1.5},
    {"step": 2, "samples": 16, "tokens": 128, "split": "validation", "accuracy": 0.5, "loss": 2.0},
]


def hostile_lines(rng: random.Random, rows: list[dict[str, object]]) -> bytes:
    """JSON lines with keys and values replaced, repeated and reordered, and then perhaps bytes damaged."""
    lines = []
    for row in rng.choices(rows, k=rng.randint(1, 6)):
        changed = dict(row)
        for _ in range(rng.randint(0, 2)):
            key = rng.choice([*changed, *(str(value) for value in HOSTILE)])
            changed[key] = rng.choice([*HOSTILE, "$x_{", "<script>", float("nan"), 10**400, [10**400]])
        lines.append(json.dumps(changed))
    content = ("\n".join(lines) + rng.choice(("", "\n"))).encode("utf-8", "surrogatepass")
    return mutated(rng, content) if rng.random() < 0.5 else content


def replaced(rng: random.Random, path: Path) -> None:
    """Something that is no such file in its place, or other content."""
    content = path.read_bytes()
    path.unlink()
    match rng.randrange(6):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to("nowhere")
        case 3:
            path.write_bytes(rng.randbytes(200))
        case _:
            path.write_bytes(mutated(rng, content))


def test_metrics_files(tmp_path: Path) -> None:
    for number, rng in inputs("metrics"):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(hostile_lines(rng, _ROWS))
        check(library(lambda path=path: read_metrics(path)), f"metrics:{number}")
        path.unlink()


def test_reports_of_runs(tmp_path: Path) -> None:
    for number, rng in inputs("report", 12):
        run = tmp_path / f"run{number}"
        run.mkdir()
        (run / "metrics.jsonl").write_bytes(hostile_lines(rng, _ROWS))
        (run / "config.yaml").write_text(json.dumps(_CONFIG))
        (run / "status.json").write_text(json.dumps({"state": "done", "step": 2}))
        if rng.random() < 0.5:
            replaced(rng, run / rng.choice(("metrics.jsonl", "config.yaml", "status.json")))
        before = snapshot(run)
        outcome = library(lambda run=run: read_run(run))
        check(outcome, f"report:{number}")
        if outcome.code == 0 and rng.random() < 0.2:
            report([run], tmp_path / "out")  # drawing takes its second, whatever is drawn
        assert snapshot(run) == before
        for page in tmp_path.glob("out/report.*"):
            assert page.read_bytes().count(b"<script") <= (page.suffix == ".html")  # its own


def test_sweep_folders(tmp_path: Path) -> None:
    for number, rng in inputs("sweep"):
        sweep = write_sweep(tmp_path / f"sweep{number}", [1, 2])
        victim = tmp_path / f"victim{number}" / "checkpoints" / "step-00000001"
        victim.mkdir(parents=True)
        study = StudyPlan("s", "accuracy", "max", {"optimizer": {"lr": 0.1}}, sweep / "trials" / "s")
        plan = SweepPlan(sweep, sweep, "capt.pretrain", {"s": study}, 1, 1, 1, False)
        spec = TrialSpec("s", {"optimizer.lr": 0.1}, 1)
        for seed in (1, 2):
            add_trial(sweep, "s", {"optimizer.lr": 0.1}, seed, [0.5, 0.6])
        run = plan.run_dir(spec)
        run.mkdir(parents=True)
        write_spec(run, spec)
        TrialState(attempts=1, seconds=2.0).write(run)
        check_base_jobs(plan)
        (run / "status.json").write_text('{"state": "done"}')
        lines = [json.loads(line) for line in (sweep / "trials.jsonl").read_text().splitlines()]
        lines[0]["run"] = rng.choice((lines[0]["run"], f"../victim{number}", str(victim.parents[1]), "trials/../.."))
        (sweep / "trials.jsonl").write_bytes(hostile_lines(rng, lines))
        (run / "metrics.jsonl").write_bytes(hostile_lines(rng, _ROWS))
        marks = [run / name for name in ("trial.json", "point.json", "status.json", "metrics.jsonl")]
        if rng.random() < 0.7:
            replaced(rng, rng.choice([*marks, sweep / "bases.json", sweep / "trials.jsonl", sweep / "sweep.yaml"]))
        before = snapshot(victim)
        for step in (
            lambda sweep=sweep: read_sweep(sweep),
            lambda plan=plan: check_base_jobs(plan),
            lambda study=study: started_trials(study),
            lambda run=run, study=study: best_row(validations(run), study),
            lambda run=run: what_went_wrong(run, 1),
            lambda plan=plan, spec=spec: TrialLog(plan, 0).add(spec, "done"),
            lambda run=run: prepare_restart(run, None),
        ):
            check(library(step), f"sweep:{number}")
        assert victim.is_dir()
        assert snapshot(victim) == before


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glue")
    for task in ("rte", "cola", "stsb", "qqp"):
        write_task(folder, task, train=5, dev=5)
    return folder


def test_glue_files(glue: Path, tmp_path: Path) -> None:
    for number, rng in inputs("glue"):
        task = GLUE[rng.choice(("rte", "cola", "stsb", "qqp"))]
        home = tmp_path / task.folder
        home.mkdir(exist_ok=True)
        path = home / "dev.tsv"
        content = (glue / task.folder / "dev.tsv").read_bytes()
        if rng.random() < 0.3:
            cells = content.split(b"\t")
            cells[rng.randrange(len(cells))] = str(rng.choice(HOSTILE)).encode("utf-8", "replace")
            content = b"\t".join(cells)
        path.write_bytes(mutated(rng, content))
        if rng.random() < 0.2:
            replaced(rng, path)
        check(library(lambda task=task: read_split(tmp_path, task, "dev")), f"glue:{number}")
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
