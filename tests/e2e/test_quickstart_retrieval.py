"""``make quickstart-retrieval`` at a tiny size: every command of the Makefile, on a generated corpus with titles."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.overlap import same_text
from examples.quickstart.own_structure import write_data, write_docstring_data, write_library_search
from tests.documented import commands
from tests.finetune import sentence
from tests.language import write_corpus
from tests.support import run_capt
from tests.unit.retrieval.toy import write_beir, write_sentence_folder

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)

_TINY = (
    "model.size=custom model.layers=1 model.hidden=64 model.heads=2 model.ffn=64 tokenizer.vocab_size=170 "
    "tokenizer.byte_fallback=false data.sequence_length=32"
)
SIZES = {
    "READING": "schedule.max_steps=2 schedule.warmup_steps=1 batch.global=16 batch.micro=8 validate.samples=8",
    "FIRST": "schedule.max_steps=4 schedule.warmup_steps=1 batch.global=16 batch.micro=8 validate.every=2",
    "SECOND": "schedule.max_steps=2 schedule.warmup_steps=1 batch.global=16 batch.micro=8 validate.every=2",
    "RERANKING": "schedule.epochs=null schedule.max_steps=2 batch.global=8",
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
            exec(arguments[1], {"print": lambda *words, **options: None})
        if program != "/capt":
            continue
        added = shlex.split(_TINY) if arguments[1] in ("mlm_tiny", "capt_text") else []
        done = run_capt(*arguments, *added, cwd=tmp_path, env=env)
        assert done.returncode == 0, f"{arguments}\n{done.stderr[-3000:]}"
    page = (folder / "report" / "report.md").read_text()
    table = page.split("## Retrieval")[1]
    systems = {"random": 1, "text": 2, "pairs": 4, "text-then-pairs": 4, "mined": 2, "distilled": 2}
    for system in (*(f"{name}, step-{step:08}" for name, step in systems.items()), "bm25"):
        assert f"| {system} |" in table
    # The last command: a line for each, with the interval of its difference from pairs alone.
    figures = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [line[0] for line in figures] == [
        *("pairs", "random", "text", "text-then-pairs", "mined", "reranked", "distilled", "bm25")
    ]
    assert all(line[4] == "to" or line[3] == "none" for line in figures[1:])
    scored = [json.loads(line) for line in (folder / "scored" / "pairs.jsonl").read_text().splitlines()]
    assert all(len(row["pos_scores"]) == 1 and len(row["neg_scores"]) == len(row["neg"]) for row in scored)
    assert any(
        "loss/distillation" in line for line in (folder / "distilled" / "metrics.jsonl").read_text().splitlines()
    )
    for picture in ("retrieval-beir.png", "scores-beir.png"):
        assert (folder / "report" / picture).stat().st_size > 5000
    said = json.loads((folder / "mined" / "metrics.jsonl").read_text().splitlines()[0])
    assert said["split"] == "validation"
    assert said["ndcg@10"] > 0


@pytest.mark.slow
def test_the_search_in_pythons_library(tmp_path: Path) -> None:
    """``make quickstart``, its lines as a shell runs them, with small modules for the installed packages."""
    _write_modules(tmp_path / "code")
    folder = tmp_path / "quickstart"
    args = (
        "schedule.max_steps=4 schedule.stop_after=2 schedule.warmup_steps=1 batch.global=16 batch.micro=8 "
        "validate.every=2 run.threads=1 run.tensorboard=false"
    )
    make = ["make", "-n", "-o", "install", "quickstart", f"RUN={folder}", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run([*make, f"ARGS={args}"], cwd=ROOT, capture_output=True, text=True, check=True)
    recipe = done.stdout.replace("/data'), ", f"/data'), [Path('{tmp_path / 'code'}')], ")
    recipe = recipe.replace(" mlm_tiny ", f" mlm_tiny {_TINY.replace('170', '140')} run.threads=1 ")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ran = subprocess.run(["bash", "-e", "-c", recipe], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "bm25" in ran.stdout
    assert all(answer in ran.stdout for answer in (folder / "data" / "answers.txt").read_text().split("\n"))
    assert (folder / "export" / "modules.json").is_file()
    assert (folder / "report" / "report.html").is_file()


def test_three_commands_from_documents_and_pairs_to_a_search_with_a_reranker(tmp_path: Path) -> None:
    """The page's commands with a small encoder for MiniLM; the answers have the scores of the export."""
    from sentence_transformers import CrossEncoder

    encoder, generator = write_sentence_folder(tmp_path / "encoder"), random.Random(5)
    texts = [f"{sentence(generator, 9)} number {i}" for i in range(30)]
    (tmp_path / "documents").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "documents" / f"{i}.txt").write_text(f"{text}\n")
    rows = [json.dumps({"query": " ".join(text.split()[:3]), "pos": [text]}) for text in texts]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(words: Sequence[str]) -> str:
        done = run_capt(*words, cwd=tmp_path, env=env)
        assert done.returncode == 0, f"{words}\n{done.stderr[-3000:]}"
        return done.stdout

    page = ROOT / "docs/guide/rerankers.md"
    mine, train, build, ask, *_ = (words[1:] for words in commands(page))
    assert [mine[0], train[:2], build[:2], ask[:1]] == ["mine", ["finetune", "rerank"], ["search", "build"], ["search"]]
    small = ["schedule.max_steps=2", "batch.global=8", "run.threads=1", "run.tensorboard=false"]
    for words in (mine, [*train, *small], build):
        run([word.replace("sentence-transformers/all-MiniLM-L6-v2", str(encoder)) for word in words])
    hits = json.loads(run([*ask, "--json", "--top", "5"]))["hits"]
    run(["convert", "runs/reranker", "exported", "--to", "hf"])
    theirs = CrossEncoder(str(tmp_path / "exported"), device="cpu").predict(
        [("what is asked", hit["passage"]) for hit in hits]
    )
    assert [hit["score"] for hit in hits] == pytest.approx(theirs.tolist(), abs=1e-5)
    assert [hit["score"] for hit in hits] == sorted((hit["score"] for hit in hits), reverse=True)


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


