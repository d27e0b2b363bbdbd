"""Folders of any form give the vectors of ``encode_query`` and ``encode_document``, or are refused early."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import UserError
from capt.pretrain.language.load import load_backbone
from capt.pretrain.models.hf_model import read_hf
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.neighbors import neighbors
from capt.pretrain.retrieval.options import EncoderOptions
from capt.pretrain.retrieval.work import perform
from tests.finetune import write_encoder
from tests.unit.retrieval.toy import write_beir

TEXTS = ["the river runs", "A stone", "no bird sings and the door opens and the tree falls and the King sleeps"]
KINDS = ("sentence_transformers.models.{}", "sentence_transformers.sentence_transformer.modules.{}")

PROMPTS: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"query": "no "}, "query"),
    ({"document": "yes "}, "document"),
    ({"query": "no ", "passage": "yes "}, None),
    ({"query": "no ", "passage": "yes "}, "passage"),
    ({"query": "no ", "document": "", "passage": "yes "}, "query"),
    ({"query": "", "document": "yes "}, "document"),
    ({"search_query": "no ", "search_document": "yes "}, "search_query"),
    ({"corpus": "yes ", "query": None}, "corpus"),
    ({"query": "no the river ", "document": "yes perhaps "}, None),
]
"""Prompts, and the name of the default one."""

STRUCTURES: list[dict[str, Any]] = [
    {},
    {"pooling": {"pooling_mode_cls_token": True}, "more": ["Normalize"]},
    {"pooling": {"pooling_mode": "mean", "include_prompt": False}, "kind": 1},
    {"paths": ("0_Transformer", "1_Pooling"), "kind": 1, "sentence": {"max_seq_length": 9}},
    {"paths": ("a/0_T", "b c/1.Pooling"), "more": ["Normalize"]},
    {"paths": ("./", "./1_Pooling/"), "sentence": {"do_lower_case": True, "max_seq_length": None}},
    {"pooling": {"pooling_mode": ["cls", "max"]}, "more": ["LayerNorm"], "settings": {"truncate_dim": 20}},
    {"pooling": {"pooling_mode": "lasttoken"}, "more": ["Dense", "Normalize"], "kind": 1},
    {"pooling": {"pooling_mode": "weightedmean", "include_prompt": False}, "settings": {"truncate_dim": 999}},
    {"modules": False, "tokenizer": {"model_max_length": 8}},
    {"modules": False, "sentence": {"do_lower_case": True, "max_seq_length": 5}},
    {"sentence": None, "tokenizer": {"model_max_length": 11}, "settings": None},
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "bert", "BertModel")


def write_folder(
    folder: Path, encoder: Path, prompts: Mapping[str, Any], default: str | None, structure: Mapping[str, Any]
) -> Path:
    """A folder of sentence-transformers as any release, or a hand, may have written it."""
    import torch
    from safetensors.torch import save_file

    places = structure.get("paths", ("", "1_Pooling"))
    shutil.copytree(encoder, folder / places[0])
    if more := structure.get("tokenizer"):
        (folder / places[0] / "tokenizer_config.json").write_text(json.dumps(more))
    if (sentence := structure.get("sentence", {"max_seq_length": 24, "do_lower_case": False})) is not None:
        (folder / places[0] / "sentence_bert_config.json").write_text(json.dumps(sentence))
    if not structure.get("modules", True):
        return folder
    kinds = ["Transformer", "Pooling", *structure.get("more", [])]
    paths = [*places, *(f"{number}_{kind}" for number, kind in enumerate(kinds[2:], 2))]
    (folder / places[1]).mkdir(parents=True)
    pooling = structure.get("pooling", {"pooling_mode_mean_tokens": True})
    key = "embedding_dimension" if "pooling_mode" in pooling else "word_embedding_dimension"
    (folder / places[1] / "config.json").write_text(json.dumps({key: 32, **pooling}))
    width = 32 * (2 if isinstance(pooling.get("pooling_mode"), list) else 1)
    for kind, path in zip(kinds[2:], paths[2:], strict=True):
        (folder / path).mkdir()
        if kind == "Dense":
            sizes = {"in_features": 32, "out_features": 6, "bias": False}
            (folder / path / "config.json").write_text(
                json.dumps({**sizes, "activation_function": "torch.nn.modules.activation.Tanh"})
            )
            save_file({"linear.weight": torch.randn(6, 32)}, folder / path / "model.safetensors")
        elif kind == "LayerNorm":
            (folder / path / "config.json").write_text(json.dumps({"dimension": width}))
            save_file(
                {"norm.weight": torch.rand(width), "norm.bias": torch.rand(width)}, folder / path / "model.safetensors"
            )
    spelt = KINDS[structure.get("kind", 0)]
    rows = [
        {"idx": i, "name": str(i), "path": path, "type": spelt.format(kind)}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    if (settings := structure.get("settings", {})) is not None:
        settings = {**settings, "prompts": prompts, "default_prompt_name": default}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


def folders(root: Path, encoder: Path) -> Iterator[Path]:
    """Every structure once, and every prompt with one that reads it."""
    prompts = cycle(PROMPTS)
    for number, structure in enumerate([*STRUCTURES, {}]):
        reads = structure.get("modules", True) and structure.get("settings", {}) is not None
        yield write_folder(root / str(number), encoder, *(next(prompts) if reads else ({}, None)), structure)


def write_router(folder: Path, encoder: Path) -> Path:
    """A folder whose queries and documents go through encoders of their own."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Router, Transformer

    shorter = write_encoder(folder.with_name("shorter"), "BertModel", num_hidden_layers=1)
    queries = [Transformer(str(encoder), max_seq_length=9), Pooling(32)]
    documents = [Transformer(str(shorter), max_seq_length=7), Pooling(32)]
    model = SentenceTransformer(modules=[Router.for_query_document(queries, documents)], device="cpu")
    model.prompts["query"] = "no "
    model.save(str(folder), create_model_card=False)
    return folder


