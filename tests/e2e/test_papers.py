"""Every command of the page "From nothing to the papers' figures", in its order, at tiny size.

What the page downloads has stand-ins of the same form. A command is run as it is printed, with further keys that make
it small; a sweep is the shipped one with one seed and one or a few values of each grid.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from capt.finetune.glue import submission
from capt.launcher.cli import main
from tests.documented import ROOT, commands
from tests.finetune import rows, write_task, write_vocabulary
from tests.language import write_corpus
from tests.latent import write_text
from tests.support import run_capt

pytestmark = pytest.mark.timeout(1800)

PAGE = ROOT / "docs/guide/papers.md"
TEST_ROWS = 13
TASKS = ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]
LANGUAGE = (
    "model.size=custom", "model.layers=1", "model.hidden=16", "model.heads=2", "model.ffn=32", "model.max_positions=64",
    "model.pad_vocab_to=1", "model.compile=false", "data.sequence_length=32", "batch.global=8", "batch.micro=4",
    "schedule.max_steps=2", "schedule.warmup_steps=1", "validate.every=0", "validate.samples=8", "checkpoint.every=0",
    "loader.workers=0",
)  # fmt: skip
VISION_LANGUAGE = ("model.size=micro", *LANGUAGE[9:])
LATENT = (
    "model.embedding=12", "model.hidden=16", "model.latent=4", "model.noise=4", "critic.hidden=16", "critic.updates=2",
    "batch.global=8", "batch.micro=8", "schedule.epochs=null", "schedule.max_steps=2",
)  # fmt: skip
COMMON = ("run.tensorboard=false", "run.threads=1", "run.log_every=1", "engine.precision=fp32")
SHORT = ("schedule.max_steps=2", "batch.global=8", "batch.micro=8")
SMALL = {
    "capt_small_paper": LANGUAGE, "mlm_small": LANGUAGE, "capt_vl_qa": VISION_LANGUAGE, "lxmert": VISION_LANGUAGE,
    "vqa": SHORT, "gqa": SHORT, "nlvr2": SHORT, "ace/skipgram": (), "ace/nce_ace": (),
}  # fmt: skip
"""Job -> the keys that make it small."""
SWEEPS: Mapping[str, tuple[list[str], Sequence[str], dict[str, Any]]] = {
    "glue": (TASKS, (*SHORT[:1], "batch.micro=16"), {}),
    "capt_figure3_left": (["adaptive"], LANGUAGE, {"contrast.queue": {"grid": [0, 16, 32]}}),
    "capt_figure3_right": (["mlm", "mask", "shuffle"], LANGUAGE, {}),
    "latent_table1": (["vae"], LATENT, {}),
    "latent_table2_yahoo": (["vae"], LATENT, {}),
    "latent_table2_yelp": (["vae"], LATENT, {}),
}
"""Sweep -> the studies that are run, the keys that make their jobs small, and other grids."""
WORDS = {"50265": "370", "16": "1", "128": "32", "--nproc": "--nproc", "8": "1", "200": "4"}
"""Numbers of the commands that are made smaller."""


COCO = {"train": "train2014", "validation": "val2014", "test": "test2015"}
"""Split of the synthetic world -> the name of its pictures."""


def parts() -> dict[str, str]:
    """The text below each heading with an anchor, to the next heading."""
    pieces = re.split(r"^##+ .*\{#([\w-]+)\}$", PAGE.read_text(), flags=re.M)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def commands_of(text: str, folder: Path) -> list[list[str]]:
    """The commands of a part of the page."""
    (folder / "part.md").write_text(text)
    return list(commands(folder / "part.md"))


def test_no_command_stands_outside_of_the_parts_that_are_run(tmp_path: Path) -> None:
    found = {name: commands_of(text, tmp_path) for name, text in parts().items()}
    assert [words for own in found.values() for words in own] == list(commands(PAGE))
    assert all(found.values())
    assert {words[0] for words in commands(PAGE)} <= {"capt", "hf", "for", "done", "python"}
    jobs = {words[2] for words in commands(PAGE) if words[0] == "capt" and words[1] in ("pretrain", "finetune")}
    sweeps = {words[2] for words in commands(PAGE) if words[:2] == ["capt", "sweep"]}
    assert (jobs, sweeps) == (set(SMALL), set(SWEEPS))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stand-ins of everything that the page has fetched."""
    folder = tmp_path_factory.mktemp("papers")
    _text(folder)
    for name in ("PTB", "Yahoo", "Yelp"):
        (folder / name).mkdir()
        write_text(folder / name)
    for path in (folder / "Yelp").iterdir():  # a label and a tab before each text
        path.write_text("".join(f"1\t{line}\n" for line in path.read_text().splitlines()))
    (folder / "word-sim").mkdir()
    (folder / "word-sim/EN-RG-65.txt").write_text("river\tstone\t1\nking\tqueen\t9\nbird\tstone\t5\n")
    for name, (studies, keys, grids) in SWEEPS.items():
        _sweep(folder, name, studies, keys, grids)
    return folder


