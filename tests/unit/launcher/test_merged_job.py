"""CONFIG is merged once, where the job is launched: no rank reads base files, shipped jobs or the environment again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capt.launcher.backends import backend, torchrun
from capt.launcher.plan import Launch, LaunchFiles, Options, job_file
from capt.launcher.start import begin
from capt.pretrain import __main__ as entry
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import job_from_mapping, load_job, load_mapping, parse_mapping
from capt.pretrain.config.reader import to_yaml

TEXTS = (
    *("1e-4", "1E5", "+2e3", "1.", ".5", "010", "0x1f", "1_000", "24:00:00", "2026-11-20", "no", "on", "Null", "~", ""),
    *("${a}", "a: b", "- a", "#", "'", '"', "a\nb", " a ", "\u00fc\U0001f600", "true", "!x", "&a", "*a", "[", "%", "@"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a job that has a base file and reads the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WHERE", "here")
    (tmp_path / "hosts").write_text("node-1 slots=1\nnode-2 slots=1\n")
    (tmp_path / "parent.yaml").write_text("base: capt_tiny\nbatch: {micro: 4}\n")
    (tmp_path / "mine.yaml").write_text(
        "base: parent.yaml\nrun: {dir: 'runs/${oc.env:WHERE}'}\ndata: {text_column: '\\${plain}'}\n"
    )
    return tmp_path


class _NotStartedError(Exception):
    """Stand-in for the start of the processes."""


def launched(monkeypatch: pytest.MonkeyPatch, *words: str, **options: object) -> Launch:
    """Launch that a backend receives, its files written."""
    given: list[Launch] = []
    chosen = backend("local")

    def start(launch: Launch, plan: Any) -> Any:
        given.append(launch)
        assert plan.files == launch.files
        for path, text in plan.files.items():
            assert path.read_text() == text
            assert path.stat().st_mode & 0o777 == 0o600
        raise _NotStartedError

    monkeypatch.setattr(chosen, "start", start)
    with pytest.raises(_NotStartedError):
        begin("capt.pretrain", "mine.yaml", words, Options.given(**options), debug=False, show=None)
    return given[0]


def test_ranks_read_what_was_merged_at_the_launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job("mine.yaml", ["optimizer.lr=1e-3"])
    launch = launched(monkeypatch, "optimizer.lr=1e-3")
    assert not (folder / "runs").exists(), "a launch that failed leaves nothing"
    assert launch.job == job
    ((path, text),) = launch.files.items()
    assert launch.arguments == (str(path), "--merged")
    monkeypatch.setenv("WHERE", "elsewhere")
    for name in ("parent.yaml", "mine.yaml"):
        (folder / name).unlink()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    options = entry.parse(launch.arguments)
    assert options.merged
    assert load_job(options.config, options.overrides, resolved=True) == job
    assert job.model_dump()["data"]["text_column"] == "${plain}"


def test_another_launch_into_the_folder_does_not_change_the_job_of_the_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, again = (launched(monkeypatch, *words) for words in ((), ("run.seed=2",), ()))
    assert first.files.keys() == again.files.keys()
    assert first.files.keys().isdisjoint(second.files)


def test_a_launch_that_fails_leaves_the_job_that_an_earlier_one_is_going_to_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Slurm job waits in the queue while its user starts the same job again on the login node."""
    first = launched(monkeypatch)
    ((path, text),) = first.files.items()
    queued = LaunchFiles(first.run_dir, first.files)
    queued.write()
    for words in ((), ("run.seed=2",)):
        launched(monkeypatch, *words)
        assert path.read_text() == text
        assert [file.name for file in first.run_dir.glob("job-*.yaml")] == [path.name]
    queued.remove()
    assert not (folder / "runs").exists()


def test_commands_that_a_user_runs_by_hand_on_each_host_merge_there(folder: Path) -> None:
    """Nothing is written where ``torchrun`` is only shown, so they cannot read a merged job."""
    job = load_job("mine.yaml")
    path = job_file(job.run.dir, "x")
    words = ("mine.yaml", "a=b")
    launch = Launch("capt.pretrain", (str(path), "--merged"), job, Options(), files={path: "x"}, unmerged=words)
    here, elsewhere = (
        torchrun.plan(Launch("capt.pretrain", launch.arguments, job, options, files=launch.files, unmerged=words))
        for options in (Options(), Options(hostfile=Path("hosts")))
    )
    assert [command.argv[-2:] for command in here.commands] == [(str(path), "--merged")]
    assert [command.argv[-2:] for command in elsewhere.commands] == [words, words]
    assert (here.files, elsewhere.files) == ({path: "x"}, {})


def test_a_rank_that_does_not_see_the_job_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry, "_FILE_SECONDS", 0.2)
    assert entry.main(["runs/x/job-1.yaml", "--merged"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: runs/x/job-1.yaml: ")
    assert line.endswith("does not see it; name a run.dir on a file system that all hosts mount")


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_written_is_read_as_the_same_values(text: str) -> None:
    mapping = {"a": text, text or "b": {"c": [text, 1, 1e-7, 1e22, -0.5, True, None, {}, []]}}
    read = parse_mapping(to_yaml(mapping), "x")
    assert read == mapping
    assert [type(value) for value in read["a" if text != "a" else "b"]] == [str] * len(text)


def test_every_shipped_job_is_the_same_after_it_was_merged() -> None:
    for name, words in (("capt_tiny", []), ("rte", ["data.path=x", "model.init=y"]), ("ptb/vae", ["data.path=x"])):
        merged = parse_mapping(to_yaml(load_mapping(name, words)), name)
        assert job_from_mapping(merged, name) == load_job(name, words)


def test_a_job_that_its_ranks_could_not_read_is_refused_at_the_launch(folder: Path) -> None:
    (folder / "mine.yaml").write_text("base: capt_tiny\nx: " + "[" * 40 + "]" * 40)
    with pytest.raises(ConfigError, match="nested over 30 deep"):
        begin("capt.pretrain", "mine.yaml", [], Options(), debug=False, show=None)
