"""``capt report``: what one run did, or how several compare, as an offline page, curves, a table and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pretrain.engine.report.compare import compare
from pretrain.engine.report.page import write_html, write_json, write_markdown
from pretrain.engine.report.plots import draw
from pretrain.engine.report.runs import read_run
from tokenizer.errors import DataError

__all__ = ["report"]


def report(runs: Sequence[Path], out: Path) -> Path:
    """Write ``report.html``, ``report.md``, ``report.json`` and the curves (PNG) of ``runs`` into ``out``.

    One run shows every curve it logged. Several are overlaid, named by the configuration keys in which they differ, and
    runs that differ only in ``run.seed`` are summed up as mean and standard deviation. The page holds its images and
    styles and needs no network. Returns the path of ``report.html``.

    Raises:
        DataError: no run is given, a folder or its metrics.jsonl or config.yaml is missing, or holds nothing usable.
    """
    if not runs:
        raise DataError("no run is given; name at least one run folder")
    comparison = compare([read_run(folder) for folder in runs])
    out.mkdir(parents=True, exist_ok=True)
    light, dark = (draw(comparison, theme) for theme in ("light", "dark"))
    for name, figure in light.items():
        (out / f"{name}.png").write_bytes(figure)
    write_json(comparison, out / "report.json")
    write_markdown(comparison, list(light), out / "report.md")
    return write_html(comparison, light, dark, out / "report.html")
