"""Cache of a host: what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capt.pretrain.base.cache import use_own_compile_cache
from capt.pretrain.base.errors import ConfigError
from tests.unit.models.support import small_model

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    return tmp_path / "capt" / "compiled"


def test_what_is_compiled_is_kept_in_a_folder_of_the_user_alone(cache: Path) -> None:
    small_model(compile=True)
    assert os.environ[VARIABLE] == str(cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    use_own_compile_cache()
    assert os.environ[VARIABLE] == str(cache)


@pytest.mark.parametrize("fault", ["others write", "link", "file"])
def test_code_is_not_loaded_from_where_others_write(cache: Path, tmp_path: Path, fault: str) -> None:
    cache.parent.mkdir()
    if fault == "others write":
        cache.mkdir()
        cache.chmod(0o777)
    elif fault == "link":
        (tmp_path / "theirs").mkdir()
        cache.symlink_to(tmp_path / "theirs")
    else:
        cache.write_text("")
    with pytest.raises((ConfigError, FileExistsError), match="compiled"):
        use_own_compile_cache()
    assert VARIABLE not in os.environ


def test_a_folder_that_the_user_names_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/mine")
    small_model(compile=True)
    assert os.environ[VARIABLE] == "/mine"
    assert not cache.exists()
