from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.data.docstrings import docstring_file, prose, python_folders
from examples.quickstart.own_structure import write_pairs

NUMPY = """
    Return the union of the indexes that are given by the user.

    The behavior of ``sort`` is not :class:`~pandas.Index` consistent, and the
    result may therefore depend on the order of the arguments.

    Parameters
    ----------
    indexes : list of Index or list objects
        When intersect is true, the function does not accept a list
        of lists as one of its arguments.
    sort : bool

    >>> union(a, b)  # the union of the indexes a and b in the order of a
    Index([1, 2])

    Examples::

        result = union(first, second)
        for item in result: print(item)

    * the first point of a list which is long enough to be
      a sentence of its own
    * short point
"""

GOOGLE = """
    Run part of the model from the start node to the end node.

    Args:
        start: The name of the node which is the first node of the submodule
            we want to run.
        end (str): The name of the node which is the last node of the submodule that we want.
    Returns:
        `List[int]`: A list of integers in the range [0, 1].
"""


def test_prose_of_a_numpy_docstring() -> None:
    assert list(prose(NUMPY)) == [
        "Return the union of the indexes that are given by the user.",
        "The behavior of sort is not pandas.Index consistent, and the result may therefore depend on the order of the"
        " arguments.",
        "When intersect is true, the function does not accept a list of lists as one of its arguments.",
        "the first point of a list which is long enough to be a sentence of its own",
    ]


def test_prose_of_a_google_docstring() -> None:
    assert list(prose(GOOGLE)) == [
        "Run part of the model from the start node to the end node.",
        "The name of the node which is the first node of the submodule we want to run.",
        "The name of the node which is the last node of the submodule that we want.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Too short to keep.",
        "x = f(a, b); y = g(x) for x in range(10)",
        "eins zwei drei vier sechs sieben acht neun zehn",
        "| a | table | of | the | words | in | it | is |",
    ],
)
def test_what_is_not_english_prose_is_left_out(text: str) -> None:
    assert list(prose(text)) == []


def install(folder: Path) -> Path:
    """A site-packages with two packages, a vendored copy, a broken file and tests."""
    sentence = "This is the {} of the {} and it is long enough to be kept by the filter."
    files = {
        "b/__init__.py": f'"""{sentence.format("module", "package b")}"""\n',
        "a/core.py": f'class A:\n    """{sentence.format("class", "module a")}"""\n\n    def f(self):\n'
        f'        """{sentence.format("method", "class A")}"""\n\n        def inner():\n'
        f'            """{sentence.format("inner function", "method")}"""\n',
        "z/vendored.py": f'"""{sentence.format("module", "package b")}"""\n',
        "b/broken.py": f'"""{sentence.format("module", "broken package")}"""\ndef (:\n',
        "b/latin1.py": f'"""{sentence.format("module", "old package")} caf\xe9"""\n',
        "b/tests/test_b.py": f'"""{sentence.format("test", "package b")}"""\n',
        "b/escape.py": f'"""{sentence.format("module", "regular expressions")}"""\nx = "\\d"\n',
    }
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source, encoding="latin-1")
    return folder


def test_documents_are_modules_in_a_fixed_order_without_repetition(tmp_path: Path) -> None:
    folder = install(tmp_path / "site")
    seen: list[tuple[int, int]] = []
    path = docstring_file(tmp_path / "cache", 1, [folder], progress=lambda done, total: seen.append((done, total)))
    sentence = "This is the {} of the {} and it is long enough to be kept by the filter."
    documents = [
        [("class", "module a"), ("method", "class A"), ("inner function", "method")],
        [("module", "package b")],
        [("module", "regular expressions")],
    ]
    expected = ["".join(sentence.format(*names) + "\n" for names in document) + "\n" for document in documents]
    assert path.read_text() == "".join(expected)
    assert seen == [(6, 6)]
    assert list((tmp_path / "cache").iterdir()) == [path]


def test_file_is_made_once_for_a_set_of_sources(tmp_path: Path) -> None:
    folder = install(tmp_path / "site")
    path = docstring_file(tmp_path / "cache", 1, [folder])
    path.write_text("marked")
    assert docstring_file(tmp_path / "cache", 1, [folder]).read_text() == "marked"
    with (folder / "a" / "core.py").open("a") as source:
        source.write("\n")
    assert docstring_file(tmp_path / "cache", 1, [folder]) != path


def test_result_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    folder = Path(json.__file__).parent.parent / "email"
    one, two = (docstring_file(tmp_path / str(n), n, [folder]) for n in (1, 2))
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_size > 10_000