def test_a_folder_of_text_has_pairs_of_its_own(tmp_path: Path) -> None:
    """The beginning of a document asks for what follows; what is asked in the test is in no text that is read."""
    write_corpus(tmp_path / "plain.txt", documents=150)  # sentences, the first one a line
    titled = "\n\n".join(f"Title number {i}\nthe body has words enough to be found by {i}" for i in range(60))
    long = " ".join(f"a sentence of number {i} in a line." for i in range(300))
    (tmp_path / "titled.txt").write_text(f"{titled}\n\nshort\n\n{long}\n")
    said = write_data(tmp_path / "out", None, [tmp_path / "plain.txt", tmp_path / "titled.txt"])
    read = {
        name: [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]
        for name in ("pairs.jsonl", "beir/corpus.jsonl", "beir/queries.jsonl")
    }
    pairs, corpus, queries = read.values()
    bodies, text = {row["_id"]: row["text"] for row in corpus}, (tmp_path / "out" / "text.txt").read_text()
    judged = [line.split("\t") for line in (tmp_path / "out/beir/qrels/test.tsv").read_text().splitlines()[1:]]
    asked = {row["_id"]: row["text"] for row in queries}
    every = {row["query"]: row["pos"][0] for row in pairs} | {asked[query]: bodies[body] for query, body, _ in judged}
    assert f"{len(pairs)} pairs of the beginnings of documents" in said
    assert len(asked) == len(judged) == len(every) // 10 >= 20
    assert every["Title number 7"] == "the body has words enough to be found by 7"
    assert every["a sentence of number 0 in a line."].startswith("a sentence of number 1 in a line.")
    assert "short" not in text.split()
    assert not [query for query in asked.values() if f"{query}\n" in text]
    assert all(body in text for body in bodies.values())
    (tmp_path / "one.txt").write_text("A title of one\nand the text of it, which has words enough\n")
    with pytest.raises(DataError, match="1 document with a beginning and more after it, of 100"):
        write_data(tmp_path / "few", None, [tmp_path / "one.txt"])


def _write_modules(folder: Path) -> dict[str, str]:
    """Write modules of documented functions, of the standard library's names but one; returns the word of each."""
    words = {"mine": "river", "abc": "stone", "csv": "house", "shutil": "door", "glob": "child", "os": "book",
             "statistics": "letter"}  # fmt: skip
    folder.mkdir()
    for module, word in words.items():
        functions = [
            f'def part{i}(x, y=1):\n    """Return the part of the {word} that has the number {i} in the list."""\n'
            for i in range(40)
        ]
        (folder / f"{module}.py").write_text("\n".join(functions))
    return words


def test_pythons_own_library_is_searched_by_what_is_held_out(tmp_path: Path) -> None:
    """In the tour's order, and nothing that is asked is trained on or read by the encoder."""
    words = _write_modules(tmp_path / "code")
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
