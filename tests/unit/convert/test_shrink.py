"""Encoders of every family with fewer layers and pieces compute what transformers does with the others cut away."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.config.load import load_job
from capt.pretrain.convert.shrink import shrink_model
from capt.pretrain.pairs.config import PairJob
from capt.pretrain.pairs.export import command
from capt.pretrain.retrieval.encode import embed
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions
from tests.finetune import write_encoder
from tests.pairs import pairs_mapping, taught_by
from tests.runs import rows_of
from tests.support import run_ranks, train_job

KEPT = [0, 2, 4]
_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 48}
_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>")
_BYTES = [f"<0x{i:02X}>" for i in range(256)]


def _words(rng: random.Random, count: int) -> list[str]:
    parts = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    return ["".join(rng.choices(parts, k=rng.randint(1, 4))) for _ in range(count)]


def _texts(seed: int, count: int) -> list[str]:
    """Texts of words of the seed's own, and of some that all seeds have."""
    common, own = _words(random.Random(0), 30), _words(random.Random(seed), 60)
    rng = random.Random(seed)
    return [" ".join(rng.choices([*common, *own], k=rng.randint(2, 12))) for _ in range(count)]


def _word_piece(first: tuple[str, ...], texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=[*first])
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_level(first: tuple[str, ...], texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # ModernBERT's special tokens come behind its pieces, and so get other ids.
    behind = first[0] == "[UNK]"
    special = [] if behind else [*first]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    if behind:
        tokenizer.add_special_tokens([*first])
    return tokenizer


def _sentence_piece_bpe(first: tuple[str, ...], texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*first, *_BYTES], max_token_length=8)
    tokenizer.train_from_iterator(texts, trainer)
    # Bytes are pieces, and no tokens that are looked for in a text.
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in _BYTES]
    return Tokenizer.from_str(json.dumps(spec))


def _unigram(first: tuple[str, ...], texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=[*first], unk_token=first[3])
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


