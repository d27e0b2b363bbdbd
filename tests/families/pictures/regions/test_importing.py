"""Feature files to stores: the same for any number of processes, after a kill, and never half."""

from __future__ import annotations

import os
import shutil
import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.regions import importing, writer
from capt.pretrain.regions.importing import import_regions
from capt.pretrain.regions.picture import Picture
from capt.pretrain.regions.store import RegionStore
from capt.pretrain.regions.writer import write_store
from tests.families.pictures.regions.pictures import encode, random_pictures


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_ROWS", 5)
    monkeypatch.setattr(importing, "_SYNC_SECONDS", 0.0)


def _pictures() -> list[Picture]:
    return list(random_pictures(60, size=16))


def _files(folder: Path) -> list[Path]:
    """Three files with 60 pictures: of one, of 22 and of 37."""
    pictures, paths = _pictures(), []
    for name, start, stop in (("b", 0, 1), ("a", 1, 23), ("c", 23, 60)):
        paths.append(folder / f"{name}.tsv")
        paths[-1].write_bytes(b"".join(encode(picture) for picture in pictures[start:stop]))
    return paths


def _content(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.iterdir())}


def test_the_store_is_that_of_the_writer_whatever_the_number_of_processes(tmp_path: Path) -> None:
    paths = _files(tmp_path)
    steps: list[tuple[int, int]] = []
    manifest = import_regions(tmp_path / "one", paths, workers=1, progress=lambda *step: steps.append(step))
    import_regions(tmp_path / "three", paths, workers=3)
    assert _content(tmp_path / "one") == _content(tmp_path / "three")
    write_store(
        tmp_path / "plain", _pictures(), feature_dtype="fp16", features_of=manifest.features_of,
        sources=manifest.sources,
    )  # fmt: skip
    assert _content(tmp_path / "one") == _content(tmp_path / "plain")
    assert [source.pictures for source in manifest.sources] == [1, 22, 37]
    total = 2 * sum(path.stat().st_size for path in paths)
    assert steps[-1] == (total, total)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv", "b.tsv", "c.tsv", "one", "plain", "three"]


def _import_until(step: int, out: Path, paths: list[Path]) -> None:
    """Import, and be killed when the progress is called for the ``step``-th time."""
    calls = 0

    def kill(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), signal.SIGKILL)

    import_regions(out, paths, workers=1, progress=kill)


@pytest.mark.parametrize("step", [1, 40, 62, 66, 73])
def test_an_import_that_was_killed_goes_on(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _files(tmp_path)
    import_regions(tmp_path / "whole", paths, workers=1)
    process = get_context("fork").Process(target=_import_until, args=(step, tmp_path / "store", paths))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "store").exists()
    written: list[int] = []
    write = writer.BlockWriter.__call__
    monkeypatch.setattr(
        writer.BlockWriter, "__call__", lambda self, block: (written.append(block.number), write(self, block))[1]
    )
    steps: list[tuple[int, int]] = []
    import_regions(tmp_path / "store", paths, workers=1, progress=lambda *step: steps.append(step))
    assert _content(tmp_path / "store") == _content(tmp_path / "whole")
    blocks = 1 + 5 + 8
    assert len(written) == blocks - max(0, step - 61)  # 60 rows are counted first, then comes a call for each block
    assert steps[-1] == (2 * sum(path.stat().st_size for path in paths),) * 2


def _killed(tmp_path: Path, paths: list[Path]) -> None:
    process = get_context("fork").Process(target=_import_until, args=(70, tmp_path / "store", paths))
    process.start()
    process.join(60)
    assert (tmp_path / ".store.import" / "journal").exists()


def test_a_changed_file_begins_it_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = _files(tmp_path)
    _killed(tmp_path, paths)
    paths[1].write_bytes(paths[1].read_bytes() + encode(next(random_pictures(1, size=16))._replace(id="new")))
    import_regions(tmp_path / "store", paths, workers=1)
    assert "beginning anew" in caplog.text
    import_regions(tmp_path / "whole", paths, workers=1)
    assert _content(tmp_path / "store") == _content(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["journal", "plan.json", "features.npy", "index"])
