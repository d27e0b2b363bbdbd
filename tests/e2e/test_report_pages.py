"""The HTML reports in a real browser: no error, every picture drawn, readable on a phone, in light and in dark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capt.pretrain.report.write import report
from tests.browser import CHROMIUM, Browser
from tests.unit.report.test_report import rows, write_run
from tests.unit.report.test_sweep_report import a_sweep

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)")

PHONE, DESKTOP = 390, 1280

LOOK = """(async () => {
  document.querySelectorAll('details').forEach(element => element.open = true);
  const images = [...document.images];
  await Promise.all(images.map(image => image.decode().catch(() => null)));

  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = color => {  // any CSS colour, as the browser draws it
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const background = element => {
    for (; element; element = element.parentElement) {
      const color = rgba(getComputedStyle(element).backgroundColor);
      if (color[3] === 255) return color;
      if (color[3] !== 0) throw new Error('a background that is half transparent: ' + element.tagName);
    }
    throw new Error('no background');
  };
  const luminance = color => {
    const [r, g, b] = color.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const texts = [...document.body.querySelectorAll('*')].filter(element =>
    element.getClientRects().length && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  return {
    title: document.title,
    images: images.map(image => ({
      name: image.alt.replace('Curves: ', ''), natural: image.naturalWidth,
      shown: image.clientWidth, dark: image.currentSrc !== image.src})),
    width: document.documentElement.scrollWidth,
    paper: luminance(rgba(getComputedStyle(document.body).backgroundColor)),
    texts: texts.map(element => ({
      text: element.textContent.trim().slice(0, 40), size: parseFloat(getComputedStyle(element).fontSize),
      contrast: contrast(rgba(getComputedStyle(element).color), background(element))})),
  };
})()"""


def _one_run(folder: Path) -> list[Path]:
    return [write_run(folder / "run", status={"state": "failed"})]


def _compared_runs(folder: Path) -> list[Path]:
    """Labels, folders and notes of ordinary length, which is more than a phone shows in a line."""
    long = folder / "a_folder_of_runs_whose_name_has_no_place_where_a_browser_would_break_the_line"
    runs = [write_run(long / f"w{w}-s{s}", rows(60 + s), seed=s, weight=w) for w in (1.0, 0.0) for s in (1, 2)]
    (runs[0] / "status.json").unlink()
    return runs


def _two_sweeps(folder: Path) -> list[Path]:
    return [a_sweep(folder / "one"), a_sweep(folder / "two", shift=0.01)]


RUN_FIGURES = ["losses", "optimisation", "throughput", "validation"]
PAGES: dict[str, tuple[Callable[[Path], list[Path]], list[str]]] = {
    "one run": (_one_run, RUN_FIGURES),
    "compared runs": (_compared_runs, RUN_FIGURES),
    "sweeps": (_two_sweeps, ["curves", "hyperparameters"]),
}
"""The function that writes the folders of each report, and the pictures that its page has."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium") / "profile") as browser:
        yield browser


@pytest.mark.parametrize("name", PAGES)
def test_a_report_in_the_browser(name: str, browser: Browser, tmp_path: Path) -> None:
    write, figures = PAGES[name]
    page = report(write(tmp_path), tmp_path / "report")
    for width in (PHONE, DESKTOP):
        for scheme in ("light", "dark"):
            browser.call("Emulation.setDeviceMetricsOverride",
                         width=width, height=844, deviceScaleFactor=1, mobile=width == PHONE)  # fmt: skip
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            browser.open(page)
            seen = browser.evaluate(LOOK)
            where = f"{name}, {width} px, {scheme}"
            assert seen["title"], where
            assert [image["name"] for image in seen["images"]] == figures, where
            for image in seen["images"]:
                assert image["natural"] > 0, f"{where}: a picture is not drawn"
                assert image["dark"] == (scheme == "dark"), f"{where}: the picture of the other scheme"
                assert image["shown"] >= 0.6 * image["natural"], f"{where}: a picture too small to read"
            assert seen["width"] <= width, f"{where}: the page scrolls sideways, it is {seen['width']} px wide"
            assert (seen["paper"] < 0.5) == (scheme == "dark"), where
            assert len(seen["texts"]) > 10, where
            for text in seen["texts"]:
                assert text["contrast"] >= 4.5, f"{where}: {text}"
                assert text["size"] >= 12, f"{where}: {text}"
            assert _complaints(browser) == [], where


POINT = """(name => {
  for (const figure of document.querySelectorAll('figure')) {
    const panel = JSON.parse(figure.dataset.panels).find(panel => panel.title[1] === name);
    if (!panel) continue;
    const image = figure.querySelector('img');
    const [left, bottom, right, top] = panel.box;
    image.scrollIntoView({block: 'center'});
    figure.scrollLeft = (left + right) / 2 * image.width - innerWidth / 2;  // a picture may be wider than the window
    const frame = image.getBoundingClientRect();
    return {x: frame.left + (left + 0.5 * (right - left)) * frame.width,
            y: frame.top + (1 - (bottom + top) / 2) * frame.height};
  }
})"""


def test_the_pointer_shows_the_values_of_a_panel(browser: Browser, tmp_path: Path) -> None:
    page = report([write_run(tmp_path / f"s{seed}", seed=seed) for seed in (1, 2)], tmp_path / "report")
    for width in (PHONE, DESKTOP):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False)
        browser.open(page)
        place = browser.evaluate(f"{POINT}('loss/mlm')")
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        tip = browser.evaluate("[...document.querySelector('.tip').children].map(row => row.textContent)")
        assert tip[0].startswith("loss/mlm, optimizer step 3"), tip
        names = [f"s1 seed {seed}: training, average" for seed in (1, 2)]
        assert all(row.startswith(f"{name} 0.") for name, row in zip(names, tip[1::2], strict=True)), tip
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        assert browser.evaluate("document.querySelector('.tip')") is None
        assert _complaints(browser) == []


def _complaints(browser: Browser) -> list[str]:
    """Warnings and errors of the page in the console, its exceptions, and requests to any other place."""
    complaints = []
    for event in browser.events:
        kind, details = event["method"], event.get("params", {})
        if kind == "Runtime.exceptionThrown" or (kind == "Log.entryAdded" and details["entry"]["level"] != "info"):
            complaints.append(json.dumps(details))
        if kind == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            complaints.append(json.dumps(details["args"]))
        if kind == "Network.requestWillBeSent" and not details["request"]["url"].startswith(("file:", "data:")):
            complaints.append(details["request"]["url"][:300])
    return complaints


def test_the_look_finds_what_is_wrong(browser: Browser, tmp_path: Path) -> None:
    """On a page with a broken picture, pale text, a wide box and an exception."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><meta name='viewport' content='width=device-width'><body style='background: white'>"
        "<p style='color: #aaa'>pale</p><img src='data:image/png;base64,AAAA'><div style='width: 999px'>wide</div>"
        "<script>console.error('cry'); fetch('http://example.invalid/'); missing()</script>"
    )
    browser.call("Emulation.setDeviceMetricsOverride", width=PHONE, height=844, deviceScaleFactor=1, mobile=True)
    browser.open(page)
    seen = browser.evaluate(LOOK)
    assert seen["images"][0]["natural"] == 0
    assert seen["width"] > PHONE
    assert seen["texts"][0]["contrast"] == pytest.approx(2.32, abs=0.01)
    assert any("missing is not defined" in complaint for complaint in _complaints(browser))
    assert any("cry" in complaint for complaint in _complaints(browser))
    assert any(complaint.startswith("http://example") for complaint in _complaints(browser))