def test_packages_outside_of_site_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in ``.pth`` files, and the finders that setuptools writes for an editable install, lead to packages."""
    site, info = tmp_path / "site", tmp_path / "site" / "c-1.dist-info"
    for folder in (info, site / "inner", tmp_path / "a", tmp_path / "b" / "deeper", tmp_path / "c"):
        folder.mkdir(parents=True)
    (site / "a.pth").write_text(f"# {tmp_path}\nimport os; os.sep\n\n{tmp_path / 'a'}  \ninner\n../b\nnowhere\n")
    (site / "b.pth").write_text(f"{tmp_path / 'b' / 'deeper'}\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: c\nVersion: 1\n")
    (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    (info / "top_level.txt").write_text("editable_c\nnot-a-name\nnowhere_at_all\n")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name != "editable_c":
                return None
            return spec_from_file_location(
                name, tmp_path / "c/__init__.py", submodule_search_locations=[f"{tmp_path}/c"]
            )

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path if name == "x" else site))
    found = [path for path in python_folders() if tmp_path in path.parents]
    assert found == [*(tmp_path / name for name in "abc"), site]


def test_folder_without_docstrings(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    with pytest.raises(DataError, match="no docstrings in 0 Python files"):
        docstring_file(tmp_path / "cache", 1, [tmp_path / "site"])
    assert list((tmp_path / "cache").iterdir()) == []


def test_real_english_dominates(tmp_path: Path) -> None:
    """The commonest words in the standard library's docstrings are those of English, at English rates."""
    library = Path(json.__file__).parent.parent
    path = docstring_file(tmp_path, 1, [library / name for name in ("asyncio", "email", "unittest", "http")])
    words = path.read_text().lower().split()
    assert len(words) > 10_000
    assert 0.05 < words.count("the") / len(words) < 0.12
    assert sum(words.count(w) for w in ("a", "and", "in", "is", "of", "to")) / len(words) > 0.1
    assert (
        sum(word.strip(".,;:!?()'\"").replace("-", "").replace("'", "").isalpha() for word in words) / len(words) > 0.93
    )


def test_control_characters_do_not_reach_the_corpus(tmp_path: Path) -> None:
    """A docstring may hold an escaped NUL or a lone surrogate; the text file made of them may not."""
    source = tmp_path / "source"
    source.mkdir()
    plain = "This is the first line of a text that is read by the people who use it."
    (source / "a.py").write_text(
        f'"""{plain}"""\ndef f():\n    """It ends with the \\0 of the file that is in the way."""\n'
    )
    (source / "b.py").write_text('def g():\n    """It is the half of a pair \\ud800 that has no end in the file."""\n')
    text = docstring_file(tmp_path / "cache", 1, [source]).read_bytes()
    assert plain.encode() in text
    assert b"\0" not in text
    assert b"half of a pair" not in text


def test_pairs_are_what_a_public_function_does_and_its_signature(tmp_path: Path) -> None:
    """With its module and the names of its arguments, but not the object of a method; tests and what is private are
    left out, and so are paragraphs in which the functions' own names alone tell them apart."""
    says = "Return the {} of the list that is given by the user."

    def function(name: str, arguments: str, what: str) -> str:
        return f'def {name}({arguments}):\n    """{says.format(what)}\n\n    :param rows: x"""\n'

    method = function("mean", "self, rows: list = ()", "average").replace("\n", "\n    ").rstrip()
    files = {
        "module.py": f"class Table:\n    {method}\n\nclass _Table:\n    {method.replace('average', 'mode')}\n"
        + function("total", "rows, /, *args, start=0, **more", "sum")
        + function("_hidden", "x", "end")
        + function("first", "x", "copy")
        + function("second", "x", "copy")
        + function("Ant", "x", "Ant")
        + function("Bee", "x", "Bee"),
        "package/__init__.py": "async " + function("length", "", "count"),
        "package/_private.py": function("size", "", "size"),
        "package/idle_test/module.py": function("shape", "", "shape"),
        "test_module.py": function("order", "", "order"),
        "broken.py": '"""not Python""" (',
    }
    for name, text in files.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text)
    assert write_pairs(tmp_path / "out", [tmp_path / "code"], workers=1) == 3
    rows = [json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()]
    assert rows == [
        {"query": says.format("average"), "pos": ["module.Table.mean(rows)"]},
        {"query": says.format("sum"), "pos": ["module.total(rows, *args, start, **more)"]},
        {"query": says.format("count"), "pos": ["package.length()"]},
    ]


def test_files_without_a_described_function_are_refused(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = 1\n")
    with pytest.raises(DataError, match="no function in 1 Python files has a docstring"):
        write_pairs(tmp_path / "out", [tmp_path], workers=1)
