"""Hub ids against the hub client's own cache layout, offline; and paths that are never asked for at the hub."""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.language.inputs import check_hf_folder
from capt.pretrain.models.hf_config import SENTENCE_FILES, hub_hint, hub_id, local_folder, origin, source_path
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.options import EncoderOptions
from capt.pretrain.retrieval.sentence_models import load_cross_encoder, load_sentence_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(cache: Path, repo: str, source: Path, commit: str = COMMIT) -> Path:
    """``source`` as the hub client keeps a snapshot: files are links into ``blobs``, ``refs/main`` names the commit."""
    home = cache / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    for folder in (snapshot, home / "blobs", home / "refs"):
        folder.mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    for number, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        blob = home / "blobs" / f"{number:040x}"
        blob.write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(exist_ok=True, parents=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub client's cache in a folder of its own, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_an_id_is_found_in_the_cache_and_its_revision_pinned(offline: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    snapshot = cached(offline, "x/y", tmp_path / "model")
    for given in ("x/y", "x/y@main", f"x/y@{COMMIT}"):
        assert local_folder(Path(given)) == snapshot
        assert origin(Path(given), snapshot) == f"x/y@{COMMIT}"
    for given in ("x/z", "x/y@other"):
        with pytest.raises(CheckpointError, match=f"{given}: no such folder; the hub client is offline") as caught:
            local_folder(Path(given))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    ["../nope", "./x", "./a/b", "nope", "/a/b", "~/x", "a/b/c", "here/nope", "here", "a b/c", "a/b@", "-a/b", "a/.."],
)
def test_what_may_be_a_path_is_never_asked_for(
    offline: Path, tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail(f"{given} was asked for"))
    path = source_path(given)
    assert hub_id(path) is None
    assert local_folder(path) == path


def test_a_folder_named_like_a_model_of_the_hub_is_said(
    offline: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is taken where both are there; where it is missing the message says why the hub was not asked."""
    for name in ("x/mine", "x/y", "model"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    snapshots = {name: cached(offline, name, tmp_path / "model") for name in ("x/y", "x/absent")}
    caplog.set_level(logging.INFO)
    assert local_folder(Path("x/mine")) == Path("x/mine")
    assert caplog.text == ""
    assert local_folder(Path("x/y")) == Path("x/y")
    assert "x/y: the folder here, and not the hub's model of this name, which is x/y@main" in caplog.text
    for name, snapshot in snapshots.items():
        assert local_folder(Path(f"{name}@main")) == snapshot
    encode = partial(load_text_encoder, options=EncoderOptions())
    for refuses in (check_hf_folder, encode, load_sentence_model, load_cross_encoder):
        with pytest.raises(
            CheckpointError, match=r"folder x is here, so this is a path; .* is x/absent@main"
        ) as caught:
            refuses(Path("x/absent"))
        assert "\n" not in str(caught.value)
    for plain in ("absent", "x/y/absent", "../x/absent", "a/absent"):
        assert hub_hint(Path(plain)) == ""


def test_only_weights_json_and_tokenizer_files_are_fetched(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, object] = {}

    def download(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        return "folder"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    local_folder(Path("x/y@v1.0"))
    assert (asked["repo"], asked["revision"]) == ("x/y", "v1.0")
    there = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "vocab.json", "pytorch_model.bin",
             "modeling_x.py", "tf_model.h5", "flax_model.msgpack", "README.md", "onnx/model.onnx", "rust_model.ot",
             "training_args.bin", "consolidated.pth", "dict.txt"]  # fmt: skip
    fetched = list(filter_repo_objects(there, allow_patterns=asked["allow_patterns"]))  # type: ignore[arg-type]
    assert fetched == there[:4]


def test_modules_are_fetched_from_the_folders_that_are_named(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    folder, asked = tmp_path / ("a" * 40), []
    folder.mkdir()

    def download(repo: str, **options: object) -> str:
        asked.append(options)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    there = ["0_Transformer/config.json", "a b/c/config.json", "a b/c/model.safetensors", "x/y/config.json",
             "query_0_Transformer/vocab.txt", "a b/c/modeling.py", "onnx/model.onnx"]  # fmt: skip
    for number, (kinds, expected) in enumerate(
        ((("Transformer", "Dense"), there[:3]), (("Router", "Dense"), there[:5]))
    ):
        modules = zip(kinds, ("0_Transformer", "a b/c"), strict=True)
        rows = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules]
        (folder / "modules.json").write_text(json.dumps(rows))
        local_folder(Path(f"x/y{number}"), SENTENCE_FILES)
        assert asked[-1]["revision"] == folder.name
        fetched = list(filter_repo_objects(there, allow_patterns=asked[-1]["allow_patterns"]))
        assert fetched == expected
