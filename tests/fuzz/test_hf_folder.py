"""Hostile Hugging Face folders: read for import, for fine-tuning and for ``capt neighbors``."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from capt.finetune.load import load_backbone
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.language.import_hf import command as import_hf
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.models.foreign.families import FAMILIES
from capt.pretrain.models.hf_model import read_hf
from tests.fuzz.harness import HOSTILE, check, command, inputs, library, mutated, snapshot
from tests.unit.convert.models import config, model, tokenizer


@pytest.fixture(scope="module")
def loaded_libraries() -> None:
    """Imports are not what the time limit is about."""
    import sentence_transformers  # noqa: F401
    from transformers import MODEL_MAPPING, AutoConfig

    for family in FAMILIES:
        _ = MODEL_MAPPING[type(AutoConfig.for_model(family))]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small whole folder, written without the comparison with transformers."""
    from capt.pretrain.convert.encoder import export_encoder

    out = tmp_path_factory.mktemp("good") / "model"
    cfg = config(layers=1, hidden=12, heads=1, ffn=16)
    export_encoder("hf", model(cfg).state_dict(), cfg, tokenizer(), out, "", check=False)
    return out


Edit = Callable[[Path, random.Random], None]


def _json(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def hostile_value(folder: Path, rng: random.Random) -> None:
    name = rng.choice(("config.json", "config.json", "tokenizer_config.json"))

    def change(value: dict[str, Any]) -> None:
        for _ in range(rng.randint(1, 3)):
            value[rng.choice(list(value))] = rng.choice(HOSTILE)

    _json(folder, name, change)


def missing_key(folder: Path, rng: random.Random) -> None:
    _json(
        folder, rng.choice(("config.json", "tokenizer_config.json")), lambda value: value.pop(rng.choice(list(value)))
    )


def damaged_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice([p for p in sorted(folder.iterdir()) if p.is_file()])
    path.write_bytes(mutated(rng, path.read_bytes()))


def odd_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice([p for p in sorted(folder.iterdir()) if p.name != "README.md"])
    path.unlink()
    kind = rng.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(rng.choice(("/etc/passwd", "/dev/zero", str(path), "../../nowhere")))
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.write_bytes(b"")
    else:
        with path.open("wb") as file:
            file.truncate(rng.choice((10**6, 10**9, 10**12)))


def odd_tensors(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice(("model.safetensors", "capt_head.safetensors"))
    tensors = load_file(path)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(sorted(tensors))
        kind = rng.randrange(6)
        if kind == 0:
            del tensors[name]
        elif kind == 1:
            tensors[name] = tensors[name].reshape(-1).clone()
        elif kind == 2:
            tensors[rng.choice(("x", "a" * 5000, "roberta.\n", "../x", "roberta.encoder.layer.7.x"))] = torch.zeros(2)
        elif kind == 3:
            tensors[name] = torch.zeros(tensors[name].shape, dtype=rng.choice((torch.uint8, torch.int64, torch.bool)))
        elif kind == 4:
            tensors[name] = torch.zeros(rng.choice(((0,), (), (1, 1, 1), (3, 5))))
        else:
            tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, path)


def odd_header(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = rng.choice(sorted(header))
    part = header[name]
    part[rng.choice(list(part) or ["x"])] = rng.choice((*HOSTILE, [-1], [2**63, 4], [0, 2**62], "F8_E4M3", "F4"))
    written = json.dumps(header).encode()
    size = rng.choice((len(written), len(written), 0, 2**40, 2**63 + 5))
    path.write_bytes(struct.pack("<Q", size) + written + content[8 + length :])


def odd_index(folder: Path, rng: random.Random) -> None:
    names = sorted(load_file(folder / "model.safetensors"))
    shards = (
        "model.safetensors",
        "../model.safetensors",
        "/etc/passwd",
        "x.bin",
        "model/../x.safetensors",
        "a\n.safetensors",
    )
    value: Any = {"metadata": {}, "weight_map": {name: rng.choice(shards[: rng.choice((1, 6))]) for name in names}}
    if rng.random() < 0.5:
        value = rng.choice((*HOSTILE, {"weight_map": rng.choice(HOSTILE)}, {"weight_map": {"a": rng.choice(HOSTILE)}}))
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))


