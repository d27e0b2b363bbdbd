"""An extraction that is interrupted continues, and ends in the same bytes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from capt.pretrain.base.errors import DataError
from capt.pretrain.base.verification import sha256
from capt.pretrain.regions.extract import run
from capt.pretrain.regions.extract.parts import ExtractOptions
from capt.pretrain.regions.store import RegionStore
from tests.families.pictures.regions.extract.support import as_bytes, picture, write_model

NUMBER = 7


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    (folder / "pictures").mkdir()
    for number in range(NUMBER):
        (folder / "pictures" / f"p{number}.png").write_bytes(as_bytes(picture(40 + number, 33, number)))
    for kind in ("vit", "detr"):
        write_model(folder / kind, kind)
    return folder


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PART", 2)


def _hashes(store: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(store.iterdir())}


class InterruptedForTestError(Exception):
    """Stand-in for the end of the process."""


class Progress:
    """Counts the pictures that are worked on, and ends the work at one."""

    def __init__(self, last: int = 100) -> None:
        self.seen: list[int] = []
        self.last = last

    def __call__(self, done: int, total: int) -> None:
        assert total == NUMBER
        self.seen.append(done)
        if done == self.last:
            raise InterruptedForTestError


def _extract(home: Path, out: Path, progress: Progress, backend: str = "vit", *, skip: bool = False) -> None:
    options = ExtractOptions(backend, home / backend, device="cpu", threshold=0.01, batch=3, skip_damaged=skip)
    run.extract_regions([home / "pictures"], out, options, progress)


@pytest.mark.parametrize("backend", ["vit", "detr"])
def test_it_goes_on_to_the_same_bytes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    with pytest.raises(InterruptedForTestError):
        _extract(home, tmp_path / "store", Progress(last=5), backend)
    assert not (tmp_path / "store").exists()
    again = Progress()
    _extract(home, tmp_path / "store", again, backend)
    assert again.seen == [5, 6, 7], "two parts of two were there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    monkeypatch.setattr(run, "PART", 4096)
    _extract(home, tmp_path / "whole", Progress(), backend)
    assert _hashes(tmp_path / "store") == _hashes(tmp_path / "whole")


def test_parts_of_something_else_are_not_used(home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InterruptedForTestError):
        _extract(home, tmp_path / "store", Progress(last=5))
    again = Progress()
    with caplog.at_level(logging.WARNING):
        _extract(home, tmp_path / "store", again, "detr")
    assert again.seen == list(range(1, NUMBER + 1))
    assert "beginning anew" in caplog.text
    assert RegionStore.open(tmp_path / "store").manifest.features_of["backend"] == "detr"


def test_pictures_that_have_changed_are_looked_at_again(home: Path, tmp_path: Path) -> None:
    """The one that stopped the extraction was mended: the other parts are as they were."""
    shutil.copytree(home, tmp_path / "home")
    home = tmp_path / "home"
    with pytest.raises(InterruptedForTestError):
        _extract(home, tmp_path / "store", Progress(last=7))
    (home / "pictures" / "p2.png").write_bytes(as_bytes(picture(55, 44, 9)))
    again = Progress()
    _extract(home, tmp_path / "store", again)
    assert again.seen == [3, 4, 7], "of four parts the second, and the last, which was not there"
    _extract(home, tmp_path / "whole", Progress())
    assert _hashes(tmp_path / "store") == _hashes(tmp_path / "whole")


def test_what_was_skipped_stops_an_extraction_that_skips_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "decode", _broken(home, {"p2"}))
    with pytest.raises(InterruptedForTestError):
        _extract(home, tmp_path / "store", Progress(last=7), skip=True)
    with pytest.raises(DataError, match=r"p2\.png.*--skip-damaged"):
        _extract(home, tmp_path / "store", Progress())


def test_damaged_pictures_can_be_skipped_in_the_second_try(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "decode", _broken(home, {"p2", "p3", "p6"}))  # all of the second part
    with pytest.raises(DataError, match=r"p2\.png.*--skip-damaged"):
        _extract(home, tmp_path / "store", Progress())
    again = Progress()
    options = ExtractOptions("vit", home / "vit", device="cpu", batch=3, skip_damaged=True)
    _, damage = run.extract_regions([home / "pictures"], tmp_path / "store", options, again)
    assert [Path(where).stem for where in damage.skipped] == ["p2", "p3", "p6"]
    assert 1 not in again.seen, "the first part was there"
    assert sorted(RegionStore.open(tmp_path / "store").names()) == ["p0", "p1", "p4", "p5"]


def _broken(home: Path, names: set[str]) -> object:
    contents = {(home / "pictures" / f"{name}.png").read_bytes() for name in names}
    decode = run.decode

    def broken(content: bytes, most: int) -> object:
        if content in contents:
            raise DataError("damaged")
        return decode(content, most)

    return broken
