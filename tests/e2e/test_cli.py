"""``capt`` as a user meets it: help, answers, and one readable line for everything that is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import Capt

ROOT = Path(__file__).parents[2]
COMMANDS = [
    ["pretrain"],
    ["resume"],
    ["evaluate"],
    ["convert"],
    ["neighbors"],
    ["report"],
    ["doctor"],
    ["bench"],
    *(["tokenizer", command] for command in ("train", "encode", "export")),
    *(["data", command] for command in ("prepare", "inspect")),
    *(["config", command] for command in ("show", "validate", "schema", "diff")),
]


@pytest.fixture
def capt(capt: Capt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Capt:
    """Commands run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    return capt


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few paragraphs."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    line = "the river ran over stones and under a bridge while birds sang in the blue light of early morning"
    path.write_text("\n\n".join(f"{line[i % 40 :]} {line[: i % 50]}." for i in range(300)))
    return path


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_an_example(capt: Capt, command: list[str]) -> None:
    code, out, _ = capt(*command, "--help")
    assert code == 0
    assert f"Example: capt {' '.join(command)}" in out or f"| capt {' '.join(command)}" in out


@pytest.mark.parametrize("arguments", [[], ["--help"], ["config"], ["tokenizer"], ["data"]])
def test_help_needs_no_asking(capt: Capt, arguments: list[str]) -> None:
    code, out, err = capt(*arguments)
    assert (code, err) == (0, "")
    assert "Commands:" in out


