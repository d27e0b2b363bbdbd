import json
from pathlib import Path

import pytest

from capt.launcher.bench import find_benchmarks, run_benchmarks
from capt.pretrain.base.errors import ConfigError

GOOD = '''"""Speed of nothing.

More text.
"""
print("chatter")
print('{"rows": [{"size": 1, "seconds": 0.123456}, {"size": 2, "note": "a|b"}], "bound": 0.5}')
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "tests" / "benchmarks"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "bench_good.py").write_text(GOOD)
    (folder / "bench_bad.py").write_text('"""A miss."""\nprint("too slow")\nraise SystemExit(1)\n')
    return tmp_path


def test_results_stand_with_what_they_were_measured_on(checkout: Path) -> None:
    out = checkout / "docs"
    assert run_benchmarks(find_benchmarks(["good"], checkout), out) == 0
    record = json.loads((out / "good.json").read_text())
    assert record["result"]["rows"][0] == {"size": 1, "seconds": 0.123456}
    assert record["versions"]["torch"]
    page = (out / "good.md").read_text()
    assert page.startswith("# Speed of nothing\n")
    assert "`python -m tests.benchmarks.bench_good`" in page
    assert "| size | seconds | note |\n| --- | --- | --- |\n| 1 | 0.1235 |  |\n| 2 |  | a\\|b |\n" in page
    assert "- bound: 0.5" in page
    assert "GiB" in page


def test_a_missed_bound_is_a_failure_and_its_output_is_kept(checkout: Path) -> None:
    assert run_benchmarks(find_benchmarks([], checkout), checkout / "docs") == 1
    assert "too slow" in (checkout / "docs" / "bad.md").read_text()
    assert (checkout / "docs" / "good.md").is_file()


def test_a_failure_without_a_result_leaves_the_page_of_another_machine(
    checkout: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An example is `capt bench gpu` without a GPU."""
    out, path = checkout / "docs", checkout / "tests/benchmarks/bench_card.py"
    path.write_text("print('{\"ms\": 1}')\n")
    assert run_benchmarks(find_benchmarks(["card"], checkout), out) == 0
    kept = (out / "card.md").read_bytes(), (out / "card.json").read_bytes()
    path.write_text('print("a warning")\nraise SystemExit(1)\n')
    assert run_benchmarks(find_benchmarks(["card"], checkout), out) == 1
    assert ((out / "card.md").read_bytes(), (out / "card.json").read_bytes()) == kept
    assert f"card: exit code 1 and no result; {out / 'card.md'} stays as it is" in caplog.text


def test_unknown_names_and_missing_checkouts_are_refused(checkout: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'good'"):
        find_benchmarks(["god"], checkout)
    with pytest.raises(ConfigError, match="source checkout"):
        find_benchmarks([], checkout / "docs")


def test_options_reach_the_one_benchmark_that_is_named(checkout: Path) -> None:
    (checkout / "tests/benchmarks/bench_said.py").write_text(
        'import json, sys\nprint(json.dumps({"said": " ".join(sys.argv[1:])}))\n'
    )
    out, options = checkout / "docs", ["--files", "my text.txt"]
    assert run_benchmarks(find_benchmarks(["said"], checkout), out, options) == 0
    record = json.loads((out / "said.json").read_text())
    assert record["result"] == {"said": "--files my text.txt"}
    assert record["command"] == "python -m tests.benchmarks.bench_said --files 'my text.txt'"
    with pytest.raises(ConfigError, match="exactly one"):
        run_benchmarks(find_benchmarks([], checkout), out, options)


def test_a_benchmark_may_say_more_than_one_table(checkout: Path) -> None:
    sections = [{"title": "First", "text": "Words.", "rows": [{"a": 1}]}, {"title": "Last", "text": "- more"}]
    result = {"sections": sections, "bound": 2}
    (checkout / "tests/benchmarks/bench_told.py").write_text(f"import json\nprint(json.dumps({result!r}))\n")
    out = checkout / "docs"
    assert run_benchmarks(find_benchmarks(["told"], checkout), out) == 0
    page = (out / "told.md").read_text()
    assert page.endswith("\n## First\n\nWords.\n\n| a |\n| --- |\n| 1 |\n\n## Last\n\n- more\n\n- bound: 2\n")
