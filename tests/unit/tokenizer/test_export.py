from __future__ import annotations

import io
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece import sentencepiece_model_pb2 as pb

from capt.pretrain.base.errors import DataError
from capt.tokenizer.check import LINES, TRICKY
from capt.tokenizer.encode import TextTokenizer, load_tokenizer
from capt.tokenizer.export import export
from capt.tokenizer.special import SpecialIds
from capt.tokenizer.train import train
from tests.unit.tokenizer.corpus import lines


def foreign(path: Path, **options: Any) -> Path:
    """A SentencePiece model as other projects train them: <unk> 0, <s> 1, </s> 2, no padding, no mask."""
    model = io.BytesIO()
    defaults = {"model_type": "unigram", "vocab_size": 600, "minloglevel": 2}
    SentencePieceTrainer.train(sentence_iterator=iter(lines()[:4000]), model_writer=model, **{**defaults, **options})
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module", params=[("unigram", "nmt_nfkc"), ("bpe", "nmt_nfkc"), ("bpe", "identity")], ids=str)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TextTokenizer, SentencePieceProcessor, str]:
    kind, normalization = request.param
    out = tmp_path_factory.mktemp("both") / "t"
    train(lines()[:6000], out, vocab_size=1200, type=kind, normalization=normalization)
    return load_tokenizer(out), SentencePieceProcessor(model_file=str(out / "sentencepiece.model")), normalization


def test_every_line_has_the_ids_of_sentencepiece(both: tuple[TextTokenizer, SentencePieceProcessor, str]) -> None:
    tokenizer, processor, _ = both
    texts = [*lines(), *TRICKY]
    assert len(texts) > 10 * LINES
    wrong = [
        t for t, ids in zip(texts, tokenizer.encode_batch(texts), strict=True) if ids.tolist() != processor.encode(t)
    ]
    assert wrong == []


def test_decoding_is_that_of_sentencepiece(both: tuple[TextTokenizer, SentencePieceProcessor, str]) -> None:
    tokenizer, processor, _ = both
    texts = [*lines()[:1000], *TRICKY]
    for ids in tokenizer.encode_batch(texts):
        assert tokenizer.decode(ids) == processor.decode(ids.tolist())


ALPHABET = "ab \n\t▁<s>/[]0x41-=éü日本한글ไтʼ½ﬁ…\u00a0\u200b😀👍🏽\u0301\u200d\ufe0f"


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=ALPHABET, max_size=40) | st.text(max_size=40))
def test_any_text(both: tuple[TextTokenizer, SentencePieceProcessor, str], text: str) -> None:
    """With identity normalization no text differs; with NFKC, only marks after a replaced character (see export.py)."""
    tokenizer, processor, normalization = both
    if normalization != "identity":
        text = "".join(c for c in text if c.isascii() or c in "éü日本한글тʼ😀👍🏽…▁")
    assert tokenizer.encode_batch([text])[0].tolist() == processor.encode(text)


def test_a_foreign_unigram_model(tmp_path: Path) -> None:
    model = foreign(tmp_path / "m.model", user_defined_symbols=["(", "return"], control_symbols=["[CLS]"])
    with pytest.raises(DataError, match="no pad and no mask token"):
        export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert export(model, tmp_path / "out", add_missing=True, model_max_length=99) == len(TRICKY)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.special == SpecialIds(bos=1, pad=600, eos=2, unk=0, mask=601)
    assert tokenizer.model_max_length == 99
    assert tokenizer.special_ids == (0, 1, 2, 3, 600, 601)
    processor = SentencePieceProcessor(model_file=str(model))
    pairs = [
        (ids.tolist(), processor.encode(t)) for t, ids in zip(lines(), tokenizer.encode_batch(lines()), strict=True)
    ]
    ties = [(ours, theirs) for ours, theirs in pairs if ours != theirs]
    assert len(ties) < len(pairs) / 1000
    assert all(sorted(ours) == sorted(theirs) for ours, theirs in ties)


def test_ties_of_a_foreign_model_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = foreign(tmp_path / "m.model")
    checked = export(model, tmp_path / "out", texts=lines(), add_missing=True)
    assert checked == len(lines()) + len(TRICKY)
    assert f"of {checked} lines got pieces of equal score in another order" in caplog.text


