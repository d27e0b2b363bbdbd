from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from capt.pretrain.base.errors import DataError
from capt.tokenizer import encode
from capt.tokenizer.check import TRICKY
from capt.tokenizer.encode import load_tokenizer
from capt.tokenizer.special import SpecialIds
from capt.tokenizer.train import train
from tests.unit.tokenizer.corpus import DATA, docstrings, lines, realdata

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "mask", "[", "]", "un", "##able", "able", "naive", "the", "##s"]


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return tmp_path / "bert"


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A byte-level BPE folder as GPT-2's: 256 bytes, one merge, <|endoftext|>."""
    out = tmp_path / "gpt"
    out.mkdir()
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "<|endoftext|>"]
    (out / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (out / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    return out


def test_ids_are_int32_without_special_tokens(trained: Path) -> None:
    tokenizer = load_tokenizer(trained)
    encoded = tokenizer.encode_batch(["Return the first line.", "", "   "])
    assert [ids.dtype for ids in encoded] == [np.int32] * 3
    assert [ids.ndim for ids in encoded] == [1] * 3
    assert len(encoded[0]) > 3
    assert len(encoded[1]) == len(encoded[2]) == 0
    assert tokenizer.encode_batch([]) == []


def test_special_tokens_in_a_text_are_text(trained: Path, bert: Path, byte_level: Path) -> None:
    text = "<s> a<mask>b </s> <pad> <unk> [MASK] [CLS] <|endoftext|>"
    for folder in (trained, bert, byte_level):
        tokenizer = load_tokenizer(folder, add_missing=True)
        (ids,) = tokenizer.encode_batch([text])
        assert not set(ids.tolist()) & (set(tokenizer.special_ids) - {tokenizer.special.unk})


def test_text_comes_back(trained: Path) -> None:
    tokenizer = load_tokenizer(trained)
    texts = ["Return the first line.", "snow ☃, 雪 and 😀", "x = f(a)[0]", "<mask> is <s>text</s>"]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    (ids,) = tokenizer.encode_batch(["the end"])
    wrapped = [tokenizer.special.bos, *ids, tokenizer.special.eos]
    assert tokenizer.decode(wrapped) == "the end"
    assert tokenizer.decode(np.asarray(wrapped), skip_special=False) == "<s> the end</s>"


def test_a_pickled_copy_encodes_alike(trained: Path) -> None:
    tokenizer = load_tokenizer(trained)
    copy = pickle.loads(pickle.dumps(tokenizer))
    for ours, theirs in zip(tokenizer.encode_batch(list(TRICKY)), copy.encode_batch(list(TRICKY)), strict=True):
        assert ours.tolist() == theirs.tolist()
    assert copy.fingerprint == tokenizer.fingerprint


def test_batches_are_cut_by_size(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(trained)
    texts = [*lines()[:50], "", "long " * 100]
    whole = tokenizer.encode_batch(texts)
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 60)
    groups = list(encode._by_size(texts))
    assert [text for group in groups for text in group] == texts
    assert len(groups) > 20
    assert all(len(group) == 1 or sum(map(len, group)) <= 60 for group in groups)
    assert all(np.array_equal(a, b) for a, b in zip(whole, tokenizer.encode_batch(texts), strict=True))


def test_the_fingerprint_is_of_the_content(trained: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(trained)
    shutil.copytree(trained, tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").fingerprint == tokenizer.fingerprint
    tokenizer.save(tmp_path / "saved", model_max_length=64)
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.fingerprint == tokenizer.fingerprint
    assert saved.model_max_length == 64

    spec = json.loads((trained / "tokenizer.json").read_text())
    spec["normalizer"]["normalizers"].append({"type": "Lowercase"})
    (tmp_path / "copy" / "tokenizer.json").write_text(json.dumps(spec))
    assert load_tokenizer(tmp_path / "copy").fingerprint != tokenizer.fingerprint
    train(docstrings(), tmp_path / "other", vocab_size=1499, type="bpe")
    assert load_tokenizer(tmp_path / "other").fingerprint != tokenizer.fingerprint


def test_saving_keeps_other_files(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    load_tokenizer(trained).save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]


def test_truncation_and_padding_of_a_file_are_dropped(trained: Path, tmp_path: Path) -> None:
    backend = Tokenizer.from_file(str(trained / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "a text of more than four pieces, certainly"
    (expected,) = load_tokenizer(trained).encode_batch([text])
    (ids,) = load_tokenizer(tmp_path).encode_batch([text])
    assert ids.tolist() == expected.tolist()
    assert len(ids) > 8


def test_special_pieces_of_a_foreign_unigram_model_do_not_match_text(tmp_path: Path) -> None:
    """XLM-R's own tokenizer.json scores its control pieces 0, above any word."""
    tokens = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("<mask>", 0.0)]
    backend = Tokenizer(models.Unigram([*tokens, *((c, -3.0) for c in "▁</>sa")], unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens([name for name, _ in tokens])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    (ids,) = tokenizer.encode_batch(["a</s>a"])
    assert [tokenizer.backend.id_to_token(i) for i in ids] == ["▁", "a", "<", "/", "s", ">", "a"]


def test_word_piece(bert: Path) -> None:
    tokenizer = load_tokenizer(bert)
    assert tokenizer.special == SpecialIds(bos=2, pad=0, eos=3, unk=1, mask=4)
    assert tokenizer.vocab_size == len(WORDS)
    (ids,) = tokenizer.encode_batch(["The UNABLE naïve xyz [MASK]s"])
    pieces = [WORDS[i] for i in ids]
    assert pieces == ["the", "un", "##able", "naive", "[UNK]", "[", "mask", "]", "[UNK]"]
    assert tokenizer.backend.encode("the", "able").ids == [2, 12, 3, 10, 3]
    assert tokenizer.backend.encode("the", "able").type_ids == [0, 0, 0, 1, 1]


def test_word_piece_case_is_seen_or_configured(bert: Path) -> None:
    (bert / "vocab.txt").write_text("\n".join([*WORDS, "The"]) + "\n")
    (ids,) = load_tokenizer(bert).encode_batch(["The the"])
    assert ids.tolist() == [len(WORDS), WORDS.index("the")]
    (bert / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    (ids,) = load_tokenizer(bert).encode_batch(["The the"])
    assert ids.tolist() == [WORDS.index("the")] * 2


def test_byte_level_without_mask_and_pad(byte_level: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        DataError, match=r"no pad and no mask token; .*\(pad_token, mask_token\), or append <pad>, <mask>"
    ):
        load_tokenizer(byte_level)
    tokenizer = load_tokenizer(byte_level, add_missing=True)
    assert tokenizer.special == SpecialIds(bos=258, pad=259, eos=258, unk=258, mask=260)
    assert tokenizer.vocab_size == 261
    assert tokenizer.special_ids == (258, 259, 260)
    assert "<mask> appended to the vocabulary as the mask token" in caplog.text
    (ids,) = tokenizer.encode_batch(["the th☃"])
    assert tokenizer.decode(ids) == "the th☃"
    assert ids.tolist()[0] == 257


def test_declared_special_tokens_win(byte_level: Path) -> None:
    config = {"pad_token": {"content": "!"}, "mask_token": "#", "bos_token": "<|endoftext|>", "cls_token": None}
    (byte_level / "special_tokens_map.json").write_text(json.dumps(config))
    (byte_level / "tokenizer_config.json").write_text(
        '{"model_max_length": 1024, "mask_token": "%", "pad_token": null}'
    )
    tokenizer = load_tokenizer(byte_level)
    names = [tokenizer.backend.id_to_token(i) for i in (tokenizer.special.pad, tokenizer.special.mask)]
    assert names == ["!", "#"]
    assert tokenizer.model_max_length == 1024
    (byte_level / "special_tokens_map.json").write_text(json.dumps({**config, "mask_token": "[M]"}))
    (byte_level / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    with pytest.raises(DataError, match=r"no mask token; .* or append \[M\]"):
        load_tokenizer(byte_level)
    added = load_tokenizer(byte_level, add_missing=True)
    assert added.backend.id_to_token(added.special.mask) == "[M]"
    assert added.model_max_length == 512


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer in it; it needs tokenizer.json"),
        ({"vocab.json": "{}"}, "has vocab.json but no merges.txt"),
        ({"merges.txt": ""}, "has merges.txt but no vocab.json"),
        ({"spm.model": "x"}, "not a SentencePiece model"),
        ({"sentencepiece.model": "x"}, "a SentencePiece model only; `capt tokenizer export"),
        ({"sentencepiece.bpe.model": "x"}, r"to which its class adds what no file says; .*save_pretrained"),
        ({"tokenizer.json": "{"}, "tokenizer.json: not valid JSON"),
        ({"tokenizer.json": '{"version": "1.0"}'}, "damaged tokenizer"),
        (
            {"tokenizer.json": "{}", "tokenizer_config.json": "[]"},
            "tokenizer_config.json: damaged .*: Input should be an object",
        ),
        ({"vocab.txt": "a\nb\n"}, "no bos and no pad and no eos and no unk and no mask token"),
        ({"vocab.json": '{"a</w>": 0}', "merges.txt": ""}, "vocab.json is not a byte-level BPE vocabulary"),
        ({"vocab.json": "nonsense", "merges.txt": ""}, "vocab.json: not valid JSON"),
        ({"vocab.txt": "\n".join([*WORDS, "x", "the "])}, r"line 16: the token 'the', as on line 13, .* \[unused13\]"),
        ({"vocab.txt": "\ufeff" + "\n".join(WORDS)}, "line 1: begins with a byte order mark"),
    ],
)
def test_bad_folders(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "merges", "message"),
    [
        ('"the": 257', '"the": 256', None, "the tokens 'th' and 'the' have the same id, 256"),
        (
            '"the": 257',
            '"the": 257, "the": 9',
            None,
            "vocab.json: .* the key 'the' occurs twice in one object; keep one",
        ),
        ('"the": 257', '"the": 257, "<mask>": 300, "<pad>": 0', None, "'!' and '<pad>' have the same id, 0"),
        ("", "", "#version: 0.2\n", "merges.txt: makes 0 of the 2 longer tokens of vocab.json"),
        ("", "", "", "merges.txt: makes 0 of the 2 longer tokens of vocab.json"),
        ("", "", "t h\n", "merges.txt: makes 1 of the 2 longer tokens of vocab.json"),
    ],
)
def test_a_vocabulary_whose_tokens_texts_cannot_get(
    old: str, new: str, merges: str | None, message: str, byte_level: Path
) -> None:
    path = byte_level / "vocab.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    if merges is not None:
        (byte_level / "merges.txt").write_text(merges)
    with pytest.raises(DataError, match=message):
        load_tokenizer(byte_level, add_missing=True)


def test_a_token_twice_in_tokenizer_json(bert: Path) -> None:
    load_tokenizer(bert).save(bert)
    path = bert / "tokenizer.json"
    path.write_text(path.read_text().replace('"the": 12', '"the": 12, "the": 5'))
    with pytest.raises(
        DataError, match=r"tokenizer.json: .* the key 'the' occurs twice in one object; keep one of them"
    ):
        load_tokenizer(bert)


def test_merges_that_tokenizer_json_lacks(byte_level: Path) -> None:
    load_tokenizer(byte_level, add_missing=True).save(byte_level)
    path = byte_level / "tokenizer.json"
    spec = json.loads(path.read_text())
    path.write_text(json.dumps({**spec, "model": {**spec["model"], "merges": []}}))
    with pytest.raises(DataError, match=r"tokenizer.json: has no merges, .* no text gets 'th' and 1 other tokens"):
        load_tokenizer(byte_level)


def test_ids_without_a_token_are_said_and_stay(byte_level: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = byte_level / "vocab.json"
    path.write_text(path.read_text().replace('"the": 257', '"the": 290'))
    (ids,) = load_tokenizer(byte_level, add_missing=True).encode_batch(["the"])
    assert ids.tolist() == [290]
    assert "ids that belong to no token, the first is 257" in caplog.text


def test_empty_lines_of_a_vocabulary_count_as_ids(bert: Path, caplog: pytest.LogCaptureFixture) -> None:
    (bert / "vocab.txt").write_text("\n".join([*WORDS, "", "\u2028", "last"]))
    (ids,) = load_tokenizer(bert).encode_batch(["last"])
    assert ids.tolist() == [len(WORDS) + 2]
    assert f"ids that belong to no token, the first is {len(WORDS)}" in caplog.text


def test_merges_that_do_not_fit(byte_level: Path) -> None:
    (byte_level / "merges.txt").write_text("#version: 0.2\nt h\nth e\nq q\n")
    with pytest.raises(DataError, match="damaged tokenizer"):
        load_tokenizer(byte_level, add_missing=True)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such folder"):
        load_tokenizer(tmp_path / "nowhere")


FORKED = """
import os, sys
from pathlib import Path
from capt.tokenizer.encode import load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]))
texts = ["some text to encode"] * 2000
before = tokenizer.encode_batch(texts)
child = os.fork()
if child == 0:
    same = all((a == b).all() for a, b in zip(before, tokenizer.encode_batch(texts)))
    os._exit(0 if same else 3)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("parallelism", [{}, {"TOKENIZERS_PARALLELISM": "true"}], ids=str)
def test_a_forked_process_encodes(trained: Path, parallelism: dict[str, str]) -> None:
    """The child waits forever where the variable is true and nobody sees to it."""
    environment = {**os.environ, **parallelism, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(trained)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


class TestRealVocabularies:
    pytestmark = realdata

    @pytest.mark.parametrize(
        ("name", "special", "size"),
        [
            ("roberta", SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=50264), 50265),
            ("bert-base-uncased", SpecialIds(bos=101, pad=0, eos=102, unk=100, mask=103), 30522),
        ],
    )
    def test_ids(self, name: str, special: SpecialIds, size: int) -> None:
        tokenizer = load_tokenizer(DATA / "vocab" / name)
        assert tokenizer.special == special
        assert tokenizer.vocab_size == size

    def test_known_ids(self) -> None:
        """ "Hello world" as fairseq's RoBERTa and Google's BERT encode it."""
        assert load_tokenizer(DATA / "vocab" / "roberta").encode_batch(["Hello world"])[0].tolist() == [31414, 232]
        bert = load_tokenizer(DATA / "vocab" / "bert-base-uncased")
        assert bert.encode_batch(["Hello world"])[0].tolist() == [7592, 2088]

    def test_gpt2_needs_a_decision(self) -> None:
        with pytest.raises(DataError, match="no pad and no mask token"):
            load_tokenizer(DATA / "vocab" / "gpt2")
        tokenizer = load_tokenizer(DATA / "vocab" / "gpt2", add_missing=True)
        assert tokenizer.special == SpecialIds(bos=50256, pad=50257, eos=50256, unk=50256, mask=50258)
        assert tokenizer.encode_batch(["Hello world"])[0].tolist() == [15496, 995]
