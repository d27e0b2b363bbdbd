"""Text for tokenizer tests: the docstrings of Python's own library, which is wherever the tests run."""

from __future__ import annotations

import ast
import functools
import os
import sysconfig
from pathlib import Path
from typing import Any

import pytest

DATA = Path(os.environ.get("CAPT_DATA", "/nonexistent"))
realdata = [
    pytest.mark.realdata,
    pytest.mark.skipif(not DATA.is_dir(), reason="CAPT_DATA does not point to a folder with the real data"),
]


_BLOCKS = ("body", "cases", "handlers", "orelse", "finalbody")


@functools.cache
def docstrings() -> tuple[str, ...]:
    """Some 3,000 docstrings (prose, code, tables, rows of dashes), in a fixed order."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nodes: list[Any] = [ast.parse(file.read_text(encoding="utf-8"))]
        for node in nodes:  # statements alone, level by level: `ast.walk` goes into every expression too
            nodes += (inner for name in _BLOCKS for inner in getattr(node, name, ()))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found.append(ast.get_docstring(node, clean=False) or "")
    return tuple(text for text in found if text)


def lines() -> list[str]:
    return [line for text in docstrings() for line in text.splitlines() if line.strip()]
