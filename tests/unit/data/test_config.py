from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from capt.pretrain.base.cache import default_cache
from capt.pretrain.data.config import CorruptionConfig, DataConfig


@pytest.mark.parametrize(
    ("keys", "source"),
    [
        ({}, None),
        ({"source": "docstrings"}, "docstrings"),
        ({"source": "docstrings", "files": "a.txt"}, "files"),
        ({"source": "docstrings", "name": "x/y"}, "hub"),
        ({"files": "a.txt"}, "files"),
        ({"shards": "prepared"}, "files"),
        ({"name": "Salesforce/wikitext"}, "hub"),
        ({"source": "files", "files": ["a.txt", "b.txt"]}, "files"),
        ({"source": None, "files": ["a.txt"]}, "files"),
    ],
)
def test_source_follows_from_what_is_given(keys: dict[str, object], source: str | None) -> None:
    assert DataConfig(**keys).source == source


def test_one_file_is_a_list_of_one() -> None:
    assert DataConfig(files="a.txt", validation_files="b.txt").files == ["a.txt"]


A = {"name": "a", "files": "a.txt"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "files"}, r"data\.files is empty"),
        ({"source": "hub"}, r"data\.name is not set"),
        ({"source": "hub", "name": "x/y", "files": "a.txt"}, r"data\.source is hub: set data\.source=files"),
        ({"files": "a.txt", "name": "x/y"}, r"data\.name is given, but data\.source is files"),
        ({"validation_split": "test"}, r"data\.validation_split is given"),
        ({"sequence_length": 4}, "greater than or equal to 8"),
        ({"validation_fraction": 1.0}, "less than 1"),
        ({"validation_fraction": -0.1}, "greater than or equal to 0"),
        ({"workers": 0}, "greater than 0"),
        ({"document_start": "("}, "is not a regular expression: missing \\)"),
        ({"source": "internet"}, r"data\.source: unknown source 'internet'; known: docstrings, files, hub"),
        ({"sequence_lenght": 128}, "Extra inputs are not permitted"),
        ({"mixture": [{**A, "weight": 0}]}, "source a: weight 0 never reads it"),
        ({"mixture": [{**A, "weight": -1}]}, "greater than or equal to 0"),
        ({"mixture": [{**A, "weight": float("nan")}]}, "finite number"),
        ({"mixture": [{**A, "weight": [[0.5, 1], [0, 1]]}]}, "its shares do not fall"),
        ({"mixture": [{**A, "weight": [[0, 1], [0.5, 0]]}]}, r"all weights are 0 at 0\.5 of the training"),
        ({"mixture": [{**A, "epochs": 0}]}, "greater than 0"),
        ({"mixture": [{"name": "a"}]}, "source a: set either files or shards"),
        ({"mixture": [{**A, "shards": "x"}]}, "source a: set either files or shards"),
        ({"mixture": [A, A]}, "a is the name of several sources"),
        ({"mixture": [{**A, "name": "a/b"}]}, "should match pattern"),
        ({"mixture": [{**A, "document_start": "("}]}, "is not a regular expression"),
        ({"mixture": [A], "files": "a.txt"}, r"data\.mixture and data\.files are both given"),
        ({"mixture": [A], "validation_files": "a.txt"}, r"data\.mixture and data\.validation_files are both given"),
        ({"mixture": [A], "source": "hub"}, r"data\.source is hub"),
        ({"files": "a.txt", "temperature": 0.3}, r"data\.temperature is given without data\.mixture"),
    ],
)
def test_impossible_settings_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(**keys)


def test_cache_follows_the_desktop_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == DataConfig().cache == tmp_path / "capt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache() == Path("/home/someone/.cache/capt")


@pytest.mark.parametrize("kind", ["shuffle+mask_tokens", ["shuffle", "mask_tokens"]])
def test_corruptions_by_name_or_list(kind: str | list[str]) -> None:
    assert CorruptionConfig(type=kind).names == ["shuffle", "mask_tokens"]


def test_validating_needs_nothing_heavy() -> None:
    code = (
        "import sys; from capt.pretrain.data.config import CorruptionConfig, DataConfig; CorruptionConfig();"
        "DataConfig();"
        "print([m for m in ('torch', 'datasets', 'transformers', 'pyarrow', 'tokenizers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize("url", ["s3://b/x.txt", "hdfs://n/x.txt", "https://a.b/x.txt"])
def test_a_url_is_told_what_is_read(url: str) -> None:
    with pytest.raises(ValidationError, match="is a URL; what is read is on a file system"):
        DataConfig(files="a.txt", cache=url)


@pytest.mark.parametrize(("value", "word"), [(True, "once"), (False, "never"), ("always", "always"), ("once", "once")])
def test_verify_takes_a_word_or_a_truth_value(value: object, word: str) -> None:
    assert DataConfig(files="a.txt", verify=value).verify == word
