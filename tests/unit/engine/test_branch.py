"""Checkpoint that a run branches from, also after a kill in its first seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.engine.branch import chosen_branch, plant


def checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step-{step:08}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


def test_a_branch_that_was_killed_while_it_began_keeps_its_checkpoint(tmp_path: Path) -> None:
    """The other run has a newer one by then."""
    stable, branch = tmp_path / "stable", tmp_path / "branch"
    first = checkpoint(stable, 10)
    assert chosen_branch(stable, branch, None) == first.resolve()
    plant(first, branch)
    checkpoint(stable, 20)
    assert chosen_branch(stable, branch, stable) == first.resolve()
    assert chosen_branch(stable, branch, first) == first, "as the record names it"
    assert chosen_branch(stable, tmp_path / "another", None).name == "step-00000020"
    with pytest.raises(ConfigError, match=r"is a checkpoint of run\.dir itself"):
        chosen_branch(branch / "checkpoints" / "step-00000010", branch, None)
    with pytest.raises(ConfigError, match="neither a run with a complete checkpoint"):
        chosen_branch(tmp_path, branch, None)
