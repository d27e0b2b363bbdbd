"""GLUE's files: layouts, quotes, labels by name, sizes, and every way in which a file can be wrong."""

from __future__ import annotations

import gzip
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from capt.finetune.glue.files import read_split
from capt.finetune.glue.tasks import GLUE, GlueTask, glue_task
from capt.pretrain.base.errors import ConfigError, DataError

HEADERS = {
    ("cola", "test"): "index\tsentence",
    ("sst2", "train"): "sentence\tlabel",
    ("sst2", "test"): "index\tsentence",
    ("mrpc", "train"): "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    ("mrpc", "test"): "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
    ("stsb", "dev"): "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
    ("qqp", "train"): "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
    ("qqp", "test"): "id\tquestion1\tquestion2",
    ("mnli", "train"): "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse"
    "\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
    ("mnli", "dev_matched"): "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse"
    "\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
    ("rte", "dev"): "index\tsentence1\tsentence2\tlabel",
    ("rte", "test"): "index\tsentence1\tsentence2",
    ("ax", "test"): "index\tsentence1\tsentence2",
}


def write(folder: Path, task: str, split: str, *rows: str, name: str | None = None) -> Path:
    home = folder / GLUE[task].folder
    home.mkdir(exist_ok=True)
    header = HEADERS.get((task, split))
    path = home / (name or f"{split}.tsv")
    text = "".join(f"{row}\n" for row in ([header, *rows] if header else rows))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8", newline="")
    return folder


def small(task: str, **rows: int) -> GlueTask:
    """The task as if its official splits were this small."""
    return replace(GLUE[task], rows={**GLUE[task].rows, **rows})


def test_each_layout(tmp_path: Path) -> None:
    write(tmp_path, "cola", "train", 'gj04\t0\t*\tA "quoted word.', "gj04\t1\t\tOne.")
    cola = read_split(tmp_path, GLUE["cola"], "train")
    assert (cola.first, cola.second, list(cola.labels)) == (['A "quoted word.', "One."], None, [0, 1])
    assert cola.labels.dtype == np.int64
    write(tmp_path, "cola", "test", "0\tFirst .", "1\tSecond .")
    assert read_split(tmp_path, GLUE["cola"], "test").first == ["First .", "Second ."]
    write(tmp_path, "sst2", "train", "a film \t1")
    assert read_split(tmp_path, GLUE["sst2"], "train").first == ["a film "]
    write(tmp_path, "mrpc", "train", "1\t10\t11\tone\ttwo")
    mrpc = read_split(tmp_path, GLUE["mrpc"], "train")
    assert (mrpc.first, mrpc.second, list(mrpc.labels)) == (["one"], ["two"], [1])
    write(tmp_path, "stsb", "dev", "0\tg\tf\ty\to\ts\ts\ta\tb\t3.250")
    stsb = read_split(tmp_path, GLUE["stsb"], "dev")
    assert (stsb.first, stsb.second, stsb.labels.dtype, list(stsb.labels)) == (["a"], ["b"], np.float32, [3.25])
    write(tmp_path, "rte", "dev", "0\tp\th\tnot_entailment", "1\tp\th\tentailment")
    assert list(read_split(tmp_path, GLUE["rte"], "dev").labels) == [1, 0]
    write(tmp_path, "ax", "test", "0\tp\th", name="diagnostic.tsv")
    assert read_split(tmp_path, GLUE["ax"], "test").second == ["h"]


def test_mnli_has_its_label_last_and_two_dev_sets(tmp_path: Path) -> None:
    parses = "\t".join(["x"] * 6)
    for label in ("contradiction", "entailment"):
        write(tmp_path, "mnli", "train", f"0\t1\t{parses}\tp\th\tneutral\t{label}")
        assert list(read_split(tmp_path, GLUE["mnli"], "train").labels) == [GLUE["mnli"].labels.index(label)]
    five = "\t".join(["entailment"] * 5)
    write(tmp_path, "mnli", "dev_matched", f"7\t1\t{parses}\tp\th\t{five}\tneutral")
    dev = read_split(tmp_path, GLUE["mnli"], "dev")
    assert (list(dev.labels), dev.index, dev.source) == ([1], [0], str(tmp_path / "MNLI/dev_matched.tsv"))


def test_text_is_kept_to_the_last_character(tmp_path: Path) -> None:
    odd = 'said "no\u2028 \x85 \x1c and, "" left\r'
    write(tmp_path, "qqp", "test", f"0\t{odd}x\t", "1\t\tlast")
    found = read_split(tmp_path, small("qqp", test=2), "test")
    assert (found.first, found.second) == ([f"{odd}x", ""], ["", "last"])


