"""``make quickstart-vl`` at a tiny size: every command of the Makefile, on the synthetic microworld."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from capt.finetune.visual.dumps import check_predictions
from tests.support import run_capt

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.timeout(900)

_MODEL = (
    *("model.size=custom", "model.language_layers=1", "model.vision_layers=1", "model.cross_layers=1"),
    *("model.hidden=32", "model.heads=2", "model.ffn=64"),
)
_TINY = (
    *("batch.global=16", "batch.micro=4", "run.threads=1", "run.log_every=1", "run.tensorboard=false"),
    *("tokenizer.vocab_size=300", "tokenizer.byte_fallback=false", "contrast.queue=32", "validate.samples=32"),
)
SIZES = {
    "PICTURES": "40",
    "PRETRAINING": f"schedule.max_steps=4 schedule.warmup_steps=1 schedule.stop_after=2 {' '.join((*_MODEL, *_TINY))}",
    "FINETUNING": "schedule.max_steps=3 run.threads=1",
    **dict.fromkeys(("EPOCHS_VQA", "EPOCHS_GQA", "EPOCHS_NLVR2"), "null"),
}


def _commands(folder: Path) -> list[list[str]]:
    """The commands of the target, split as a shell does."""
    sizes = [f"{key}={value}" for key, value in SIZES.items()]
    make = ["make", "-n", "-o", "install", "quickstart-vl", f"VL={folder}", "BIN=", *sizes]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    return [shlex.split(line) for line in lines.splitlines() if line.startswith("/")]


def _expanded(arguments: list[str]) -> list[str]:
    """Patterns of files as a shell expands them."""
    names: list[str] = []
    for argument in arguments:
        found = sorted(Path("/").glob(argument[1:])) if argument.startswith("/") and "*" in argument else []
        names.extend(map(str, found) if found else [argument])
    return names


def test_the_target_runs_from_nothing_to_figures(tmp_path: Path) -> None:
    folder, commands = tmp_path / "quickstart-vl", list[str]()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for program, *arguments in _commands(folder):
        if program != "/capt":
            continue
        arguments = _expanded(arguments)
        expected = 0
        if "||" in arguments:  # stops half-way on purpose
            arguments, expected = arguments[: arguments.index("||")], 75
        done = run_capt(*arguments, cwd=tmp_path, env=env)
        assert done.returncode == expected, (arguments, done.stderr[-3000:])
        commands.append(" ".join(arguments[:2]))
    assert [command for command in commands if command.startswith(("regions", "finetune"))] == [
        *("regions microworld", "regions import", "regions inspect", "finetune vqa", "finetune gqa", "finetune nlvr2")
    ]
    world = folder / "world"
    files = {
        "vqa": ("vqa_test.json", [world / "vqa" / "test_questions.json", world / "vqa" / "test_annotations.json"]),
        "gqa": ("gqa_test.json", [world / "gqa" / "test_questions.json"]),
        "nlvr2": ("nlvr2_test.csv", [world / "nlvr2" / "test.json"]),
    }
    for task, (name, data) in files.items():
        checked = check_predictions(folder / name, data)
        assert checked.problems == []
        figures = json.loads((folder / f"{task}_figures.json").read_text())
        assert checked.scores["accuracy"] in _values(figures), (task, checked.scores, figures)
    assert (folder / "boxes.png").stat().st_size > 500
    assert "synthetic" in (folder / "report" / "report.html").read_text()
    _loads_in_transformers(folder / "export" / "hf")


def _values(tree: object) -> list[object]:
    return [value for leaf in tree.values() for value in _values(leaf)] if isinstance(tree, dict) else [tree]


def _loads_in_transformers(folder: Path) -> None:
    from transformers import LxmertForPreTraining

    model, info = LxmertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.hidden_size == 32
