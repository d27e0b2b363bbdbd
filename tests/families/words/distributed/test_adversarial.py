"""A generator over a divided vocabulary learns what one process learns, and resumes within a window exactly."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base import distributed
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import load_job
from capt.pretrain.embeddings.task import EmbeddingTask
from capt.pretrain.engine.callbacks.agreement import TrainingDivergedError
from capt.pretrain.engine.callbacks.progress import summary
from capt.pretrain.engine.checkpoint import find_checkpoint, read_weights
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.run import run_job
from capt.pretrain.engine.task import Progress, to_float
from tests.runs import training_rows
from tests.support import run_ranks

PRESETS = Path(__file__).parents[4] / "configs" / "pretrain" / "ace"
NCE = (
    "objective.type=nce", "generator.importance=true", "generator.entropy=0.5",
    "generator.baseline=self_critical", "generator.mask_false_negatives=true",
)  # fmt: skip
MARGIN = ("objective.type=margin", "generator.baseline=batch_mean", "negatives.weights=self_adversarial")


def _write_text(path: Path) -> None:
    """Sentences about one of eight topics, each with words of its own, so that there is something to learn."""
    draw = np.random.default_rng(0)
    lines = []
    for _ in range(900):
        words = draw.integers(8) * 12 + draw.integers(12, size=10)
        lines.append(" ".join(f"w{word}" for word in words))
    path.write_text("\n".join(lines) + "\n")


def _settings(folder: Path, name: str, *more: str) -> list[str]:
    return [
        f"data.files=[{folder}/text.txt]", f"data.cache={folder}/cache", "data.subsample=0", "data.workers=1",
        "model.dim=8", "optimizer.lr=0.003", "generator.lr=0.1", "generator.every=3", "negatives.block=8",
        "negatives.shared=6", "generator.samples=3", "batch.global=2048", "schedule.max_steps=8", "run.log_every=1",
        "run.tensorboard=false", f"run.dir={folder / name}", *more,
    ]  # fmt: skip


def _runs(folder: Path, runs: list[tuple[str, bool, tuple[str, ...]]]) -> list[int]:
    quiet_libraries(debug=False)
    codes = []
    for name, resume, more in runs:
        job = load_job(PRESETS / "nce_ace.yaml", _settings(folder, name, *more))
        codes.append(run_job(job, resume=resume))
    return codes


def _assert_same(one: Path, other: Path, tolerance: float, steps: int = 8) -> None:
    """Every figure of every step and every number of both modules, relative to the scale of its kind.

    The scale of ``generator_loss`` is that of the logarithms that it is a mean of, that of a table its largest number.
    """
    scales = {
        "loss": 0.0, "generator_loss": np.log(96), "generator_reward": 1.0, "penalty": 1.0, "generator_entropy": 0.0,
        "distinct_rate": 0.0,
    }  # fmt: skip
    rows, others = training_rows(one), training_rows(other)
    assert len(rows) == len(others) == steps
    for name, scale in scales.items():
        figures = ([row[name] for row in part] for part in (rows, others))
        np.testing.assert_allclose(*figures, rtol=tolerance, atol=tolerance * scale, err_msg=name)
    for module in ("discriminator", "generator"):
        tables, expected = (read_weights(find_checkpoint(run), module) for run in (other, one))
        for name, table in tables.items():
            largest = float(expected[name].abs().max())
            np.testing.assert_allclose(
                table.numpy(), expected[name].numpy(), rtol=0, atol=tolerance * largest, err_msg=f"{module} {name}"
            )


def test_two_and_four_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    """At 1e-6. The generator's Adam would enlarge what sums in another order differ by, or a wrong sum of gradients."""
    _write_text(tmp_path / "text.txt")
    options = {"sgns": (), "nce": NCE, "margin": MARGIN}
    ranks = {"sgns": 2, "nce": 4, "margin": 2}
    for world in (1, 2, 4):
        runs = [(f"{name}{world}", False, more) for name, more in options.items() if world in (1, ranks[name])]
        assert run_ranks(_runs, world, tmp_path, runs, timeout=240) == [[0] * len(runs)] * world
    for name, world in ranks.items():
        _assert_same(tmp_path / f"{name}1", tmp_path / f"{name}{world}", 1e-6)
        first, last = training_rows(tmp_path / f"{name}1")[0], training_rows(tmp_path / f"{name}1")[-1]
        assert last["loss"] < first["loss"], "there was something to learn"


