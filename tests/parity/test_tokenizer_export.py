"""Our folders in ``transformers``: the same ids, and the forms that are known to be silently wrong are caught."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, BertTokenizer, GPT2Tokenizer, RobertaTokenizer

from capt.pretrain.base.errors import DataError
from capt.tokenizer.check import TRICKY, check_with_transformers
from capt.tokenizer.encode import load_tokenizer
from capt.tokenizer.train import train
from tests.unit.tokenizer.corpus import DATA, lines, realdata


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("parity") / request.param
    train(lines()[:6000], out, vocab_size=1500, type=request.param)
    return out


def books(count: int) -> list[str]:
    with gzip.open(DATA / "corpus" / "books.valid.txt.gz", "rt", encoding="utf-8") as file:
        return [line.rstrip("\n") for line, _ in zip(file, range(count), strict=False)]


def test_a_trained_folder_loads_with_our_ids(folder: Path) -> None:
    assert check_with_transformers(folder, lines()[:2000]) == 2000 + len(TRICKY)


def test_it_loads_beside_a_roberta_config(folder: Path, tmp_path: Path) -> None:
    load_tokenizer(folder).save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}')
    assert check_with_transformers(tmp_path, lines()[:1000]) >= 1000


def test_without_options_only_special_tokens_in_the_text_differ(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    texts = [text for text in lines()[:1000] if not any(name in text for name in theirs.all_special_tokens)]
    assert len(texts) > 990
    assert theirs(texts, add_special_tokens=False)["input_ids"] == [ids.tolist() for ids in ours.encode_batch(texts)]
    assert "token_type_ids" not in theirs("a", "b")


def test_a_mask_in_a_text_stands_for_a_word(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    before, after = ours.encode_batch(["Return the", "of the list"])
    assert theirs("Return the <mask> of the list")["input_ids"] == [0, *before, 4, *after, 2]
    (dot,) = theirs.convert_tokens_to_ids(["."])
    assert theirs("Return the <mask>.")["input_ids"] == [0, *before, 4, dot, 2]


def test_what_transformers_saves_again_is_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == load_tokenizer(folder).fingerprint


@pytest.mark.parametrize("name", ["RobertaTokenizer", None])
def test_forms_that_are_silently_wrong_are_caught(folder: Path, tmp_path: Path, name: str | None) -> None:
    """transformers rebuilds the pipeline for these, without an error; our check must not pass them."""
    shutil.copytree(folder, tmp_path / "t")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config = (
        {**config, "tokenizer_class": name} if name else {k: v for k, v in config.items() if k != "tokenizer_class"}
    )
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "t" / "config.json").write_text('{"model_type": "roberta"}')
    with pytest.raises(DataError, match=r"differently|another pipeline"):
        check_with_transformers(tmp_path / "t", lines()[:1000])


def test_a_wrong_special_token_is_caught(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "t")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (tmp_path / "t" / "tokenizer_config.json").write_text(
        json.dumps({**config, "sep_token": "<s>", "eos_token": "</s>"})
    )
    with pytest.raises(DataError, match="encoders here read <s> "):
        check_with_transformers(tmp_path / "t", lines()[:10])


class TestRealVocabularies:
    pytestmark = realdata

    @pytest.mark.parametrize(
        ("name", "own_class"),
        [("roberta", RobertaTokenizer), ("gpt2", GPT2Tokenizer), ("bert-base-uncased", BertTokenizer)],
    )
    def test_a_vocabulary_folder(self, tmp_path: Path, name: str, own_class: type) -> None:
        """Ids of real lines are those of the class that transformers has for it, and of the folder that we save."""
        tokenizer = load_tokenizer(DATA / "vocab" / name, add_missing=name == "gpt2")
        texts = [*books(1500), *TRICKY]
        reference = own_class.from_pretrained(DATA / "vocab" / name)
        expected = reference(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected
        tokenizer.save(tmp_path / "saved")
        assert check_with_transformers(tmp_path / "saved", texts) >= 1500
        assert load_tokenizer(tmp_path / "saved").fingerprint == tokenizer.fingerprint
        reference.save_pretrained(tmp_path / "theirs")
        assert load_tokenizer(tmp_path / "theirs", add_missing=name == "gpt2").fingerprint == tokenizer.fingerprint

    @pytest.mark.parametrize("name", ["roberta", "bert-base-uncased"])
    def test_pairs(self, tmp_path: Path, name: str) -> None:
        tokenizer = load_tokenizer(DATA / "vocab" / name)
        tokenizer.save(tmp_path)
        reference = {"roberta": RobertaTokenizer, "bert-base-uncased": BertTokenizer}[name]
        expected = reference.from_pretrained(DATA / "vocab" / name)("one text", "another one")
        assert dict(AutoTokenizer.from_pretrained(tmp_path)("one text", "another one")) == dict(expected)

    @pytest.mark.parametrize("kind", ["unigram", "bpe"])
    def test_books(self, tmp_path: Path, kind: str) -> None:
        texts = books(3000)
        report = train(texts, tmp_path / "t", vocab_size=2000, type=kind)  # type: ignore[arg-type]
        assert report.checked >= 1000
        assert check_with_transformers(tmp_path / "t", texts) >= 3000
