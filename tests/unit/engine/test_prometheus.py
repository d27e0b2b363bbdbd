"""The figures of a run as a Prometheus server asks for them."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.engine import heartbeat
from capt.pretrain.engine.callbacks.trackers import Prometheus
from capt.pretrain.engine.loop import Run
from capt.pretrain.engine.task import Progress
from capt.pretrain.registry import callback_class

SECTION = r"# TYPE capt_section_seconds gauge\ncapt_section_seconds\{{section=\"{}\"\}} \d+\.\d{{3}}\n"
ROOT = Path(__file__).parents[3]
RUN = object.__new__(Run)  # of which the callback sees the step alone
RUN.progress = Progress(step=7)


@pytest.fixture
def served() -> Iterator[tuple[Prometheus, str]]:
    callback = callback_class("prometheus")(port=0)
    callback.on_start(RUN)
    assert callback._server is not None
    host, port = callback._server.server_address[:2]
    assert host == "127.0.0.1", "other hosts are not let in unless the job says so"
    yield callback, f"http://{host}:{port}"
    callback.close(RUN)


def _get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def test_the_newest_numbers_of_each_row_are_served(served: tuple[Prometheus, str]) -> None:
    callback, address = served
    heartbeat.enter("data")
    assert re.fullmatch(SECTION.format("data"), _get(f"{address}/metrics")), "nothing else before the first row"
    callback.on_metrics(RUN, {"loss/mlm": 2.0, "tokens_per_second": 10}, None)
    callback.on_metrics(RUN, {"loss/mlm": 1.5, "grad_norm": float("inf"), "x": float("nan")}, None)
    callback.on_metrics(RUN, {"loss/mlm": 1.75}, "validation")
    *rows, _, section = _get(f"{address}/metrics").splitlines()
    assert section.startswith("capt_section_seconds{")
    assert rows == [
        "# TYPE capt_grad_norm gauge", "capt_grad_norm Inf",
        "# TYPE capt_loss_mlm gauge", "capt_loss_mlm 1.5", 'capt_loss_mlm{split="validation"} 1.75',
        "# TYPE capt_step gauge", "capt_step 7.0",
        "# TYPE capt_tokens_per_second gauge", "capt_tokens_per_second 10.0",
        "# TYPE capt_x gauge", "capt_x NaN",
    ]  # fmt: skip
    with pytest.raises(urllib.error.HTTPError, match="404"):
        _get(f"{address}/other")


def test_a_run_that_hangs_is_seen_by_the_age_of_its_section(
    served: tuple[Prometheus, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat.enter("step")
    at = time.monotonic()
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: at + 120.0)
    assert re.search(r'capt_section_seconds\{section="step"\} 1(19|20)\.\d+', served[0].text())


def test_the_grafana_board_asks_for_figures_that_there_are() -> None:
    """The figures are the metrics on the page of the run folder, under the names that the endpoint gives them."""
    page = (ROOT / "docs/reference/run.md").read_text()
    callback = Prometheus()
    listed = {name for cell in re.findall(r"^\| (`.*?) \|", page, re.M) for name in re.findall(r"`([\w/]+)`", cell)}
    callback.on_metrics(RUN, dict.fromkeys(listed, 0.0), None)
    served = set(re.findall(r"^(capt_\w+)[{ ]", callback.text(), re.M))
    board = json.loads((ROOT / "docker/kubernetes/grafana.json").read_text())
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    named = set(re.findall(r"\bcapt_\w+", asked))
    assert {"capt_step", "capt_loss", "capt_tokens_per_second", "capt_section_seconds"} <= named <= served


def test_a_port_that_is_taken_is_named_and_the_server_ends_with_the_run(served: tuple[Prometheus, str]) -> None:
    callback, address = served
    port = int(address.rpartition(":")[2])
    resumed = callback_class("prometheus")(port=port)
    resumed.on_resume(RUN, newest=True)
    resumed.on_start(RUN)  # a warning: the run is worth more than its figures
    resumed.close(RUN)
    with pytest.raises(ConfigError, match=rf"run\.callbacks\.prometheus: 127\.0\.0\.1:{port} .* choose another port"):
        Prometheus(port=port).on_start(RUN)
    callback.close(RUN)
    with pytest.raises(urllib.error.URLError):
        _get(f"{address}/metrics")
