"""The language job through its real entry: resume repeats the uninterrupted run, on any world size."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from capt.pretrain.engine.checkpoint import find_checkpoint
from tests.language import language_mapping, write_corpus
from tests.runs import training_rows, validations
from tests.support import run_ranks, stopped_at, train_in_parts, train_seen

RAMP = {"ramp": [[200, 4], [500, 6]]}
"""Two steps of 4 windows of 32 tokens, two of 6, the rest of 8: one micro-batch of 2 on two ranks, then two, one of
them with a window less."""


def _losses(run_dir: str) -> list[dict[str, float]]:
    keys = ("step", "loss", "loss/mlm", "loss/capt", "grad_norm", "temperature")
    return [{key: row[key] for key in keys} for row in training_rows(run_dir)]


@pytest.mark.parametrize("mixed", [False, True])
def test_resume_equals_the_uninterrupted_run_to_the_last_digit(tmp_path: Path, mixed: bool) -> None:
    """Dropout on, accumulation, a queue that wraps, a checkpoint in the middle of an epoch, masks that become fewer."""
    masks = {"rate": [[0.2, 0.4], [0.5, 0.3], [0.5, 0.1], [1.0, 0.2]]}
    job = language_mapping(tmp_path, model={"dropout": 0.1, "attention_dropout": 0.1}, corruption=masks, batch=RAMP)
    if mixed:
        other = {"name": "other", "files": [str(write_corpus(tmp_path / "other.txt", 4, 1))], "epochs": 2}
        text = {"name": "text", "files": job["data"].pop("files"), "weight": [[0.2, 0.1], [0.8, 4.0]]}
        job["data"]["mixture"] = [text, other]
    whole = {**job, "run": {**job["run"], "dir": str(tmp_path / "whole")}}
    assert [code for code, _ in run_ranks(train_seen, 2, whole)] == [0, 0]
    assert [code for code, _ in run_ranks(train_seen, 2, stopped_at(job, 4))] == [75, 75]
    assert [code for code, _ in run_ranks(train_seen, 2, job, True)] == [0, 0]
    assert len(_losses(whole["run"]["dir"])) == 6
    assert _losses(job["run"]["dir"]) == _losses(whole["run"]["dir"])
    _check_merge([tmp_path / "whole", tmp_path / "run"], tmp_path / "merged")


def _check_merge(runs: list[Path], out: Path) -> None:
    """``capt merge`` validates what it mixes, here twice the same, and the mixture as the runs did on two ranks."""
    last = validations(runs[0])[-1]
    head, *lines = run_ranks(_merge, 1, [str(run) for run in runs], str(out))[0].splitlines()
    assert head.split() == ["before:", "whole", "before:", "run", "after:", "merged"]
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


def test_resume_on_other_world_sizes_and_stages(tmp_path: Path) -> None:
    """2 -> 1 -> 4 ranks, ZeRO 1 -> 3 -> 2: the same samples in every step, losses within 1e-5; with frozen weights."""
    masks = {"rate": [[0.0, 0.4], [1.0, 0.1]]}
    optimizer = {"lr": 1e-3, "clip": 1.0, "layer_decay": 0.8, "freeze": "embeddings"}
    model = {"initializer_range": 0.1}
    job = language_mapping(tmp_path, model=model, optimizer=optimizer, corruption=masks, batch=RAMP)
    whole = {**job, "run": {**job["run"], "dir": str(tmp_path / "whole")}}
    reference = [ids for _, ids in run_ranks(train_seen, 2, whole)]
    assert train_in_parts(job, 2) == [sorted(a + b) for a, b in zip(*reference, strict=True)]
    for ours, theirs in zip(_losses(job["run"]["dir"]), _losses(whole["run"]["dir"]), strict=True):
        for key in ("loss", "loss/mlm", "loss/capt"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (ours["step"], key)


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    job = language_mapping(tmp_path)
    assert run_ranks(train_seen, 1, stopped_at(job, 1))[0][0] == 75
    other = {**job, "tokenizer": {**job["tokenizer"], "type": "unigram", "vocab_size": 420}}
    outcome = run_ranks(train_seen, 1, other, True)[0][0]
    assert "trained with tokenizer" in str(outcome)
    assert "tokenizer.path to a copy of" in str(outcome)


def test_a_run_keeps_the_tokenizer_that_it_has_trained(tmp_path: Path) -> None:
    """Where the text changes, and with the cache gone; a tokenizer of the new text would be another one."""
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
