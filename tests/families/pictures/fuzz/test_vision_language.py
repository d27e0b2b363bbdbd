"""Questions, answer tables and result files from somebody else: every form, damaged, mislabelled, packed or planted."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from capt.finetune.visual.dumps import check_predictions
from capt.pretrain.vision_language.data.answers import load_table
from capt.pretrain.vision_language.data.read import read_examples
from tests.families.pictures.vision_language.data import forms
from tests.fuzz.harness import check, inputs, library, mutated, snapshot
from tests.fuzz.planting import changed_json, plant

OBJECTS: list[Any] = [
    *(forms.PRETRAINING, forms.LXMERT_VQA, forms.LXMERT_GQA, forms.LXMERT_NLVR2, forms.QUESTIONS, forms.ANNOTATIONS),
    *(forms.GQA, forms.COCO, forms.COCO_RESULTS, ["yes", "no"], [{"ans": "yes", "dsets": []}], {"yes": 0, "no": 1}),
]
RESULTS: list[Any] = [
    [{"question_id": 42000, "answer": "a cat"}, {"question_id": 7001, "answer": "no"}],
    [{"questionId": "201", "prediction": "no"}],
    "dev-850-0-0,True\ndev-850-1-0,True\n",
]


def _content(rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        rows = [changed_json(rng, row) if rng.random() < 0.5 else row for row in forms.NLVR2]
        return "\n".join(map(json.dumps, rows)).encode()
    if kind == 1:
        return rng.choice([forms.FLICKR, *(r for r in RESULTS if isinstance(r, str))]).encode()
    value = rng.choice([*OBJECTS, *(r for r in RESULTS if not isinstance(r, str))])
    return json.dumps(changed_json(rng, value) if kind == 2 else value).encode()


def _damage(rng: random.Random, path: Path) -> None:
    kind = rng.randrange(6)
    content = _content(rng)
    if kind == 0:
        plant(rng, path)
        return
    if kind == 1:
        content = rng.choice((b"\0", b"[", b'{"a":', b"[" * 10, b" ", b"9")) * (1 << 15)
    elif kind == 2:
        content = mutated(rng, content)
    elif kind == 3:
        content = rng.choice(
            (b'[{"img_id": "x", "sent": "\\ud800", "question_id": 1}]', b"[" + b"9" * 5000 + b"]", b"[NaN]", b"")
        )
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" and rng.random() < 0.9 else content)


def _use(path: Path, other: Path) -> None:
    read_examples([path] if other.suffix == ".csv" else [path, other])


def test_data_files_tables_and_result_files(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    codes = {}
    for number, rng in inputs("vision_language"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        path = folder / rng.choice(("a.json", "a.json.gz", "a.csv", "COCO_val2014"))
        _damage(rng, path)
        data = forms.write(folder / "q.json", forms.QUESTIONS)
        before = snapshot(folder)
        uses = {
            "read": partial(_use, path, rng.choice((data, Path("none.csv")))),
            "table": partial(load_table, path),
            "check": partial(check_predictions, path, [data]),
            "data": partial(check_predictions, data, [path]),
        }
        for name, use in uses.items():
            outcome = library(use)
            check(outcome, f"vision_language:{number} {name}")
            codes.setdefault(name, set()).add(outcome.code)
        assert snapshot(folder) == before
    assert codes["read"] == {0, 2}
