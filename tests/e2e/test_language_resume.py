"""The language job through its real entry: what a resumed run keeps, a merge of its checkpoints, a late queue."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from capt.pretrain.engine.checkpoint import find_checkpoint
from tests.language import language_mapping, write_corpus
from tests.runs import training_rows, validations
from tests.support import run_ranks, stopped_at, train_seen


def _losses(run_dir: str) -> list[dict[str, float]]:
    keys = ("step", "loss", "loss/mlm", "loss/capt", "grad_norm", "temperature")
    return [{key: row[key] for key in keys} for row in training_rows(run_dir)]


def test_a_merge_is_validated_as_the_runs_were(tmp_path: Path) -> None:
    """``capt merge`` validates what it mixes, here twice the same, and the mixture as the runs did on two ranks."""
    assert [code for code, _ in run_ranks(train_seen, 2, language_mapping(tmp_path))] == [0, 0]
    run, copy, out = (tmp_path / name for name in ("run", "copy", "merged"))
    shutil.copytree(run, copy, symlinks=True)
    last = validations(run)[-1]
    head, *lines = run_ranks(_merge, 1, [str(run), str(copy)], str(out))[0].splitlines()
    assert head.split() == ["before:", "run", "before:", "copy", "after:", "merged"]
    found = {line.split()[0]: line.split()[1:] for line in lines}
    assert found.keys() <= last.keys()
    assert all(values == [values[0]] * 3 for values in found.values())
    for name in ("loss/mlm", "loss/capt_fixed", "validation_samples"):
        assert float(found[name][0]) == pytest.approx(last[name], rel=1e-4), name


def _merge(runs: list[str], out: str) -> str:
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.convert.merge import command

    quiet_libraries(debug=False)
    return command([Path(run) for run in runs], Path(out))


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    job = language_mapping(tmp_path)
    assert run_ranks(train_seen, 1, stopped_at(job, 1))[0][0] == 75
    other = {**job, "tokenizer": {**job["tokenizer"], "type": "unigram", "vocab_size": 420}}
    outcome = run_ranks(train_seen, 1, other, True)[0][0]
    assert "trained with tokenizer" in str(outcome)
    assert "tokenizer.path to a copy of" in str(outcome)


def test_a_run_keeps_the_tokenizer_that_it_has_trained(tmp_path: Path) -> None:
    """The text changes and the cache is gone; a tokenizer of the new text would be another one."""
    job = language_mapping(tmp_path)
    assert run_ranks(train_seen, 1, stopped_at(job, 1))[0][0] == 75
    write_corpus(tmp_path / "text.txt", seed=1)
    shutil.rmtree(job["data"]["cache"])
    config = (Path(job["run"]["dir"]) / "config.yaml").read_text()
    refused = run_ranks(train_seen, 1, {**job, "run": {**job["run"], "log_every": 3}}, True)[0][0]
    assert "trained on other text" in str(refused)
    assert (Path(job["run"]["dir"]) / "config.yaml").read_text() == config, "a refused resume changes nothing"
    going_on = {**job, "data": {**job["data"], "allow_change": True}, "checkpoint": {"every": 1, "keep": 1}}
    assert run_ranks(train_seen, 2, going_on, True)[0][0] == 0
    assert (find_checkpoint(Path(job["run"]["dir"])) / "tokenizer" / "tokenizer.json").is_file()


def test_the_queue_serves_from_queue_start_on(tmp_path: Path) -> None:
    """Until then the losses are those without a queue; from then on its rows, filled meanwhile, are negatives."""
    job = language_mapping(tmp_path)
    without = {**job, "run": {**job["run"], "dir": str(tmp_path / "without")}, "contrast": {"queue": 0}}
    late = {**job, "contrast": {"queue": 41, "queue_start": 4}}
    for mapping in (without, late):
        assert [code for code, _ in run_ranks(train_seen, 1, mapping)] == [0]
    ours, theirs = _losses(late["run"]["dir"]), _losses(without["run"]["dir"])
    assert ours[:4] == theirs[:4]
    assert ours[4]["loss/capt"] > theirs[4]["loss/capt"] + 1
