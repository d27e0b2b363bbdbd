"""Checkpoints and run folders from somebody else: refused in one line, or as good as the original."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from capt.launcher.plan import Options
from capt.launcher.start import resume
from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.checkpoint import load_module_weights, open_checkpoint, read_metadata, read_weights, verify
from capt.pretrain.engine.checkpoint.save import write_weights_only
from capt.pretrain.engine.run_folder import read_best, read_status
from capt.pretrain.registry import TASKS
from capt.pretrain.report.runs import read_run
from tests.fuzz.harness import HOSTILE, check, inputs, library, mutated, snapshot
from tests.toy.config import ToyJob
from tests.toy.task import ToyModel

TASKS["toy"] = "tests.toy"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint of the toy task."""
    job = job_from_mapping({"task": {"type": "toy"}}, "test")
    target = tmp_path_factory.mktemp("run") / "checkpoints" / "step-00000000"
    return write_weights_only(target, job, {"model": ToyModel(13)}, {"width": 13})


def _load(checkpoint: Path) -> object:
    """Load a checkpoint as evaluation, conversion and resuming do."""
    open_checkpoint(checkpoint, ToyJob, "toy")
    state = read_metadata(checkpoint)
    load_module_weights(checkpoint, "model", ToyModel(13))
    return state


def _reseal(checkpoint: Path, **changes: Any) -> None:
    """Let the manifest list what is there, as its author would."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    files = {
        name.relative_to(checkpoint).as_posix(): {
            "size": name.stat().st_size, "sha256": hashlib.sha256(name.read_bytes()).hexdigest(),
        }
        for name in sorted(checkpoint.rglob("*"))
        if name.is_file() and name != path
    }  # fmt: skip
    path.write_text(json.dumps({**manifest, "files": files, **changes}))


def _edited(rng: random.Random, value: Any) -> Any:
    """JSON with one or two values replaced, dropped or added anywhere."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 2)):
        at: Any = value
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.8:
                at = at[key]
                continue
            change = rng.randrange(4)
            if change == 0:
                del at[key]
            elif change == 1 and isinstance(at, dict):
                at[str(rng.choice(HOSTILE))] = at[key]
            else:
                at[key] = rng.choice(HOSTILE)
            break
    return value


