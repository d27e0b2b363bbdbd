import errno

import pytest

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.convert.output import export_folder


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_folder_is_never_replaced(tmp_path, overwrite):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="out: "), export_folder(tmp_path / "out", overwrite=overwrite):
        pass
    assert names(tmp_path / "out") == ["thesis.tex"]


def test_an_older_export_is_replaced_on_request_only_and_whole(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("config.json", "stale"):
        (out / name).write_text("old")
    with pytest.raises(CheckpointError, match="not empty"), export_folder(out):
        pass
    with pytest.raises(RuntimeError), export_folder(out, overwrite=True):
        raise RuntimeError
    assert names(out) == ["config.json", "stale"]
    with export_folder(out, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
    assert names(out) == ["config.json"]
    assert (out / "config.json").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_a_file_or_link_as_target_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(CheckpointError, match="not a folder"), export_folder(tmp_path / name, overwrite=True):
            pass


FULL = [OSError(errno.ENOSPC, "No space"), Exception("No space left on device (os error 28)")]


@pytest.mark.parametrize("error", FULL, ids=["python", "rust"])
def test_a_full_disk_says_so(tmp_path, error):
    with pytest.raises(CheckpointError, match="no space left on the disk"), export_folder(tmp_path / "out"):
        raise error
    assert names(tmp_path) == []


def test_a_parent_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"), export_folder(tmp_path / "file" / "out"):
        pass