_Train = Callable[[tuple[str, ...], list[str]], Tokenizer]
_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_DEBERTA = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
_MODERN = {"global_attn_every_n_layers": 3, "local_attention": 8, "max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, _Train, tuple[str, ...], dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", _word_piece, _BERT, {"max_position_embeddings": 64}),
    "roberta": ("RobertaForMaskedLM", _byte_level, (*_ROBERTA, "<mask>"), {"max_position_embeddings": 66,
                "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", _unigram, (*_ROBERTA, "<mask>"), {"max_position_embeddings": 66,
                    "type_vocab_size": 1}),
    "mpnet": ("MPNetForMaskedLM", _word_piece, (*_ROBERTA[:3], "[UNK]", "<mask>"), {"max_position_embeddings": 66}),
    "deberta": ("DebertaV2ForMaskedLM", _unigram, _DEBERTA, {
        "max_position_embeddings": 64, "relative_attention": True, "position_buckets": 8, "type_vocab_size": 0,
        "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False, "legacy": False}),
    "modernbert": ("ModernBertForMaskedLM", _byte_level, ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"), _MODERN),
    "mmbert": ("ModernBertForMaskedLM", _sentence_piece_bpe, ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"), _MODERN),
}  # fmt: skip


def _write(folder: Path, family: str) -> None:
    cls, train, first, settings = FAMILIES[family]
    backend = train(first, [*_texts(1, 300), *_texts(2, 300)])
    names = {role: name for name in first for role in ("pad", "unk", "mask", "cls", "sep")
             if name.lower().strip("<>[]") == role}  # fmt: skip
    names = {"cls": next(n for n in first if n in ("<s>", "[CLS]", "<bos>")),
             "sep": next(n for n in first if n in ("</s>", "[SEP]", "<eos>")), **names}  # fmt: skip
    tokens = {f"{role}_token": name for role, name in names.items()}
    backend.post_processor = None
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
    from tokenizers import processors

    cls_id, sep_id = (fast.convert_tokens_to_ids(names[role]) for role in ("cls", "sep"))
    fast.backend_tokenizer.post_processor = processors.BertProcessing((names["sep"], sep_id), (names["cls"], cls_id))
    fast.save_pretrained(folder)
    architecture = getattr(transformers, cls)
    ids = {f"{role}_token_id": fast.convert_tokens_to_ids(names[role]) for role in ("pad", "cls", "sep")}
    torch.manual_seed(1)
    config = architecture.config_class(
        **_SIZES | settings, vocab_size=len(fast) + 3, bos_token_id=cls_id, eos_token_id=sep_id, **ids
    )
    model = architecture(config)
    for name, parameter in model.named_parameters():  # biases too, which begin at zero
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def _cut(model: torch.nn.Module) -> torch.nn.Module:
    """The model with some of its layers, cut in memory."""
    for module in list(model.modules()):
        for name, part in module.named_children():
            if isinstance(part, torch.nn.ModuleList) and len(part) == 6:
                setattr(module, name, torch.nn.ModuleList([part[i] for i in KEPT]))
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_its_layers_do_with_the_whole_vocabulary(tmp_path: Path, family: str) -> None:
    """Ids map one to one, and logits at kept ids are equal, by transformers' own classes and tokenizers."""
    _write(tmp_path / "whole", family)
    mine, others = _texts(1, 40), _texts(2, 40)
    named = [*KEPT[:-1], KEPT[-1] - 6]  # the last one counted from the end
    found = shrink_model(tmp_path / "whole", tmp_path / "small", layers=named, texts=lambda: mine)
    assert (found.layers, found.texts, found.whole, found.different) == ((6, 3), 40, 40, 0)
    assert found.difference == 0
    assert found.pieces[1] < 0.9 * found.pieces[0]
    assert found.bytes[1] < found.bytes[0]
    cls = getattr(transformers, FAMILIES[family][0])
    before, after = (cls.from_pretrained(tmp_path / name, local_files_only=True) for name in ("whole", "small"))
    read = [transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("whole", "small")]
    assert after.config.vocab_size == len(read[1]) == found.pieces[1]
    pieces = read[1].convert_ids_to_tokens(range(len(read[1])))
    old = dict(zip(range(len(pieces)), read[0].convert_tokens_to_ids(pieces), strict=True))
    before, after = _cut(before), after.eval()
    for text in mine[:12]:
        ids = [tokenizer(text)["input_ids"] for tokenizer in read]
        assert [old[i] for i in ids[1]] == ids[0]
        logits = [m(input_ids=torch.tensor([i])).logits[0] for m, i in zip((before, after), ids, strict=True)]
        torch.testing.assert_close(logits[1], logits[0][:, list(old.values())], rtol=1e-5, atol=1e-5)
    _require_sentence_vectors(tmp_path / "small", mine[:12], after, read[1])
    if family in ("mpnet", "deberta", "modernbert"):
        return  # the kinds of their tokenizers are those of others
    # Texts of other words are read in other pieces, none of which is unknown: their letters are there.
    again = shrink_model(tmp_path / "whole", tmp_path / "few", texts=lambda: mine, number=5)
    assert again.different > 0
    assert again.whole + again.different >= again.texts
    few = transformers.AutoTokenizer.from_pretrained(tmp_path / "few")
    strange = [] if FAMILIES[family][1] in (_word_piece, _unigram) else ["Zürich € \U0001f600"]  # bytes stay
    assert all(few.unk_token_id not in few(text)["input_ids"] for text in (*mine, *others, *strange))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_and_the_last_layer_learn_the_vectors_of_all_and_are_exported(tmp_path: Path, family: str) -> None:
    """The export compares itself with sentence-transformers."""
    _write(tmp_path / "whole", family)
    mine, texts = _texts(1, 60), tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in mine))
    shrink_model(tmp_path / "whole", tmp_path / "small", layers=[0, -1], texts=lambda: mine)
    store = EncodeOptions(str(tmp_path / "vectors"))
    embed(load_text_encoder(tmp_path / "whole", EncoderOptions(length=24)), mine, "document", store)
    mapping = pairs_mapping(
        tmp_path, schedule={"max_steps": 30}, validate={"every": 30}, optimizer={"lr": 3e-3},
        **taught_by(tmp_path / "vectors", {"cosine": 1.0}),
    )  # fmt: skip
    mapping["model"]["init"] = str(tmp_path / "small")
    mapping["data"] |= {"files": [str(texts)], "loss": "none"}
    assert run_ranks(train_job, 1, mapping) == [0]
    run = Path(mapping["run"]["dir"])
    cosines = [row["teacher/cosine"] for row in rows_of(run) if "teacher/cosine" in row]
    # With random weights all vectors of a ModernBERT have one direction: there is nothing to learn, and little to lose.
    assert cosines[-1] > min(cosines[0] + 0.02, 0.95)
    assert (command(run, tmp_path / "out", to="sentence-transformers") / "modules.json").is_file()


def _require_sentence_vectors(folder: Path, texts: list[str], model: Any, tokenizer: Any) -> None:
    """sentence-transformers reads the folder, and has the mean of the states of transformers."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing")
    vectors = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(texts)
    for text, vector in zip(texts, vectors, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        states = model.base_model(input_ids=ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(torch.from_numpy(vector), states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_folder_of_sentence_transformers_keeps_its_modules(tmp_path: Path, family: str) -> None:
    """Behind a prompt the first word of a text has other pieces in byte-level BPE: its space belongs to it."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing")
    _write(tmp_path / "whole" / "0_Transformer", family)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{path[2:]}"}
        for i, path in enumerate(("0_Transformer", "1_Pooling"))
    ]
    (tmp_path / "whole" / "1_Pooling").mkdir()
    limit = {"max_seq_length": 60, "do_lower_case": False}
    (tmp_path / "whole" / "0_Transformer" / "sentence_bert_config.json").write_text(json.dumps(limit))
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    for name, content in (("modules.json", modules), ("1_Pooling/config.json", pooling)):
        (tmp_path / "whole" / name).write_text(json.dumps(content))
    mine, others = [" ".join(text.split()[:2]) for text in _texts(1, 40)], _texts(2, 20)
    # Words of a prompt that no text has.
    prompt = " ".join(" ".join(others).split()[:8]) + ": "
    settings = {"prompts": {"query": prompt, "document": ""}, "default_prompt_name": None}
    (tmp_path / "whole" / "config_sentence_transformers.json").write_text(json.dumps(settings))
    shrink_model(tmp_path / "whole", tmp_path / "small", texts=lambda: mine)
    whole, small = (
        sentence_transformers.SentenceTransformer(str(tmp_path / name), device="cpu") for name in ("whole", "small")
    )
    assert abs(small.encode(mine) - whole.encode(mine)).max() < 1e-6
    asked = [model.encode(mine, prompt_name="query") for model in (whole, small)]
    assert abs(asked[0] - asked[1]).max() < 1e-6
    shrink_model(tmp_path / "whole", tmp_path / "few", texts=lambda: mine, number=1)
    few = transformers.AutoTokenizer.from_pretrained(tmp_path / "few" / "0_Transformer")
    assert few.tokenize(prompt) == small.tokenizer.tokenize(prompt)