def test_malformed_rows_of_qqp_are_dropped_in_train_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "qqp", "train", "1\t2\t3\ta\tb\t1", "4\t5\t6\tcut", "off\t0", "7\t8\t9\tc\td\t0")
    with caplog.at_level(logging.WARNING):
        found = read_split(tmp_path, small("qqp", train=2), "train")
    assert (found.first, list(found.labels)) == (["a", "c"], [1, 0])
    assert "2 malformed rows were left out (lines 3, 4)" in caplog.text
    write(tmp_path, "qqp", "test", "0\ta\tb", "1\tcut")
    with pytest.raises(DataError, match=r"test\.tsv, line 3: 2 columns; the header has 3"):
        read_split(tmp_path, GLUE["qqp"], "test")


def test_gzip_bom_crlf_and_the_tasks_own_folder(tmp_path: Path) -> None:
    write(tmp_path, "rte", "dev", "0\tp\th\tentailment", name="dev.tsv.gz")
    assert len(read_split(tmp_path, GLUE["rte"], "dev")) == 1
    assert read_split(tmp_path / "RTE", GLUE["rte"], "dev").second == ["h"]
    text = HEADERS["rte", "dev"] + "\r\n0\tp\th\tentailment\r\n"
    (tmp_path / "RTE/dev.tsv").write_text("\ufeff" + text, encoding="utf-8", newline="")
    assert read_split(tmp_path, GLUE["rte"], "dev").second == ["h"]


def test_sizes_are_compared_with_the_official_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "rte", "dev", *["0\tp\th\tentailment"] * 277)
    with caplog.at_level(logging.WARNING):
        read_split(tmp_path, GLUE["rte"], "dev")
        assert caplog.text == ""
        write(tmp_path, "rte", "dev", *["0\tp\th\tentailment"] * 280)
        read_split(tmp_path, GLUE["rte"], "dev")
    assert "RTE dev has 280 rows, the official one has 277 (3 more)" in caplog.text


ROW = "0\tp\th\tentailment"


