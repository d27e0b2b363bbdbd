"""Hostile jobs, overrides, bases and sweeps through ``capt config`` and ``capt sweep --dry-run``."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from capt.pretrain.config.load import load_mapping
from tests.fuzz.harness import HOSTILE, check, command, inputs, mutated, snapshot

JOBS = ("capt_tiny", "capt_large", "mlm_small", "ptb/clvae_plus_mi", "clusters_k4", "yelp/vae", "rte", "stsb")
SWEEPS = ("capt_tiny_sweep", "glue_small", "latent_table1", "glue")
WORDS = (
    "base", "task", "type", "run", "dir", "data", "files", "a", "<<", "*a", "&a", "!!int", "!!python/name:os.system",
    "---", "...", "{", "}", "[", "]", ":", ": ", "- ", "? ", "|", ">", "'", '"', "\\", "\\x00", "\\ud800", "#", "%",
    "@", "`", "${", "}", "${oc.env:HF_TOKEN}", "${run}", "1", "9" * 400, "1e9", "1_", "0x1", "~", "null", "\n", "\n  ",
    "\t", "\0", "\x1b[2J", "\u2028", "\ufeff", "é", "\U0001f600", "x" * 3000, "capt_tiny", "..", "/", ",", "=",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "canary")
    return tmp_path


def _places(value: Any, parents: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*parents, key)
        yield from _places(inner, (*parents, key))


def _damaged(rng: random.Random, mapping: dict[str, Any], resolved: dict[str, Any]) -> dict[str, Any]:
    """A few keys of a job, as it is in its file or with all its defaults, set to what they should not be."""
    changed = copy.deepcopy(rng.choice((mapping, resolved)))
    for _ in range(rng.randint(1, 3)):
        *parents, last = rng.choice(list(_places(changed)))
        node: Any = changed
        for key in parents:
            node = node[key]
        value = copy.deepcopy(rng.choice(HOSTILE))
        if isinstance(node, dict) and rng.random() < 0.2:
            node[rng.choice(("", "x" * 300, "\n", "base", "type", "seed", "dir", "files", 1, None, True))] = value
        else:
            node[last] = value
    return changed


def _dump(value: Any) -> bytes:
    return yaml.dump(value, Dumper=yaml.CSafeDumper, sort_keys=False).encode("utf-8", "surrogatepass")


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 40)))


def _overrides(rng: random.Random, resolved: dict[str, Any]) -> list[str]:
    keys = [".".join(map(str, place)) for place in _places(resolved)]
    made = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        key = rng.choice([rng.choice(keys), rng.choice(keys) + ".x", _text(rng)[:50]])
        value = str(rng.choice(HOSTILE)) if rng.random() < 0.7 else _text(rng)
        made.append(f"{key}={value}")
    return [text for text in made if not text.startswith("-")]


def _files(rng: random.Random, folder: Path, text: bytes) -> Path:
    """The job as a file of its own, or at the end of a chain of bases."""
    path = folder / "job.yaml"
    kind = rng.randrange(6)
    if kind == 0:
        text = mutated(rng, text)
    elif kind == 1:
        text = _text(rng).encode("utf-8", "surrogatepass")
    elif kind == 2:
        (folder / "base.yaml").write_bytes(text)
        bases = rng.choice(
            (["base.yaml"], "base.yaml", ["base.yaml", "capt_tiny"], "job.yaml", 3, [[]], "a/b", "\0", "..")
        )
        text = _dump({"base": bases, rng.choice(("run", "data", "x")): rng.choice(HOSTILE)})
    path.write_bytes(text)
    return path


def test_jobs(folder: Path) -> None:
    from capt.pretrain.config import load_job

    needs = {"rte": ["data.path=x", "model.init=y"], "stsb": ["data.path=x", "model.init=y"]}
    known = {
        name: (load_mapping(name), load_job(name, needs.get(name, [])).model_dump(mode="json", by_alias=True))
        for name in JOBS
    }
    for number, rng in inputs("configs"):
        mapping, resolved = known[rng.choice(JOBS)]
        path = _files(rng, folder, _dump(_damaged(rng, mapping, resolved)))
        overrides = _overrides(rng, resolved)
        before = snapshot(folder)
        words = rng.choice((["validate"], ["validate"], ["validate"], ["show"], ["diff", "capt_tiny"]))
        arguments = ["config", *words, str(path), *([] if words[0] == "diff" else overrides)]
        outcome = command(*arguments)
        check(outcome, f"configs:{number} {arguments}")
        assert "canary" not in outcome.text, f"configs:{number}"
        assert snapshot(folder) == before, f"configs:{number}"


def test_sweeps(folder: Path) -> None:
    known = {name: load_mapping(name) for name in SWEEPS}
    for number, rng in inputs("sweeps", 10):
        mapping = known[rng.choice(SWEEPS)]
        path = folder / "job.yaml"
        text = _dump(_damaged(rng, mapping, mapping))
        path.write_bytes(mutated(rng, text) if rng.random() < 0.2 else text)
        before = snapshot(folder)
        arguments = ["sweep", str(path), *_overrides(rng, mapping), "--dry-run"]
        check(command(*arguments), f"sweeps:{number} {arguments}")
        assert snapshot(folder) == before, f"sweeps:{number}"


def test_names(folder: Path) -> None:
    """Hostile names of jobs and tasks."""
    for number, rng in inputs("names", 15):
        name = str(rng.choice(HOSTILE)) if rng.random() < 0.5 else _text(rng)
        if not name.startswith("-"):
            check(command("config", rng.choice(("validate", "schema", "show")), name), f"names:{number} {name!r}")