def other_family(folder: Path, rng: random.Random) -> None:
    families = ("bert", "electra", "distilbert", "albert", "mpnet", "camembert", "deberta-v2", "xlm-roberta", "gpt2")

    def change(value: dict[str, Any]) -> None:
        value["model_type"] = rng.choice(families)
        value[rng.choice(list(value))] = rng.choice(HOSTILE)

    _json(folder, "config.json", change)


EDITS: tuple[Edit, ...] = (
    hostile_value, hostile_value, missing_key, damaged_file, odd_file, odd_tensors, odd_header, odd_index, other_family,
)  # fmt: skip


def prepared(good: Path, folder: Path, rng: random.Random) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder / "model")
    for _ in range(rng.choice((1, 1, 2))):
        try:
            rng.choice(EDITS)(folder / "model", rng)
        except Exception:  # an edit of what another edit has damaged
            continue
    return folder / "model"


READERS: dict[str, Callable[[Path], object]] = {"read": read_hf, "finetune": load_backbone}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.usefixtures("loaded_libraries")
def test_reading(reader: str, good: Path, tmp_path: Path) -> None:
    for number, rng in inputs(f"hf-{reader}"):
        folder = prepared(good, tmp_path / "in", rng)
        before = snapshot(tmp_path)
        check(library(lambda folder=folder: READERS[reader](folder)), f"hf-{reader}:{number}")
        assert snapshot(tmp_path) == before


def test_import(good: Path, tmp_path: Path) -> None:
    """``capt convert --from hf``: a refusal leaves nothing, whatever is in the output's place."""
    for number, rng in inputs("hf-import", 15):
        folder = prepared(good, tmp_path / "in", rng) if rng.random() < 0.8 else good
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.unlink(missing_ok=True)
        place = rng.randrange(5)
        if place == 1:
            out.write_text("mine")
        elif place == 2:
            out.symlink_to(tmp_path / "elsewhere")
        elif place == 3:
            out.mkdir()
            (out / "thesis.tex").write_text("mine")
        before = snapshot(tmp_path)
        overwrite = ["--overwrite"] if rng.random() < 0.5 else []
        outcome = command("convert", str(folder), str(out), "--from", "hf", *overwrite)
        check(outcome, f"hf-import:{number}")
        if outcome.code == 2:
            assert snapshot(tmp_path) == before, f"hf-import:{number}\n{outcome.text}"
        else:
            assert place in (0, 4)


@pytest.mark.usefixtures("loaded_libraries")
def test_sentence_transformers_folders(good: Path, tmp_path: Path) -> None:
    """``capt neighbors``: a folder that names code, pickles or files elsewhere is refused before it is loaded."""
    (tmp_path / "text.txt").write_text("a line of more than twenty characters\n")
    kinds = (
        "sentence_transformers.models.Transformer",
        "sentence_transformers.models.Pooling",
        "os.system",
        "evil.Module",
    )
    for number, rng in inputs("hf-sentences", 15):
        folder = prepared(good, tmp_path / "in", rng)
        module = {
            "idx": 0,
            "name": "0",
            "path": rng.choice(("", "1_Pooling", "../x", "/etc")),
            "type": rng.choice(kinds),
        }
        if rng.random() < 0.3:
            module[rng.choice(list(module))] = rng.choice(HOSTILE)
        value: object = [module] if rng.random() < 0.8 else rng.choice(HOSTILE)
        (folder / "modules.json").write_text(json.dumps(value))
        before = snapshot(tmp_path)
        outcome = command("neighbors", str(folder), "query", "--text", str(tmp_path / "text.txt"))
        check(outcome, f"hf-sentences:{number}")
        assert snapshot(tmp_path) == before


def test_the_seed_input_is_read(good: Path, tmp_path: Path) -> None:
    """The edits damage a folder that every reader takes."""
    assert isinstance(read_hf(good).config, RobertaConfig)
    assert load_backbone(good).encoder.hidden_size == 12
    import_hf(good, tmp_path / "run")
    with pytest.raises(CheckpointError):
        read_hf(tmp_path)