def test_vectors_are_those_of_the_library(encoder: Path, tmp_path: Path) -> None:
    """Prompts of any name, modules in any place, poolings, lengths, routers: whatever the library loads."""
    from sentence_transformers import SentenceTransformer

    router = write_router(tmp_path / "router", encoder)
    assert "at most 7 tokens (9 of a query)" in load_text_encoder(router, EncoderOptions()).protocol()
    assert "at most 8 tokens, prompts" in load_text_encoder(router, EncoderOptions(length=8)).protocol()
    for folder in (router, *folders(tmp_path, encoder)):
        theirs = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        ours = load_text_encoder(folder, EncoderOptions())
        said = {path.name: path.read_text() for path in folder.glob("*sent*.json")}
        for role, encode in (
            ("query", theirs.encode_query), ("document", theirs.encode_document), ("text", theirs.encode),
        ):  # fmt: skip
            expected = encode(TEXTS, show_progress_bar=False)
            found = ours.encode(TEXTS, role)  # type: ignore[arg-type]
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() < 1e-5, (role, said)
            prompt = ours.prompts[role]
            if role != "text":
                assert (f"{role} {prompt!r}" in ours.protocol()) == bool(prompt), (ours.protocol(), said)


def test_a_special_token_without_a_row_is_no_fault_of_texts_that_lack_it(encoder: Path, tmp_path: Path) -> None:
    """EmbeddingGemma's tokenizer has a token for pictures, and its model no row for it."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "gemma", encoder, {}, None, {})
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(str(folder))
    ours, theirs = load_text_encoder(folder, EncoderOptions()), SentenceTransformer(str(folder), device="cpu")
    assert np.abs(ours.encode(TEXTS, "query") - theirs.encode_query(TEXTS, show_progress_bar=False)).max() < 1e-5
    with pytest.raises(UserError, match="no row for its token '<image_soft_token>', which is in the text 'a <image"):
        ours.encode([*TEXTS, "a <image_soft_token>"], "document")


def test_a_vector_that_depends_on_the_texts_beside_it_is_told_of(
    encoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Padding on the left moves a text's positions, and its first token, in the library as well."""
    for side in ("right", "left"):
        for pooling in ("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken"):
            caplog.clear()
            structure = {"tokenizer": {"padding_side": side}, "pooling": {pooling: True}}
            folder = write_folder(tmp_path / side / pooling, encoder, {}, None, structure)
            ours = load_text_encoder(folder, EncoderOptions())
            alone, beside = ours.encode(TEXTS[:1], "query")[0], ours.encode(TEXTS, "query")[0]
            assert (np.abs(alone - beside).max() > 0.01) == (side == "left") == ("depends on the texts" in caplog.text)
    assert '"padding_side": "right" in tokenizer_config.json gives a text one vector' in caplog.text


