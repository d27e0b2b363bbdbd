"""Arrays in files: what grows is what was appended, and nothing is read that is not what the record asks for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from capt.pretrain.base import arrays
from capt.pretrain.base.arrays import ArrayFile, Column, map_array, write_array
from capt.pretrain.base.errors import DataError
from capt.pretrain.base.locks import make_folder_once

KINDS = [("<u2", ()), ("<i8", (3,)), ("|S5", ()), ("|b1", ()), ("<f2", (2, 2))]


@pytest.mark.parametrize("at_once", [1, 50, 1 << 20])
def test_a_column_holds_what_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(arrays, "_AT_ONCE", at_once)
    for number, (dtype, row) in enumerate(KINDS):
        parts = [np.arange(10, 10 + n * int(np.prod(row))).reshape(n, *row).astype(dtype) for n in (3, 0, 1, 7)]
        whole = np.concatenate(parts)
        for has_header in (False, True):
            path = tmp_path / f"{number}{has_header}"
            here, there = Column(None, dtype, row), Column(path, dtype, row, has_header=has_header)
            for part in parts:
                here.append(part)
                there.append(part)
            assert there.finish().shape == (0, *row)
            np.testing.assert_array_equal(here.finish(), whole)
            assert len(here) == len(there) == 11
            assert here.sha256 == there.sha256 == hashlib.sha256(whole.tobytes()).hexdigest()
            np.testing.assert_array_equal(map_array(path, ArrayFile(dtype, whole.shape, has_header)), whole)
            if has_header:
                np.testing.assert_array_equal(np.load(path), whole)
    with pytest.raises(FileExistsError):
        Column(path, dtype, row).finish()


def test_an_array_without_values_and_numpys_own_file_are_mapped(tmp_path: Path) -> None:
    for shape in ((0,), (0, 4), (5,), (2, 3)):
        path, values = tmp_path / f"{shape}.npy", np.ones(shape, dtype="<f4")
        write_array(path, ArrayFile("<f4", shape), values)
        np.save(tmp_path / "own.npy", values)
        assert path.read_bytes() == (tmp_path / "own.npy").read_bytes()
        assert map_array(path, ArrayFile("<f4", shape)).shape == shape


def test_what_the_record_does_not_ask_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    write_array(path, ArrayFile("<i4", (4,)), np.arange(4))
    whole = path.read_bytes()
    damages = {"shorter": whole[:-1], "longer": whole + b"\0", "another header": whole.replace(b"<i4", b"<f4")}
    for what, content in damages.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.npy is damaged: 144 bytes of <i4 \[4\] are expected.*; mend it"):
            map_array(path, ArrayFile("<i4", (4,)), "; mend it")
        assert what
    path.unlink()
    with pytest.raises(DataError, match=r"a\.npy is missing; mend it"):
        map_array(path, ArrayFile("<i4", (4,)), "; mend it")
    path.mkdir()
    with pytest.raises(DataError, match=r"a\.npy is not a regular file"):
        map_array(path, ArrayFile("<i4", (4,)))


def test_a_folder_appears_whole_and_once(tmp_path: Path) -> None:
    """Remains of a killed writer of any host are removed, a failure leaves nothing, and a link is not followed."""
    folder, elsewhere = tmp_path / "f", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    (tmp_path / ".f.other-1.partial").mkdir()
    (tmp_path / ".f.link.partial").symlink_to(elsewhere)

    def fail(partial: Path) -> None:
        (partial / "half").touch()
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        make_folder_once(folder, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    make_folder_once(folder, lambda partial: (partial / "whole").touch())
    make_folder_once(folder, fail)
    make_folder_once(folder, lambda partial: (partial / "new").touch(), is_made=(folder / "new").is_file, replace=True)
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert (elsewhere / "mine").exists()
