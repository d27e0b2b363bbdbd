"""``capt evaluate`` and ``capt convert`` hand a checkpoint to what its task has, and say when there is nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from capt.pretrain import registry
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.engine.checkpoint.save import write_weights_only
from capt.pretrain.registry import TASKS, job_class, task_class, task_module
from tests.support import Capt
from tests.toy.task import ToyModel

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of the tests' own task."""
    monkeypatch.setitem(TASKS, "toy", "tests.toy")
    job = job_from_mapping({"task": {"type": "toy"}, "run": {"dir": str(tmp_path / "run")}}, "test")
    write_weights_only(tmp_path / "run" / "checkpoints" / "step-00000000", job, {"model": ToyModel(13)}, {})
    return tmp_path / "run"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package ``their_task``, without any module, in the place of the toy task."""
    (tmp_path / "their_task").mkdir()
    (tmp_path / "their_task" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TASKS, "toy", "their_task")
    yield tmp_path / "their_task"
    for name in [name for name in sys.modules if name.partition(".")[0] == "their_task"]:
        del sys.modules[name]


def test_a_task_evaluates_and_exports_by_convention(capt: Capt, checkpoint: Path, tmp_path: Path) -> None:
    _, out, err = capt("evaluate", str(checkpoint), "--json")
    assert err == ""
    loss = json.loads(out)["loss"]
    assert loss > 0
    assert capt("evaluate", str(checkpoint), "-o", "scale=2.0")[1] == f"loss {2 * loss:.6f}\n"
    assert capt("evaluate", str(checkpoint), "--seed", "7")[1] != f"loss {loss:.6f}\n"
    exported = tmp_path / "export"
    assert capt("convert", str(checkpoint), str(exported), "--to", "safetensors") == (0, f"{exported}\n", "")
    weights = load_file(exported / "model.safetensors")
    whole = ToyModel(13)
    assert weights.keys() == dict(whole.named_parameters()).keys()
    assert not whole.load_state_dict(weights, strict=False).unexpected_keys
    assert torch.equal(weights["scale"], torch.ones(1))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["evaluate", "RUN", "-o", "scael=2"], "task toy has no option 'scael'; did you mean 'scale'?"),
        (["evaluate", "RUN", "-o", "checkpoint=x"], "task toy has no option 'checkpoint'; it takes scale, seed"),
        (["evaluate", "RUN", "-o", "scale=2", "--retrieval", "x"], "--option has no meaning with --retrieval"),
        (["evaluate", "RUN", "-o", "scale"], "--option scale: not of the form NAME=VALUE"),
        (["evaluate", "RUN", "-o", "scale=wide"], "--option scale=wide: Input should be a valid number"),
        (["evaluate", "RUN", "-o", "scale=[1"], "--option scale=[1: Input should be a valid number"),
        (["evaluate", "RUN", "--sts", "x"], "--sts has no meaning for a checkpoint of task toy, which takes --seed"),
        (["convert", "RUN", "OUT", "--to", "hf"], "'hf' is unknown; a checkpoint of task toy can be written as safet"),
        (["convert", "RUN", "OUT", "--to", "safetensor"], "did you mean 'safetensors'?"),
        (["convert", "RUN", "OUT", "--to", "safetensors", "--pooling", "cls"], "--pooling has no meaning for a check"),
        (["convert", "RUN", "OUT", "--to", "safetensors", "-o", "to=hf"], "task toy has no option 'to'"),
        (["convert", "RUN", "OUT", "--from", "hf", "-o", "a=b"], "has no meaning with --from hf"),
    ],
)
def test_an_option_that_the_task_does_not_take_is_one_sentence(
    capt: Capt, checkpoint: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    paths = {"RUN": str(checkpoint), "OUT": str(tmp_path / "out")}
    code, out, err = capt(*(paths.get(argument, argument) for argument in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert not (tmp_path / "out").exists()


def test_a_task_without_a_command_gets_one_sentence(capt: Capt, checkpoint: Path, package: Path) -> None:
    code, out, err = capt("evaluate", str(checkpoint), "--text", "text.txt")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "a checkpoint of task toy, which cannot be evaluated" in err
    code, out, err = capt("convert", str(checkpoint), str(checkpoint / "out"), "--to", "hf")
    assert (code, out) == (2, "")
    assert "a checkpoint of task toy, which cannot be converted" in err


def test_a_task_that_is_not_installed_gets_one_sentence(
    capt: Capt, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(TASKS, "toy")
    for arguments in (["evaluate", str(checkpoint)], ["convert", str(checkpoint), "out", "--to", "hf"]):
        code, _, err = capt(*arguments)
        assert code == 2
        assert err.count("\n") == 1
        assert "unknown task 'toy'" in err


def test_a_task_of_another_distribution_is_handed_its_options(capt: Capt, checkpoint: Path, package: Path) -> None:
    (package / "evaluate.py").write_text(
        "def command(checkpoint, *, samples=7, words=None):\n    return {'samples': samples, 'words': words}\n"
        "def as_text(result):\n    return f'{result}'\n"
    )
    assert capt("evaluate", str(checkpoint)) == (0, "{'samples': 7, 'words': None}\n", "")
    assert capt("evaluate", str(checkpoint), "--samples", "3")[1] == "{'samples': 3, 'words': None}\n"
    assert capt("evaluate", str(checkpoint), "-o", "words=[a, 2]")[1] == "{'samples': 7, 'words': ['a', 2]}\n"
    code, _, err = capt("evaluate", str(checkpoint), "--weighted-sentences", "3")
    assert code == 2
    assert "--weighted-sentences has no meaning for a checkpoint of task toy" in err


def test_an_installed_package_brings_a_task_with_all_its_commands(
    capt: Capt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toy task under another name, installed by pip, known by its entry point alone."""
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "installed_toy").mkdir(parents=True)
    for path in (ROOT / "tests" / "toy").glob("*.py"):
        text = path.read_text().replace("tests.toy", "installed_toy").replace('"toy"', '"their_toy"')
        (source / "installed_toy" / path.name).write_text(text)
    (source / "installed_toy" / "report.py").write_text(
        "from capt.pretrain.report.document import ReportSection\n"
        "def run_sections(runs):\n    return [ReportSection('Toys', [f'{len(runs)} toy run'])]\n"
    )
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "toys"\nversion = "1"\n'
        '[project.entry-points."capt.tasks"]\ntheir_toy = "installed_toy"\n'
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    monkeypatch.syspath_prepend(site)
    registry.entry_point_values.cache_clear()
    run = tmp_path / "run"
    try:
        assert task_class("their_toy").__module__ == "installed_toy.task"
        job = job_from_mapping({"task": {"type": "their_toy"}, "run": {"dir": str(run)}}, "test")
        (run / "config.yaml").parent.mkdir()
        (run / "config.yaml").write_text(job_to_yaml(job))
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        write_weights_only(run / "checkpoints" / "step-00000000", job, {"model": ToyModel(13)}, {})
        assert capt("evaluate", str(run), "-o", "scale=0.0")[:2] == (0, "loss 0.000000\n")
        assert capt("convert", str(run), str(tmp_path / "out"), "--to", "safetensors")[0] == 0
        assert load_file(tmp_path / "out" / "model.safetensors").keys() == dict(ToyModel(13).named_parameters()).keys()
        page = tmp_path / "report" / "report.html"
        assert capt("report", str(run), "--out", str(page.parent))[:2] == (0, f"{page}\n")
        assert page.is_file()
        assert "1 toy run" in (tmp_path / "report" / "report.md").read_text()
    finally:
        registry.entry_point_values.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "installed_toy"]:
            del sys.modules[name]


