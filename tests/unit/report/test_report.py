"""Reports: what is read from a run folder, how runs are named and summed up, and that the page needs no other file."""

from __future__ import annotations

import json
import math
import re
import statistics
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from capt.pretrain.base.errors import ConfigError, DataError
from capt.pretrain.config import flatten
from capt.pretrain.engine.judgement import direction
from capt.pretrain.report.compare import compare
from capt.pretrain.report.plots import figure_keys, smooth
from capt.pretrain.report.runs import read_run
from capt.pretrain.report.write import report


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "samples": 8 * step, "tokens": 64 * step, **values}


def rows(steps: int = 60, every: int = 20, shift: float = 0.0) -> list[dict[str, Any]]:
    out = []
    for step in range(1, steps + 1):
        loss = 5 / step + shift
        out.append(row(step, **{"loss": loss, "loss/mlm": loss, "lr": 1e-3, "tokens_per_second": 9e4 + step}))
        if step % every == 0:
            values = {"loss/mlm": loss + 0.1, "accuracy/mlm": 0.5 - loss / 20, "retrieval/to_corrupted": 0.9}
            out.append(row(step, split="validation", **values))
    return out


def write_run(
    folder: Path,
    lines: list[dict[str, Any]] | None = None,
    *,
    seed: int = 1,
    weight: float = 1.0,
    status: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir(parents=True)
    config = {
        "task": {"type": "capt_language"},
        "run": {"dir": str(folder), "seed": seed},
        "contrast": {"weight": weight, "temperature": {"type": "constant"}},
        "optimizer": {"betas": [0.9, 0.98]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "status.json").write_text(json.dumps(status or {"state": "done"}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines or rows()))
    return folder


SCRIPT = (files("capt.pretrain.report") / "page.js").read_text()


class Page(HTMLParser):
    """Collects what a page would load, its text, and checks that every tag is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.tags: list[str] = []
        self.script = ""
        self.feed(path.read_text())
        assert self.open == []
        assert self.script == SCRIPT

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("link", "iframe")
        assert tag != "script" or (not attrs and "script" not in self.tags), "only the page's own script"
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.script += data
        else:
            self.text += data


def test_one_run(tmp_path: Path) -> None:
    page_path = report([write_run(tmp_path / "run")], tmp_path / "out")
    assert page_path == tmp_path / "out/report.html"
    page = Page(page_path)
    assert len(page.loads) == 2 * 4
    assert all(load.startswith("data:image/png;base64,iVBOR") for load in page.loads)
    plain = re.sub("data:image/png;base64,[A-Za-z0-9+/=]+", "", page_path.read_text())
    assert not re.search(r"https?:|url\(|@import", plain)
    assert "accuracy/mlm ↑" in page.text
    assert "contrast.temperature.type" in page.text
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    figures = ["losses.png", "optimisation.png", "throughput.png", "validation.png"]
    assert names == sorted([*figures, "report.html", "report.json", "report.md"])
    for name in figures:
        png = (tmp_path / "out" / name).read_bytes()
        width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
        assert width > 600
        assert height > 200
    markdown = (tmp_path / "out/report.md").read_text()
    assert "![losses](losses.png)" in markdown
    found = json.loads((tmp_path / "out/report.json").read_text())
    (group,) = found["groups"]
    assert group["runs"][0]["status"] == {"state": "done"}
    assert group["validation"]["loss/mlm"]["final"]["mean"] == pytest.approx(5 / 60 + 0.1)
    assert group["validation"]["loss/mlm"]["best"]["steps"] == [60]


def evaluation(folder: Path, step: int, **metrics: float | None) -> None:
    poolers = {"cls": {"top1": 0.25}, "mean": {"top1": 0.75}}
    section = {"name": "held.txt, 15% masked", "protocol": "512 windows", "metrics": metrics, "poolers": poolers}
    content = {"checkpoint": "x", "versions": {}, "sections": [section]}
    (folder / f"evaluation-step-{step:08d}.json").write_text(json.dumps(content))


def test_what_evaluate_has_measured_is_in_the_report(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", weight=0.0)
    evaluation(one, 40, **{"loss/mlm": 2.5})
    evaluation(one, 60, **{"loss/mlm": 1.25, "accuracy/mlm": None})
    evaluation(two, 60, **{"loss/mlm": 1.5})
    own = {"checkpoint": "x", "words": 8, "word_similarity": {"RG-65": {"drop": 41.5, "zero": None}}, "mixed": True}
    (two / "evaluation-test.json").write_text(json.dumps(own))  # as other tasks write theirs
    (two / "evaluation-step-00000010.json").write_text('{"word_similarity": {}}')
    (two / "evaluation-validation.json").write_text('{"a":' * 950 + "1" + "}" * 950)
    (two / "evaluation-step-00000030.json").write_text('{"sections": [1]}')
    report([one, two], tmp_path / "out")
    markdown = (tmp_path / "out/report.md").read_text()
    assert "| held.txt, 15% masked | one, step-00000040 | one, step-00000060 | two, step-00000060 |" in markdown
    assert "| loss/mlm ↓ | 2.5 | 1.25 | 1.5 |" in markdown
    assert "| top1 (mean) ↑ | 0.75 | 0.75 | 0.75 |" in markdown
    assert "held.txt, 15% masked: 512 windows" in markdown
    assert "| figure | two, test |" in markdown
    assert "| word_similarity.RG-65.drop | 41.5 |" in markdown
    assert "| words | 8 |" in markdown
    assert "mixed" not in markdown
    for left_out in ("step-00000030", "validation"):
        assert f"evaluation-{left_out}.json is not what capt evaluate writes and was left out" in markdown
    (group, _) = json.loads((tmp_path / "out/report.json").read_text())["groups"]
    assert group["runs"][0]["evaluations"]["step-00000060"][0]["metrics"]["loss/mlm"] == 1.25


def test_every_run_has_its_own_figures_of_quantized_vectors_and_bm25_is_there_once(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, weight=weight) for name, weight in (("one", 1.0), ("two", 0.0))]
    for run, value in zip(runs, (0.25, 0.75), strict=True):
        systems = {"full": value + 0.125, "int8": value, "bm25": 0.5}
        poolers = {system: {"ndcg@10": figure} for system, figure in systems.items()}
        content = {"checkpoint": "x", "versions": {}, "sections": [{"name": "s", "protocol": "p", "poolers": poolers}]}
        (run / "evaluation-step-00000060.json").write_text(json.dumps(content))
    report(runs, tmp_path / "out")
    lines = (tmp_path / "out/report.md").read_text().splitlines()
    own = [f"| {run}, step-00000060{system} | {figure} |" for run, system, figure in (
        ("one", "", 0.375), ("one", ", int8", 0.25), ("two", "", 0.875), ("two", ", int8", 0.75),
    )]  # fmt: skip
    for start in [*own, "| bm25 | 0.5 |"]:
        assert sum(line.startswith(start) for line in lines) == 1, start


def test_runs_that_have_logged_nothing_are_named_and_left_out(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{i}") for i in range(3)]
    (runs[0] / "metrics.jsonl").write_text("")
    (runs[2] / "metrics.jsonl").unlink()
    page = Page(report(runs, tmp_path / "out"))
    assert page.text.count("left out: ") == 2
    assert f"left out: {runs[0] / 'metrics.jsonl'}: no line is" in page.text
    assert "Run run1" in page.text
    assert len(json.loads((tmp_path / "out/report.json").read_text())["left_out"]) == 2


def test_the_head_of_a_report_says_time_tokens_parameters_hardware_and_judgement(tmp_path: Path) -> None:
    lines = [line | {"seconds_per_step": 60.0} if "split" not in line else line for line in rows()]
    folder = write_run(tmp_path / "run", lines)
    for step, size in ((20, 3), (60, 5)):
        manifest = {
            "world_size": 2, "provenance": {"hardware": "a GPU"},
            "modules": {"model": {"shapes": {"a": [size, 10], "b": [7]}, "ties": {"c": "a"}}},
        }  # fmt: skip
        checkpoint = folder / f"checkpoints/step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    report([folder], tmp_path / "out")
    markdown = (tmp_path / "out/report.md").read_text()
    assert "| done | 3,840 | 1:00:00 | 57 | 2 ranks, a GPU |" in markdown
    assert "| run | learning | loss/mlm went from 0.35 at step 20 to 0.1833 at step 60 |" in markdown
    (checkpoint / "manifest.json").write_text('{"world_size": -1}')
    assert read_run(folder).notes == ["checkpoints/step-00000060/manifest.json is damaged and was left out"]


def test_the_points_of_the_curves_are_in_the_page(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"s{seed}", seed=seed) for seed in (1, 2)]
    page = report(folders, tmp_path / "out").read_text()
    figures = [json.loads(unescape(found)) for found in re.findall("data-panels='(.*?)'", page)]
    losses = next(panel for panels in figures for panel in panels if panel["title"][1] == "loss/mlm")
    names = [line["name"] for line in losses["lines"]]
    assert names == [f"s1 seed {s}: {kind}" for s in (1, 2) for kind in ("training, average", "validation")]
    assert losses["lines"][1]["points"] == [[s, float(f"{5 / s + 0.1:.6g}")] for s in (20, 40, 60)]
    left, bottom, right, top = losses["box"]
    assert 0 <= left < right <= 1
    assert 0 <= bottom < top <= 1


def test_several_runs_are_named_by_what_differs_and_summed_over_seeds(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"w{weight}-s{seed}", rows(shift=0.1 * seed - weight), seed=seed, weight=weight)
        for weight in (1.0, 0.0)
        for seed in (1, 2, 4)
    ]
    found = compare([read_run(folder) for folder in folders])
    assert [group.label for group in found.groups] == ["A: contrast.weight=1.0", "B: contrast.weight=0.0"]
    assert [group.seeds for group in found.groups] == [["1", "2", "4"]] * 2
    final = found.groups[0].final("loss/mlm")
    expected = [5 / 60 + 0.1 * seed - 1.0 + 0.1 for seed in (1, 2, 4)]
    assert final is not None
    assert final.values == pytest.approx(expected)
    assert (final.mean, final.std) == pytest.approx((statistics.fmean(expected), statistics.stdev(expected)))
    report(folders, tmp_path / "out")
    markdown = (tmp_path / "out/report.md").read_text()
    assert "| contrast.weight | 1.0 | 0.0 |" in markdown
    assert f"{statistics.fmean(expected):.2f} ± {statistics.stdev(expected):.2f}" in markdown


def test_a_seed_that_was_stopped_and_resumed_is_one_more_seed(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"s{seed}", seed=seed) for seed in (1, 2, 3)]
    config = yaml.safe_load((folders[1] / "config.yaml").read_text())
    config |= {"schedule": {"stop_after": 30}, "checkpoint": {"every": 10, "keep": 9}}
    config["run"] |= {"log_every": 7, "threads": 4, "resume": "auto", "ledger": False}
    config["supervise"] = {"restarts": 7}
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(config))
    (group,) = compare([read_run(folder) for folder in folders]).groups
    assert group.seeds == ["1", "2", "3"]
    config["optimizer"]["lr"] = 0.1
    (folders[1] / "config.yaml").write_text(yaml.safe_dump(config))
    assert compare([read_run(folder) for folder in folders]).differing == ["optimizer.lr"]


def test_runs_that_differ_in_many_keys_are_named_by_their_folders(tmp_path: Path) -> None:
    """Runs of several tasks share few keys: a label of all would fill the page."""
    folders = [write_run(tmp_path / name) for name in ("text", "pairs")]
    config = yaml.safe_load((folders[1] / "config.yaml").read_text())
    for count, label in ((8, "B: key0=0, "), (9, "B: pairs")):
        (folders[1] / "config.yaml").write_text(yaml.safe_dump(config | {f"key{n}": n for n in range(count)}))
        found = compare([read_run(folder) for folder in folders])
        assert len(found.differing) == count
        assert found.groups[1].label.startswith(label)
    report(folders, tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    assert "The 9 keys that differ" in page
    assert "A: text" in page


def test_best_follows_the_direction_of_the_metric(tmp_path: Path) -> None:
    lines = [
        row(step, split="validation", **{"loss/mlm": loss, "accuracy/mlm": accuracy, "odd": 1.0})
        for step, loss, accuracy in ((10, 3.0, 0.2), (20, 1.0, 0.7), (30, 2.0, 0.6), (40, math.nan, math.nan))
    ]
    (group,) = compare([read_run(write_run(tmp_path / "run", lines))]).groups
    for metric, best in (("loss/mlm", 1.0), ("accuracy/mlm", 0.7)):
        summary = group.best(metric)
        assert summary is not None
        assert (summary.values, summary.steps) == ([best], [20])
    final = group.final("loss/mlm")
    assert final is not None
    assert (final.values, final.steps, final.std) == ([2.0], [30], None)
    assert group.best("odd") is None
    assert group.final("absent") is None


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("loss/capt_fixed", -1),
        ("uniformity", -1),
        ("contrast/first_direction", -1),
        ("noise/cls/0.15/drift", -1),
        ("noise/cls/0.15/centred_gap", 1),
        ("noise/mean/0.3/top1", 1),
        ("retrieval/to_original", 1),
        ("sts/dev/spearman", 1),
        ("temperature", 0),
        ("glossary", 0),
        ("nelbo_iw", -1),
        ("ppl_dual", 0),
    ],
)
def test_direction(name: str, way: int) -> None:
    assert direction(name) == way


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows(6))
    whole = read_run(folder)
    assert whole.notes == []
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 0.')
    torn = read_run(folder)
    assert torn.training == whole.training
    assert torn.notes == ["the last line of metrics.jsonl (line 7) is torn and was left out: killed while writing?"]
    assert "is torn" in Page(report([folder], tmp_path / "out")).text
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(row(7, loss=0.5)) + "\n")
    damaged = read_run(folder)
    assert damaged.series("loss", validation=False)[0] == [1, 2, 3, 4, 5, 6, 7]
    assert damaged.notes == ["damaged lines of metrics.jsonl were left out: 7"]


def test_the_last_of_several_resumes_wins(tmp_path: Path) -> None:
    lines = [row(step, loss=1.0) for step in (1, 2, 3, 4)]
    lines += [row(4, split="validation", accuracy=0.1), row(5, loss=1.0)]
    assert read_run(write_run(tmp_path / "straight", lines)).notes == []
    resumed = [row(step, loss=2.0) for step in (3, 4)] + [row(4, split="validation", accuracy=0.2)]
    again = [row(4, loss=3.0), row(4, split="validation", accuracy=0.3)]
    run = read_run(write_run(tmp_path / "run", lines + resumed + again))
    assert run.series("loss", validation=False) == ([1, 2, 3, 4], [1.0, 1.0, 2.0, 3.0])
    assert run.series("accuracy", validation=True) == ([4], [0.3])
    assert run.last_step == 4
    (note,) = run.notes
    assert note.startswith("6 rows were logged again")


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run is given"):
        report([], tmp_path / "out")
    with pytest.raises(DataError, match="nowhere: no such run folder"):
        report([tmp_path / "nowhere"], tmp_path / "out")
    folder = write_run(tmp_path / "run")
    (folder / "config.yaml").write_text("run: [")
    with pytest.raises(ConfigError, match=r"config\.yaml: not valid YAML"):
        read_run(folder)
    (folder / "config.yaml").unlink()
    with pytest.raises(DataError, match=r"config\.yaml: no such file"):
        read_run(folder)
    folder = write_run(tmp_path / "other")
    for content in ("", "\n", "not json\n", "[1]\n", '{"loss": 1}\n'):
        (folder / "metrics.jsonl").write_text(content)
        with pytest.raises(DataError, match=r"metrics\.jsonl: no line is a JSON object with a step"):
            report([folder], tmp_path / "out")
        with pytest.raises(DataError, match=r"metrics\.jsonl: no line is a JSON object with a step"):
            report([folder, folder], tmp_path / "out")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match=r"metrics\.jsonl: no such file"):
        read_run(folder)
    assert not (tmp_path / "out").exists()


def test_status_is_optional_but_missed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "status.json").write_text('{"state": ')
    assert read_run(folder).notes == ["status.json is damaged and was left out"]
    (folder / "status.json").unlink()
    assert read_run(folder).notes == ["no status.json: the run does not say how it ended"]


def test_values_that_are_not_finite_are_drawn_around_and_said(tmp_path: Path) -> None:
    lines = rows(50)
    lines[30]["loss"] = math.nan
    lines[31]["loss"] = math.inf
    folder = write_run(tmp_path / "run", lines)
    assert read_run(folder).notes == ["values that are not finite were logged for loss"]
    report([folder], tmp_path / "out")


def test_text_from_outside_is_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    lines = [row(step, **{hostile: 1.0, "$\\frac{": 2.0, "'\" onload='x": 1.0}) for step in (1, 2)]
    lines += [row(2, split="validation", **{f"{hostile}/{name}": 1.0 for name in "abcd"})]
    folder = write_run(tmp_path / "a&b <script>", lines, status={"state": "<b>done"})
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {hostile: hostile}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    page = Page(report([folder], tmp_path / "out"))  # it asserts that no such tag is there
    assert "a&b <script>" in page.text
    assert hostile in page.text
    assert "<b>done" not in page.text, "no state of a run"
    assert "<" not in (tmp_path / "out" / "report.md").read_text(), "Markdown takes HTML as it stands"


def test_runs_of_different_length_and_metrics_are_compared_with_a_warning(tmp_path: Path) -> None:
    long, short = write_run(tmp_path / "long", rows(60)), write_run(tmp_path / "short", rows(20), weight=0.0)
    page = Page(report([long, short], tmp_path / "out"))
    assert "the runs end at different steps (20, 60)" in page.text


def test_metrics_without_validation_and_with_one_point(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [row(1, loss=2.0)])
    report([folder], tmp_path / "out")
    assert (tmp_path / "out/losses.png").exists()
    assert not (tmp_path / "out/validation.png").exists()
    assert "## Validation" not in (tmp_path / "out/report.md").read_text()


def test_sections_give_families_of_metrics_their_own_figure(tmp_path: Path) -> None:
    lines = [line | {"accuracy/mlm": 0.1, "validation_samples": 64} for line in rows(20)]
    lines[-1] |= {f"noise/cls/0.15/{name}": 0.5 for name in ("cosine_gap", "centred_gap", "drift", "top1")}
    lines[-1] |= {"degenerate": 0.0, "baseline": 0.5, "recall/to_document/error": 0.03}  # no curves
    found = figure_keys(compare([read_run(write_run(tmp_path / "run", lines))]))
    assert found == {
        "losses": ["loss/mlm"],  # the same numbers as loss
        "optimisation": ["lr"],
        "throughput": ["tokens_per_second"],
        "validation": ["accuracy/mlm", "retrieval/to_corrupted"],
        "validation-noise": [f"noise/cls/0.15/{name}" for name in ("cosine_gap", "centred_gap", "drift", "top1")],
    }


def test_smoothing_keeps_lines_and_does_not_lag() -> None:
    line = [2.0 * i for i in range(200)]
    assert smooth(line)[5:-5] == pytest.approx(line[5:-5])
    noisy = [1.0 if i % 2 else -1.0 for i in range(400)]
    assert max(abs(value) for value in smooth(noisy)) <= 1 / 11
    with_gap = [1.0] * 60 + [math.nan] * 10 + [1.0] * 60
    assert smooth(with_gap)[:64] == pytest.approx([1.0] * 63 + [math.nan], nan_ok=True)


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": [1, 2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [1, 2], "e": {}}
