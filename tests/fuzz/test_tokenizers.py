"""Tokenizer folders from somebody else, of all kinds: damaged, planted, growing, or a fault of the Rust library."""

from __future__ import annotations

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from capt.tokenizer.encode import load_tokenizer
from tests.fuzz.harness import check, inputs, library, mutated, snapshot
from tests.fuzz.planting import changed_json, plant

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TEXTS = ["Hello world, it is me.", "", "a" * 300, "naïve 日本 😀 <mask>"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, "▁", *map(chr, range(97, 123)), "▁hello", "lo", "wor"]
    unigram = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=3))
    unigram.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(" ", "▁"), normalizers.Lowercase()]
    )
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.add_special_tokens(SPECIAL)
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL, *letters, "lo", "wo"])}
    bpe = Tokenizer(models.BPE(vocabulary, [("l", "o"), ("w", "o")], unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    files = [
        {"tokenizer.json": unigram.to_str()},
        {"tokenizer.json": bpe.to_str()},
        {"vocab.json": json.dumps(vocabulary), "merges.txt": "#version: 0.2\nl o\nw o\n"},
        {"vocab.txt": "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "w", "##or", "##ld"])},
    ]
    for i, content in enumerate(files):
        folder = root / str(i)
        folder.mkdir()
        bert = "vocab.txt" in content
        config: dict[str, Any] = {"model_max_length": 512, "do_lower_case": True, "strip_accents": None}
        if not bert:
            config |= {"bos_token": "<s>", "mask_token": {"content": "<mask>", "lstrip": True, "__type": "AddedToken"}}
        for name, text in {
            **content,
            "tokenizer_config.json": json.dumps(config),
            "special_tokens_map.json": "{}",
        }.items():
            (folder / name).write_text(text)
    return sorted(root.iterdir())


def _step(rng: random.Random) -> dict[str, Any]:
    """A step of a pipeline that grows a text, or looks for something awkward."""
    return rng.choice(
        [
            {"type": "Replace", "pattern": {"String": rng.choice("aelo ")}, "content": rng.choice(["aa", "x" * 5000])},
            {
                "type": "Replace",
                "pattern": {"Regex": rng.choice(["", "(a+)+$", "(", "\\p{L}*", "a{99999}"])},
                "content": "b",
            },
            {"type": "Prepend", "prepend": "p" * rng.choice((1, 10, 100_000))},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": rng.random() < 0.5},
            {"type": "Split", "pattern": {"Regex": "(a|a)*"}, "behavior": "Isolated", "invert": False},
            {"type": "Precompiled", "precompiled_charsmap": rng.choice(["", "AAAA", "/////w==", "A" * 1000])},
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "NFKC"},
        ]
    )


def _pipeline(rng: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    part, key = rng.choice((("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")))
    return {**spec, part: {"type": "Sequence", key: [_step(rng) for _ in range(rng.choice((1, 3, 40, 100)))]}}


def _damage(rng: random.Random, folder: Path) -> None:
    path = rng.choice([file for file in sorted(folder.iterdir()) if file.stat().st_size > 2])
    kind = rng.randrange(5)
    if kind == 0:
        path.write_bytes(mutated(rng, path.read_bytes()))
    elif kind == 1:
        plant(rng, path)
    elif path.suffix != ".json":
        path.write_text(
            "\n".join(rng.choice(("a", "b c", "[CLS]", "", "\0", "x" * 9999)) for _ in range(rng.randrange(50)))
        )
    elif kind == 2 and path.name == "tokenizer.json":
        path.write_text(json.dumps(_pipeline(rng, json.loads(path.read_text()))))
    else:
        path.write_text(json.dumps(changed_json(rng, json.loads(path.read_text()))))


def _use(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, add_missing=True)
    ids = tokenizer.encode_batch(TEXTS)
    assert sum(map(len, ids)) < 1_000_000
    tokenizer.decode(ids[0])
    assert tokenizer.vocab_size < 1 << 24
    assert tokenizer.special_ids
    assert len(tokenizer.fingerprint) == 64


def test_tokenizer_folders(folders: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    codes = set()
    for number, rng in inputs("tokenizers"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(rng.choice(folders), folder)
        _damage(rng, folder)
        before = snapshot(folder)
        outcome = library(partial(_use, folder))
        check(outcome, f"tokenizers:{number}")
        assert snapshot(folder) == before
        codes.add(outcome.code)
    assert 2 in codes
