"""The code that a model card shows a user runs as it is, on texts of any length, and gives finite numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from capt.pretrain.convert.card import CardFacts
from capt.pretrain.convert.encoder import Form, export_encoder
from capt.pretrain.language.export import TARGETS, model_card
from tests.unit.convert.models import config, model, tokenizer

LONG = "a cat sat on the mat and nobody minded " * 300


Written = Callable[[Form, str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """An export, written once."""

    @functools.cache
    def write(form: Form, kind: str) -> Path:
        out = tmp_path_factory.mktemp("card") / "out"
        _write(form, kind, out)
        return out

    return write


def _write(form: Form, kind: str, out: Path) -> None:
    if form == "onnx":
        pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    cfg = config(kind)
    card = model_card(form, CardFacts("x", {}), {})
    export_encoder(form, model(cfg).state_dict(), cfg, tokenizer(kind), out, card)


def _run(folder: Path, *edits: tuple[str, str]) -> dict[str, Any]:
    """Run the card's code, as a user types it, with the folder in the place of PATH."""
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    for old, new in (("PATH", str(folder)), *edits):
        assert old in code
        code = code.replace(old, new)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.parametrize(
    ("form", "kind"),
    [("hf", "unigram"), ("hf", "wordpiece"), ("sentence-transformers", "wordpiece"), ("onnx", "wordpiece")],
)
def test_the_code_of_the_card_runs(form: Form, kind: str, written: Written) -> None:
    folder = written(form, kind)
    names = _run(folder)
    longer = _run(folder, ("A text with a", LONG) if form == "hf" else ('"one sentence"', repr(LONG)))
    for found in (names, longer):
        result = found["logits"].detach().numpy() if form == "hf" else np.asarray(found["embeddings"])
        assert np.isfinite(result).all()
    if form == "hf":
        assert int(names["tokenizer"].mask_token_id) in names["tokenizer"](names["text"])["input_ids"]
        pair = names["tokenizer"]("the cat", "on the mat", return_tensors="pt")
        assert torch.isfinite(names["model"](**pair).logits).all()
    if form == "onnx":
        assert set(names["inputs"]) == {given.name for given in names["session"].get_inputs()}
        nothing = {name: np.zeros_like(x) for name, x in dict(names["inputs"]).items()}
        sentences, hidden = names["session"].run(None, nothing)
        assert (sentences == 0).all()
        assert np.isfinite(hidden).all()


@pytest.mark.parametrize("form", TARGETS)
def test_exports_of_equal_models_are_equal_byte_for_byte(form: Form, written: Written, tmp_path: Path) -> None:
    first, second = written(form, "wordpiece"), tmp_path / "again"
    _write(form, "wordpiece", second)
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(files) >= 5
    assert [file for file in files if (first / file).read_bytes() != (second / file).read_bytes()] == []


def test_no_text_of_a_card_is_markup() -> None:
    """A card with hostile names has the elements and links of one with harmless names."""
    hostile = (
        "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "![a](http://x.y/z.png)", "a|b", "`code`", "a\n# b",
        "a\n---\nlicense: x\n---\n", "&lt;script&gt;", "**bold**", "_i_", "https://x.y", "</td><script>", "~~s~~",
        "<http://x.y>", "a\r\n\r\n<b>", "1. x", "\\", "\u2028<b>", "\ud800",
    )  # fmt: skip
    known = ("`pooler_output`", "`RobertaModel`", "`capt_head.safetensors`")
    markup = re.compile(r"<[A-Za-z/!?]|\]\(|[`*~]|:" + "//")
    for text in hostile:
        job = {"data": {"files": [text], "source": text}}
        facts = {text: text, "list": [text, 1.5]}
        card = model_card("hf", CardFacts(f"x{text}", job, {"step": 1}, {text: 1.0}), facts)
        head, body = card.split("---\n", 2)[1:]
        assert "license" not in yaml.safe_load(head)
        before, _, after = body.partition("## Use")
        body = before + after.split("```\n")[-1]
        for name in known:
            body = body.replace(name, "")
        assert not markup.search(body), text
        titles = ["# x", "## Model", "## Training", "## Last", "## Versions", "## Limitations"]
        found = re.findall(r"^#.*", body, re.MULTILINE)
        assert len(found) == len(titles), text
        assert all(line.startswith(title) for line, title in zip(found, titles, strict=True)), text
        card.encode()
