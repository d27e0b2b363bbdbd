"""Each script of ``examples`` at a tiny size, and all Python of README and its guide page, in one process."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import capt
from capt.library import Run, _as_overrides
from capt.pretrain.config.load import job_from_mapping, load_mapping
from capt.pretrain.engine.run import run_job
from tests.documented import ROOT, blocks
from tests.finetune import write_encoder
from tests.support import run_ranks

TEXTS = [f"The river {number} runs over stone {number}." for number in range(60)]
STOCK = "sentence-transformers/all-MiniLM-L6-v2"


def test_every_example_runs(tmp_path: Path) -> None:
    (found,) = run_ranks(_all, 1, tmp_path, timeout=240)
    assert set(found) == {*(path.stem for path in (ROOT / "examples").glob("[a-z]*.py")), "guide", "audit"}
    assert found["search"][0] in TEXTS
    assert len(found["search"]) == 5
    assert set(found["labels"]) <= {"low", "high"}
    assert len(found["labels"]) == 2
    assert {"config.json", "modules.json"} <= set(found["pairs"])
    assert {"config.json", "model.safetensors"} <= set(found["text"])
    assert len(found["compare"]) == 2
    assert all("ndcg@10" in figures and "bm25" in figures for figures in found["compare"])
    assert found["loop"][-1] < found["loop"][0] / 2
    assert [set(names) >= {"rows"} for names in found["guide"]] == [True, False, False]
    assert "prediction" in found["guide"][1]
    rows_written, figures = found["audit"]
    assert rows_written == len(TEXTS)
    assert "ndcg@10" in figures


def _all(folder: Path) -> dict[str, Any]:
    """Run each example in this process, training included, and return what each leaves."""
    os.chdir(folder)
    multiprocessing.current_process()._config["daemon"] = False  # loaders of data start workers
    capt.train = _train_here  # its processes are the test of the documentation's
    encoder = str(write_encoder(folder / "encoder", "BertModel"))
    Path("my.txt").write_text("\n\n".join(TEXTS))
    rows = [{"query": f"Where is river {number}?", "pos": [text]} for number, text in enumerate(TEXTS)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("table.csv").write_text(
        "text,label\n" + "".join(f"{text},{('low', 'high')[n > 29]}\n" for n, text in enumerate(TEXTS))
    )
    beir = _beir(folder / "beir/nfcorpus")
    given = {
        "search": ["my.txt", "--ask", "river 7", "--model", encoder],
        "pairs": ["pairs.jsonl", "--model", encoder, "--batch", "8", "--steps", "2"],
        "labels": ["table.csv", "--model", encoder, "--epochs", "1", "--new", TEXTS[3], TEXTS[40]],
        "text": ["my.txt", "--steps", "2", "--pieces", "370", "--batch", "8"],
        "compare": [str(beir), encoder, encoder],
        "loop": ["--steps", "60"],
    }
    found = {name: _main(name)(arguments) for name, arguments in given.items()}
    _run_guide(found)
    for name in ("pairs", "text"):
        found[name] = sorted(path.name for path in found[name].iterdir())
    found["compare"] = [list(_names(figures)) for figures in found["compare"]]
    return found


def _run_guide(found: dict[str, Any]) -> None:
    """Run the blocks of the guide's page on the files that it names, made by the examples."""
    made = {"exported-st": found["pairs"], "runs/mine": "runs/labels-example", "runs/first": "encoder"}
    for name, source in made.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(Path(source).resolve())
    found["guide"] = []
    for body in blocks(ROOT / "docs/guide/python.md", "python"):
        names: dict[str, Any] = {}
        exec(body, names)
        found["guide"].append(sorted(set(names) - {"__builtins__", "capt"}))
    found["audit"] = names["audit"]["rows_written"], _names(names["figures"])


def _names(value: Any) -> set[str]:
    """The keys of nested mappings."""
    if isinstance(value, list):
        return set().union(*map(_names, value))
    return set(value).union(*map(_names, value.values())) if isinstance(value, dict) else set()


def _main(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def _train_here(job: str, **overrides: Any) -> Run:
    merged = job_from_mapping(load_mapping(job, list(_as_overrides(overrides))), job)
    assert run_job(merged) == 0
    return Run(merged.run.dir)


def _beir(folder: Path) -> Path:
    (folder / "qrels").mkdir(parents=True)
    for name, key in (("corpus", "d"), ("queries", "q")):
        lines = [json.dumps({"_id": f"{key}{n}", "title": "", "text": text}) for n, text in enumerate(TEXTS)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    judged = "".join(f"q{n}\td{n}\t1\n" for n in range(60))
    (folder / "qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    return folder


def test_the_python_of_readme_finds_what_is_asked(tmp_path: Path, capsys: Any) -> None:
    encoder = write_encoder(tmp_path / "encoder", "BertModel")
    (code,) = (body for body in blocks(ROOT / "README.md", "python") if "capt.load" in body)
    exec(code.replace(STOCK, str(encoder)), {})
    score, _, text = capsys.readouterr().out.splitlines()[-1].partition(" ")
    assert -1 <= float(score) <= 1
    assert text in code
