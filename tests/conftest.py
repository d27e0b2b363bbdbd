"""Shared fixtures, and the reasons for which tests skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs the real data or a GPU where there is none, saying so; keep together what must not be split.

    Where several workers share the tests (``pytest -n``), each takes whole files, so that the fixtures of a module are
    made once. Files that start Ray or make network namespaces follow one another in the same worker.
    """
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            folder = item.path.parent.name
            name = "clusters" if folder in ("multihost", "sweep") else str(item.path)
            item.add_marker(pytest.mark.xdist_group(name))
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


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder that CAPT_DATA names (only for tests marked ``realdata``)."""
    return Path(os.environ["CAPT_DATA"])
