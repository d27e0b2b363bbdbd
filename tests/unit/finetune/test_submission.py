"""The leaderboard's zip: what is written is valid, and what is not is refused."""

from __future__ import annotations

import zipfile
from dataclasses import replace as with_
from pathlib import Path

import numpy as np
import pytest

from capt.finetune.glue.submission import SUBMISSION_FILES, majority_wnli, write_submission
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


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("RTE", None, "not complete: RTE: no predictions"),
        ("RTE", np.zeros(10, dtype=np.int64), "RTE: 10 predictions; the official test set has 3,000"),
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
