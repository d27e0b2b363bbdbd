"""Our docstrings in Markdown: they carry reStructuredText's formulas and references, which a terminal shows as well."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_FORMULA = re.compile(r"^( *)\.\. math::[ \t]*\n?((?:\n|\1[ \t]+.*(?:\n|$))+)", re.M)
_INLINE = re.compile(r":math:`([^`]+)`")
_REFERENCE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([^`]+)`")
_LITERAL = re.compile(r"(?<!`)``([^`]+)``(?!`)")
_TABLE = re.compile(r"^(=+(?: +=+)+)\n(.+)\n\1\n((?:.+\n)+?)\1$", re.M)
_BLOCK = re.compile(r"::\n\n((?:(?: {4,}.*)?\n)+)")


class Docstrings(griffe.Extension):
    """Rewrites every docstring once, when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """griffe's hook for modules, classes, functions and attributes."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Markdown of a docstring: formulas to LaTeX between signs, simple tables to Markdown's, roles to code."""
    text = _FORMULA.sub(lambda match: _display(match[1], match[2]), text)
    text = _TABLE.sub(lambda match: _table(match[1], match[2], match[3]), text)
    text = _INLINE.sub(r"\\(\1\\)", text)
    text = _REFERENCE.sub(lambda match: f"`{match[1].rpartition('.')[2]}`", text)
    text = _BLOCK.sub(r":\n\n\1", text)
    return _LITERAL.sub(r"`\1`", text)


def _display(indent: str, body: str) -> str:
    lines = textwrap.dedent(body).strip()
    if "&" in lines:
        lines = f"\\begin{{aligned}}\n{lines}\n\\end{{aligned}}"
    return textwrap.indent(f"\n\\[\n{lines}\n\\]\n\n", indent)


def _table(rule: str, head: str, body: str) -> str:
    columns = [match.span() for match in re.finditer("=+", rule)]
    columns[-1] = (columns[-1][0], 1000)
    rows = [[line[start:end].strip() for start, end in columns] for line in (head, *body.splitlines())]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]])