def test_a_rank_without_text_in_the_last_update_takes_part(tmp_path: Path) -> None:
    """Half an epoch is 9 segments, 4 in an update: of the last update one rank of two has nothing."""
    _write_text(tmp_path / "text.txt")
    short = ("schedule.max_steps=100", "schedule.epochs=0.5")
    for world in (1, 2):
        runs = [
            (f"{name}{world}", False, (*more, *short))
            for name, more in (("sgns", ()), ("nce", NCE), ("margin", MARGIN))
        ]
        assert run_ranks(_runs, world, tmp_path, runs, timeout=240) == [[0, 0, 0]] * world
    for name in ("sgns", "nce", "margin"):
        _assert_same(tmp_path / f"{name}1", tmp_path / f"{name}2", 1e-6, steps=3)


def test_a_run_that_is_resumed_within_a_window_does_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    _write_text(tmp_path / "text.txt")
    runs = [("whole", False, NCE), ("part", False, (*NCE, "schedule.stop_after=5")), ("part", True, NCE)]
    assert run_ranks(_runs, 1, tmp_path, runs, timeout=240) == [[0, 75, 0]]
    _assert_same(tmp_path / "whole", tmp_path / "part", 0)


def _figures(folder: Path, *more: str) -> tuple[str, str]:
    """Last progress line of a run, and the error that ended it."""
    quiet_libraries(debug=False)
    distributed.initialize(1)
    own = _settings(folder, "figures", "generator.every=1", "schedule.max_steps=30", *more)
    task = EmbeddingTask(load_job(PRESETS / "nce_ace.yaml", own), folder)
    engines = build_engines(task.build_modules(), task.job, task.optimizers())
    shown, progress = "", Progress()
    try:
        for batch in itertools.islice(task.build_batches(progress), 30):
            metrics = task.step(engines, batch, progress)
            progress.step += 1
            shown = summary({name: to_float(metric) for name, metric in metrics.items()}, task.status)
    except TrainingDivergedError as error:
        return shown, str(error)
    return shown, ""


def test_a_generator_that_collapses_is_named_in_the_progress_line(tmp_path: Path) -> None:
    """Without entropy and with steps far too long it soon draws one word alone; with short ones it does not."""
    _write_text(tmp_path / "text.txt")
    for world in (1, 2):
        for shown, error in run_ranks(_figures, world, tmp_path, "generator.entropy=0", "generator.lr=2"):
            assert "GENERATOR COLLAPSED (entropy 0." in shown
            assert not error
    ((shown, error),) = run_ranks(_figures, 1, tmp_path, "generator.lr=0.01")
    assert "COLLAPSED" not in shown
    assert not error


@pytest.mark.parametrize("objective", ["sgns", "nce"])
def test_what_diverges_ends_the_run_with_its_name(tmp_path: Path, objective: str) -> None:
    _write_text(tmp_path / "text.txt")
    more = (f"objective.type={objective}", "generator.baseline=self_critical")
    for _, error in run_ranks(_figures, 2, tmp_path, *more, "generator.type=sgd", "generator.lr=1e30"):
        assert "the generator has diverged" in error
        assert "lower generator.lr" in error
    for _, error in run_ranks(_figures, 2, tmp_path, *more, "optimizer.type=adagrad", "optimizer.lr=1e38"):
        assert "the discriminator has diverged" in error
        assert "lower optimizer.lr (it is 1e+38)" in error


def test_vectors_that_have_diverged_are_never_saved(tmp_path: Path) -> None:
    """AdaGrad, which shortens no step, at far too high a rate, in a chunk whose figures nobody looks at."""
    _write_text(tmp_path / "text.txt")
    more = (
        *NCE,
        "optimizer.type=adagrad",
        "optimizer.lr=1e30",
        "schedule.max_steps=40",
        "run.log_every=40",
        "checkpoint.every=8",
    )
    with pytest.raises(AssertionError, match=r"DivergedError"):
        run_ranks(_runs, 1, tmp_path, [("run", False, more)])
    for folder in (tmp_path / "run" / "checkpoints").glob("step-*"):
        for module in ("discriminator", "generator"):
            assert all(bool(table.isfinite().all()) for table in read_weights(folder, module).values())
