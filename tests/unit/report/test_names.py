"""Names are text in every form of a report: no markup, no link, no picture, no path."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from capt.pretrain.report.document import (
    Drawing,
    ReportFigure,
    ReportSection,
    Table,
    markdown_text,
    write_figures,
    write_html,
    write_markdown,
)

PIECES = [
    "[a](javascript:alert(1))", "![p](http://127.0.0.1:9/p.png)", "<img src=x onerror=alert(1)>", "<https://a.b>",
    "https://a.b/c", "www.a.b", "[a]: http://b", "[^1]", "`code`", "``` fence", "**bold**", "_it_", "__x__", "~~s~~",
    "a|b", "\\", "\\|", "# h", "- item", "+ item", "1. item", "12) item", "> quote", "---", "===", "&lt;&amp;&#33;",
    "$x^2$", "a_b_c", "loss/mlm", "-0.94", "1.0", "0:00:04", "A: x=1, y=2", "=1+2", "@SUM(A1)", "a\nb\n\n# c",
    "\x1b[31mred", "\u202eevil", "é 名 ±",
]  # fmt: skip
NAMES = [*PIECES, *(f"{a} {b}" for a, b in zip(PIECES, reversed(PIECES), strict=True)), *(f"x{p}y" for p in PIECES)]
ALLOWED = {"h1", "h2", "p", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "img"}


def renderer() -> MarkdownIt:
    """A renderer that makes a link of whatever it can."""
    markdown: Any = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    markdown.validateLink = lambda url: True
    return markdown  # type: ignore[no-any-return]


def plain(text: str) -> str:
    """A name in one line of characters that can be shown."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def texts(html: str) -> list[str]:
    """The text between tags."""
    unescaped = [re.sub("<[^>]*>", "", part) for part in re.split(r"</(?:h1|h2|p|li|th|td)>", html)]
    entities = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&amp;": "&"}
    return [re.sub("&[a-z]+;", lambda found: entities[found[0]], part).strip() for part in unescaped]


@pytest.mark.parametrize("name", NAMES)
def test_markdown_shows_a_name_as_it_is(name: str, tmp_path: Path) -> None:
    figure = ReportFigure(name, Drawing(b"png"), Drawing(b"png"))
    table = Table([name, "value"], [["row", name], [name, "end"]])
    sections = [ReportSection(name, notes=[name, "note"], tables=[table], remarks=[name], figures=[figure, figure])]
    write_markdown(name, sections, tmp_path / "report.md")
    html = renderer().render((tmp_path / "report.md").read_text())
    assert set(re.findall(r"<(\w+)", html)) <= ALLOWED, html
    pictures = re.findall(r'<img src="([^"]*)"', html)
    assert len(set(pictures)) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+\.png", picture) for picture in pictures)
    shown = [text for text in texts(html) if text]
    assert shown == [plain(text) for text in [name, name, name, "note", name, "value", "row", name, name, "end", name]]
    (tmp_path / "figures").mkdir()
    write_figures(sections, tmp_path / "figures")
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(pictures)


@pytest.mark.parametrize("name", ["https://a.b/c", "www.a.b", "see http://x.y."])
def test_addresses_do_not_become_links_by_themselves(name: str) -> None:
    assert not re.search(r"(?<!\\):|www(?<!\\)\.", markdown_text(name)), "a character of it is escaped"


def test_the_page_shows_names_as_they_are(tmp_path: Path) -> None:
    panel = {"box": [0, 0, 1, 1], "lines": [{"name": "'><script>alert(1)</script>", "points": []}]}
    hostile = Drawing(b"png", [panel])
    sections = [
        ReportSection(name, notes=[name], tables=[Table([name], [[name]], details=name)], remarks=[name],
                      figures=[ReportFigure(name, hostile, hostile)])
        for name in NAMES
    ]  # fmt: skip
    page = write_html("</title><script>x</script>", sections, tmp_path / "report.html").read_text()
    tags = set(re.findall(r"<(\w+)", page))
    frame = {"html", "head", "meta", "title", "style", "body", "script"}
    assert tags <= ALLOWED | frame | {"figure", "picture", "source", "details", "summary", "div"}
    assert page.count("<script") == 1
    assert len(re.findall(r"<img src='data:", page)) == len(re.findall("<img", page))
    assert "script-src 'sha256-" in page
    assert json.dumps(panel["lines"][0]["name"])[1:-1] not in page  # type: ignore[index]