def test_an_empty_text_of_no_token_has_the_same_vector_alone(tmp_path: Path) -> None:
    """Decoders' tokenizers may add no special token; a batch of an empty text alone is an error in the library."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2Model, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "a", "text", "river"]
    bare = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(tmp_path / "a")
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    shape = {"vocab_size": 5, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    GPT2Model(GPT2Config(**shape, **ids)).save_pretrained(tmp_path / "a")
    for pooling in ("lasttoken", "mean"):
        structure = {"pooling": {"pooling_mode": pooling}}
        folder = write_folder(tmp_path / pooling, tmp_path / "a", {}, None, structure)
        ours = load_text_encoder(folder, EncoderOptions())
        for role in ("query", "document"):
            beside = ours.encode(["", "a river"], role)
            for texts in ([""], ["", ""]):
                alone = ours.encode(texts, role)
                assert alone.shape == (len(texts), 32)
                assert np.abs(alone - beside[0]).max() < 1e-5
        query = load_text_encoder(folder, EncoderOptions(query_prompt="river "))
        assert np.abs(query.encode([""], "query")).max() > 0


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **changes}))


def without(folder: Path, part: str) -> None:
    """Leave tensors out of the weights of a folder."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if part not in name}, path, {"format": "pt"})


def more_words(path: Path) -> None:
    """Give a tokenizer more ids than its model has rows."""
    path.write_text(path.read_text() + "".join(f"more{i}\n" for i in range(50)))


LONG = "word " * 2_000_000
UNFIT_MODELS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "reranker": ("reranker", lambda folder: None, "a 'CrossEncoder', which scores pairs of texts"),
    "saved reranker": (
        "embedder",
        lambda folder: edit(folder / "config_sentence_transformers.json", model_type="CrossEncoder"),
        "a 'CrossEncoder', which scores pairs",
    ),
    "sparse": (
        "embedder",
        lambda folder: edit(folder / "config_sentence_transformers.json", model_type="SparseEncoder"),
        "a 'SparseEncoder', which gives a weight to each token",
    ),
    "generative": ("generative", lambda folder: None, "model_type is 'gpt2'"),
    "no tokenizer": ("embedder", lambda folder: (folder / "vocab.txt").unlink(), "no tokenizer in it"),
    "no tokenizer either": ("bert", lambda folder: (folder / "vocab.txt").unlink(), "no tokenizer in it"),
    "no weights": ("embedder", lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "lacks a layer": ("embedder", lambda folder: without(folder, "layer.1.output"), "lacks weights, .*layer.1.output"),
    "other tokenizer": (
        "embedder",
        lambda folder: more_words(folder / "vocab.txt"),
        "its tokenizer has .* ids and the model",
    ),
    "longer than its positions": (
        "embedder",
        lambda folder: edit(folder / "sentence_bert_config.json", max_seq_length=99),
        "cuts texts to 99 tokens, and the model has positions for 64; set max_seq_length",
    ),
    "prompt": (
        "embedder",
        lambda folder: edit(folder / "config_sentence_transformers.json", prompts={"document": "no " * 30}),
        "the document prompt .* fills all 24 tokens",
    ),
    "long prompt": (
        "embedder",
        lambda folder: edit(folder / "config_sentence_transformers.json", prompts={"query": LONG[:3_000_000]}),
        "the prompt 'word .* has 3,000,000 characters, which 24 tokens do not hold",
    ),
    "longer prompt": (
        "embedder",
        lambda folder: edit(folder / "config_sentence_transformers.json", prompts={"query": LONG}),
        "config_sentence_transformers.json",
    ),
}
"""Faults of the folder of a model that gives vectors: what it begins as, what is changed, what is said."""