def _text(folder: Path) -> None:
    articles = write_corpus(folder / "text.txt", documents=120).read_text().split("\n\n")
    home, books = folder / "wikipedia/20231101.en", folder / "bookcorpus"
    home.mkdir(parents=True)
    books.mkdir()
    for number in range(2):
        own = articles[number::2]
        columns = {name: [f"{name} {n}" for n in range(len(own))] for name in ("id", "url", "title")}
        table = pyarrow.table({**columns, "text": own})
        pyarrow.parquet.write_table(table, home / f"train-{number:05}-of-00002.parquet")
        lines = write_corpus(folder / "book.txt", documents=60, seed=number + 1).read_text().lower()
        (books / f"books_large_p{number + 1}.txt").write_text(re.sub(r"\n+", "\n", lines))


def _glue(folder: Path) -> None:
    for task in TASKS:
        write_task(folder / "GLUE", task)
    for file in submission.SUBMISSION_FILES.values():
        columns, path = file.task.columns[file.split], folder / "GLUE" / file.task.folder / f"{file.split}.tsv"
        names = [columns.index or "index", str(columns.first), *([str(columns.second)] if columns.second else [])]
        path.parent.mkdir(exist_ok=True)
        cells = [[str(n), *filter(None, texts[:2])] for n, texts in enumerate(rows(file.model, TEST_ROWS, 9))]
        path.write_text("".join("\t".join(line) + "\n" for line in [names, *cells]))


def _sweep(folder: Path, name: str, studies: list[str], keys: Sequence[str], grids: dict[str, Any]) -> None:
    """The shipped sweep, cut, under the same name in ``folder``."""
    shipped = ROOT / f"configs/sweep/{name}.yaml"
    if not shipped.exists():
        return
    sweep = yaml.safe_load(shipped.read_text())
    sweep["sweep"]["seeds"] = [1]
    sweep["studies"] = {study: sweep["studies"][study] for study in studies}
    sweep["space"] = {key: {"grid": each["grid"][:1]} for key, each in sweep.get("space", {}).items()} | grids
    own = dict(text.split("=", 1) for text in [*keys, *COMMON])
    settings = {key: yaml.safe_load(value) for key, value in own.items() if key not in sweep["space"]}
    sweep["overrides"] = sweep.get("overrides", {}) | settings
    sweep["trial"] = {"workers": 1, "cpus": 1, "gpus": 0}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(sweep))


