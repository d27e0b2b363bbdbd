"""``capt data inspect`` of pairs: what it shows is what is in the files and what an encoder reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from capt.launcher.cli import app
from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.pairs.data_config import PairSource, Prompts
from capt.pretrain.pairs.inspect import summarize_pairs
from capt.tokenizer.encode import load_tokenizer
from capt.tokenizer.train import train

WORDS = [
    "a",
    "an",
    "the",
    "query",
    "document",
    "answer",
    "river",
    "stone",
    "engine",
    "naïve",
    "日本",
    "wing",
    ",",
    ".",
    "?",
]


def some_text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("tokenizer") / "tok"
    train([some_text(rng) for _ in range(200)], folder, vocab_size=365)
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rng = random.Random(1)
    rows: list[dict[str, Any]] = [
        {"query": some_text(rng), "pos": [some_text(rng)], "neg": [some_text(rng) for _ in range(i % 6)]}
        for i in range(30)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"query": "", "pos": ["x"]}])))
    return tmp_path / "a.jsonl"


def inspect(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", "inspect", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("prompt", ["", "search query: "])
@pytest.mark.parametrize("length", [8, 20, 512])
def test_ids_are_those_of_transformers(pairs: Path, tokenizer: Path, prompt: str, length: int) -> None:
    source = PairSource(
        name="a", files=[str(pairs)], prompts=Prompts(query=prompt), query_length=length, document_length=2 * length
    )
    if prompt and length == 8:
        with pytest.raises(
            ConfigError, match=r"the prompt 'search query: ' has \d+ tokens, the text after it at most 6"
        ):
            summarize_pairs(source, load_tokenizer(tokenizer))
        return
    summary = summarize_pairs(source, load_tokenizer(tokenizer), samples=30)
    reference = AutoTokenizer.from_pretrained(tokenizer)
    before = len(reference(prompt, add_special_tokens=False)["input_ids"])
    cut = {"query": 0, "document": 0}
    rows = [json.loads(line) for line in pairs.read_text().splitlines()][:30]
    for row, sample in zip(rows, summary.samples, strict=True):
        given = [row["query"], *row["pos"], *row["neg"][:3]]
        assert [text.text for text in sample.texts] == given
        assert sample.more == max(len(row["neg"]) - 3, 0)
        for shown, text in zip(sample.texts, given, strict=True):
            own, limit = (prompt, length + before) if shown.role == "query" else ("", 2 * length)
            ids = reference(own + text, truncation=True, max_length=limit)["input_ids"]
            assert shown.ids == ids
            assert shown.pieces == reference.convert_ids_to_tokens(ids)
            assert shown.is_cut == (len(reference(own + text)["input_ids"]) > limit)
        for name, texts, limit in (
            ("query", [prompt + row["query"]], length + before),
            ("document", row["pos"] + row["neg"], 2 * length),
        ):
            cut[name] += sum(len(reference(text)["input_ids"]) > limit for text in texts)
    assert (summary.query.cut, summary.document.cut) == (cut["query"], cut["document"])
    assert (summary.counts.rows, summary.counts.used, summary.counts.without_query) == (31, 30, 1)
    assert (summary.positives, summary.negatives) == (30, sum(len(row["neg"]) for row in rows))
    assert (summary.query.texts, summary.document.texts) == (30, summary.positives + summary.negatives)


def test_the_command(pairs: Path, tokenizer: Path) -> None:
    text = inspect(pairs, "--tokenizer", tokenizer, "--sequence-length", 10, "--samples", 1)
    assert (
        f"{pairs}: query 'query'; positive 'pos'; negative 'neg'\n31 rows, 30 usable: 30 positives and 75 negatives"
        in text
    )
    assert f"\n{pairs}, line 1\n     query | <s> " in text
    assert "are longer than 10, and are cut" in text
    [shown] = json.loads(inspect(pairs, "--tokenizer", tokenizer, "--json"))
    assert shown["counts"]["without_query"] == 1
    assert [sample["place"] for sample in shown["samples"]] == [f"{pairs}, line {i}" for i in (1, 2, 3)]
    assert "characters" in inspect(pairs)
    assert "positive 'query'" in inspect(pairs, "--columns", "query=pos", "--columns", "positive=query")


def test_what_is_wrong_is_said(pairs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inspect(pairs)
    assert f"rows left out, the query is empty: 1, the first at {pairs}, line 31" in caplog.text
    for arguments, error, message in [
        ([], ConfigError, "nothing to inspect"),
        ([pairs, "model.init=x"], ConfigError, "keys belong to a job"),
        ([pairs, "--columns", "query"], ConfigError, "write ROLE=NAME"),
        ([pairs, "--job", "capt_tiny"], ConfigError, "only capt_pairs jobs read pairs"),
        ([pairs, "--form", "scores"], DataError, "are not two texts and a score"),
        ([tmp_path], DataError, "manifest.json"),
        ([tmp_path / "none.csv"], DataError, "does not exist"),
    ]:
        result = CliRunner().invoke(app, ["data", "inspect", *map(str, arguments)])
        assert isinstance(result.exception, error), arguments
        assert message in str(result.exception)