UNFIT_TEACHERS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "embedder": ("embedder", lambda folder: None, "a 'SentenceTransformer'; give the folder or hub id of a cross-enc"),
    "encoder": ("bert", lambda folder: None, r"\['BertModel'\] in config.json gives no scores"),
    "classifier": ("classifier", lambda folder: None, "a classifier with 2 labels"),
    "generative": ("generative", lambda folder: None, r"\['GPT2LMHeadModel'\] in config.json gives no scores"),
    "no tokenizer": ("reranker", lambda folder: (folder / "vocab.txt").unlink(), "no tokenizer in it"),
    "no head": ("reranker", lambda folder: without(folder, "classifier"), "lacks weights, .*'classifier.bias'"),
    "nothing": ("reranker", lambda folder: (folder / "config.json").unlink(), "no config.json; give the folder"),
}
"""The same of ``--cross-encoder``."""


@pytest.fixture(scope="module")
def models(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(encoder, root / "bert")
    write_folder(root / "embedder", encoder, {}, None, {})
    write_encoder(root / "reranker", "BertForSequenceClassification", num_labels=1)
    write_encoder(root / "classifier", "BertForSequenceClassification", num_labels=2)
    write_encoder(root / "generative", "GPT2LMHeadModel", n_positions=64)
    return root


def test_a_model_that_does_not_fit_is_refused_before_work(models: Path, tmp_path: Path) -> None:
    """By every command that takes one: in one line, and before a text is encoded."""
    beir, store = write_beir(tmp_path / "beir"), tmp_path / "store"
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"query": f"no {word}", "pos": [word]}) + "\n" for word in TEXTS))
    # As ranks read it of a file.
    plain: dict[str, Any] = {"options": {"store": str(store)}, "encoder_options": {}}
    mining = {**plain, "call": "capt.pretrain.retrieval.mine:mine", "pairs": [str(pairs)], "corpus": str(beir),
              "rules": {"short": "keep"}, "out": str(tmp_path / "mined")}  # fmt: skip

    def encode(model: Path) -> object:
        return perform({**plain, "call": "capt.pretrain.retrieval.work:encode_all", "model": str(model),
                        "text": [str(beir)], "role": "document"})  # fmt: skip

    def evaluate(model: Path) -> object:
        return perform({**plain, "call": "capt.pretrain.retrieval.evaluate:evaluate", "model": str(model),
                        "sets": [str(beir)], "settings": {}})  # fmt: skip

    def mine(model: Path) -> object:
        return perform({**mining, "model": str(model), "cross_encoder": None})

    def mine_with(teacher: Path) -> object:
        return perform({**mining, "model": str(models / "embedder"), "cross_encoder": str(teacher)})

    def find(model: Path) -> object:
        (tmp_path / "lines.txt").write_text("the river runs and the stone sleeps\n")
        return neighbors(model, ["river"], text=[tmp_path / "lines.txt"], store=store)

    commands = cycle([encode, evaluate, mine, find])
    cases = [(name, unfit, next(commands)) for name, unfit in UNFIT_MODELS.items()]
    cases += [(f"{name}, teacher", unfit, mine_with) for name, unfit in UNFIT_TEACHERS.items()]
    # A job that starts from such a folder reads it before its data, or says what it lacks.
    for name in ("generative", "no tokenizer", "no weights", "lacks a layer", "other tokenizer"):
        begins, change, _ = UNFIT_MODELS[name]
        folder = tmp_path / "start" / name
        shutil.copytree(models / ("bert" if begins == "embedder" else begins), folder)
        change(folder)
        for read in (load_backbone, read_hf):
            with pytest.raises(UserError) as error:
                read(folder)
            assert "\n" not in str(error.value), name
            assert str(folder) in str(error.value)
    for name, (begins, change, says), command in cases:
        folder = tmp_path / "unfit" / name
        shutil.copytree(models / begins, folder)
        change(folder)
        with pytest.raises(UserError, match=says) as error:
            command(folder)
        assert "\n" not in str(error.value), name
        assert len(str(error.value)) < 700, name
        assert not list(store.rglob("*.rows")), f"{name}: refused after texts were encoded"
    audit = mine_with(models / "reranker")
    assert isinstance(audit, dict)
    assert audit["rows_written"] == 3
