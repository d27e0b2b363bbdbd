"""A generator over a divided vocabulary learns what one process learns, and resumes within a window exactly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pretrain.config.load import load_job
from pretrain.engine import distributed
from pretrain.engine.checkpoint import find_checkpoint, read_weights
from pretrain.engine.quiet import quiet_libraries
from pretrain.engine.run import run_job
from tests.support import run_ranks

PRESETS = Path(__file__).parents[2] / "configs" / "pretrain" / "ace"
NCE = (
    "objective.type=nce", "generator.importance=true", "generator.entropy=0.5", "generator.entropy_words=200",
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


def _runs(folder: Path, runs: list[tuple[str, bool, tuple[str, ...]]]) -> list[int]:
    quiet_libraries(debug=False)
    codes = []
    for name, resume, more in runs:
        settings = [
            f"data.files=[{folder}/text.txt]", f"data.cache={folder}/cache", "data.subsample=0", "data.workers=1",
            "model.dim=8", "optimizer.lr=0.003", "generator.lr=0.1", "generator.every=3", "negatives.block=8",
            "negatives.shared=6", "generator.samples=3", "batch.global=2048",
            f"batch.micro={2048 // distributed.world_size()}", "schedule.max_steps=11", "run.log_every=1",
            "run.tensorboard=false", f"run.dir={folder / name}", *more,
        ]  # fmt: skip
        codes.append(run_job(load_job(PRESETS / "nce_ace.yaml", settings), resume=resume))
    return codes


def _rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _assert_same(one: Path, other: Path, tolerance: float) -> None:
    names = ("loss", "generator_loss", "generator_reward", "penalty", "generator_entropy", "distinct_rate")
    rows, others = _rows(one), _rows(other)
    assert len(rows) == len(others) == 11
    for name in names:
        figures = ([row[name] for row in part] for part in (rows, others))
        np.testing.assert_allclose(*figures, rtol=tolerance, atol=tolerance, err_msg=name)
    for module in ("discriminator", "generator"):
        tables, expected = (read_weights(find_checkpoint(run), module) for run in (other, one))
        for name, table in tables.items():
            np.testing.assert_allclose(
                table.numpy(), expected[name].numpy(), rtol=0, atol=10 * tolerance, err_msg=f"{module} {name}"
            )


def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    _write_text(tmp_path / "text.txt")
    for world in (1, 2):
        runs = [(f"{name}{world}", False, more) for name, more in (("sgns", ()), ("nce", NCE), ("margin", MARGIN))]
        assert run_ranks(_runs, world, tmp_path, runs, timeout=240) == [[0, 0, 0]] * world
    for name in ("sgns", "nce", "margin"):
        _assert_same(tmp_path / f"{name}1", tmp_path / f"{name}2", 1e-5)
        first, last = _rows(tmp_path / f"{name}1")[0], _rows(tmp_path / f"{name}1")[-1]
        assert last["loss"] < first["loss"], "there was something to learn"


def test_a_run_that_is_resumed_within_a_window_does_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    _write_text(tmp_path / "text.txt")
    runs = [("whole", False, NCE), ("part", False, (*NCE, "schedule.stop_after=5")), ("part", True, NCE)]
    assert run_ranks(_runs, 1, tmp_path, runs, timeout=240) == [[0, 75, 0]]
    _assert_same(tmp_path / "whole", tmp_path / "part", 0)
