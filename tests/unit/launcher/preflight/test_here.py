"""Needs of a job on this host, and how a launch is refused."""

from __future__ import annotations

import logging
import shutil
import socket
from pathlib import Path

import pytest
import torch

from capt.launcher.plan import Options
from capt.launcher.preflight import limits, probe, run
from capt.launcher.preflight.report import Check, refuse, table
from capt.launcher.start import begin
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job

GIB = 1 << 30


def test_this_host_can_run_a_tiny_job(tmp_path: Path) -> None:
    job = load_job("capt_tiny", [f"run.dir={tmp_path / 'runs' / 'first'}"])
    checks = run.check_here(job, 1)
    assert [check for check in checks if check.level == "fail"] == []
    assert {check.name: check.level for check in checks}["disk"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_refuses_and_says_how_much_is_missing() -> None:
    check = limits.disk(3 * GIB, GIB, 4, "/runs")
    assert check.level == "fail"
    assert "4 checkpoints of about 1.0 GiB need 4.0 GiB" in check.finding
    assert check.advice.startswith("free 1.0 GiB, lower checkpoint.keep")
    assert limits.disk(4 * GIB, GIB, 4, "/runs").level == "ok"
    assert limits.disk(1, None, 4, "/runs").level == "note"


@pytest.mark.parametrize(
    ("job", "sizes"),
    [("capt_tiny", {}), ("capt_vl_microworld", {}), ("pairs_tiny", {"model.projection": 64, "model.init": "x"})],
)
def test_sizes_beyond_any_machine_are_refused_before_a_start_by_their_key(
    job: str, sizes: dict[str, object], tmp_path: Path
) -> None:
    more = [f"run.dir={tmp_path / 'run'}", *(f"{key}={value}" for key, value in sizes.items())]
    for dtype, numbers in (("fp32", 4), ("bf16", 2)):
        queue = 1_000_000_000
        checks = run.check_here(load_job(job, [*more, f"contrast.queue={queue}", f"contrast.queue_dtype={dtype}"]), 1)
        first = next(check for check in checks if check.level == "fail")
        assert (first.name, first.finding.partition(" takes")[0]) == ("memory", "contrast.queue")
        assert load_job(job, [*more, f"contrast.queue={queue}"]).queue_bytes() % (queue * 8) == 0  # type: ignore[operator]
        assert list(limits.queue_memory(queue * numbers, queue * numbers)) == []
    assert [check for check in run.check_here(load_job(job, more), 1) if check.name == "memory"] == []
    with pytest.raises(ConfigError, match=r"batch\.micro: 1000000000: input should be less than or equal to 65536"):
        load_job(job, [*more, "batch.micro=1000000000"])


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_checkpoint_is_estimated_from_the_model_and_measured_in_a_run(tmp_path: Path, weight: float) -> None:
    """The estimate is the parameters of the model that is built, two moments of each, and the queue."""
    from capt.pretrain.models.capt import CaptModel

    job = load_job(
        "capt_tiny", [f"run.dir={tmp_path}", "checkpoint.keep=2", "contrast.queue=1024", f"contrast.weight={weight}"]
    )
    contrast = weight > 0
    with torch.device("meta"):
        sizes = job.model.for_tokenizer(job.tokenizer.vocab_size, job.model.pad_id)  # type: ignore[attr-defined]
        model = CaptModel(sizes, contrast)
    exact = 12 * sum(parameter.numel() for parameter in model.parameters()) + 1024 * (4 * sizes.hidden + 8) * contrast
    one, copies = run.needed(job)
    assert one == pytest.approx(exact, rel=0.02)
    assert copies == 3
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        (folder / "weights").write_bytes(bytes(998))
    assert run.needed(job) == (1000, 1)
    best = load_job("capt_tiny", [f"run.dir={tmp_path}", "checkpoint.keep=2", "checkpoint.best=loss/mlm"])
    assert run.needed(best) == (1000, 2)


def test_sizes_that_a_tokenizer_or_init_brings_are_not_guessed(tmp_path: Path) -> None:
    assert load_job("capt_tiny", ["tokenizer.path=tok"]).checkpoint_bytes() is None
    assert load_job("capt_tiny", ["model.init=USER/NAME"]).checkpoint_bytes() is None
    plain = load_job("capt_tiny", ["contrast.queue=0", "optimizer.type=sgd", "optimizer.momentum=0"])
    adam = load_job("capt_tiny", ["contrast.queue=0"])
    assert adam.checkpoint_bytes() == 3 * plain.checkpoint_bytes()  # type: ignore[operator]
    muon = load_job("capt_tiny", ["contrast.queue=0", "optimizer.type=muon"])
    matrices = muon.model.layers * (4 * muon.model.hidden**2 + 2 * muon.model.hidden * muon.model.ffn)  # type: ignore[attr-defined]
    assert adam.checkpoint_bytes() - muon.checkpoint_bytes() == 4 * matrices  # type: ignore[operator]
    averaged, queued = (load_job("capt_tiny", ["contrast.queue=64", f"contrast.momentum={m}"]) for m in (0.99, "null"))
    assert averaged.checkpoint_bytes() - queued.checkpoint_bytes() == plain.checkpoint_bytes()  # type: ignore[operator]


def test_a_port_in_use_is_found(tmp_path: Path) -> None:
    job = load_job("capt_tiny", [f"run.dir={tmp_path}"])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (check,) = [check for check in run.check_here(job, 1, port) if check.level == "fail"]
    assert check.name == "rendezvous port"
    assert str(port) in check.finding
    assert "--master-port" in check.advice
    assert [check.name for check in run.check_here(job, 1, port) if check.level == "fail"] == []


def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (check, _) = run.check_here(load_job("capt_tiny", [f"run.dir={tmp_path / 'file' / 'run'}"]), 1)
    assert (check.name, check.level) == ("run folder", "fail")
    assert "Not a directory" in check.finding


def test_several_faults_are_lines_of_the_log_and_one_error(caplog: pytest.LogCaptureFixture) -> None:
    red = [Check("clock", "fail", f"fault {i}", "a remedy", f"node-{i}") for i in range(3)]
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError) as caught:
        refuse([Check("disk", "warn", "little", "more"), *red, Check("GPUs", "ok", "none")])
    assert str(caught.value) == (
        "preflight: node-0: clock: fault 0 (a remedy); 2 more above; --no-preflight starts the job nevertheless"
    )
    assert [record.getMessage() for record in caplog.records] == [
        "preflight: disk: little (more)",
        *(f"preflight: node-{i}: clock: fault {i} (a remedy)" for i in (1, 2)),
    ]
    refuse([Check("GPUs", "ok", "none"), Check("disk", "note", "x")])