def test_a_damaged_folder_of_an_import_is_not_believed(tmp_path: Path, damage: str) -> None:
    paths = _files(tmp_path)
    _killed(tmp_path, paths)
    work = tmp_path / ".store.import"
    for path in [work / damage] if damage != "index" else list((work / "index").iterdir()):
        path.write_bytes(path.read_bytes()[:-7])
    import_regions(tmp_path / "store", paths, workers=1)
    import_regions(tmp_path / "whole", paths, workers=1)
    assert _content(tmp_path / "store") == _content(tmp_path / "whole")


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    paths = _files(tmp_path)
    calls = 0

    def change(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 63:
            os.utime(paths[2], ns=(1, 1))

    with pytest.raises(DataError, match=r"c.tsv has changed since its rows were counted"):
        import_regions(tmp_path / "store", paths, workers=1, progress=change)


def _row(number: int, **change: Any) -> bytes:
    return encode(_pictures()[number]._replace(**change))


BAD = {
    "truncated": (lambda row: row[:-30], "b.tsv, row 2: features"),
    "not base64": (lambda row: row[:-20] + b"!" * 8 + row[-12:], "b.tsv, row 2: features is not base64"),
    "cut in a field": (lambda row: row[:60], "b.tsv, row 2: .*not the 10"),
    "twice": (lambda row: _row(0), r"b.tsv, row 2: picture 'p0' is in \S*b.tsv, row 1 already"),
    "outside": (lambda row: _row(1, width=1), "b.tsv, row 2: picture 'p1': box 1 .* is not in"),
    "other size": (
        lambda row: _row(1, features=_pictures()[1].features[:, :5]),
        "b.tsv, row 2: picture 'p1': 5 f",
    ),
    "no objects": (lambda row: _row(1, objects=None), "b.tsv, row 2: .*: 16 features a region and attributes, and 16"),
    "nan": (lambda row: _row(1, features=_pictures()[1].features * np.nan), "b.tsv, row 2: .*not finite"),
    "in parts of the picture": (
        lambda row: _row(1, boxes=np.array([[0.1, 0.2, 0.3, 0.4]] * len(_pictures()[1].boxes), np.float32)),
        "b.tsv, row 2: picture 'p1': all boxes lie in its first pixel, .* give them in pixels",
    ),
    "no name": (lambda row: _row(1, id=""), "b.tsv, row 2: '' is not a name"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_and_nothing_is_left(tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    paths = _files(tmp_path)
    with paths[0].open("ab") as file:
        file.write(change(_row(1)))
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=message):
        import_regions(tmp_path / "store", [paths[0]], workers=1)
    assert sorted(tmp_path.iterdir()) == before


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    paths = _files(tmp_path)
    other = tmp_path / "other.tsv"
    other.write_bytes(encode(next(random_pictures(1, size=4))._replace(id="o")))
    empty, packed = tmp_path / "empty.tsv", tmp_path / "f.tsv.gz"
    empty.touch()
    packed.write_bytes(b"\x1f\x8b" + bytes(50))
    for files, message in (
        ([paths[0], other], "other.tsv: 4 features a region.* 16"),
        ([tmp_path / "none.tsv"], "none.tsv: no such file"),
        ([paths[0], tmp_path / "none.tsv"], "none.tsv: no such file"),
        ([empty], "empty.tsv: the file is empty"),
        ([paths[0], empty], "empty.tsv: the file is empty"),
        ([packed], "unpack it first"),
        ([paths[0], paths[0]], r"b.tsv, row 1: picture 'p0' is in \S*b.tsv, row 1 already; 1 picture more than once"),
    ):
        with pytest.raises(DataError, match=message):
            import_regions(tmp_path / "store", files, workers=2)


def test_the_disk_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_FREE", 1 << 60)
    with pytest.raises(
        DataError, match=r"the store needs [\d,]+ bytes \([\d,]+ of them stay free\) and [\d,]+ are free"
    ):
        import_regions(tmp_path / "store", _files(tmp_path), workers=1)


def test_fp32_keeps_every_bit(tmp_path: Path) -> None:
    import_regions(tmp_path / "store", _files(tmp_path), feature_dtype="fp32", features_of="a detector", workers=1)
    store = RegionStore.open(tmp_path / "store")
    assert store.manifest.features_of == {"backend": "lxmert", "features": "a detector"}
    picture = _pictures()[30]
    read = store.regions(store.rows(["p30"]))
    assert np.array_equal(read.features[0], picture.features)


def test_an_import_goes_on_from_another_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _files(tmp_path)
    import_regions(tmp_path / "whole", paths, workers=1)
    monkeypatch.chdir(tmp_path)
    _killed(tmp_path, [Path(path.name) for path in paths])
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    import_regions(tmp_path / "store", [Path("..") / path.name for path in paths], workers=1)
    features = "features.npy"
    assert (tmp_path / "store" / features).read_bytes() == (tmp_path / "whole" / features).read_bytes()


def test_both_rows_of_a_picture_that_comes_twice_are_named(tmp_path: Path) -> None:
    paths = _files(tmp_path)
    with paths[2].open("ab") as file:
        file.write(encode(_pictures()[4]))
    with pytest.raises(DataError, match=r"c.tsv, row 38: picture 'p4' is in \S*a.tsv, row 4 already; 1 picture more"):
        import_regions(tmp_path / "store", paths, workers=1)


def test_a_name_that_no_manifest_can_hold_is_refused_first(tmp_path: Path) -> None:
    path = tmp_path / "a\udcff.tsv"
    path.write_bytes(encode(_pictures()[0]))
    for options in ({"paths": [path]}, {"paths": _files(tmp_path), "features_of": "\udcff"}):
        with pytest.raises(DataError, match="not UTF-8 text"):
            import_regions(tmp_path / "store", workers=1, **options)
    assert not [path for path in tmp_path.iterdir() if "store" in path.name]


def test_damaged_rows_can_be_left_out_and_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every kind of damage, in the middle of a file; the store is that of the rows that are whole."""
    pictures, damaged = _pictures()[:30], []
    lines = []
    for number, (change, _) in enumerate(BAD.values()):
        lines += [encode(picture) for picture in pictures[3 * number : 3 * number + 3]]
        bad = change(_row(30 + number)).rstrip(b"\n") + b"\n"
        lines.append(bad)
        damaged.append(len(lines))
    again, whole = tmp_path / "a.tsv", tmp_path / "whole.tsv"
    again.write_bytes(b"".join(lines))
    whole.write_bytes(b"".join(encode(picture) for picture in pictures[: 3 * len(BAD)]))
    with pytest.raises(DataError, match=r"a.tsv, row 4: .*; --skip-damaged leaves such pictures out"):
        import_regions(tmp_path / "no", [again], workers=1)
    for workers in (1, 2):
        manifest = import_regions(tmp_path / f"out{workers}", [again], workers=workers, skip_damaged=True)
        (source,) = manifest.sources
        assert [text.split(":")[0] for text in source.left_out] == [f"row {number}" for number in damaged]
        assert source.pictures == manifest.pictures == 3 * len(BAD)
    import_regions(tmp_path / "plain", [whole], workers=1)
    assert {k: v for k, v in _content(tmp_path / "out1").items() if k != "manifest.json"} == {
        k: v for k, v in _content(tmp_path / "plain").items() if k != "manifest.json"
    }
    assert all(f"a.tsv, row {number}: " in caplog.text for number in damaged)


def test_pictures_of_another_file_are_left_out_as_repeated(tmp_path: Path) -> None:
    paths = _files(tmp_path)
    with paths[2].open("ab") as file:
        file.write(_row(3))
    with pytest.raises(DataError, match="--skip-damaged takes the first"):
        import_regions(tmp_path / "store", paths, workers=1)
    manifest = import_regions(tmp_path / "store", paths, workers=1, skip_damaged=True)
    assert [len(source.left_out) for source in manifest.sources] == [0, 0, 1]
    assert manifest.sources[2].left_out[0].startswith("row 38: picture 'p3' is in ")
    assert manifest.pictures == 60
