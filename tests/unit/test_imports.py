"""Every arrow points down, and what a login node runs stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tokenizer", "configs", "pretrain", "finetune", "launcher")


def _in(package: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for name in names)


# A room is a folder or a module. It may import itself and what stands here; a name allows what lies in it as well.
BASE = ("capt.pretrain.base",)
TASK = (
    "tokenizer",
    *_in("pretrain", "base", "config", "data", "models", "contrast", "contrastive", "engine", "registry"),
)
LATENT = (
    *BASE,
    "capt.pretrain.engine",
    "capt.pretrain.latent.config",
    "capt.pretrain.latent.text_files",
    "capt.pretrain.latent.data",
)

EMBEDDINGS = (*BASE, "capt.pretrain.engine", "capt.pretrain.embeddings.config", "capt.pretrain.embeddings.config")


ALLOWED: dict[str, tuple[str, ...]] = {
    "capt.pretrain.base": (),
    "tokenizer": BASE,
    "configs": (),
    "capt.pretrain.registry": BASE,
    "capt.pretrain.config": (*BASE, "capt.pretrain.registry"),
    # ---- engine: optimizers, then engines, then checkpoints of both, then callbacks; the loop and the run use them all
    "capt.pretrain.engine.optim": (*BASE, "capt.pretrain.config", "capt.pretrain.engine.optim.settings"),
    "capt.pretrain.engine.engines": (
        *(*BASE, "capt.pretrain.config"),
        *_in("capt.pretrain.engine", "optim", "own_time", "row_shard"),
    ),
    "capt.pretrain.engine.checkpoint": (
        *(*BASE, "capt.pretrain.config"),
        *_in("capt.pretrain.engine", "durable", "engines", "optim", "provenance", "row_shard", "task"),
        "capt.pretrain.engine.verification",
    ),
    "capt.pretrain.engine.callbacks": (
        *(*BASE, "capt.pretrain.config", "capt.pretrain.registry"),
        *_in("capt.pretrain.engine", "checkpoint", "durable", "engines", "flags", "heartbeat", "interruption"),
        *_in("capt.pretrain.engine", "judgement", "loop", "metrics_file", "run_folder", "task"),
    ),
    "capt.pretrain.engine": (*BASE, "capt.pretrain.config", "capt.pretrain.registry", "capt.pretrain.engine"),
    # ---- fault tolerance: callbacks that the engine finds in the registry, so that no arrow leads back
    "capt.pretrain.reliability.ledger": (
        *(*BASE, "capt.pretrain.data.sampler"),
        *_in("capt.pretrain.engine", "checkpoint", "durable", "task"),
    ),
    "capt.pretrain.reliability": (*BASE, "capt.pretrain.config", "capt.pretrain.engine", "capt.pretrain.reliability"),
    # ---- what tasks are built of
    "capt.pretrain.contrast": BASE,
    "capt.pretrain.contrastive": (
        *BASE,
        "capt.pretrain.config",
        "capt.pretrain.contrast",
        "capt.pretrain.engine",
        "capt.pretrain.data.sampler",
    ),
    "capt.pretrain.data": (*BASE, "tokenizer", "capt.pretrain.config.base", "capt.pretrain.registry"),
    "capt.pretrain.models": (*BASE, "tokenizer", "capt.pretrain.config.base"),
    "capt.pretrain.models.foreign": (*BASE, "tokenizer", "capt.pretrain.models"),
    "capt.pretrain.models.lxmert": (*BASE, "tokenizer", "capt.pretrain.config.base", "capt.pretrain.models"),
    "capt.pretrain.regions": (*BASE, "capt.pretrain.regions.extract.prepare"),
    "capt.pretrain.regions.extract": (
        *(*BASE, "capt.pretrain.regions", *_in("capt.pretrain.models", "hf_config", "hf_folder", "hub")),
    ),
    "capt.pretrain.report": (*BASE, "capt.pretrain.config", "capt.pretrain.registry", "capt.pretrain.engine"),
    "capt.pretrain.verbs": (*BASE, "capt.pretrain.config", "capt.pretrain.registry", "capt.pretrain.engine"),
    "capt.pretrain.convert": (
        *(room for room in TASK if room not in _in("pretrain", "data", "contrast", "contrastive")),
        "capt.pretrain.verbs",
    ),
    "capt.pretrain.__main__": (*BASE, "capt.pretrain.config", "capt.pretrain.engine"),
    # ---- tasks
    "capt.pretrain.language": (*TASK, "capt.pretrain.convert"),
    "capt.pretrain.latent.text_files": (*BASE, "capt.pretrain.config"),
    "capt.pretrain.latent.config": (*BASE, "capt.pretrain.config", "capt.pretrain.latent.text_files"),
    "capt.pretrain.latent.data": LATENT,
    "capt.pretrain.latent.models": (*LATENT, "capt.pretrain.models"),
    "capt.pretrain.latent.objectives": (*LATENT, "capt.pretrain.contrast", "capt.pretrain.latent.models"),
    "capt.pretrain.latent.training": (
        *LATENT,
        "capt.pretrain.contrast",
        *_in("capt.pretrain.latent", "models", "objectives"),
    ),
    "capt.pretrain.latent.ngram": BASE,
    "capt.pretrain.latent.restore": (*LATENT, "capt.pretrain.latent.models"),
    "capt.pretrain.latent.evaluation": (
        *(*LATENT, "capt.pretrain.contrast"),
        *_in("capt.pretrain.latent", "artifacts", "models", "objectives", "training", "ngram", "restore"),
    ),
    "capt.pretrain.latent.report": (
        *BASE,
        "capt.pretrain.config",
        "capt.pretrain.report",
        "capt.pretrain.latent.config",
    ),
    "capt.pretrain.latent": (*TASK, "capt.pretrain.latent"),
    "capt.pretrain.embeddings.config": (
        *BASE,
        "capt.pretrain.config",
        "capt.pretrain.data",
        "capt.pretrain.embeddings.config",
    ),
    "capt.pretrain.embeddings.data": (*EMBEDDINGS, "capt.pretrain.data"),
    "capt.pretrain.embeddings.vectors": BASE,
    "capt.pretrain.embeddings.sampler": (
        *EMBEDDINGS,
        *_in("capt.pretrain.embeddings", "data", "tables", "exchange", "objectives"),
    ),
    "capt.pretrain.embeddings.objectives": EMBEDDINGS,
    "capt.pretrain.embeddings": (*TASK, "capt.pretrain.convert", "capt.pretrain.report", "capt.pretrain.embeddings"),
    "capt.pretrain.vision_language.data": (*BASE, "capt.pretrain.regions.nlvr1"),
    "capt.pretrain.vision_language.microworld": (*BASE, "capt.pretrain.regions", "capt.pretrain.vision_language.data"),
    "capt.pretrain.vision_language": (
        *(*TASK, "capt.pretrain.convert", "capt.pretrain.regions", "capt.pretrain.report"),
        "capt.pretrain.vision_language",
    ),
    "finetune": ("tokenizer", *_in("pretrain", "base", "config", "engine", "models", "language")),
    "capt.finetune.glue": (
        *("finetune", "tokenizer"),
        *_in("pretrain", "base", "config", "data.sts_files", "engine", "models", "convert", "report"),
    ),
    "capt.finetune.visual": (
        *("finetune", "tokenizer"),
        *_in("pretrain", "base", "config", "engine", "models", "convert", "report", "regions", "vision_language"),
    ),
    # ---- launcher
    "capt.launcher.supervisor": (*BASE, "capt.pretrain.engine", "capt.launcher.ssh", "capt.launcher.ssh"),
    "capt.launcher.backends": (
        *(*BASE, "capt.pretrain.config.reader", "capt.pretrain.engine", "capt.pretrain.registry"),
        *_in("launcher", "cluster", "environment", "hostfile", "plan", "raycluster", "ssh", "supervisor", "watch"),
    ),
    "capt.launcher.preflight": (
        *(*BASE, "capt.pretrain.config"),
        *_in("launcher", "check", "environment", "hostfile", "plan", "ssh"),
    ),
    "capt.launcher.sweep": (
        *_in("pretrain", "base", "config", "engine", "report"),
        *_in("launcher", "backends", "raycluster", "supervisor"),
    ),
    "capt.launcher.commands": ("finetune", "pretrain", "tokenizer", "configs", "launcher"),
    "launcher": (*_in("pretrain", "__main__", "base", "config", "engine", "registry", "reliability"), "launcher"),
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


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_down(path: Path) -> None:
    module = _name(path)
    room = _room(module)
    if not room:
        assert module in PACKAGES or module == "pretrain", f"{module} belongs to no room; add it to ALLOWED"
        return
    for line, imported in _imports(path):
        if imported.split(".")[0] not in PACKAGES or _room(imported) == room:
            continue
        allowed = any(imported == name or imported.startswith(name + ".") for name in ALLOWED[room])
        assert allowed, f"{path.relative_to(ROOT)}:{line}: {room} must not import {imported}"


def _graph() -> dict[str, set[str]]:
    """What each module imports of ours, at its top, in its functions and for type checkers alone."""
    modules = {_name(path): path for path in _sources()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = {imported for _, imported in _imports(path) if imported in modules} - {module}
    return graph


def _assert_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_no_circle_of_modules() -> None:
    graph = _graph()
    assert len(graph) > 300
    assert (
        "capt.pretrain.engine.engines.deepspeed" in graph["capt.pretrain.engine.engines.build"]
    )  # imported in a function
    _assert_no_circle(graph)


def test_no_circle_of_rooms() -> None:
    """In each folder: its subfolders, each as one, and its modules."""
    graph = _graph()
    folders = ["", *(name for name, path in ((_name(p), p) for p in _sources()) if path.name == "__init__.py")]
    folders += sorted({_name(path.parent) for path in _sources()} - set(folders))
    assert {"", "capt.pretrain.engine", "capt.pretrain.latent", "finetune", "launcher"} <= set(folders)
    for folder in folders:
        depth = len(folder.split(".")) if folder else 0

        def child(module: str, folder: str = folder, depth: int = depth) -> str | None:
            if not folder and module.startswith(
                "capt.pretrain.base"
            ):  # the floor of the house, below the tokenizer as well
                return "capt.pretrain.base"
            inside = not folder or module == folder or module.startswith(folder + ".")
            return ".".join(module.split(".")[: depth + 1]) if inside else None

        rooms: dict[str, set[str]] = {}
        for module, imported in graph.items():
            if (room := child(module)) is not None:
                rooms.setdefault(room, set()).update(other for name in imported if (other := child(name)) is not None)
        _assert_no_circle({room: others - {room} for room, others in rooms.items()})


def test_nothing_imports_the_launcher() -> None:
    for path in _sources():
        if path.relative_to(ROOT).parts[0] != "launcher":
            assert not any(name.split(".")[0] == "launcher" for _, name in _imports(path)), path


HEAVY = ("torch", "deepspeed", "transformers", "ray", "datasets")


@pytest.mark.parametrize(
    "module",
    [
        "capt.pretrain.config",
        "capt.pretrain.language.config",
        "capt.pretrain.vision_language.config",
        "capt.pretrain.engine.engines.deepspeed_config",
    ],
)
def test_configuration_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
