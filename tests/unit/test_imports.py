"""Every arrow points down, and what a login node runs stays light."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ROOT / "capt"
PACKAGES = ("tokenizer", "configs", "pretrain", "finetune", "launcher")


def _in(package: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for name in names)


# Names are written without `capt.`. A room is a folder or a module. It may import itself and what its row names; a
# name allows what lies in it as well.
BASE = ("pretrain.base",)
TASK = (
    "tokenizer",
    *_in("pretrain", "base", "config", "data", "models", "contrast", "contrastive", "engine", "plan", "registry"),
)
LATENT = (
    *BASE,
    "pretrain.engine",
    "pretrain.latent.config",
    "pretrain.latent.text_files",
    "pretrain.latent.corpus",
    "pretrain.latent.batches",
)

EMBEDDINGS = (*BASE, "pretrain.engine", "pretrain.embeddings.config")

ALLOWED: dict[str, tuple[str, ...]] = {
    "pretrain.base": (),
    "tokenizer": BASE,
    "configs": (),
    "pretrain.registry": BASE,
    "pretrain.config": (*BASE, "pretrain.registry"),
    # ---- engine: optimizers, then engines, then checkpoints of both, then callbacks; the loop and the run use them all
    "pretrain.engine.optim": (*BASE, "pretrain.config", "pretrain.engine.optim.settings"),
    "pretrain.engine.engines": (
        *(*BASE, "pretrain.config"),
        *_in("pretrain.engine", "optim", "own_time", "rank"),
    ),
    "pretrain.engine.checkpoint": (
        *(*BASE, "pretrain.config"),
        *_in("pretrain.engine", "durable", "engines", "optim", "provenance", "step_folders", "task"),
    ),
    "pretrain.engine.callbacks": (
        *(*BASE, "pretrain.config", "pretrain.registry"),
        *_in("pretrain.engine", "checkpoint", "durable", "engines", "heartbeat", "interruption", "provenance"),
        *_in("pretrain.engine", "judgement", "loop", "metrics_file", "run_folder", "step_folders", "task"),
    ),
    "pretrain.engine": (*BASE, "pretrain.config", "pretrain.registry", "pretrain.engine"),
    # ---- fault tolerance: callbacks that the engine finds in the registry, so that no arrow leads back
    "pretrain.reliability.ledger": (
        *(*BASE, "pretrain.config.ramp", "pretrain.data.mixture", "pretrain.data.sampler"),
        *_in("pretrain.engine", "checkpoint", "durable", "step_folders", "task"),
    ),
    "pretrain.reliability": (*BASE, "pretrain.config", "pretrain.engine", "pretrain.reliability"),
    # ---- what tasks are built of
    "pretrain.contrast": BASE,
    "pretrain.contrastive": (
        *BASE,
        "pretrain.config",
        "pretrain.contrast",
        "pretrain.engine",
        "pretrain.data.sampler",
    ),
    "pretrain.bottleneck": (*BASE, *_in("pretrain", "config", "models", "engine.durable")),
    "pretrain.data": (*BASE, "tokenizer", *_in("pretrain", "config.base", "config.ramp", "registry")),
    "pretrain.models": (*BASE, "tokenizer", *_in("pretrain", "config.base", "config.lora", "registry")),
    "pretrain.models.foreign": (*BASE, "tokenizer", "pretrain.config.base", "pretrain.models"),
    "pretrain.models.lxmert": (*BASE, "tokenizer", "pretrain.config.base", "pretrain.models"),
    "pretrain.regions": (*BASE, "pretrain.regions.extract.prepare"),
    "pretrain.regions.extract": (
        *(*BASE, "pretrain.regions", *_in("pretrain.models", "hf_config", "hf_folder", "hub")),
    ),
    "pretrain.plan": (
        *BASE,
        *_in("pretrain", "config", "contrast", "contrastive", "engine", "models", "registry", "report"),
    ),
    "pretrain.report": (*BASE, "pretrain.config", "pretrain.registry", "pretrain.engine"),
    "pretrain.commands": (*BASE, "pretrain.config", "pretrain.registry", "pretrain.engine"),
    "pretrain.convert": (
        *(room for room in TASK if room not in _in("pretrain", "data", "contrast", "contrastive")),
        "pretrain.commands",
    ),
    "pretrain.__main__": (*BASE, "pretrain.config", "pretrain.engine", "pretrain.registry"),
    # ---- tasks
    "pretrain.language": (*TASK, "pretrain.bottleneck", "pretrain.convert"),
    "pretrain.pairs": (*TASK, "pretrain.convert", *_in("pretrain.language", "load", "inputs", "plan")),
    "pretrain.retrieval": (
        *(*BASE, "tokenizer", "pretrain.convert"),
        *_in("pretrain", "config", "contrast", "data", "engine", "language", "models", "pairs"),
        *_in("pretrain", "commands", "registry"),
    ),
    "pretrain.latent.text_files": (*BASE, "pretrain.config"),
    "pretrain.latent.config": (*BASE, "pretrain.config", "pretrain.latent.text_files"),
    "pretrain.latent.corpus": LATENT,
    "pretrain.latent.batches": LATENT,
    "pretrain.latent.posterior": LATENT,
    "pretrain.latent.models": (*LATENT, "pretrain.models", "pretrain.latent.posterior"),
    "pretrain.latent.objectives": (*LATENT, "pretrain.contrast", "pretrain.latent.posterior"),
    "pretrain.latent.training": (
        *LATENT,
        "pretrain.contrast",
        *_in("pretrain.latent", "posterior", "objectives"),
    ),
    "pretrain.latent.ngram": BASE,
    "pretrain.latent.kenlm": (*BASE, "pretrain.latent.ngram"),
    "pretrain.latent.evaluation": (
        *(*LATENT, "pretrain.contrast"),
        *_in("pretrain.latent", "posterior", "models", "objectives", "training", "ngram", "kenlm"),
    ),
    "pretrain.latent": (*TASK, "pretrain.latent"),
    "pretrain.embeddings.config": (
        *BASE,
        "pretrain.config",
        "pretrain.data",
        "pretrain.embeddings.config",
    ),
    "pretrain.embeddings.corpus": (*EMBEDDINGS, "pretrain.data"),
    "pretrain.embeddings.positives": (*EMBEDDINGS, "pretrain.data", "pretrain.embeddings.corpus"),
    "pretrain.embeddings.vectors": BASE,
    "pretrain.embeddings.generator": (
        *EMBEDDINGS,
        *_in("pretrain.embeddings", "positives", "tables"),
    ),
    "pretrain.embeddings.objectives": EMBEDDINGS,
    "pretrain.embeddings": (*TASK, "pretrain.convert", "pretrain.embeddings"),
    "pretrain.vision_language.data": (*BASE, *_in("pretrain.regions", "picture")),
    "pretrain.vision_language.microworld": (*BASE, "pretrain.regions", "pretrain.vision_language.data"),
    "pretrain.vision_language": (
        *(*TASK, "pretrain.convert", "pretrain.regions", "pretrain.report"),
        "pretrain.vision_language",
    ),
    "finetune": ("tokenizer", *_in("pretrain", "base", "config", "engine", "models", "language", "plan")),
    "finetune.columns": (*BASE, *_in("pretrain.data", "formats", "tables")),
    "finetune.new_rows": (*BASE, "pretrain.data.formats"),
    "finetune.text_predictor": ("finetune", "tokenizer", *_in("pretrain", "base", "engine", "models", "registry")),
    "finetune.text_export": ("finetune", "tokenizer", *_in("pretrain", "base", "convert", "engine", "models")),
    "finetune.glue": (
        *("finetune", "tokenizer", *_in("pretrain.data", "hub", "sts_files")),
        *_in("pretrain", "base", "config", "engine", "models", "convert", "report", "plan"),
    ),
    "finetune.labels": (
        *("finetune", "tokenizer", *_in("pretrain.data", "formats", "tables")),
        *_in("pretrain", "base", "config", "engine", "models", "convert", "plan"),
    ),
    "finetune.rerank": (
        *("finetune", "tokenizer", "pretrain.contrast", "pretrain.pairs"),
        *_in("pretrain.data", "config"),
        *_in("pretrain", "base", "config", "engine", "models", "convert", "language", "plan", "retrieval.metrics"),
    ),
    "finetune.visual": (
        *("finetune", "tokenizer"),
        *_in("pretrain", "base", "config", "engine", "models", "convert", "regions", "report", "vision_language"),
    ),
    # ---- launcher
    "launcher.supervisor": (*BASE, "pretrain.engine", "launcher.ssh"),
    "launcher.kubernetes": (
        *(*BASE, "pretrain.config.base", "pretrain.config.load", "pretrain.engine"),
        *_in("launcher", "environment", "ssh"),
    ),
    "launcher.backends": (
        *(*BASE, *_in("pretrain.config", "base", "load", "reader"), "pretrain.engine", "pretrain.registry"),
        *_in("launcher", "allocation", "environment", "kubernetes", "plan", "raycluster", "ssh", "supervisor"),
        "launcher.watch",
    ),
    "launcher.preflight": (
        *(*BASE, "pretrain.config", "pretrain.engine.step_folders", "pretrain.plan", "pretrain.registry"),
        *_in("launcher", "environment", "plan", "ssh", "supervisor"),
    ),
    "launcher.sweep": (
        *_in("pretrain", "base", "config", "engine", "report"),
        *_in("launcher", "backends", "kubernetes", "raycluster", "supervisor"),
    ),
    "launcher.commands": ("finetune", "pretrain", "tokenizer", "configs", "launcher"),
    "launcher": (*_in("pretrain", "__main__", "base", "config", "engine", "registry", "reliability"), "launcher"),
    # ---- the commands from Python
    "library": ("finetune", "pretrain", "launcher"),
}


@functools.cache
def _imports(path: Path) -> tuple[tuple[int, str], ...]:
    return tuple(_found_imports(path))


def _found_imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.removeprefix("capt.")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports are not used here"
            base = node.module or ""
            for alias in node.names:
                submodule = ROOT.joinpath(*base.split("."), alias.name)
                is_module = submodule.is_dir() or submodule.with_suffix(".py").is_file()
                yield node.lineno, (f"{base}.{alias.name}" if is_module else base).removeprefix("capt.")


def _room(module: str) -> str:
    rooms = [room for room in ALLOWED if module == room or module.startswith(room + ".")]
    return max(rooms, key=len, default="")


def _name(path: Path) -> str:
    return ".".join(path.relative_to(CODE).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _sources() -> list[Path]:
    return [CODE / "library.py", *(path for package in PACKAGES for path in sorted((CODE / package).rglob("*.py")))]


def test_arrows_point_down() -> None:
    for path in _sources():
        module = _name(path)
        room = _room(module)
        if not room:
            assert module in PACKAGES or module == "pretrain", f"{module} belongs to no room; add it to ALLOWED"
            continue
        for line, imported in _imports(path):
            if imported.split(".")[0] not in PACKAGES or _room(imported) == room:
                continue
            allowed = any(imported == name or imported.startswith(name + ".") for name in ALLOWED[room])
            assert allowed, f"{path.relative_to(CODE)}:{line}: {room} must not import {imported}"


def _graph() -> dict[str, set[str]]:
    """Imports of ours in each module, at its top, in its functions and for type checkers alone."""
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
    assert "pretrain.engine.engines.deepspeed" in graph["pretrain.engine.engines.build"]  # imported in a function
    _assert_no_circle(graph)


def test_no_circle_of_rooms() -> None:
    """In each folder: its subfolders, each as one, and its modules."""
    graph = _graph()
    folders = ["", *(name for name, path in ((_name(p), p) for p in _sources()) if path.name == "__init__.py")]
    folders += sorted({_name(path.parent) for path in _sources() if path.parent != CODE} - set(folders))
    assert {"", "pretrain.engine", "pretrain.latent", "finetune", "launcher"} <= set(folders)
    for folder in folders:
        depth = len(folder.split(".")) if folder else 0

        def child(module: str, folder: str = folder, depth: int = depth) -> str | None:
            if not folder and module.startswith("pretrain.base"):  # the floor of the house, below the tokenizer as well
                return "pretrain.base"
            inside = not folder or module == folder or module.startswith(folder + ".")
            return ".".join(module.split(".")[: depth + 1]) if inside else None

        rooms: dict[str, set[str]] = {}
        for module, imported in graph.items():
            if (room := child(module)) is not None:
                rooms.setdefault(room, set()).update(other for name in imported if (other := child(name)) is not None)
        _assert_no_circle({room: others - {room} for room, others in rooms.items()})


FAMILIES = {
    "pictures": (
        *_in("pretrain", "vision_language", "regions", "models.lxmert", "convert.lxmert"),
        *("finetune.visual", *_in("launcher.commands", "regions", "predictions")),
    ),
    "latent variables": ("pretrain.latent", "launcher.commands.latent"),
    "words": ("pretrain.embeddings", "launcher.commands.embeddings"),
}
"""Packages beside the core, which is text."""


def _family(module: str) -> str | None:
    return next(
        (name for name, rooms in FAMILIES.items() for room in rooms if f"{module}.".startswith(f"{room}.")), None
    )


def test_families_enter_by_the_registries_alone() -> None:
    """The core imports no family, and no family another: only tables of names lead to them."""
    graph = _graph()
    assert {_family(module) for module in graph} == {None, *FAMILIES}
    for module, imported in graph.items():
        for other in imported:
            assert _family(other) in (None, _family(module)), f"{module} must not import {other}"


def test_nothing_imports_the_launcher() -> None:
    """The library may: it calls the functions behind commands, and nothing imports it."""
    for path in _sources():
        above = {"launcher": {"library"}, "library.py": set()}.get(
            path.relative_to(CODE).parts[0], {"launcher", "library"}
        )
        assert not any(name.split(".")[0] in above for _, name in _imports(path)), path


HEAVY = ("torch", "deepspeed", "transformers", "ray", "datasets", "sklearn")
LIGHT = {
    "capt.launcher.cli": (*HEAVY, "numpy", "pydantic", "rich"),
    "capt.tokenizer": (*HEAVY, "numpy", "tokenizers", "sentencepiece"),
    "capt.pretrain.base.errors": (*HEAVY, "numpy", "tokenizers", "sentencepiece"),
    "capt.pretrain.base.atomic": (*HEAVY, "numpy", "tokenizers", "sentencepiece"),
    "capt.pretrain.base.files": (*HEAVY, "numpy", "tokenizers", "sentencepiece"),
    **dict.fromkeys(
        (
            "capt.pretrain.config",
            "capt.pretrain.language.config",
            "capt.pretrain.vision_language.config",
            "capt.pretrain.engine.engines.deepspeed_config",
            "capt.finetune.glue.config",
            "capt.pretrain.models.config",
            "capt.pretrain.engine.metrics_file",
            "capt.tokenizer.train",
            "capt.tokenizer.check",
            "capt.finetune.config",
            "capt.pretrain.language.inputs",
            "capt.pretrain.models.hf_folder",
        ),
        HEAVY,
    ),
    # records of runs and sweeps are read where the extra of the reports is not installed
    **dict.fromkeys(_in("capt.pretrain.report", "sweeps", "document"), ("matplotlib",)),
}
"""Modules, and what each of them and those before it leave alone."""


def test_light_modules_import_nothing_heavy() -> None:
    """In one process, in this order: what the first of them imports is seen immediately."""
    code = (
        "import importlib, json, sys\n"
        "for module, heavy in json.loads(sys.argv[1]).items():\n"
        "    importlib.import_module(module)\n"
        "    found = sorted(set(heavy) & set(sys.modules))\n"
        "    assert not found, f'{module} imports {found}'\n"
    )
    argv = [sys.executable, "-c", code, json.dumps(LIGHT)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