def _damage_manifest(rng: random.Random, checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    if rng.random() < 0.3:
        path.write_bytes(mutated(rng, path.read_bytes()))
    else:
        path.write_text(json.dumps(_edited(rng, json.loads(path.read_text()))))


def _damage_json(name: str) -> Callable[[random.Random, Path], None]:
    def damage(rng: random.Random, checkpoint: Path) -> None:
        path = checkpoint / name
        if name.endswith(".json") and rng.random() < 0.7:
            path.write_text(json.dumps(_edited(rng, json.loads(path.read_text()))))
        else:
            path.write_bytes(mutated(rng, path.read_bytes()))
        _reseal(checkpoint)

    return damage


def _damage_tensors(rng: random.Random, checkpoint: Path) -> None:
    """Files that safetensors takes, and which the manifest covers, with tensors that do not fit; or raw damage."""
    (path,) = checkpoint.glob("model-weights-*")
    if rng.random() < 0.4:
        path.write_bytes(mutated(rng, path.read_bytes()))
    else:
        sizes = {"first.weight": 91, "first.bias": 13, "norm.weight": 13, "layers.0.weight": 91, "scale": 1, "other": 5}
        types = (torch.float32, torch.float32, torch.float16, torch.int64, torch.bool)
        tensors = {}
        for _ in range(rng.randint(0, 6)):
            name, numel = rng.choice(list(sizes.items()))
            start = rng.choice((0, 0, 1, 7, 10**17))
            kind = rng.choice(("weight", "weight", "exp_avg", "../x", ""))
            shape = rng.choice(((numel,), (numel - 1,), (numel + 1,), (0,), (), (1, numel)))
            tensors[f"{kind}/{name}@{rng.choice((str(start), '', '-1', '1e3', '٣'))}"] = torch.zeros(
                shape, dtype=rng.choice(types)
            )
        save_file(tensors, path)
    if rng.random() < 0.3:
        shutil.copy(path, path.with_name(rng.choice(("model-weights-00001-of-00002.safetensors", "queue-0", "x"))))
    _reseal(checkpoint)


def _damage_folder(rng: random.Random, checkpoint: Path) -> None:
    """Files that are missing, added, links, FIFOs or huge."""
    path = checkpoint / rng.choice(sorted(p.name for p in checkpoint.iterdir()))
    how = rng.randrange(6)
    if how == 0:
        (checkpoint / "tokenizer").mkdir()
        (checkpoint / "tokenizer" / rng.choice(("x", "a b", "\u202e", "\n"))).write_text("x")
    elif how == 1:
        shutil.copy(path, checkpoint / "model-weights-00000-of-00003.safetensors")
    else:
        content = path.read_bytes()
        path.unlink()
        if how == 2:
            path.symlink_to("/etc/passwd")
        elif how == 3:
            os.mkfifo(path)
        elif how == 4:
            path.mkdir()
        else:
            path.write_bytes(content)
            os.truncate(path, rng.choice((0, 1 << 40)))


DAMAGES = {
    "manifest": _damage_manifest,
    "state": _damage_json("state.json"),
    "config": _damage_json("config.yaml"),
    "tensors": _damage_tensors,
    "folder": _damage_folder,
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_checkpoint_from_somebody_else(kind: str, sound: Path, tmp_path: Path) -> None:
    taken = 0
    for number, rng in inputs(f"checkpoint-{kind}"):
        checkpoint = tmp_path / "run" / "checkpoints" / "step-00000000"
        shutil.copytree(sound, checkpoint)
        DAMAGES[kind](rng, checkpoint)
        before = snapshot(tmp_path)
        outcome = library(lambda checkpoint=checkpoint: _load(checkpoint))  # type: ignore[misc]
        check(outcome, (kind, number))
        taken += outcome.code == 0
        assert snapshot(tmp_path) == before, (kind, number)
        shutil.rmtree(tmp_path / "run")
    assert kind == "tensors" or taken < 40 or number > 100


def test_only_listed_files_are_opened(sound: Path, tmp_path: Path) -> None:
    """A stray shard of weights beside the checkpoint's own, and a manifest that lists none."""
    checkpoint = tmp_path / "checkpoints" / "step-00000000"
    shutil.copytree(sound, checkpoint)
    stray = checkpoint / "model-weights-00000-of-00003.safetensors"
    save_file({"weight/scale@0": torch.full((1,), 666.0)}, stray)
    assert float(read_weights(checkpoint)["scale"]) == 1.0, "it is not listed"
    with pytest.raises(CheckpointError, match=rf"holds {stray.name}, which its manifest.json does not list; remove it"):
        verify(checkpoint)
    stray.unlink()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "files": {}}))
    with pytest.raises(
        CheckpointError,
        match=r"manifest.json: damaged .*lacks config.yaml, which every checkpoint",
    ):
        verify(checkpoint)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "tokenizer/../../x", "a//b", "./a", "a\\b", "", "a\n"])
def test_no_name_leaves_the_checkpoint(name: str, sound: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000000"
    shutil.copytree(sound, checkpoint)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="another version: files"):
        verify(checkpoint)


RUN_FILES: dict[str, bytes] = {
    "status.json": b'{"exit_code": null, "reason": "", "state": "running", "step": 3}',
    "best.json": b'{"metric": "loss", "mode": "max", "step": 3, "value": 0.5}',
}


@pytest.mark.parametrize("name", RUN_FILES)
def test_the_small_files_of_a_run_from_somebody_else(name: str, tmp_path: Path) -> None:
    read = {"status.json": read_status, "best.json": read_best}[name]
    for number, rng in inputs(name):
        if rng.random() < 0.6:
            content = json.dumps(_edited(rng, json.loads(RUN_FILES[name]))).encode()
        else:
            content = mutated(rng, RUN_FILES[name])
        (tmp_path / name).write_bytes(content)
        check(library(lambda: read(tmp_path)), (name, number, content))


def _resume_dry(run: Path) -> object:
    return resume("capt.pretrain", run, [], Options(), checkpoint=None, debug=False, show=lambda text: None)


def test_a_run_folder_from_somebody_else(sound: Path, tmp_path: Path) -> None:
    """`capt resume --dry-run`, and what `capt report` reads, of a run of which any file is damaged."""
    config = (sound / "config.yaml").read_bytes()
    files = {
        **RUN_FILES,
        "config.yaml": config,
        "metrics.jsonl": b'{"step": 1, "loss": 2.5}\n' * 3,
        "launch.json": b"{}",
    }
    for number, rng in inputs("run folder", 12):
        run = tmp_path / "run"
        run.mkdir()
        chosen = rng.choice(sorted(files))
        for name, content in files.items():
            (run / name).write_bytes(mutated(rng, content) if name == chosen else content)
        before = snapshot(run)
        check(library(lambda run=run: _resume_dry(run)), ("resume", number, chosen))  # type: ignore[misc]
        assert snapshot(run) == before
        check(library(lambda run=run: read_run(run)), ("report", number, chosen))  # type: ignore[misc]
        shutil.rmtree(run)
