"""Folders of any form give the vectors of ``encode_query`` and ``encode_document``, or are refused early."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.retrieval.encoders import EncoderOptions, load_text_encoder
from tests.finetune import write_encoder

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


def test_vectors_are_those_of_the_library(encoder: Path, tmp_path: Path) -> None:
    """Prompts of any name, modules in any place, poolings, lengths: whatever the library loads."""
    from sentence_transformers import SentenceTransformer

    for folder in folders(tmp_path, encoder):
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