def run_part(name: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of a part, one after the other."""
    monkeypatch.chdir(world)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(world / "cache"))
    found: list[str] = []
    for words in commands_of(parts()[name], world):
        if words[0] == "hf":
            assert (world / words[words.index("--local-dir") + 1]).is_dir(), "what is fetched has a stand-in"
        elif words[0] == "for":
            found = sorted(glob.glob(words[3].rstrip(";")))
        elif "$run" in words:
            assert found
            for run in found:
                _run([run if word == "$run" else word for word in words[1:]], world)
        elif words[0] == "capt":
            _run(words[1:], world)
        elif words[0] == "python":
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [sys.executable, *words[1:]], capture_output=True, text=True, env=environment, check=False
            )
            assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])


def _run(words: list[str], world: Path) -> None:
    verb, subject = words[:2]
    words = [verb, *(WORDS.get(word, word) for word in words[1:])]
    if verb in ("pretrain", "finetune"):
        words += [*COMMON, *SMALL[subject]]
    if verb == "data" and subject == "prepare":
        words += [key for key in LANGUAGE if key.startswith(("data.", "model."))]
    if verb == "plan":
        words += [*COMMON, *SMALL[subject]]
    if verb == "sweep":
        words = [verb, f"{subject}.yaml", *words[2:]]
        done = subprocess.run(
            [sys.executable, "-m", "capt.launcher", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-4000:])
    elif verb == "glue-submission":  # of files that have few rows in this process
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0, words
    else:
        result = run_capt(*words, cwd=world, env=os.environ)
        assert result.returncode == 0, (words, result.stdout[-2000:], result.stderr[-4000:])


@pytest.mark.slow
def test_text_from_the_hub_to_a_submission(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in list(submission.SUBMISSION_FILES.items()):
        task = dataclasses.replace(file.task, rows={**file.task.rows, file.split: TEST_ROWS})
        monkeypatch.setitem(submission.SUBMISSION_FILES, name, dataclasses.replace(file, task=task))
    monkeypatch.setattr(submission, "majority_wnli", lambda: np.zeros(TEST_ROWS, dtype=np.int64))
    _glue(world)
    run_part("capt-text", world, monkeypatch)
    report = (world / "report_glue/report.md").read_text()
    assert all(name in report for name in ("A: glue_capt", "B: glue_mlm", "| CAPT | published, dev |"))
    assert (world / "submission.zip").is_file()
    shutil.copytree(world / "GLUE/RTE", world / "GLUE_RTE/RTE")
    # Of the eight tasks one is enough for the two stages.
    _sweep(world, "glue", ["rte"], SWEEPS["glue"][1], {})
    run_part("figure-3", world, monkeypatch)
    for side, count in (("left", 3), ("right", 3)):
        figures = json.loads((world / f"report_figure3_{side}/report.json").read_text())
        assert len(figures["GLUE by pretraining (CAPT, Figure 3)"]["rows"]) == count
        assert (world / f"report_figure3_{side}/glue-by-pretraining.png").is_file()


@pytest.mark.family
@pytest.mark.slow
def test_pictures_from_lxmerts_files_to_result_files(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pictures(world)
    run_part("capt-pictures", world, monkeypatch)
    report = (world / "report_pictures/report.md").read_text()
    assert "capt_vl" in report
    assert "| LXMERT | published |" in report
    assert len(json.loads((world / "gqa_submit.json").read_text())) == len(
        json.loads((world / "gqa/submit.json").read_text())
    )


@pytest.mark.family
@pytest.mark.slow
def test_latent_tables(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_part("clvae", world, monkeypatch)
    for name in ("ptb", "yahoo", "yelp"):
        assert "Latent-variable models (Tables 1 to 3 and 7)" in (world / f"report_{name}/report.md").read_text()


@pytest.mark.family
def test_word_vectors_of_a_dump(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_part("ace", world, monkeypatch)
    assert (world / "vectors.txt").read_text().split("\n")[0].split()[1] == "300"
    assert "| RG-65 |" in (world / "report_words/report.md").read_text()


def _pictures(folder: Path) -> None:
    """LXMERT's files: those of a small synthetic world under their names and in their forms."""
    made = run_capt("regions", "microworld", "--out", "world", "--pictures", "60", cwd=folder, env=os.environ)
    assert made.returncode == 0, made.stderr
    write_vocabulary(folder / "bert-base-uncased", bert=True)
    tables = {
        "mscoco_imgfeat": {
            "train2014": "pictures/train",
            "val2014": "pictures/validation",
            "test2015": "pictures/test",
        },
        "vg_gqa_imgfeat": {"vg_gqa": "pictures/train", "gqa_testdev": "pictures/test"},
        "nlvr2_imgfeat": {"train": "nlvr2/train", "valid": "nlvr2/validation", "test": "nlvr2/test"},
    }
    for home, files in tables.items():
        (folder / home).mkdir()
        for name, source in files.items():
            text = (folder / f"world/{source}.tsv").read_text()
            # Pictures of Visual Genome have numbers of their own.
            text = re.sub(r"^COCO_\w+?_0*(\d+)\t", r"9000\1\t", text, flags=re.M) if home[:2] == "vg" else text
            (folder / home / f"{name}_obj36.tsv").write_text(text)
    sentences = {name: (folder / f"world/pretraining/{name}.json").read_text() for name in ("train", "validation")}
    renamed = re.sub(r'"COCO_\w+?_0*(\d+)"', r'"9000\1"', sentences["train"])
    half = json.loads(sentences["validation"])
    (folder / "lxmert").mkdir()
    for name, content in {
        "mscoco_train": sentences["train"], "vgnococo": renamed, "mscoco_nominival": json.dumps(half[3:]),
        "mscoco_minival": json.dumps(half[:3]),
    }.items():  # fmt: skip
        (folder / f"lxmert/{name}.json").write_text(content)
    shutil.copy(folder / "world/answers.json", folder / "lxmert/all_ans.json")
    _questions(folder)


def _questions(folder: Path) -> None:
    """Questions and statements of fine-tuning in LXMERT's forms."""
    for task, names in {
        "vqa": ("train", "nominival", "minival", "test"),
        "gqa": ("train", "valid", "testdev", "submit"),
    }.items():
        (folder / task).mkdir()
        for name in names:
            split = {"train": "train", "nominival": "train", "valid": "train"}.get(name, "validation")
            split = "test" if name in ("test", "testdev", "submit") else split
            questions = json.loads((folder / f"world/{task}/{split}_questions.json").read_text())
            if task == "vqa":
                rows_ = questions["questions"]
                answers = json.loads((folder / f"world/vqa/{split}_annotations.json").read_text())["annotations"]
                own = [
                    {"question_id": q["question_id"], "img_id": f"COCO_{COCO[split]}_{q['image_id']:012}",
                     "sent": q["question"], "label": {a["multiple_choice_answer"]: 1.0}}
                    for q, a in zip(rows_, answers, strict=True)
                ]  # fmt: skip
            else:
                own = [
                    {"question_id": key, "img_id": f"9000{q['imageId']}", "sent": q["question"],
                     "label": {q["answer"]: 1.0}}
                    for key, q in questions.items()
                ]  # fmt: skip
            half = own[1::2] if name in ("nominival", "valid") else own[::2]
            if name in ("test", "submit"):
                half = [{key: value for key, value in q.items() if key != "label"} for q in own]
            (folder / task / f"{name}.json").write_text(json.dumps(half))
    (folder / "nlvr2").mkdir()
    for name, split in (("train", "train"), ("valid", "validation"), ("test", "test")):
        shutil.copy(folder / f"world/nlvr2/{split}.json", folder / f"nlvr2/{name}.json")
