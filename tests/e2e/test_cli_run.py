"""A run through the command line, from text to nearest neighbours, on one and two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import training_rows
from tests.support import run_capt
from tests.unit.retrieval.toy import write_beir

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)

JOB = (
    *("data.sequence_length=32", "data.workers=1", "tokenizer.vocab_size=370", "run.threads=1", "run.log_every=1"),
    *(
        "model.pad_vocab_to=64",
        "model.layers=1",
        "model.hidden=32",
        "model.heads=2",
        "model.ffn=64",
        "batch.global=8",
        "batch.micro=4",
    ),
    *("schedule.max_steps=8", "schedule.warmup_steps=2", "contrast.queue=37", "validate.every=0", "checkpoint.every=3"),
)


class Folder:
    """A user's folder with a text in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        for name in ("pretrain.py", "launcher.py", "tokenizer.py", "finetune.py", "configs/__init__.py"):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text("raise SystemExit('a module of the working folder was run')\n")
        line = "the river ran over stones and under a bridge while birds sang in the blue light of early morning"
        (path / "text.txt").write_text("\n\n".join(f"{line[i % 40 :]} {line[: i % 50]}." for i in range(300)))

    def capt(self, *arguments: str, code: int = 0, forked: bool = False) -> tuple[str, str]:
        """Run ``capt``, which must end with ``code``, and return its stdout and stderr.

        A launch is started as a user starts it; ``forked`` saves the start of the others.
        """
        if forked:
            done = run_capt(*arguments, cwd=self.path, env=self.env)
        else:
            command = [sys.executable, "-P", "-m", "capt.launcher.cli", *arguments]
            done = subprocess.run(
                command, cwd=self.path, env=self.env, capture_output=True, text=True, timeout=240, check=False
            )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    def steps(self) -> list[int]:
        """The steps that the run has logged."""
        return [row["step"] for row in training_rows(self.path / "r")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A run that stopped on two processes and was finished on one."""
    folder = Folder(tmp_path_factory.mktemp("user"))
    job = ["capt_tiny", "data.files=text.txt", f"data.cache={folder.path / 'cache'}", "run.dir=r", *JOB]
    _, log = folder.capt("pretrain", *job, "schedule.stop_after=5", "--nproc", "2", code=75)
    assert "continue with: capt resume r" in log
    assert folder.steps() == [1, 2, 3, 4, 5]
    assert "already holds a run" in folder.capt("pretrain", *job, code=2, forked=True)[1]
    folder.capt("resume", "r", "schedule.stop_after=null", "--nproc", "1", forked=True)
    assert folder.steps() == [1, 2, 3, 4, 5, 6, 7, 8]
    return folder


def test_the_run_folder_tells_how_it_was_launched_and_ended(folder: Folder) -> None:
    assert json.loads((folder.path / "r" / "launch.json").read_text()) == {"launcher": "local", "nproc": 1}
    assert json.loads((folder.path / "r" / "status.json").read_text())["state"] == "done"


def test_evaluate(folder: Folder) -> None:
    words = ("evaluate", "r", "--text", "text.txt", "--samples", "8", "--pooler", "cls", "--out", "e.json")
    said, _ = folder.capt(*words, forked=True)
    assert "protocol: 8 of" in said
    assert json.loads((folder.path / "e.json").read_text())["sections"]


def test_convert_and_look(folder: Folder) -> None:
    folder.capt("convert", "r", "hf", "--to", "hf", forked=True)
    assert json.loads((folder.path / "hf" / "config.json").read_text())["vocab_size"] == 370  # trained with 384 rows
    assert (folder.path / "hf" / "model.safetensors").is_file()
    folder.capt("convert", "hf", "back", "--from", "hf", forked=True)
    said, _ = folder.capt("neighbors", "r", "the river ran", "birds sang", "--run", "r", "--top", "2", forked=True)
    lines = said.splitlines()
    assert [lines[0], lines[3], len(lines)] == ["the river ran", "birds sang", 6]


def test_retrieval_with_a_run_on_two_ranks(folder: Folder, tmp_path: Path) -> None:
    """The figures of one process, and one line of error from the ranks; the run keeps what was measured."""
    write_beir(folder.path / "beir")
    figures = []
    for number, ranks in enumerate(([], ["--nproc", "2"])):
        out = ["--per-query", str(tmp_path / f"{number}.jsonl"), "--store", str(tmp_path / str(number))]
        words = ("evaluate", "r", "--retrieval", "beir", "--pooler", "head")
        folder.capt(*words, *out, *ranks, forked=True)
        figures.append((tmp_path / f"{number}.jsonl").read_text())
    assert figures[0] == figures[1]
    (kept,) = (folder.path / "r").glob("evaluation-*.json")
    assert "beir" in [section["name"] for section in json.loads(kept.read_text())["sections"]]
    wrong = ["--store", str(tmp_path / "0"), "--nproc", "2", "--dims", "9999"]
    said = "".join(folder.capt("evaluate", "r", "--retrieval", "beir", *wrong, code=2, forked=True))
    assert said.count("error:") == 1
    assert "--dims 9999: r gives" in said
    assert not list((tmp_path / "0").glob(".work-*"))


@pytest.mark.parametrize("data", ["empty.txt", "binary.txt", "nowhere.txt"])
def test_a_refused_job_says_so_once_and_leaves_nothing(folder: Folder, data: str) -> None:
    """The first two are found by the ranks, the last one before they start."""
    (folder.path / "empty.txt").touch()
    (folder.path / "binary.txt").write_bytes(bytes(range(256)) * 8)
    before = sorted(folder.path.iterdir())
    job = ("capt_tiny", f"data.files={data}", "run.dir=new/x", *JOB)
    log = "".join(folder.capt("pretrain", *job, "--nproc", "2", code=2, forked=True))
    assert log.count("error: ") == 1
    assert log.count(data) == 1
    assert sorted(folder.path.iterdir()) == before
