"""A folder of sentence-transformers means what ``modules.json`` says, wherever its files are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.models.foreign.families import read_description
from capt.pretrain.models.hf_folder import is_hf
from capt.pretrain.models.sentence_folder import encoder_folder, modules_of
from capt.pretrain.pairs.load import pooling_of_init

_TRANSFORMER, _POOLING = ("sentence_transformers.models.Transformer", ""), "sentence_transformers.models.Pooling"


def _modules(folder: Path, *modules: tuple[str, str]) -> None:
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in modules]))


def _folder(folder: Path, **pooling: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for name, mode in pooling.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    return folder


def test_the_pooling_is_the_one_that_is_listed(tmp_path: Path) -> None:
    """A third module puts it into ``2_Pooling``; a ``1_Pooling`` beside it is of before."""
    folder = _folder(tmp_path, **{"1_Pooling": "mean", "2_Pooling": "cls", "3_Pooling": [{}]})
    _modules(folder, _TRANSFORMER, (_POOLING, "2_Pooling"))
    assert pooling_of_init(folder) == "cls"
    for listed, message in (
        ([], "modules.json: 0 modules of the class Pooling, and one is read here; set model.pooling"),
        ([(_POOLING, "1_Pooling"), (_POOLING, "2_Pooling")], "modules.json: 2 modules of the class Pooling"),
        ([(_POOLING, "4_Pooling")], "4_Pooling/config.json: no such file"),
        ([(_POOLING, "3_Pooling")], r"3_Pooling/config.json: pools by \['{}'\]; set model.pooling"),
    ):
        _modules(folder, _TRANSFORMER, *listed)
        with pytest.raises(CheckpointError, match=message):
            pooling_of_init(folder)


def test_the_encoder_is_the_one_that_is_listed(tmp_path: Path) -> None:
    """Files beside ``modules.json`` may be of before; without the listed folder they count."""
    for number, path in enumerate(("0_Transformer", "a/b c", "./0.T/", "", ".")):
        folder = _folder(tmp_path / str(number))
        within = folder / path
        within.mkdir(parents=True, exist_ok=True)
        (within / "config.json").write_text(json.dumps({"model_type": "wrong"}))
        _modules(folder, (_TRANSFORMER[0], path), (_POOLING, "1_Pooling"))
        assert is_hf(folder)
        assert encoder_folder(folder) == within
        with pytest.raises(CheckpointError, match="model_type is 'wrong'") as error:
            read_description(folder)
        assert str(within) in str(error.value)
        (within / "config.json").unlink()
        assert encoder_folder(folder) == folder


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/x", "C:/x", "a\\..\\x", "x\0"])
def test_no_module_is_outside(path: str, tmp_path: Path) -> None:
    _modules(tmp_path, (_TRANSFORMER[0], path))
    with pytest.raises(CheckpointError, match=r"modules\.json: .*: a folder in this one is expected, without \.\."):
        modules_of(tmp_path)


@pytest.mark.parametrize("kind", ["Router", "Asym"])
def test_two_paths_are_no_encoder(kind: str, tmp_path: Path) -> None:
    _modules(tmp_path, (f"sentence_transformers.models.{kind}", ""))
    for read in (is_hf, encoder_folder):
        with pytest.raises(CheckpointError, match=f"modules.json: {kind} sends queries and documents through"):
            read(tmp_path)


def test_a_class_of_its_own_is_code(tmp_path: Path) -> None:
    _modules(tmp_path, ("custom.Transformer", ""))
    with pytest.raises(
        CheckpointError, match=r"modules.json: 'custom.Transformer': no class of sentence-transf.* code"
    ):
        modules_of(tmp_path)