def test_pieces_over_spaces(tmp_path: Path) -> None:
    """Without split_by_whitespace a piece reaches over words, so the export must not segment word by word."""
    model = foreign(
        tmp_path / "m.model", model_type="bpe", split_by_whitespace=False, pad_id=3, control_symbols=["<mask>"]
    )
    processor = SentencePieceProcessor(model_file=str(model))
    assert any("▁" in processor.id_to_piece(i)[1:] for i in range(600))
    export(tmp_path, tmp_path / "out", texts=lines())
    for text, ids in zip(lines(), load_tokenizer(tmp_path / "out").encode_batch(lines()), strict=True):
        assert ids.tolist() == processor.encode(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "word"}, "model type WORD cannot be exported exactly"),
        ({"model_type": "char", "vocab_size": 80}, "model type CHAR"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"add_dummy_prefix": False, "remove_extra_whitespaces": False}, "add_dummy_prefix=false, remove_extra_white"),
        ({"model_type": "bpe", "user_defined_symbols": ["<sep>"]}, "user-defined symbols in a BPE model"),
        ({"user_defined_symbols": ["<mask>", "[X]"]}, "m.model: '<mask>': user-defined, .* in \\['<mask>'\\]"),
    ],
)
def test_models_without_a_counterpart(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    model = foreign(tmp_path / "m.model", **options)
    with pytest.raises(DataError, match=message):
        export(model, tmp_path / "out", add_missing=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m.model"]


def test_the_name_of_a_model_becomes_no_code_in_the_command_that_is_told(tmp_path: Path) -> None:
    model = foreign(tmp_path / "a'); print('b.model", user_defined_symbols=["<mask>"])
    with pytest.raises(DataError) as caught:
        export(model, tmp_path / "out", add_missing=True)
    _, _, command = str(caught.value).partition("change its type: python ")
    told = f"{shlex.quote(sys.executable)} {command}"
    done = subprocess.run(told, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    export(tmp_path / "control.model", tmp_path / "out", add_missing=True)


def _cut_down(model: pb.ModelProto) -> None:
    kept = [piece for piece in model.pieces if piece.piece not in ("e", "q")]
    del model.pieces[:]
    model.pieces.extend(kept)


def _unused(model: pb.ModelProto) -> None:
    next(piece for piece in model.pieces if len(piece.piece) == 4).type = 5


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("unigram", _cut_down, "pieces of characters that have no piece \\('eq'\\) cannot be exported"),
        ("bpe", _cut_down, "pieces of characters that have no piece \\('eq'\\) cannot be exported"),
        ("bpe", _unused, "unused pieces in a BPE model"),
    ],
)
def test_models_that_were_changed(
    kind: str, change: Callable[[pb.ModelProto], None], message: str, tmp_path: Path
) -> None:
    """Few texts get other ids, none of them in the check without texts: the model tells."""
    path = foreign(tmp_path / "m.model", model_type=kind)
    model = pb.ModelProto.FromString(path.read_bytes())
    change(model)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(DataError, match=message):
        export(path, tmp_path / "out", add_missing=True)


def test_merges_in_another_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = foreign(tmp_path / "m.model", model_type="bpe", pad_id=3, control_symbols=["<mask>"])
    monkeypatch.setattr("capt.tokenizer.pieces.sorted", lambda merges: sorted(merges, reverse=True), raising=False)
    with pytest.raises(DataError, match="does not tokenize like SentencePiece"):
        export(model, tmp_path / "out", texts=lines())
    assert [p.name for p in tmp_path.iterdir()] == ["m.model"]


def test_what_transformers_reads_otherwise_is_refused(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = TextTokenizer.save

    def save_as_roberta(self: TextTokenizer, out: Path) -> None:
        save(self, out)
        config = out / "tokenizer_config.json"
        config.write_text(config.read_text().replace("PreTrainedTokenizerFast", "RobertaTokenizer"))

    monkeypatch.setattr(TextTokenizer, "save", save_as_roberta)
    with pytest.raises(DataError, match="RobertaTokenizer makes another pipeline"):
        export(trained / "sentencepiece.model", tmp_path / "out", texts=lines()[:200])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no protobuf at all", b"\x0a\x00"])
def test_not_a_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.model").write_bytes(content)
    with pytest.raises(DataError, match="not a SentencePiece model"):
        export(tmp_path / "m.model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_which_model(tmp_path: Path, trained: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such file"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(DataError, match=r"0 \.model files; give one"):
        export(tmp_path, tmp_path / "out")
    (tmp_path / "m.model").write_bytes((trained / "sentencepiece.model").read_bytes())
    export(tmp_path, tmp_path / "out")
    for file in ("tokenizer.json", "tokenizer_config.json", "sentencepiece.model"):
        assert (tmp_path / "out" / file).read_bytes() == (trained / file).read_bytes()
