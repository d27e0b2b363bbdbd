"""A report as sections of tables, notes and figures, and its two forms: a self-contained HTML page, and Markdown."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from pretrain.base.files import write_bytes, write_text


@dataclass(frozen=True)
class Table:
    """A table whose cells are text. With ``details`` the HTML page folds it away under that line."""

    header: list[str]
    rows: list[list[str]]
    details: str | None = None


@dataclass(frozen=True)
class ReportFigure:
    """A picture as two PNG images, for a light and for a dark page; the light one is also written as ``NAME.png``."""

    name: str
    light: bytes
    dark: bytes


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
    """Write one page that contains its images and styles; a section without a title continues the one before."""
    template = Template((files("pretrain.report") / "page.html").read_text(encoding="utf-8"))
    body = "\n".join(_html_section(section) for section in sections)
    write_text(out, template.substitute(title=escape(title), body=body))
    return out


def write_markdown(title: str, sections: Sequence[ReportSection], out: Path) -> None:
    """Write tables and links to the PNG files beside it; tables that the HTML page folds away are left out."""
    parts = [f"# {_markdown_text(title)}"]
    for section in sections:
        tables = [_markdown_table(table) for table in section.tables if table.rows and table.details is None]
        figures = [f"![{figure.name}]({figure.name}.png)" for figure in section.figures]
        notes = ["\n".join(f"- {_markdown_text(note)}" for note in section.notes)] if section.notes else []
        content = [*notes, *tables, *map(_markdown_text, section.remarks), *figures]
        parts += [f"## {_markdown_text(section.title)}", *content] if section.title and content else content
    write_text(out, "\n\n".join(parts) + "\n")


def write_figures(sections: Sequence[ReportSection], folder: Path) -> None:
    """Write the light image of every figure as ``NAME.png``."""
    for section in sections:
        for figure in section.figures:
            write_bytes(folder / f"{figure.name}.png", figure.light)


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
    return (
        f"<figure><picture><source media='(prefers-color-scheme: dark)' srcset='{_data_uri(figure.dark)}'>"
        f"<img src='{_data_uri(figure.light)}' alt='Curves: {escape(figure.name)}'></picture></figure>"
    )


def _markdown_table(table: Table) -> str:
    header, *rows = [[_markdown_text(cell).replace("|", "\\|") for cell in row] for row in (table.header, *table.rows)]
    lines: list[Sequence[str]] = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _markdown_text(text: str) -> str:
    """``text`` as one line of Markdown, with HTML escaped."""
    return " ".join(text.split()).replace("<", "&lt;")


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