@pytest.mark.parametrize(
    ("task", "split", "rows", "message"),
    [
        ("rte", "dev", [ROW, "1\tp\tentailment"], r"RTE/dev\.tsv, line 3: 3 columns; the header has 4"),
        ("rte", "dev", [ROW, ""], r"RTE/dev\.tsv, line 3: 1 columns; the header has 4"),
        ("cola", "train", ["a\t1\t\ttext", "a\t1\ttext"], r"train\.tsv, line 2: 3 columns; CoLA's train file has 4"),
        ("rte", "dev", [ROW, "1\tp\th\tEntailment"], r"line 3: unknown label 'Entailment'.*'entailment', 'not_entail"),
        ("cola", "train", ["a\t2\t\ttext"], r"line 1: unknown label '2'; CoLA has '0', '1'"),
        ("stsb", "dev", ["0\tg\tf\ty\to\ts\ts\ta\tb\t5.1"], r"line 2: score 5\.1 is outside 0 to 5"),
        ("stsb", "dev", ["0\tg\tf\ty\to\ts\ts\ta\tb\tnan"], r"line 2: score nan is outside 0 to 5"),
        ("stsb", "dev", ["0\tg\tf\ty\to\ts\ts\ta\tb\t"], r"line 2: score '' is not a number from 0 to 5"),
        ("rte", "dev", [], r"dev\.tsv: the file is empty: it holds no row under its header"),
        ("cola", "train", [], r"train\.tsv: the file is empty; give UTF-8 text"),
        ("rte", "test", ["x\tp\th"], r"line 2: index 'x' is not a whole number"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, task: str, split: str, rows: list[str], message: str) -> None:
    write(tmp_path, task, split, *rows)
    with pytest.raises(DataError, match=message):
        read_split(tmp_path, GLUE[task], split)


def test_bad_files(tmp_path: Path) -> None:
    rte = GLUE["rte"]
    with pytest.raises(DataError, match=r"nowhere: no such folder; it should hold RTE/dev\.tsv"):
        read_split(tmp_path / "nowhere", rte, "dev")
    with pytest.raises(DataError, match=r"no dev\.tsv or dev\.tsv\.gz, nor a folder RTE; it holds nothing"):
        read_split(tmp_path, rte, "dev")
    write(tmp_path, "rte", "test", "0\tp\th")
    with pytest.raises(DataError, match=r"RTE: no dev\.tsv or dev\.tsv\.gz; it holds test\.tsv"):
        read_split(tmp_path, rte, "dev")
    path = tmp_path / "RTE/dev.tsv"
    path.touch()
    with pytest.raises(DataError, match="the file is empty; give UTF-8 text"):
        read_split(tmp_path, rte, "dev")
    path.write_text("index\tsentence1\tlabel\n0\tp\tentailment\n")
    with pytest.raises(DataError, match=r"line 1: no column 'sentence2'; the header has index, sentence1, label"):
        read_split(tmp_path, rte, "dev")
    path.write_bytes(f"{HEADERS['rte', 'dev']}\n0\tcaf".encode() + b"\xe9\th\tentailment\n")
    with pytest.raises(DataError, match=r"line 2: not UTF-8 text \(byte 0xe9\)"):
        read_split(tmp_path, rte, "dev")
    path.unlink()
    path.with_suffix(".tsv.gz").write_bytes(gzip.compress(b"index\tsentence1\tsentence2\tlabel\n" * 99)[:30])
    with pytest.raises(DataError, match=r"damaged gzip file .*; fetch or pack it again"):
        read_split(tmp_path, rte, "dev")


def test_names_of_tasks_and_splits() -> None:
    assert glue_task("rte").folder == "RTE"
    for given, near in (("rtee", "rte"), ("SST-2", "sst2"), ("STS-B", "stsb"), ("MNLI", "mnli")):
        with pytest.raises(ConfigError, match=f"unknown GLUE task '{given}'; did you mean '{near}'"):
            glue_task(given)
    with pytest.raises(ConfigError, match="unknown GLUE task 'boolean'; known: cola, sst2"):
        glue_task("boolean")
    with pytest.raises(ConfigError, match="RTE has no split 'validation'; it has train, dev, test"):
        GLUE["rte"].split("validation")
    assert GLUE["mnli"].split("test") == "test_matched"


def test_every_task_is_described_in_full() -> None:
    assert list(GLUE) == ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax"]
    for task in GLUE.values():
        assert set(task.columns) == set(task.rows)
        assert len(task.names) == len(task.labels)
        assert task.pair == all(columns.second is not None for columns in task.columns.values())
    assert [task.name for task in GLUE.values() if task.regression] == ["stsb"]
    assert {task.name: task.metric for task in GLUE.values() if task.metric != "accuracy"} == {
        "cola": "matthews",
        "stsb": "pearson",
        "ax": "matthews",
    }


REAL = {
    "cola": (8551, 1043, 1063),
    "sst2": (67349, 872, 1821),
    "mrpc": (3668, 408, 1725),
    "stsb": (5749, 1500, 1379),
    "qqp": (19496, 4000, None),
    "mnli": (7235, 1500, None),
    "qnli": (None, 5463, 5463),
    "rte": (2490, 277, 3000),
}


@pytest.mark.realdata
@pytest.mark.parametrize("name", REAL)
def test_real_files_have_the_rows_that_are_said(name: str, data_folder: Path) -> None:
    task = GLUE[name]
    for split, rows in zip(("train", "dev", "test"), REAL[name], strict=True):
        if rows is not None:
            found = read_split(data_folder / "glue", task, split)
            assert len(found) == len(found.index) == rows
            assert (found.second is not None) == task.pair


@pytest.mark.realdata
def test_real_files_keep_their_quotes(data_folder: Path) -> None:
    alone = 0
    for name, split in (("mrpc", "train"), ("cola", "train"), ("qnli", "test"), ("qqp", "train")):
        found = read_split(data_folder / "glue", GLUE[name], split)
        texts = [*found.first, *(found.second or [])]
        raw = (data_folder / "glue" / GLUE[name].folder / f"{split}.tsv").read_text(encoding="utf-8")
        assert sum(text.count('"') for text in texts) == raw.count('"') > 0
        alone += sum(text.count('"') % 2 for text in texts)
    assert alone > 0  # those are the ones that a reader with quoting would merge rows at


@pytest.mark.parametrize("space", [" ", "\u00a0", "  "])
def test_spaces_around_a_label_are_no_part_of_it(tmp_path: Path, space: str) -> None:
    """The same holds of names of columns, an index or a score; texts stay as they are."""
    write(tmp_path, "sst2", "train", f"good \t1{space}", f" bad\t{space}0")
    path = tmp_path / "SST-2" / "train.tsv"
    path.write_text(path.read_text(encoding="utf-8").replace("label", f"label{space}"), encoding="utf-8")
    examples = read_split(tmp_path, small("sst2", train=2), "train")
    assert examples.labels is not None
    assert examples.labels.tolist() == [1, 0]
    assert examples.first == ["good ", " bad"]
    write(tmp_path, "rte", "dev", f"0\ta\tb\tentailment{space}")
    rte = read_split(tmp_path, small("rte", dev=1), "dev")
    assert rte.labels is not None
    assert rte.labels.tolist() == [0]
    write(tmp_path, "rte", "test", f"{space}7{space}\ta\tb")
    assert read_split(tmp_path, small("rte", test=1), "test").index == [7]
