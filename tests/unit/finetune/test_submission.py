"""The leaderboard's zip: what is written is valid, and everything that the leaderboard refuses is found."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace as with_
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from capt.finetune.glue.submission import SUBMISSION_FILES, check_submission, majority_wnli, write_submission
from capt.launcher.commands.results import register
from capt.pretrain.base.errors import DataError

LINES = {
    "AX": 1105,
    "CoLA": 1064,
    "MNLI-mm": 9848,
    "MNLI-m": 9797,
    "MRPC": 1726,
    "QNLI": 5464,
    "QQP": 390966,
    "RTE": 3001,
    "SST-2": 1822,
    "STS-B": 1380,
    "WNLI": 147,
}
"""Lines of each file, header included, as the sample submissions of published code bases have them."""


def predictions(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    for name, output in SUBMISSION_FILES.items():
        if output.task.regression:
            made[name] = rng.uniform(-0.5, 5.5, output.rows).astype(np.float32)
        else:
            made[name] = rng.integers(0, len(output.task.labels), output.rows)
    return made


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_submission(predictions(), tmp_path_factory.mktemp("glue") / "sub" / "submission.zip")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """QQP has 500 rows: its 390,965 take seconds, which is worth it where the official shape is looked at."""
    output = SUBMISSION_FILES["QQP"]
    task = with_(output.task, rows={**output.task.rows, "test": 500})
    monkeypatch.setitem(SUBMISSION_FILES, "QQP", with_(output, task=task))


def members(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def changed(valid: Path, out: Path, change: Callable[[dict[str, str]], None]) -> Path:
    """A copy with other members; QQP is left out of it, because its 390,965 lines take a while."""
    files = members(valid)
    change(files)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            if name != "QQP.tsv":
                archive.writestr(name, text)
    return out


def test_what_is_written_has_the_official_shape(valid: Path) -> None:
    files = members(valid)
    assert {name.removesuffix(".tsv"): text.count("\n") for name, text in files.items()} == LINES
    assert all(text.startswith("index\tprediction\n0\t") for text in files.values())
    first = {name: {line.split("\t")[1] for line in text.split("\n")[1:-1]} for name, text in files.items()}
    for name in ("CoLA", "SST-2", "MRPC", "QQP", "WNLI"):
        assert first[f"{name}.tsv"] == {"0", "1"}
    for name in ("RTE", "QNLI"):
        assert first[f"{name}.tsv"] == {"entailment", "not_entailment"}
    for name in ("MNLI-m", "MNLI-mm", "AX"):
        assert first[f"{name}.tsv"] == {"entailment", "neutral", "contradiction"}
    assert all(len(value) == 5 and 0 <= float(value) <= 5 for value in first["STS-B.tsv"])
    assert {"0.000", "5.000"} < first["STS-B.tsv"]
    assert [path.name for path in valid.parent.iterdir()] == ["submission.zip"]


def test_the_values_are_the_predictions(valid: Path) -> None:
    files, given = members(valid), predictions()
    for name in ("RTE", "MNLI-mm", "CoLA"):
        lines = [line.split("\t")[1] for line in files[f"{name}.tsv"].split("\n")[1:-1]]
        assert lines == [SUBMISSION_FILES[name].task.labels[value] for value in given[name]]
    scores = [float(line.split("\t")[1]) for line in files["STS-B.tsv"].split("\n")[1:-1]]
    np.testing.assert_allclose(scores, np.clip(given["STS-B"], 0, 5), atol=5.1e-4)


@pytest.mark.usefixtures("few")
def test_the_same_predictions_give_the_same_bytes(tmp_path: Path) -> None:
    one, again = (write_submission(predictions(), tmp_path / name) for name in ("one.zip", "again.zip"))
    assert again.read_bytes() == one.read_bytes()


@pytest.mark.usefixtures("few")
def test_it_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in (".sub.zip.tmp", "sub.zip"):
        (tmp_path / name).symlink_to(precious)
    out = write_submission(predictions(), tmp_path / "sub.zip")
    assert not out.is_symlink()
    assert precious.read_text() == "precious"


def test_ax_comes_from_mnli_and_wnli_may_be_its_majority() -> None:
    assert [SUBMISSION_FILES[name].model for name in ("AX", "MNLI-mm", "RTE")] == ["mnli", "mnli", "rte"]
    assert (len(majority_wnli()), set(majority_wnli())) == (146, {0})


def replace(name: str, old: str, new: str, count: int = 1) -> Callable[[dict[str, str]], None]:
    def change(files: dict[str, str]) -> None:
        assert old in files[name]
        files[name] = files[name].replace(old, new, count)

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda files: files.pop("RTE.tsv"), "RTE.tsv is missing"),
        (
            lambda files: files.update({"sub/RTE.tsv": files.pop("RTE.tsv")}),
            "RTE.tsv is in the zip as sub/RTE.tsv; all files must be at its top: zip -j NEW.zip FOLDER/*.tsv",
        ),
        (lambda files: files.update({"notes.txt": "x"}), "notes.txt is not a file of a submission"),
        (replace("RTE.tsv", "index\tprediction", "id\tlabel"), "RTE.tsv, line 1: the header is 'id\\tlabel'"),
        (replace("RTE.tsv", "\n0\t", "\n1\t"), "RTE.tsv, line 2: index '1'; it must be 0, rows count from 0"),
        (replace("CoLA.tsv", "\n5\t", "\n5\t "), "CoLA.tsv, line 7: prediction ' "),
        (replace("AX.tsv", "neutral", "not_entailment"), "prediction 'not_entailment'; AX has entailment, neutral"),
        (replace("STS-B.tsv", "\n0\t", "\n0\t9"), "is not a number from 0 to 5"),
        (replace("WNLI.tsv", "\n3\t", "\n3\tx\t"), "WNLI.tsv, line 5: 3 columns; there must be two"),
        (
            lambda files: files.update({"MRPC.tsv": files["MRPC.tsv"].rsplit("\n", 3)[0] + "\n"}),
            "MRPC.tsv: 1,723 predictions; the official test set has 1,725",
        ),
        (lambda files: files.update({"RTE.tsv": "index\tprediction\n"}), "RTE.tsv: 0 predictions; the official test"),
        (replace("RTE.tsv", "\n", "\n\n"), "RTE.tsv: 3,001 predictions"),
    ],
)
def test_what_is_wrong_is_found(
    valid: Path, tmp_path: Path, change: Callable[[dict[str, str]], None], problem: str
) -> None:
    problems = check_submission(changed(valid, tmp_path / "bad.zip", change))
    assert "QQP.tsv is missing" in problems
    assert any(problem in line for line in problems)


def test_a_folder_in_the_zip_is_no_file(valid: Path, tmp_path: Path) -> None:
    path = changed(valid, tmp_path / "with-a-folder.zip", lambda files: files.update({"empty/": ""}))
    assert check_submission(path) == ["QQP.tsv is missing"]


def test_many_wrong_lines_are_counted(valid: Path, tmp_path: Path) -> None:
    path = changed(valid, tmp_path / "bad.zip", replace("CoLA.tsv", "\t1\n", "\tyes\n", -1))
    shown = [line for line in check_submission(path) if line.startswith("CoLA.tsv")]
    assert len(shown) == 4
    assert shown[-1].endswith("more lines are wrong")
    wrong = int((predictions()["CoLA"] == 1).sum())
    assert shown[-1] == f"CoLA.tsv: {wrong - 3} more lines are wrong"


def test_files_that_are_no_zip(tmp_path: Path, valid: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.zip: no such file"):
        check_submission(tmp_path / "nowhere.zip")
    torn = tmp_path / "torn.zip"
    torn.write_bytes(valid.read_bytes()[:5000])
    with pytest.raises(DataError, match="not a whole zip file"):
        check_submission(torn)
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("RTE.tsv", b"0" * (70 << 20))
    assert any("RTE.tsv: 73,400,320 bytes" in line for line in check_submission(bomb))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("RTE", None, "not complete: RTE: no predictions"),
        ("RTE", np.zeros(10, dtype=np.int64), "RTE.tsv: 10 predictions; the official test set has 3,000"),
        ("RTE", np.full(3000, 2), "RTE: predictions must be classes from 0 to 1"),
        ("RTE", np.full(3000, -1), "RTE: predictions must be classes from 0 to 1"),
        ("RTE", np.full(3000, 0.5), "RTE: predictions must be classes from 0 to 1"),
        ("STS-B", np.full(1379, np.nan), "STS-B: 1379 predictions are not finite"),
    ],
)
def test_bad_predictions_leave_no_file(
    tmp_path: Path, name: str, values: np.ndarray | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = predictions() | {name: values}
    if values is None:
        del given[name]
    with pytest.raises(DataError, match=message):
        write_submission(given, tmp_path / "submission.zip")
    assert list(tmp_path.iterdir()) == []


def test_unknown_predictions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="MNLI: not a file of a submission"):
        write_submission(predictions() | {"MNLI": np.zeros(1, dtype=np.int64)}, tmp_path / "submission.zip")


def test_the_command(valid: Path, tmp_path: Path) -> None:
    """It accepts the whole of what is written."""
    app = typer.Typer()
    register(app)
    good = CliRunner().invoke(app, ["glue-validate", str(valid)])
    assert good.exit_code == 0
    assert "11 files with 426,309 predictions" in good.output
    broken = changed(valid, tmp_path / "bad.zip", lambda files: files.pop("RTE.tsv") and None)
    bad = CliRunner().invoke(app, ["glue-validate", str(broken)])
    assert isinstance(bad.exception, DataError)
    assert {"error: QQP.tsv is missing", "RTE.tsv is missing"} == {bad.stderr.strip(), str(bad.exception)}
