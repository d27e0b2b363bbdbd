"""Jobs of every kind on two hosts over ssh: losses and figures are those of one host."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.config.schema import Job
from tests import embeddings, latent
from tests.multihost.network import ADDRESSES, INTERFACE, Hosts, several_hosts
from tests.pairs import pairs_mapping
from tests.runs import losses
from tests.small_job import ROOT, write_job
from tests.support import run_capt
from tests.unit.retrieval.toy import write_beir, write_sentence_folder
from tests.vision_language import vision_language_mapping

pytestmark = [pytest.mark.multihost, pytest.mark.timeout(240)]

STEPS = 4


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
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


def _work(hosts: Hosts, name: str) -> Path:
    """A folder that both hosts see, from which commands of two hosts are started."""
    work = hosts.folder / name
    work.mkdir()
    (work / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={INTERFACE}\n")
    return work


def _on_both(hosts: Hosts, work: Path, words: list[str], code: int) -> str:
    """Run a command on two hosts to its end, which is this exit code; return what it wrote."""
    command = [sys.executable, "-m", "capt.launcher.cli", *words, "--hostfile", str(hosts.hostfile())]
    log = work / "log"
    head = hosts.popen(command, cwd=work, log=log, PYTHONPATH=str(ROOT))
    try:
        assert head.wait(timeout=120) == code, log.read_text(errors="replace")[-5000:]
    finally:
        head.kill()
    return log.read_text(errors="replace")


@pytest.mark.parametrize(
    "kind", [kind if kind == "pairs" else pytest.param(kind, marks=pytest.mark.family) for kind in JOBS]
)
def test_a_job_has_the_same_losses_on_two_hosts(hosts: Hosts, kind: str) -> None:
    work = _work(hosts, kind)
    (work / "job.yaml").write_text(job_to_yaml(JOBS[kind](work)))
    words = ["pretrain", "job.yaml", "validate.every=0", f"schedule.stop_after={STEPS}"]
    one = run_capt(*words, "run.dir=one", "--nproc", "2", cwd=work, env=dict(os.environ))
    assert one.returncode == 75, one.stderr
    assert "2 ranks on 2 hosts" in _on_both(hosts, work, [*words, "run.dir=two", "--no-preflight"], 75)
    assert sorted(losses(work / "one")) == list(range(1, STEPS + 1))
    assert losses(work / "two") == losses(work / "one")


def test_hosts_whose_names_are_loopback_addresses_end_with_a_line_to_write(hosts: Hosts) -> None:
    """Gloo announces what the name means: no host reaches another. With the line that is named the job trains."""
    if not ip_address(socket.gethostbyname(socket.gethostname())).is_loopback:
        pytest.skip("needs a machine whose name is a loopback address")
    work = write_job(hosts.folder / "names", schedule={"max_steps": 2, "warmup_steps": 0})
    words = ["pretrain", "job.yaml", "run.dir=run", "--no-preflight"]
    said = _on_both(hosts, work, words, 1)
    assert "gloo would announce 127." in said
    (setting,) = re.findall(r"error: rank 0 on .* write (\S+) into \.deepspeed_env", said)
    assert "Traceback" not in said
    (work / ".deepspeed_env").write_text(f"{setting}\n")
    _on_both(hosts, work, words, 0)


def test_two_hosts_give_the_figures_of_retrieval_of_one(hosts: Hosts) -> None:
    work = _work(hosts, "retrieval")
    model, data = write_sentence_folder(work / "model"), write_beir(work / "beir")
    words = ["evaluate", str(model), "--retrieval", str(data)]
    one = run_capt(*words, "--store", "store-one", "--out", "one.json", cwd=work, env=dict(os.environ))
    assert one.returncode == 0, one.stderr
    _on_both(hosts, work, [*words, "--store", "store-two", "--out", "two.json"], 0)
    results = [json.loads((work / name).read_text())["sections"] for name in ("one.json", "two.json")]
    assert results[0][0]["poolers"]
    assert results[1] == results[0]
