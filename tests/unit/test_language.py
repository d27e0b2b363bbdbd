"""Docstrings, comments, messages, help texts, keys and pages are written as sentences, in the words of the field."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documented import ROOT

PACKAGES = ("capt/pretrain", "capt/finetune", "capt/launcher", "capt/tokenizer", "tests")
SHOWN = ("help", "description", "epilog")
"""Keywords whose text a user reads."""
FRAGMENT = re.compile(
    r"(?:Of|That|Those|As|What|Whether|How|Where|Which|When|Why|Who|Whose|One|And|Nor|But|So that|Such as|Whatever"
    r"|(?:By|From|In|With) (?:how|what|which))(?![\w-])"
)
"""Openings of half a sentence: "Whether it is due" has no verb that says what the function does. "One" hides whether a
thing is described ("A file"), made ("Return a row") or done ("Do one step"); as a number it stays in "One-layer"."""
QUAINT = re.compile(
    r"\b(?:as many|so many|at once|for ever|(?:goes|go|going|went) on(?! the right)|stands?(?!-)"
    r"|one behind the other|in silence|whoever|thereof|hitherto)\b",
    re.I,
)


def texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line, text, and whether it is a docstring (of a module, class, function or constant), of all that people read."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value, True
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.lineno, _joined(node.exc), False
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in SHOWN:
                    yield keyword.value.lineno, _joined(keyword.value), False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def _joined(node: ast.AST) -> str:
    parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return "".join(part for part in parts if isinstance(part, str))


def faults(source: str) -> list[str]:
    """List the faults of a module's texts, by line."""
    found = []
    for line, text, is_docstring in texts(source):
        opening = text.strip()
        if is_docstring and FRAGMENT.match(opening):
            found.append(f"{line}: a docstring begins with a verb or a noun: {opening[:60]!r}")
        if phrase := QUAINT.search(" ".join(text.split())):
            found.append(f"{line}: {phrase[0]!r} has a plainer word")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_texts_are_plain(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert len(paths) > 5
    wrong = [f"{path.relative_to(ROOT)}:{fault}" for path in paths for fault in faults(path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('"""Of the next update."""', "docstring"),
        ('class A:\n    """As `B`."""', "docstring"),
        ('def f():\n    """Those of a box."""', "docstring"),
        ('X = 1\n"""That of the step."""', "docstring"),
        ('"""What a rank holds."""', "docstring"),
        ('"""By how much it grows."""', "docstring"),
        ('def f():\n    r"""Whether it is due."""', "docstring"),
        ('class A:\n    """One file of a set."""', "docstring"),
        ('class A:\n    x = 1\n    """How many there are."""', "docstring"),
        ('"""Read the file.\n\n    The run goes\n    on without it.\n"""', "goes on"),
        ('f(help="Files (may " "stand several times).")', "stand"),
        ('Field(1, description=f"at most so {x} so many words")', "so many"),
        ('"""Asks all hosts at once."""', "at once"),
        ('raise DataError(f"{x}: rows one " "behind the other")', "one behind the other"),
        ("x = 1  # whoever reads it", "whoever"),
    ],
)
def test_a_planted_fault_is_found(source: str, said: str) -> None:
    assert said in "".join(faults(source))


@pytest.mark.parametrize("folder", ["capt/configs", "docs"])
def test_pages_are_plain(folder: str) -> None:
    """The comments of the shipped jobs, and every page but the log of experiments and the generated ones."""
    paths = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".yaml", ".md") and p.name != "log.md"]
    paths = [p for p in paths if not {"results", "benchmarks"} & set(p.parts)]
    assert len(paths) > 5
    lines = [(path, line) for path in [*paths, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
             for line in path.read_text().splitlines()]  # fmt: skip
    wrong = [f"{path.relative_to(ROOT)}: {line.strip()}" for path, line in lines if QUAINT.search(line)]
    assert not wrong, "\n".join(wrong)


def test_plain_texts_pass() -> None:
    assert faults('class A:\n    """One-layer encoder."""') == []
    assert faults('"""Offsets of the rows; a standard ongoing mask."""\nf(name="goes on", help="Ask all hosts.")') == []
    assert faults('"""Return whether it is due."""\nx = 1  # What is due.\nf(help="Which one.")') == []


def test_the_readme_is_a_front_page() -> None:
    """A screen says what it is and what comes out; the inventories are in the documentation."""
    text = (ROOT / "README.md").read_text()
    first = "\n".join(text.splitlines()[:30])
    assert "make quickstart" in first
    assert (picture := re.search(r"!\[[^]]+\]\(([^)]+\.svg)\)", first))
    assert (ROOT / picture[1]).is_file()
    assert len(text.splitlines()) <= 120
    assert not re.search(r"^## (?:Commands|What is guaranteed)", text, re.M)


@pytest.mark.parametrize(
    "page", ["reliability.md", *(f"results/{p.name}" for p in (ROOT / "docs/results").glob("*.md"))]
)
def test_pages_of_results_begin_with_what_was_found(page: str) -> None:
    """The first thirty lines say what was asked or promised, what was found, and what was not shown."""
    opening = "\n".join(Path(ROOT / "docs" / page).read_text().splitlines()[:30])
    for word in (r"\*\*(?:Asked|Promised):\*\*", r"\*\*Found\*\*", r"\*\*Not (?:shown|tested):\*\*"):
        assert re.search(word, opening), word


def test_the_changelog_is_in_order() -> None:
    """Each release has the sections of Keep a Changelog once, in order, and no bullet twice."""
    text = (ROOT / "CHANGELOG.md").read_text()
    order = ["Added", "Changed", "Fixed", "Removed", "Security"]
    releases = re.split(r"^## \[", text, flags=re.M)[1:]
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    assert any(release.startswith(version[1] + "] - ") for release in releases)
    for release in releases:
        sections = re.findall(r"^### (\w+)", release, re.M)
        assert sections == sorted(sections, key=order.index)
        assert len(set(sections)) == len(sections)
    bullets = re.findall(r"^- .*", text, re.M)
    assert sorted(set(bullets)) == sorted(bullets)
