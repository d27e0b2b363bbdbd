"""The built pages: complete, true to the registries, and readable without a network."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from capt.launcher.backends import LAUNCHERS
from capt.launcher.sweep.config import Sweep
from capt.pretrain.config.contrast import TemperatureSection
from capt.pretrain.config.load import load_job
from capt.pretrain.config.schema import EngineSection, OptimizerSection
from capt.pretrain.contrast.kernels import KERNELS
from capt.pretrain.data.config import CORRUPTIONS
from capt.pretrain.data.formats import FORMATS
from capt.pretrain.models.architecture import ENCODERS
from capt.pretrain.pairs.representations import REPRESENTATIONS
from capt.pretrain.registry import CALLBACKS, job_class
from docs.hooks import sections
from tests.browser import CHROMIUM, Browser
from tests.documented import BLOCK, ROOT
from tests.unit.test_docs import BIN, OWN, SHIPPED

PUBLIC = (
    "base", "bottleneck", "config", "contrast", "contrastive", "convert", "data", "embeddings", "engine", "language",
    "latent", "models", "pairs", "plan", "regions", "reliability", "report", "retrieval", "vision_language",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages."""
    out = tmp_path_factory.mktemp("site")
    command = [str(BIN / "mkdocs"), "build", "--strict", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_site_has_every_key_and_every_command(site: Path) -> None:
    tables = "".join(page.read_text() for page in (site / "reference").glob("keys*/index.html"))
    leaves = {key for key in OWN if not any(other.startswith(f"{key}.") for other in OWN)} - {"schema_version"}
    assert {key for key in leaves if f"<code>{key}</code>" not in tables} == set()
    commands = (site / "reference" / "cli" / "index.html").read_text()
    assert 'id="capt-pretrain"' in commands
    assert 'id="capt-tokenizer-train"' in commands
    assert "--hostfile" in commands


def test_site_documents_the_public_functions(site: Path) -> None:
    text = (site / "reference" / "api" / "contrast" / "index.html").read_text()
    for name in ("capt_loss", "info_nce.info_nce", "ShardedQueue.enqueue", "inverted_triangle"):
        assert f'id="capt.pretrain.contrast.{name}"' in text, name
    assert ".. math::" not in text
    assert ":func:" not in text


_LOADS = re.compile(r"<(?:script|img|iframe|source|embed|object)[^>]*?\s(?:src|data|srcset)=[\"']?([^\"'\s>]+)")
_LINKS = re.compile(r"<link\b([^>]*)>")
_STYLES = re.compile(r"(?:@import\s+|url\()[\"']?([^\"')\s]+)")


def loaded(page: Path) -> Iterator[str]:
    """Links that a browser fetches itself when it opens a page or reads a style sheet."""
    text = page.read_text()
    yield from _STYLES.findall(text)
    if page.suffix == ".html":
        yield from _LOADS.findall(text)
        for link in _LINKS.findall(text):
            if "canonical" not in link:
                yield from re.findall(r"href=[\"']?([^\"'\s>]+)", link)


def test_site_needs_no_network(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 40
    remote = {(page.name, url) for page in pages for url in loaded(page) if re.match(r"(https?:)?//", url)}
    assert remote == set()


@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://cdn.example/x.js">',
        '<link rel="stylesheet" href="//fonts.example/x.css">',
        "<style>@import 'https://fonts.example/x.css';</style>",
    ],
)
def test_what_comes_from_the_network_is_noticed(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(text)
    assert any(re.match(r"(https?:)?//", url) for url in loaded(page))


def test_formulas_are_mathml(site: Path) -> None:
    text = (site / "contrast" / "index.html").read_text()
    shown = len(re.findall(r"^\$\$$", (ROOT / "docs/contrast.md").read_text(), re.M)) // 2
    assert text.count('display="block"') == shown >= 5
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert 'class="arithmatex"' not in text, page
        for formula in re.findall(r"<math.*?</math>", text, re.S):
            assert "\\" not in re.sub(r"<[^>]+>", "", formula), f"{page}: LaTeX that was not understood: {formula}"


@pytest.mark.parametrize("task", [*SHIPPED, "sweep"])
def test_every_key_has_a_meaning(task: str) -> None:
    job: Any = Sweep if task == "sweep" else job_class(task)
    silent = [
        f"{section}.{name}".strip(".")
        for section, model in [("", job), *sections(job)]
        for name, schema in model.model_json_schema(by_alias=True)["properties"].items()
        if "$ref" not in str(schema) and not schema.get("description")
    ]
    assert silent == []


def test_every_public_package_has_a_page() -> None:
    shown = {
        match
        for page in (ROOT / "docs/reference/api").glob("*.md")
        for match in re.findall(r"^::: ([\w.]+)", page.read_text(), re.M)
    }
    for package in ("tokenizer", "finetune", "launcher.sweep", *(f"pretrain.{room}" for room in PUBLIC)):
        assert any(f"{name}.".startswith(f"capt.{package}.") for name in shown), package
    for name in shown:
        assert not any(part.startswith("_") for part in name.split(".")), f"{name} is private"


def test_the_architecture_names_every_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    picture = (ROOT / "docs/architecture.svg").read_text()
    rooms = {path.parent.name for path in (ROOT / "capt/pretrain").glob("*/__init__.py")}
    assert rooms == set(PUBLIC), "a new room: add it to the page, the picture, and to PUBLIC"
    for room in rooms:
        assert f"`capt/pretrain/{room}/`" in page, room
    for room in {*rooms, "launcher", "finetune", "tokenizer", "registry"}:
        assert f">{room}</text>" in picture, room
    for method in _methods("capt/pretrain/engine/task.py", "Task") - {"__init__"}:
        assert f"`{method}(" in page, method


def _methods(file: str, name: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    (node,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {item.name for item in node.body if isinstance(item, ast.FunctionDef)}


def _choices(model: Any, field: str) -> set[str]:
    return set(get_args(model.model_fields[field].annotation))


REGISTRIES: Mapping[str, set[str]] = {
    "tasks": set(SHIPPED),
    "optimizers": _choices(OptimizerSection, "type"),
    "optimizer implementations": _choices(OptimizerSection, "backend"),
    "ZeRO stages": {str(stage) for stage in _choices(EngineSection, "zero_stage")},
    "temperatures": _choices(TemperatureSection, "type"),
    "kernels": set(KERNELS),
    "corruptions": set(CORRUPTIONS),
    "callbacks": set(CALLBACKS),
    "encoders": set(ENCODERS),
    "representations": set(REPRESENTATIONS),
    "table formats": set(FORMATS),
    "launchers": set(LAUNCHERS),
}


def test_contributing_lists_what_is_registered() -> None:
    text = BLOCK.sub("", (ROOT / "CONTRIBUTING.md").read_text())
    rows = dict(re.findall(r"^\| ([\w ]+) \| (.+?) \|", text, re.M))
    listed = {name: set(re.findall(r"`([^`]+)`", rows.get(name, ""))) for name in REGISTRIES}
    assert listed == REGISTRIES


def test_the_shipped_queues_are_those_of_the_jobs() -> None:
    """Queue, how many steps' rows it holds (both views of a batch), and the guard, as the page of training says.

    The jobs of pairs have no queue and are described on a page of their own.
    """
    page = (ROOT / "docs/guide/training.md").read_text()
    rows = re.findall(r"^\| (`capt_[^|]+) \| (\d+) \| ([\d.]+) \| (.+) \|$", page, re.M)
    told = {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    shipped = [
        path.stem
        for path in (ROOT / "capt/configs/pretrain").glob("capt_*.yaml")
        if path.stem not in ("capt_pairs", "capt_distil")
    ]
    assert sorted(told) == sorted(shipped)
    for name, (queue, steps, guard) in told.items():
        job: Any = load_job(
            name, ["model.init=x"] if name in ("capt_adapt", "capt_continue", "capt_text_continue") else []
        )
        section = job.contrast.model_dump(include={"queue_start", "drift", "queue_share", "queue_weight", "momentum"})
        unusual = {key: value for key, value in section.items() if value not in (0, None, "none")}
        named = {key: yaml.safe_load(value) for key, value in re.findall(r"`(\w+): (\w+)`", guard)}
        assert (job.contrast.queue, job.contrast.queue / (2 * job.batch.global_), unusual) == (
            int(queue),
            float(steps),
            named,
        ), name


def test_the_table_of_rates_has_those_of_the_shipped_jobs() -> None:
    page = (ROOT / "docs/guide/pairs.md").read_text()
    rows = re.findall(r"^\| .+? \| ([\d,]+) \| ([\d.e-]+) \| .*? \| .*?`(?:capt finetune )?(\w+)`", page, re.M)
    assert {name for _, _, name in rows} >= {"capt_pairs", "pairs_tiny", "pairs_weak", "pairs_hard", "mine"}
    for pairs, rate, name in rows:
        train = "data.train=x" if name == "mine" else "data.files=x"
        job = load_job(name, [train, "model.init=x"])
        assert (job.batch.global_, job.optimizer.lr) == (int(pairs.replace(",", "")), float(rate)), name


def test_the_figures_of_the_landing_page_are_those_of_the_benchmark() -> None:
    picture = (ROOT / "docs/speed.svg").read_text()
    record = json.loads((ROOT / "docs/benchmarks/step.json").read_text())
    rows = [row for row in record["result"]["rows"] if "same allocator" in row["name"]]
    told = [int(value.replace(",", "")) for value in re.findall(r'class="value"[^>]*>([\d,]+)<', picture)]
    assert told == [row[key] for row in rows for key in ("tokens/s of the Trainer", "tokens/s")]
    widths = [int(width) for width in re.findall(r'<rect class="(?:own|other)"[^>]* width="(\d+)"', picture)]
    assert widths == [round(value / max(told) * max(widths)) for value in told]
    assert re.findall(r"([\d.]+) times", picture) == [f"{row['value']:.2f}" for row in rows]
    assert record["date"] in picture
    page = (ROOT / "docs/index.md").read_text()
    for row in rows:
        assert f"{row['value']:.2f}" in page


FITS = """(() => {
  const page = document.documentElement;
  const cut = [...document.querySelectorAll('pre > code')].filter(code => code.scrollWidth > code.clientWidth + 1);
  const broken = [...document.querySelectorAll('td:first-child > code:only-child')].filter(code =>
    code.textContent.length < 32 && code.offsetHeight > 1.7 * parseFloat(getComputedStyle(code).lineHeight));
  return {page: page.scrollWidth - page.clientWidth, cut: cut.map(code => code.textContent.slice(0, 40)),
          broken: broken.map(code => code.textContent), columns: document.querySelector('pre > code')?.clientWidth};
})()"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)")
def test_no_page_cuts_code_or_breaks_keys(site: Path, tmp_path: Path) -> None:
    """At the width of a phone, a tablet and a desktop."""
    pages = [
        "",
        "quickstart",
        "reference/cli",
        "reference/keys",
        "reference/keys-capt_vl",
        "reliability",
        "results/glue",
    ]
    with Browser(tmp_path / "profile") as browser:
        for width in (390, 1024, 1440):
            browser.call("Emulation.setDeviceMetricsOverride",
                         width=width, height=900, deviceScaleFactor=1, mobile=width < 500)  # fmt: skip
            narrow = ["contrast", "guide/troubleshooting"] if width < 500 else []  # of the widest formula and key
            for page in pages + narrow:
                browser.open(site / page / "index.html")
                seen = browser.evaluate(FITS)
                where = f"{page or 'index'}, {width} px"
                assert seen["page"] <= 0, f"{where}: the page scrolls sideways"
                assert seen["cut"] == [], where
                assert seen["broken"] == [], where
