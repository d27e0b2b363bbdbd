"""Every arrow points down, and what a login node runs stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tokenizer", "configs", "pretrain", "finetune", "launcher")

# A room may import itself and what stands here; "a.b" allows that subpackage alone.
BASE = ("pretrain.base",)
TASK = ("tokenizer", *(f"pretrain.{p}" for p in ("base", "config", "data", "models", "contrast", "engine", "registry")))
ALLOWED: dict[str, tuple[str, ...]] = {
    "pretrain.base": (),
    "tokenizer": BASE,
    "configs": (),
    "pretrain.registry": BASE,
    "pretrain.config": (*BASE, "pretrain.registry"),
    "pretrain.engine": (*BASE, "pretrain.config", "pretrain.registry"),
    "pretrain.contrast": (*BASE, "pretrain.config.base", "pretrain.config.contrast", "pretrain.engine.distributed"),
    "pretrain.data": (*BASE, "tokenizer", "pretrain.config.base"),
    "pretrain.models": (*BASE, "tokenizer", "pretrain.config.base"),
    "pretrain.report": (*BASE, "pretrain.config", "pretrain.registry", "pretrain.engine"),
    "pretrain.language": (*TASK, "pretrain.convert"),
    "pretrain.latent": TASK,
    "pretrain.latent.report": (*TASK, "pretrain.report", "pretrain.latent"),
    "pretrain.verbs": (*BASE, "pretrain.config", "pretrain.registry", "pretrain.engine"),
    "pretrain.convert": (
        *(room for room in TASK if room not in ("pretrain.data", "pretrain.contrast")),
        "pretrain.verbs",
    ),
    "pretrain.__main__": (*BASE, "pretrain.config", "pretrain.engine"),
    "finetune": ("pretrain", "tokenizer"),
    "launcher": ("finetune", "pretrain", "tokenizer", "configs"),
}


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports are not used here"
            base = node.module or ""
            for alias in node.names:
                submodule = ROOT.joinpath(*base.split("."), alias.name)
                is_module = submodule.is_dir() or submodule.with_suffix(".py").is_file()
                yield node.lineno, f"{base}.{alias.name}" if is_module else base


def _room(module: str) -> str:
    rooms = [room for room in ALLOWED if module == room or module.startswith(room + ".")]
    return max(rooms, key=len, default="")


def _sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_down(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    room = _room(module)
    if not room:
        assert module in PACKAGES or module == "pretrain", f"{module} belongs to no room; add it to ALLOWED"
        return
    for line, imported in _imports(path):
        if imported.split(".")[0] not in PACKAGES or imported == room or imported.startswith(room + "."):
            continue
        allowed = any(imported == name or imported.startswith(name + ".") for name in ALLOWED[room])
        assert allowed, f"{path.relative_to(ROOT)}:{line}: {room} must not import {imported}"


def test_nothing_imports_the_launcher() -> None:
    for path in _sources():
        if path.relative_to(ROOT).parts[0] != "launcher":
            assert not any(name.split(".")[0] == "launcher" for _, name in _imports(path)), path


HEAVY = ("torch", "deepspeed", "transformers", "ray", "datasets")


@pytest.mark.parametrize(
    "module", ["pretrain.config", "pretrain.language.config", "pretrain.engine.engines.deepspeed_config"]
)
def test_configuration_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
