"""A report as sections of tables, notes and figures, and its two forms: a self-contained HTML page, and Markdown."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from itertools import count
from pathlib import Path
from string import Template
from typing import Any

from capt.pretrain.base.files import write_bytes, write_text


def number(value: int | float | None, digits: int) -> str:
    """Return ``value`` with that number of decimals; empty for None."""
    return "" if value is None else f"{value:,.{digits}f}"


@dataclass(frozen=True)
class Table:
    """A table whose cells are text. With ``details`` the HTML page folds it away under that line."""

    header: list[str]
    rows: list[list[str]]
    details: str | None = None

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, str]], details: str | None = None, *, always: int = 1) -> Table:
        """Make a table of rows that name their cells; a cell that a row does not name is empty.

        After the first ``always`` columns one in which no row has anything is left out.
        """
        rows = list(rows)
        names = list(dict.fromkeys(name for row in rows for name in row))
        names = names[:always] + [name for name in names[always:] if any(row.get(name) for row in rows)]
        return cls(names, [[row.get(name, "") for name in names] for row in rows], details)


@dataclass(frozen=True)
class Drawing:
    """A picture: a PNG image, and its panels with the points of their curves, which the page shows at the pointer.

    A panel has ``box`` (left, bottom, right and top as parts of the image), ``x`` and ``y`` (limits, and whether they
    are logarithmic), ``names`` (of places on an axis without numbers), and ``lines`` (name, colour and points).
    """

    png: bytes
    panels: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class ReportFigure:
    """A picture for a light and for a dark page; the light one is also written as ``NAME.png``."""

    name: str
    light: Drawing
    dark: Drawing


@dataclass(frozen=True)
class ReportSection:
    """A part of a report: notes (warnings) above the tables, remarks below them, and ``data`` for the JSON file."""

    title: str
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    figures: list[ReportFigure] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


def write_html(title: str, sections: Sequence[ReportSection], out: Path) -> Path:
    """Write one page that contains its images, styles and script; a section without a title continues the one before.

    The page names the script by its hash, so that a browser runs no other and loads nothing.
    """
    template = Template((files("capt.pretrain.report") / "page.html").read_text(encoding="utf-8"))
    script = (files("capt.pretrain.report") / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    body = "\n".join(_html_section(section) for section in sections)
    write_text(out, template.substitute(title=escape(title), body=body, script=script, digest=digest))
    return out


def write_markdown(title: str, sections: Sequence[ReportSection], out: Path) -> None:
    """Write tables and links to the PNG files beside it; tables that the HTML page folds away are left out."""
    parts, files_ = [f"# {markdown_text(title)}"], _file_names(sections)
    for number, section in enumerate(sections):
        tables = [_markdown_table(table) for table in section.tables if table.rows and table.details is None]
        names = zip(section.figures, files_[number], strict=True)
        figures = [f"![{markdown_text(figure.name)}]({file})" for figure, file in names]
        notes = ["\n".join(f"- {markdown_text(note)}" for note in section.notes)] if section.notes else []
        content = [*notes, *tables, *map(markdown_text, section.remarks), *figures]
        parts += [f"## {markdown_text(section.title)}", *content] if section.title and content else content
    write_text(out, "\n\n".join(parts) + "\n")


def write_figures(sections: Sequence[ReportSection], folder: Path) -> None:
    """Write the light image of every figure as ``NAME.png``."""
    for section, names in zip(sections, _file_names(sections), strict=True):
        for figure, name in zip(section.figures, names, strict=True):
            write_bytes(folder / name, figure.light.png)


def _file_names(sections: Sequence[ReportSection]) -> list[list[str]]:
    """Return the file name of each figure: letters, digits, ``.``, ``_`` and ``-`` alone, each name once."""
    taken: set[str] = set()
    names: list[list[str]] = []
    for section in sections:
        names.append([])
        for figure in section.figures:
            stem = re.sub(r"[^A-Za-z0-9._-]+", "-", figure.name)[:100].strip("-.") or "figure"
            tries = (f"{stem}{f'-{number}' if number > 1 else ''}.png" for number in count(1))
            # In lower case: some file systems take such names for one.
            names[-1].append(next(name for name in tries if name.lower() not in taken))
            taken.add(names[-1][-1].lower())
    return names


def _html_section(section: ReportSection) -> str:
    parts = []
    if section.notes:
        parts.append(f"<ul class='notes'>{''.join(f'<li>{escape(note)}</li>' for note in section.notes)}</ul>")
    parts += [_html_table(table) for table in section.tables if table.rows]
    parts += [f"<p class='small'>{escape(remark)}</p>" for remark in section.remarks]
    parts += [_html_figure(figure) for figure in section.figures]
    title = [f"<h2>{escape(section.title)}</h2>"] if section.title and parts else []
    return "\n".join([*title, *parts])


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    html = f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    if table.details is None:
        return html
    return f"<details><summary>{escape(table.details)}</summary>{html}</details>"


def _html_figure(figure: ReportFigure) -> str:
    panels = json.dumps(figure.light.panels, separators=(",", ":"), allow_nan=False)
    return (
        f"<figure data-panels='{escape(panels)}'>"
        f"<picture><source media='(prefers-color-scheme: dark)' srcset='{_data_uri(figure.dark.png)}'>"
        f"<img src='{_data_uri(figure.light.png)}' alt='Curves: {escape(figure.name)}'></picture></figure>"
    )


def _markdown_table(table: Table) -> str:
    header, *rows = [[markdown_text(cell) for cell in row] for row in (table.header, *table.rows)]
    lines: list[Sequence[str]] = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_MARKDOWN = re.compile(
    r"[\\`*\[\]|~$]"  # code, emphasis, links, pictures, cells of a table, formulas
    r"|(?<![^\W_])_|_(?![^\W_])"  # an underscore inside of a word is no emphasis
    r"|:(?=//)|(?<=\bwww)\.|@"  # addresses that become links by themselves
    r"|!(?=\[)",
    re.IGNORECASE,
)
_BLOCK = re.compile(r"^(\d{1,9}(?=[.)](?:\s|$))|(?=[-+](?:[\s-]|$)|[#=:]))")
"""The beginning of a line that makes a list, a heading or a quotation of it."""


def markdown_text(text: str) -> str:
    """Return ``text`` as one line of Markdown that shows it as it is: no markup, link, picture or HTML."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    line = _BLOCK.sub(r"\1\\", _MARKDOWN.sub(lambda match: "\\" + match[0], line))
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
