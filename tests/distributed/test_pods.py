"""A rendered job on pods that are processes of this machine: it trains, loses pods, shrinks, grows, and is done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import yaml

from capt.launcher.plan import Options
from capt.launcher.start import begin
from tests.kubernetes import Kubelet
from tests.runs import losses, step
from tests.small_job import ROOT, write_job
from tests.support import free_port, run_capt

pytestmark = pytest.mark.timeout(240)

CLUSTER = {"image": "capt", "pods": 2, "volumes": [{"claim": "shared", "mount": "/work"}]}
STEPS = 120
PACE = """
import time
from pathlib import Path
from capt.pretrain.engine.loop import Callback

class Pace(Callback):
    def before_step(self, run):
        if Path("slow").exists():
            time.sleep(0.2)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The volume of the pods, with a text and a job; the callback ``pace`` makes steps slow while there is a file."""
    packages = tmp_path / "packages"
    (packages / "pace-1.dist-info").mkdir(parents=True)
    (packages / "pace.py").write_text(PACE)
    (packages / "pace-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: pace\nVersion: 1\n")
    (packages / "pace-1.dist-info" / "entry_points.txt").write_text("[capt.callbacks]\npace = pace:Pace\n")
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    monkeypatch.chdir(tmp_path)
    return write_job(
        tmp_path / "work",
        schedule={"max_steps": STEPS, "warmup_steps": 2},
        checkpoint={"every": 5},
        supervise={"on_lost_node": "shrink", "wait_minutes": 0.15},
    )


def kubelet(folder: Path, *overrides: str) -> Kubelet:
    """The rendered job, about to be started."""
    texts: list[str] = []
    options = Options.given(launcher="kubernetes", cluster=Path("cluster.yaml"))
    job = str(folder / "job.yaml")
    assert begin("capt.pretrain", job, ["run.dir=runs/r", *overrides], options, debug=False, show=texts.append) == 0
    objects = list(yaml.safe_load_all(texts[0]))
    path = f"{ROOT}:{folder.parent / 'packages'}"
    return Kubelet(objects, folder, folder.parent / "node", free_port(together=2), path=path)


@contextmanager
def running(node: Kubelet) -> Iterator[Callable[[], str]]:
    """The pods in the background; what is called waits for the verdict."""
    with ThreadPoolExecutor(1) as pool, closing(node):
        verdict = pool.submit(node.run, until=150)
        try:
            yield verdict.result
        except BaseException:
            print(*(node.log(index)[-5000:] for index in (0, 1)), sep="\n----\n")  # noqa: T201
            raise
        finally:
            node.stop = True


def wait(node: Kubelet, condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
    assert condition(), f"pods ended so: {node.ends}\n{node.log(0)[-3000:]}"


def test_a_killed_pod_is_replaced(folder: Path) -> None:
    (folder / "slow").touch()
    node, run = kubelet(folder, "run.callbacks.pace={}", "schedule.max_steps=14"), folder / "runs/r"
    with running(node) as verdict:
        wait(node, lambda: step(run) > 5)
        node.kill(1)
        assert verdict() == "Complete"
    assert node.ends == [(1, -signal.SIGKILL), (0, 0)]
    assert sorted(losses(run)) == list(range(1, 15))


@pytest.mark.slow
def test_a_job_outlives_its_pods(folder: Path) -> None:
    (folder / "slow").touch()
    node, run = kubelet(folder, "run.callbacks.pace={}"), folder / "runs/r"

    with running(node) as verdict:
        wait(node, lambda: step(run) >= 3)
        assert [node.alive(0), node.alive(1)] == [True, True]
        node.held.add(1)
        node.kill(1)  # its node is gone, and there is no other
        wait(node, lambda: "the job continues with 1 ranks on pod-0" in node.log(0))
        at = step(run)
        wait(node, lambda: step(run) > at + 1)
        node.held.clear()  # a node is there again
        wait(node, lambda: "more pods have called" in node.log(0))
        at = step(run)
        wait(node, lambda: step(run) > at + 1)
        node.kill(0, signal.SIGTERM)  # as for the drain of a node
        wait(node, lambda: (0, 75) in node.ends)
        (folder / "slow").unlink()
        assert verdict() == "Complete"
    assert node.ends == [(1, -signal.SIGKILL), (0, 75), (0, 0)]
    assert node.failures == 1, "a pod that stops is replaced without being counted"
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    checked = run_capt("ledger", "check", str(run), cwd=folder, env=dict(os.environ))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_bad_input_fails_the_job_at_once(folder: Path) -> None:
    node = kubelet(folder, "data.files=[/absent.txt]")
    with running(node) as verdict:
        assert verdict() == "PodFailurePolicy"
    assert node.ends == [(0, 2)]
    assert "absent.txt" in node.log(0)