def test_the_list_of_commands_cuts_no_sentence(capt: Capt) -> None:
    listed = capt("--help")[1].partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) > 20
    assert [line for line in listed if line.endswith("...")] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pretrian"], "pretrian"),
        (["pretrain"], "CONFIG' (capt pretrain --help)"),
        (["pretrain", "glue"], "glue is a sweep, not a job: capt sweep glue"),
        (["finetune", "capt_tiny"], "a model of its own: capt pretrain capt_tiny"),
        (["finetune", "ptb/vae"], "a model of its own: capt pretrain ptb/vae"),
        (["config", "show", "surely_not_there"], "; shipped: ace/..., capt_adapt, "),
        (["config", "show", "ptb/vea"], "did you mean the shipped job 'ptb/vae'"),
        (["pretrain", "capt_tiny", "--nprocs", "2"], "--nprocs"),
        (["pretrain", "capt_tiny", "--nproc", "0"], "--nproc"),
        (["pretrain", "capt_tny"], "did you mean the shipped job 'capt_tiny'"),
        (["pretrain", "capt_tiny", "batch.mirco=2"], "did you mean 'micro'"),
        (["pretrain", "capt_tiny", "batch.micro"], "a.b=value"),
        (["pretrain", "capt_tiny", "--hostfile", "hosts"], "no hostfile hosts"),
        (["pretrain", "capt_tiny", "--nproc", "500"], "500 ranks"),
        (["resume", "nowhere"], "not a run folder"),
        (["evaluate", "nowhere"], "nowhere: no such folder, so neither a checkpoint nor a run"),
        (["evaluate", "nowhere", "--text", "nowhere.txt"], "nowhere"),
        (["convert", "nowhere", "out", "--to", "hf"], "nowhere"),
        (["convert", "nowhere", "out"], "either --to"),
        (["convert", "nowhere", "out", "--to", "hf", "--from", "hf"], "either --to"),
        (
            ["convert", "nowhere", "out", "--to", "tensorflow"],
            "nowhere: no such folder, so neither a checkpoint nor a run",
        ),
        (["convert", "nowhere", "out", "--from", "onnx"], "valid: hf"),
        (["convert", "nowhere", "out", "--from", "hf"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
        (["tokenizer", "train", "nowhere.txt", "--out", "tok"], "nowhere.txt"),
        (["tokenizer", "encode", "nowhere"], "nowhere"),
        (["tokenizer", "export", "nowhere", "out"], "nowhere"),
        (["data", "prepare", "capt_tiny", "data.files=nowhere.txt"], "nowhere.txt"),
        (["data", "prepare", "capt_tiny", "--out", "az://box/shards"], "for the work by --work"),
        (["data", "prepare", "capt_tiny", "--out", "hf://box/shards", "--work", "w"], "such a store is only read"),
        (["data", "prepare", "capt_tiny", "--out", "shards", "--work", "w"], "--work belongs to an address of a store"),
        (["tokenizer", "train", "x.txt", "--out", "az://box/tok"], "--out: az://box/tok is in a store"),
        (["regions", "import", "s3://bucket/x.tsv", "--out", "out"], "s3://bucket/x.tsv is in a store"),
        (["data", "inspect", "nowhere"], "nowhere does not exist"),
        (["config", "schema", "capt_langage"], "did you mean 'capt_language'"),
        (["bench", "surely_not_there"], "benchmark"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_a_user_gets_wrong_is_one_line_and_exit_code_2(
    capt: Capt, tmp_path: Path, arguments: list[str], says: str
) -> None:
    code, out, err = capt(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["resume"], ["ledger", "check"]])
def test_a_checkpoint_is_no_run(capt: Capt, tmp_path: Path, command: list[str]) -> None:
    """It has a config.yaml too; a job that began in it would add files, and the checkpoint would be refused."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    for name in ("run/config.yaml", "run/checkpoints/step-00000004/config.yaml"):
        (tmp_path / name).write_text("{task: {type: capt_language}, data: {source: docstrings}}\n")
    (checkpoint / "manifest.json").write_text("{}")
    (tmp_path / "run" / "checkpoints" / "best").symlink_to("step-00000004")
    for name in ("step-00000004", "best"):
        code, _, err = capt(*command, f"run/checkpoints/{name}")
        assert (code, err.count("\n")) == (2, 1)
        assert f"{name} is a checkpoint, not a run folder; capt resume run --checkpoint step-00000004" in err
    copied = checkpoint.rename(tmp_path / "copied")
    assert "model.init=copied begins a run with its weights" in capt(*command, "copied")[2]
    assert {path.name for path in copied.iterdir()} == {"config.yaml", "manifest.json"}


def test_debug_shows_where_an_error_came_from(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "capt.launcher.cli", "config", "show", "capt_tny", "--debug"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" in done.stderr
    assert "did you mean the shipped job 'capt_tiny'" in done.stderr


def test_a_command_that_imports_deepspeed_prints_its_answer_alone(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "capt.launcher.cli", "data", "prepare", "capt_tiny", "data.files=nowhere.txt"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_a_users_error(capt: Capt, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = capt("pretrain", "capt_tiny", "run.dir=file/run")
    assert code == 2
    assert err.splitlines()[-1] == "error: run.dir file/run: file is a file; name a folder"


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m capt.launcher.cli config schema | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_config_commands(capt: Capt, tmp_path: Path) -> None:
    code, out, _ = capt("config", "show", "capt_tiny", "optimizer.lr=0.25")
    assert code == 0
    assert yaml.safe_load(out)["optimizer"]["lr"] == 0.25
    (tmp_path / "shown.yaml").write_text(out)
    assert capt("config", "diff", "capt_tiny", "shown.yaml")[1] == "optimizer.lr: 0.001 -> 0.25\n"
    shown = capt("config", "diff", "capt_tiny", "shown.yaml", "--json")[1]
    assert json.loads(shown) == {"optimizer.lr": [0.001, 0.25]}
    assert json.loads(capt("config", "show", "shown.yaml", "--json")[1])["optimizer"]["lr"] == 0.25
    code, out, _ = capt("config", "validate", "shown.yaml", "--nproc", "2")
    assert (code, out.splitlines()[0]) == (0, "shown.yaml: a valid capt_language job")
    assert "corpus: " in out
    assert json.loads(capt("config", "validate", "shown.yaml", "--json")[1])["valid"] is True
    code, _, err = capt("config", "validate", "shown.yaml", "--nproc", "500")
    assert (code, "500 ranks" in err) == (2, True)
    schema = json.loads(capt("config", "schema")[1])
    assert {"run", "batch", "contrast", "validate"} <= set(schema["properties"])


def test_a_tokenizer_of_another_column(capt: Capt, text: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"id": str(i), "body": line}) for i, line in enumerate(text.read_text().splitlines()) if line]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    code, _, err = capt("tokenizer", "train", "rows.jsonl", "--out", "tok", "--vocab-size", "370")
    assert (code, "--text-column of capt tokenizer train" in err, "it has 'id', 'body'" in err) == (2, True, True)
    train = ("tokenizer", "train", "rows.jsonl", "--out", "tok", "--vocab-size", "370", "--json")
    code, out, _ = capt(*train, "--text-column", "body")
    assert (code, json.loads(out)["vocab_size"]) == (0, 370)


def test_from_text_to_shards(capt: Capt, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = capt("tokenizer", "train", text, "--out", "tok", "--vocab-size", "370", "--json")
    assert code == 0
    assert json.loads(out)["vocab_size"] == 370
    (tmp_path / "line").write_text("the river\nran\n")
    ids = capt("tokenizer", "encode", "tok", "line")[1].splitlines()
    pieces = capt("tokenizer", "encode", "tok", "line", "--pieces")[1].splitlines()
    assert [len(line.split()) for line in ids] == [len(line.split()) for line in pieces]
    assert "".join(pieces[0].split()).replace("▁", " ").strip() == "the river"
    assert capt("tokenizer", "export", "tok", "again", "--text", text)[0] == 0
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (tmp_path / "tok" / "tokenizer.json").read_bytes()

    job = ["capt_tiny", f"data.files={text}", "tokenizer.path=tok", "data.workers=1"]
    code, out, _ = capt("data", "prepare", *job, "--out", "shards")
    assert code == 0
    assert out.splitlines()[-1] == "use them with: data.shards=shards tokenizer.path=tok"
    code, out, _ = capt("data", "inspect", "shards/train", "--tokenizer", "tok", "--json")
    assert code == 0
    summary = json.loads(out)
    assert 290 <= summary["documents"] < 300  # the rest is held out
    assert "river" in summary["samples"][0]
    assert "documents" in capt("data", "inspect", "shards/train")[1]

    (tmp_path / "shards" / "train" / "documents.bin").write_bytes(b"")
    code, _, err = capt("data", "inspect", "shards/train")
    assert (code, "documents.bin is damaged" in err) == (2, True)


def test_doctor_answers_in_json(capt: Capt) -> None:
    code, out, _ = capt("doctor", "--json")
    assert code == 0
    assert {"name", "level", "finding", "advice", "host"} == set(json.loads(out)[0])
    code, out, _ = capt("doctor")
    assert "deepspeed" in out
