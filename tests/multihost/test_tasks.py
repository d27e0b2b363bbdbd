"""Jobs of every kind on two hosts over ssh: losses and figures are those of one host."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.config.schema import Job
from tests import embeddings, latent
from tests.multihost.network import ADDRESSES, INTERFACE, Hosts, missing, several_hosts
from tests.pairs import pairs_mapping
from tests.small_job import ROOT, losses
from tests.support import run_capt
from tests.unit.retrieval.toy import write_beir, write_sentence_folder
from tests.vision_language import vision_language_mapping

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(240)]

STEPS = 4


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := missing():
        pytest.skip(reason)
    with several_hosts(tmp_path_factory.mktemp("hosts"), ADDRESSES, warm=True) as both:
        yield both


def _latent(folder: Path) -> Job:
    latent.write_text(folder)
    return latent.small_job("clvae", folder, folder / "run", micro=4)


JOBS: dict[str, Callable[[Path], Job]] = {
    "vision_language": lambda folder: job_from_mapping(vision_language_mapping(folder), "test"),
    "pairs": lambda folder: job_from_mapping(pairs_mapping(folder), "test"),
    "latent": _latent,
    "embeddings": lambda folder: embeddings.small_job(folder, folder / "run"),
}


@pytest.mark.parametrize("kind", JOBS)
def test_a_job_has_the_same_losses_on_two_hosts(hosts: Hosts, kind: str) -> None:
    work = hosts.folder / kind
    work.mkdir()
    (work / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={INTERFACE}\n")
    (work / "job.yaml").write_text(job_to_yaml(JOBS[kind](work)))
    words = ["pretrain", "job.yaml", "validate.every=0", f"schedule.stop_after={STEPS}"]
    one = run_capt(*words, "run.dir=one", "--nproc", "2", cwd=work, env=dict(os.environ))
    assert one.returncode == 75, one.stderr
    command = [sys.executable, "-m", "capt.launcher.cli", *words, "run.dir=two", "--no-preflight"]
    log = work / "log"
    head = hosts.popen([*command, "--hostfile", str(hosts.hostfile())], cwd=work, log=log, PYTHONPATH=str(ROOT))
    try:
        assert head.wait(timeout=120) == 75, log.read_text(errors="replace")[-5000:]
    finally:
        head.kill()
    assert "2 ranks on 2 hosts" in log.read_text(errors="replace")
    assert sorted(losses(work / "one")) == list(range(1, STEPS + 1))
    assert losses(work / "two") == losses(work / "one")


def test_two_hosts_give_the_figures_of_retrieval_of_one(hosts: Hosts) -> None:
    work = hosts.folder / "retrieval"
    work.mkdir()
    (work / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={INTERFACE}\n")
    model, data = write_sentence_folder(work / "model"), write_beir(work / "beir")
    words = ["evaluate", str(model), "--retrieval", str(data)]
    one = run_capt(*words, "--store", "store-one", "--out", "one.json", cwd=work, env=dict(os.environ))
    assert one.returncode == 0, one.stderr
    command = [sys.executable, "-m", "capt.launcher.cli", *words, "--store", "store-two", "--out", "two.json"]
    log = work / "log"
    head = hosts.popen([*command, "--hostfile", str(hosts.hostfile())], cwd=work, log=log, PYTHONPATH=str(ROOT))
    try:
        assert head.wait(timeout=120) == 0, log.read_text(errors="replace")[-5000:]
    finally:
        head.kill()
    results = [json.loads((work / name).read_text())["sections"] for name in ("one.json", "two.json")]
    assert results[0][0]["poolers"]
    assert results[1] == results[0]
