"""Fine-tuning on pictures from beginning to end: train, evaluate, dump, check the dump, convert, continue."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from capt.finetune.visual.backbone import read_backbone
from capt.finetune.visual.evaluate import as_text, evaluate
from capt.finetune.visual.module import load_visual
from capt.finetune.visual.task import VisualFineTuning
from capt.launcher.cli import app
from capt.pretrain.base.errors import CheckpointError, DataError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.vision_language.load import load_model
from tests.runs import training_rows
from tests.support import run_ranks, train_job
from tests.vision_language import make_pictures, vision_language_mapping
from tests.visual import visual_mapping, write_pairs, write_small_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of VQA, and one of NLVR2."""
    folder = tmp_path_factory.mktemp("visual")
    jobs = [visual_mapping(folder, "vqa", schedule={"epochs": 6}), visual_mapping(folder, "nlvr2")]
    for job in jobs:
        assert run_ranks(train_job, 1, job) == [0]
    return folder


def _best(run: Path) -> dict[str, Any]:
    best: dict[str, Any] = json.loads((run / "best.json").read_text())
    return best


def test_questions_are_learnt_evaluated_and_dumped(folder: Path, tmp_path: Path) -> None:
    run, files = folder / "run-vqa", [folder / "vqa" / "validation.json"]
    losses = [row["loss"] for row in training_rows(run)]
    assert losses[-1] < 0.85 * losses[0]
    figures = tmp_path / "figures.json"
    result = evaluate(run, data=files, predictions=tmp_path / "answers.json", out=figures)
    assert result["metrics"]["accuracy"] == pytest.approx(_best(run)["value"])
    assert result["rows"] == {"validation.json": 24}
    assert evaluate(run)["metrics"]["accuracy"] == pytest.approx(_best(run)["value"]), "the validation set of the job"
    assert json.loads(figures.read_text())["metrics"] == result["metrics"]
    assert "vqa (validation.json 24 rows)" in as_text(result)
    answers = {row["question_id"]: row["answer"] for row in json.loads((tmp_path / "answers.json").read_text())}
    truths = {row["question_id"]: row["label"] for row in json.loads(files[0].read_text())}
    assert answers.keys() == truths.keys()
    mean = sum(truths[key].get(answer, 0.0) for key, answer in answers.items()) / len(answers)
    assert mean == pytest.approx(result["metrics"]["accuracy"])
    command = ["evaluate", str(run), "--data", str(files[0]), "--predictions", str(tmp_path / "again.json"), "--json"]
    shown = CliRunner().invoke(app, command, catch_exceptions=False)
    assert json.loads(shown.stdout)["metrics"] == pytest.approx(result["metrics"])
    assert (tmp_path / "again.json").read_text() == (tmp_path / "answers.json").read_text()
    predicted = _predict(run, files[0], tmp_path / "rows.jsonl")
    assert {int(row["id"]): row["answer"] for row in predicted} == answers
    assert [int(row["id"]) for row in predicted] == list(truths)
    assert all(0 < row["score"] < 1 for row in predicted)