@pytest.mark.parametrize("missing", ["no_such_package", "tests.no_such_package"])
def test_a_task_whose_package_is_not_there_is_one_sentence(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "theirs", missing)
    for read in (job_class, task_class, lambda task: task_module(task, "evaluate")):
        with pytest.raises(ConfigError, match=f"task.type theirs: its package '{missing}' cannot be imported"):
            read("theirs")


def test_a_task_without_its_two_modules_is_one_sentence(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"its package 'their_task' has no config\.JOB, as a task must"):
        job_class("toy")
    (package / "task.py").write_text("TASKS = 1\n")
    with pytest.raises(ConfigError, match=r"its package 'their_task' has no task\.TASK, as a task must"):
        task_class("toy")


@pytest.mark.parametrize("task", ["capt_language", "glue"])
def test_every_built_in_encoder_can_be_exported(task: str) -> None:
    module = task_module(task, "export")
    assert module is not None
    assert "hf" in module.TARGETS
    assert callable(module.command)


@pytest.mark.parametrize("task", ["capt_language", "glue", "latent"])
def test_every_built_in_task_has_an_evaluation(task: str) -> None:
    module = task_module(task, "evaluate")
    assert module is not None
    assert callable(module.command)
    assert callable(module.as_text)


@pytest.mark.parametrize("path", ["../nope", "./a/b", "nope"])
@pytest.mark.parametrize("command", [["evaluate"], ["neighbors"], ["convert"]])
def test_a_missing_path_is_never_asked_for_at_the_hub(
    capt: Capt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], path: str
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    more = {"evaluate": ["--text", "x.txt"], "neighbors": ["query"], "convert": ["out", "--from", "hf"]}[command[0]]
    code, out, err = capt(*command, path, *more)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", ["--predictions", "--out"])
def test_the_file_that_is_measured_on_is_not_overwritten(tmp_path: Path, capt: Capt, option: str) -> None:
    (tmp_path / "data.json").write_text("[]")
    (tmp_path / "link.json").symlink_to(tmp_path / "data.json")
    code, _, said = capt("evaluate", str(tmp_path), "--data", f"{tmp_path}/data.json", option, f"{tmp_path}/link.json")
    assert (code, said) == (
        2,
        f"error: {tmp_path}/link.json is read, and would be overwritten: name another file to write\n",
    )
