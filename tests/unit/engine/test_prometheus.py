"""The figures of a run as a Prometheus server asks for them."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.engine.callbacks.prometheus import Prometheus
from capt.pretrain.engine.loop import Run
from capt.pretrain.engine.task import Progress
from capt.pretrain.registry import callback_class

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
    assert _get(f"{address}/metrics") == "", "nothing before the first row"
    callback.on_metrics(RUN, {"loss/mlm": 2.0, "tokens_per_second": 10}, None)
    callback.on_metrics(RUN, {"loss/mlm": 1.5, "grad_norm": float("inf"), "x": float("nan")}, None)
    callback.on_metrics(RUN, {"loss/mlm": 1.75}, "validation")
    assert _get(f"{address}/metrics").splitlines() == [
        "# TYPE capt_grad_norm gauge", "capt_grad_norm Inf",
        "# TYPE capt_loss_mlm gauge", "capt_loss_mlm 1.5", 'capt_loss_mlm{split="validation"} 1.75',
        "# TYPE capt_step gauge", "capt_step 7.0",
        "# TYPE capt_tokens_per_second gauge", "capt_tokens_per_second 10.0",
        "# TYPE capt_x gauge", "capt_x NaN",
    ]  # fmt: skip
    with pytest.raises(urllib.error.HTTPError, match="404"):
        _get(f"{address}/other")


def test_a_port_that_is_taken_is_named_and_the_server_ends_with_the_run(served: tuple[Prometheus, str]) -> None:
    callback, address = served
    port = int(address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"run\.callbacks\.prometheus: 127\.0\.0\.1:{port} .* choose another port"):
        Prometheus(port=port).on_start(RUN)
    callback.close(RUN)
    with pytest.raises(urllib.error.URLError):
        _get(f"{address}/metrics")
