"""``make quickstart-retrieval`` at a tiny size: every command of the Makefile, on a generated corpus with titles."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
from pathlib import Path

import pytest

from capt.pretrain.base.overlap import same_text
from capt.pretrain.retrieval.own_structure import write_docstring_data, write_library_search
from tests.finetune import sentence
from tests.support import run_capt
from tests.unit.retrieval.toy import write_beir

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)

_TINY = (
    "model.size=custom model.layers=1 model.hidden=64 model.heads=2 model.ffn=64 tokenizer.vocab_size=170 "
    "tokenizer.byte_fallback=false data.sequence_length=32"
)
SIZES = {
    "FIRST": "schedule.max_steps=4 schedule.warmup_steps=1 batch.global=16 batch.micro=8 validate.every=2",
    "SECOND": "schedule.max_steps=2 schedule.warmup_steps=1 batch.global=16 batch.micro=8 validate.every=2",
    "MINING": "--number 2 --short keep",  # no margin: this model has learnt nothing yet
    "ARGS": "run.threads=1 run.log_every=1 run.tensorboard=false",
}


def _commands(folder: Path, beir: Path) -> list[list[str]]:
    """The commands of the target, split as a shell does."""
    sizes = [f"{key}={value}" for key, value in SIZES.items()]
    make = [
        "make",
        "-n",
        "-o",
        "install",
        "quickstart-retrieval",
        f"RETRIEVAL={folder}",
        f"BEIR={beir}",
        "BIN=",
        *sizes,
    ]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    return [shlex.split(line) for line in lines.splitlines() if line.startswith("/")]


def test_the_target_runs_from_nothing_to_figures(tmp_path: Path) -> None:
    beir = write_beir(tmp_path / "beir", documents=80, queries=8)
    generator = random.Random(3)
    rows = [json.loads(line) for line in (beir / "corpus.jsonl").read_text().splitlines()]
    named = "".join(json.dumps({**row, "title": f"{sentence(generator, 4)} {i}"}) + "\n" for i, row in enumerate(rows))
    (beir / "corpus.jsonl").write_text(named)
    folder = tmp_path / "quickstart"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for program, *arguments in _commands(folder, beir):
        if program == "/python":
            exec(arguments[1].replace("print", ""), {})
        if program != "/capt":
            continue
        added = shlex.split(_TINY) if arguments[1] == "mlm_tiny" else []
        done = run_capt(*arguments, *added, cwd=tmp_path, env=env)
        assert done.returncode == 0, f"{arguments}\n{done.stderr[-3000:]}"
    page = (folder / "report" / "report.md").read_text()
    table = page.split("## Retrieval")[1]
    for system in ("random, step-00000001", "pairs, step-00000004", "mined, step-00000002", "bm25"):
        assert f"| {system} |" in table
    for picture in ("retrieval-beir.png", "scores-beir.png"):
        assert (folder / "report" / picture).stat().st_size > 5000
    said = json.loads((folder / "mined" / "metrics.jsonl").read_text().splitlines()[0])
    assert said["split"] == "validation"
    assert said["ndcg@10"] > 0


def test_docstrings_stand_in_for_a_corpus(tmp_path: Path) -> None:
    """Held-out paragraphs are asked, and none of them is trained on; every judged signature is in the corpus."""
    count = write_docstring_data(tmp_path, limit=400, folders=[ROOT / "pretrain"])
    read = {
        name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("pairs.jsonl", "beir/corpus.jsonl", "beir/queries.jsonl")
    }
    assert len(read["pairs.jsonl"]) == count == 360
    asked = {same_text(row["text"]) for row in read["beir/queries.jsonl"]}
    assert len(asked) == 40
    assert not asked & {same_text(row["query"]) for row in read["pairs.jsonl"]}
    judged = [line.split("\t") for line in (tmp_path / "beir/qrels/test.tsv").read_text().splitlines()[1:]]
    assert {document for _, document, _ in judged} <= {row["_id"] for row in read["beir/corpus.jsonl"]}


def test_pythons_own_library_is_searched_by_what_is_held_out(tmp_path: Path) -> None:
    """In the tour's order, and nothing that is asked is trained on or read by the encoder."""
    words = {"mine": "river", "abc": "stone", "csv": "house", "shutil": "door", "glob": "child", "os": "book",
             "statistics": "letter"}  # fmt: skip
    for module, word in words.items():
        functions = [
            f'def part{i}(x, y=1):\n    """Return the part of the {word} that has the number {i} in the list."""\n'
            for i in range(40)
        ]
        (tmp_path / "code").mkdir(exist_ok=True)
        (tmp_path / "code" / f"{module}.py").write_text("\n".join(functions))
    out = tmp_path / "out"
    said = write_library_search(out, [tmp_path / "code"])
    for part in ("256 pairs", "24 of Python's own library are held out", "240 signatures"):
        assert part in said
    library, queries, answers = (
        (out / f"{name}.txt").read_text().splitlines() for name in ("library", "queries", "answers")
    )
    assert len(library) == 240
    assert not [line for line in library if line.startswith("mine.")]
    assert [line.partition(".")[0] for line in answers] == ["os", "shutil", "glob", "statistics"]
    for query, answer in zip(queries, answers, strict=True):
        module, number = answer.removesuffix("(x, y)").split(".part")
        assert query == f"Return the part of the {words[module]} that has the number {number} in the list."
    asked = [json.loads(line)["text"] for line in (out / "beir/queries.jsonl").read_text().splitlines()]
    assert set(queries) <= set(asked)
    for name in ("pairs.jsonl", "text.txt"):
        text = (out / name).read_text()
        assert not [query for query in asked if query in text]