def test_what_cannot_be_left_out_is_refused(tmp_path: Path, capt: Callable[..., tuple[int, str, str]]) -> None:
    folder = write_encoder(tmp_path / "bert", "BertModel")
    modern = write_encoder(
        tmp_path / "modern", "ModernBertModel", num_hidden_layers=6, global_attn_every_n_layers=3, cls_token_id=2,
        sep_token_id=3, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (folder, {}, "give --layers, --vocabulary-of, or both"),
        (folder, {"layers": [0, 9]}, "some of 0 to 1, ascending"),
        (folder, {"layers": [0, -3]}, "0,-3: some of 0 to 1, ascending, as 0,2,4; -1 is the last one"),
        (folder, {"layers": [1, 0]}, "ascending"),
        (folder, {"layers": []}, "ascending"),
        (modern, {"layers": [1, 2]}, "begin with 0"),
        (modern, {"layers": [0, 1, 3, 4, 5]}, "every n-th one must see the whole sequence, as layers 0, 3 do"),
        (tmp_path, {"layers": [0]}, r"capt convert .* OUT --to hf"),
    ]
    for source, options, message in refused:
        with pytest.raises(ConfigError, match=message):
            shrink_model(source, tmp_path / "out", **options)
    code, said, _ = capt("shrink", folder, tmp_path / "export", "--layers", "0,1")
    assert code == 0
    offered = [shlex.split(line)[1:] for line in said.splitlines() if line.startswith("next: ")]
    assert offered[0] == ["capt", "encode", "TEXTS", "--model", str(folder), "--out", "VECTORS"]
    job = load_job("capt_distil", offered[1][3:])
    assert isinstance(job, PairJob)
    assert job.model.init == tmp_path / "export"
    with pytest.raises(ConfigError, match="is in it; give another folder"):
        shrink_model(tmp_path / "export", tmp_path / "export", layers=[0], overwrite=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        shrink_model(folder, tmp_path / "out", layers=[0])