def test_a_command_without_the_switch_does_not_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from capt.launcher.commands.options import RankOptions, carry_out

    monkeypatch.setattr(run, "check_here", lambda *_: [Check("disk", "fail", "full", "free some")])
    with pytest.raises(ConfigError) as caught:
        carry_out("capt.pretrain.retrieval.work:encode_all", tmp_path, RankOptions(nproc=2), {})
    assert str(caught.value) == "preflight: disk: full (free some)"
    assert not list(tmp_path.iterdir())


def test_the_table_has_a_column_of_hosts_where_there_are_some() -> None:
    assert "host" not in table([Check("disk", "ok", "much")])
    assert "node-7" in table([Check("disk", "ok", "much"), Check("clock", "fail", "off", "ntp", "node-7")])


def test_a_local_launch_is_refused_or_starts_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "no_job.py").write_text("print('it ran')")
    monkeypatch.setenv("PYTHONPATH", str(modules))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(run.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    words = ["run.dir=r", "batch.micro=4"]
    with pytest.raises(ConfigError, match=r"preflight: disk: .*lower checkpoint.keep.*--no-preflight"):
        begin("no_job", "capt_tiny", words, Options(nproc=1), debug=False, show=None)
    assert not (tmp_path / "r").exists()
    assert begin("no_job", "capt_tiny", words, Options(nproc=1), debug=False, show=None, preflight=False) == 0
    assert "it ran" in capfd.readouterr().out


def test_the_probe_answers_for_this_host(tmp_path: Path) -> None:
    found = probe.facts(folder=str(tmp_path))
    assert found["packages"]["torch"] == torch.__version__
    assert found["sources"]
    assert found["interfaces"].get("lo", "127.0.0.1") == "127.0.0.1"
    assert found["folder"] is True
    assert probe.facts(folder=str(tmp_path / "no"))["folder"] is False


def test_one_changed_byte_is_another_source(tmp_path: Path) -> None:
    (tmp_path / "capt").mkdir()
    (tmp_path / "capt" / "a.py").write_text("x = 1\n")
    before = probe.sources([str(tmp_path)])
    (tmp_path / "capt" / "a.pyc").write_text("not ours")
    assert probe.sources([str(tmp_path)]) == before
    (tmp_path / "capt" / "a.py").write_text("x = 2\n")
    assert probe.sources([str(tmp_path)]) != before


def test_a_file_is_written_seen_and_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "token")
    assert probe.sees(path, "text", patience=0) == {"found": False}
    probe.write(path, "text")
    assert probe.sees(path, "text", patience=0) == {"found": True}
    assert probe.sees(path, "other", patience=0) == {"found": False}
    with pytest.raises(FileExistsError):
        probe.write(path, "more")
    probe.remove()
    assert not Path(path).exists()