def _predict(run: Path, file: Path, out: Path, *options: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["predict", str(run), str(file), "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_statements_without_labels_give_a_dump_and_no_metric(folder: Path, tmp_path: Path) -> None:
    """A held-out file of NLVR2 and a store that has its pictures."""
    hidden = write_pairs(tmp_path / "hidden.json", 36, 4, labels=False)
    store = write_small_store(tmp_path / "store", 44)
    with pytest.raises(DataError, match="5 pictures not in the region store"):
        evaluate(folder / "run-nlvr2", data=[hidden])
    trained = load_visual(folder / "run-nlvr2")
    data = trained.job.data.model_copy(update={"regions": tmp_path / "gone"})
    moved = replace(trained, job=trained.job.model_copy(update={"data": data}))
    with pytest.raises(DataError, match="-o regions=STORE"):
        evaluate(moved, data=[hidden])
    result = evaluate(folder / "run-nlvr2", data=[hidden], regions=store, predictions=tmp_path / "out.csv")
    assert result["metrics"] == {}
    assert as_text(result).endswith("no metric: the rows have no labels")
    lines = (tmp_path / "out.csv").read_text().splitlines()
    names = [row["identifier"] for row in json.loads(hidden.read_text())]
    assert [line.split(",")[0] for line in lines] == names
    assert {line.split(",")[1] for line in lines} <= {"True", "False"}
    predicted = _predict(folder / "run-nlvr2", hidden, tmp_path / "rows.jsonl", "--regions", str(store))
    assert [f"{row['id']},{row['answer']}" for row in predicted] == lines
    assert [row["probability_True"] > 0.5 for row in predicted] == [row["answer"] == "True" for row in predicted]
    labelled = write_pairs(tmp_path / "labelled.json", 36, 4)
    scored = evaluate(folder / "run-nlvr2", data=[labelled], regions=store)
    rows = json.loads(labelled.read_text())
    right = [line.split(",")[1] == str(bool(row["label"])) for line, row in zip(lines, rows, strict=True)]
    assert scored["metrics"]["accuracy"] == pytest.approx(sum(right) / 8)
    pairs = [all(right[i : i + 2]) for i in range(0, 8, 2)]
    assert scored["metrics"]["consistency"] == pytest.approx(sum(pairs) / 4)


def test_a_checkpoint_says_what_features_it_takes(folder: Path, tmp_path: Path) -> None:
    store = write_small_store(tmp_path / "store", 30, seed=1)  # another features_of
    with pytest.raises(CheckpointError, match="such features mean other things"):
        evaluate(folder / "run-vqa", regions=store)
    mapping = visual_mapping(folder, "vqa", model={"init": str(folder / "run-vqa")}, data={"regions": str(store)})
    mapping["run"]["dir"] = str(tmp_path / "run")
    assert "data.allow_other_features=true" in run_ranks(train_job, 1, mapping)[0]
    mapping["data"]["allow_other_features"] = True
    assert run_ranks(train_job, 1, mapping) == [0]


def test_further_fine_tuning_starts_from_every_weight(folder: Path, tmp_path: Path) -> None:
    before = load_visual(folder / "run-vqa")
    for task in ("gqa", "nlvr2"):
        mapping = visual_mapping(folder, task, model={"init": str(folder / "run-vqa"), "encoder": None})
        mapping["run"]["dir"] = str(tmp_path / task)
        job = job_from_mapping(mapping, "test")
        backbone = read_backbone(job)  # type: ignore[arg-type]
        for name, tensor in before.model.state_dict().items():
            assert torch.equal(backbone.pretrained.state[name], tensor)
        assert run_ranks(train_job, 1, mapping) == [0]
        after = load_visual(tmp_path / task)
        assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
        assert after.job.model.encoder is not None
        assert after.job.model.encoder.hidden == 32


def test_it_starts_from_pretraining_and_from_its_export(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The answers of pretraining are colours too: their rows are found by their text in both."""
    assert run_ranks(train_job, 1, vision_language_mapping(tmp_path)) == [0]
    hf = tmp_path / "hf"
    converted = CliRunner().invoke(
        app, ["convert", str(tmp_path / "run"), str(hf), "--to", "hf"], catch_exceptions=False
    )
    assert converted.exit_code == 0
    pretrained = load_model(tmp_path / "run")
    for name, init in (("ours", tmp_path / "run"), ("theirs", hf)):
        mapping = visual_mapping(
            folder,
            "vqa",
            model={"init": str(init), "encoder": None},
            tokenizer={"path": None},
            data={"sequence_length": 12},
        )
        job = job_from_mapping(mapping, "test")
        task = VisualFineTuning(job, tmp_path / name)
        with caplog.at_level(logging.INFO):
            model = task.build_modules()["model"].state_dict()
        assert "4 of 4 answers from" in caplog.text
        caplog.clear()
        state = pretrained.model.state_dict()
        for key, tensor in model.items():
            if key.startswith(("encoder.", "pooler.")):
                torch.testing.assert_close(tensor, state[key], rtol=0, atol=0)
        assert pretrained.answers is not None
        assert task.answers is not None
        for row, answer in enumerate(task.answers.answers):
            source = pretrained.answers.index(answer)
            assert torch.equal(model["answer_head.outer.weight"][row], state["answer_head.outer.weight"][source])
        assert task.tokenizer.fingerprint == pretrained.tokenizer.fingerprint
    (hf / "tokenizer.json").unlink()
    with pytest.raises((CheckpointError, DataError), match="tokenizer"):
        VisualFineTuning(job, tmp_path / "without")


def test_the_export_gives_the_same_answers_in_transformers(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LxmertForQuestionAnswering

    run = folder / "run-vqa"
    shown = CliRunner().invoke(app, ["convert", str(run), str(tmp_path / "hf"), "--to", "hf"], catch_exceptions=False)
    assert shown.exit_code == 0
    model = LxmertForQuestionAnswering.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = load_visual(run)
    store = RegionStore.open(folder / "pictures")
    picture = next(make_pictures(1))
    regions = store.regions(store.rows([picture.id]))
    features, boxes = torch.from_numpy(regions.features), torch.from_numpy(regions.boxes)
    question = tokenizer("what colour is the cat", return_tensors="pt")
    with torch.no_grad():
        theirs = model(**question, visual_feats=features, visual_pos=boxes).question_answering_score
        mine = ours.model(question["input_ids"], features[:, None], boxes[:, None], None, False)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    answers = json.loads((ours.checkpoint / "answers.json").read_text())
    assert [model.config.id2label[i] for i in range(len(answers))] == answers
    failed = CliRunner().invoke(app, ["convert", str(folder / "run-nlvr2"), str(tmp_path / "no"), "--to", "hf"])
    assert isinstance(failed.exception, CheckpointError) or "transformers has no LXMERT for statements" in failed.output
    assert not (tmp_path / "no").exists()


def test_some_options_stand_once_elsewhere(folder: Path) -> None:
    """``--data`` may be given several times for these tasks; a task with one folder refuses the second."""
    from capt.finetune.glue.evaluate import command
    from capt.pretrain.base.errors import ConfigError
    from capt.pretrain.commands import accepted_options

    assert accepted_options(command, "glue", {"data": [folder]}) == {"data": folder}
    with pytest.raises(ConfigError, match="--data may be given once for a checkpoint of task glue"):
        accepted_options(command, "glue", {"data": [folder, folder]})
