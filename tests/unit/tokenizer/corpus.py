"""Text for tokenizer tests: the docstrings of Python's own library, which is wherever the tests run."""

from __future__ import annotations

import ast
import functools
import os
import sysconfig
from pathlib import Path

import pytest

DATA = Path(os.environ.get("CAPT_DATA", "/nonexistent"))
realdata = [
    pytest.mark.realdata,
    pytest.mark.skipif(not DATA.is_dir(), reason="CAPT_DATA does not point to a folder with the real data"),
]


@functools.cache
def docstrings() -> tuple[str, ...]:
    """Some 3,000 docstrings (prose, code, tables, rows of dashes), in a fixed order."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found.append(ast.get_docstring(node, clean=False) or "")
    return tuple(text for text in found if text)


def lines() -> list[str]:
    return [line for text in docstrings() for line in text.splitlines() if line.strip()]
