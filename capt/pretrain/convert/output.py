"""Write an export into a temporary folder, rename it into place after its check, and push it to the hub."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from capt.pretrain.base.atomic import new_folder
from capt.pretrain.base.errors import CheckpointError, ConfigError, quoted
from capt.pretrain.base.files import public_mode
from capt.pretrain.base.quiet import quiet_transformers
from capt.pretrain.models.hf_config import is_hub_id

logger = logging.getLogger(__name__)

_MARK = "config.json"
"""Every export holds this file; a folder without it is never replaced."""


def refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Raise ``CheckpointError`` unless ``out`` is free, an empty folder, or an older export that may be replaced."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise CheckpointError(f"{out}: exists and is not a folder; give a new folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"{out}: the folder is not empty; give a new one, or --overwrite to replace an older export"
        )
    if not (out / _MARK).is_file():
        raise CheckpointError(f"{out}: --overwrite replaces older exports only, and this folder holds no {_MARK}")


@contextmanager
def export_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``out`` that becomes ``out`` when the block succeeds (`new_folder`).

    Raises:
        CheckpointError: ``out`` is taken, its parent cannot be written, or the disk is full.
    """
    refuse_existing(out, overwrite=overwrite)
    try:
        # The older export stays until the new one is complete.
        with new_folder(out, replace=True) as folder:
            yield folder
            mode = public_mode()  # safetensors and temporary files are made for their owner alone
            for path in folder.rglob("*"):
                if path.is_file():
                    path.chmod(mode)
    except Exception as error:
        if _disk_is_full(error):
            raise CheckpointError(f"{out}: cannot be written: no space left on the disk") from error
        if isinstance(error, OSError) and error.filename and Path(error.filename).is_relative_to(out.parent):
            raise CheckpointError(f"{out}: cannot be written: {error.strerror}") from error
        raise


def write_export(
    out: Path,
    *,
    write: Callable[[Path], None],
    check: Callable[[Path], float] | None,
    card: str,
    agrees: str,
    overwrite: bool = False,
) -> Path:
    """Write a folder with its card and compare it with our model; only then it gets its name. Returns ``out``.

    Args:
        out: the folder to make.
        write: writes the files of the model.
        check: loads the folder and returns the largest relative difference from our model, or raises; None leaves the
            comparison out.
        card: text of ``README.md``.
        agrees: what was found equal, for the log.
        overwrite: replace an older export.

    Raises:
        CheckpointError: as `export_folder`, or ``check`` fails. Nothing is left behind.
    """
    with export_folder(out, overwrite=overwrite) as folder:
        write(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        with quiet_transformers():
            difference = None if check is None else check(folder)
    if difference is not None:
        logger.info("%s: %s within %.1e", out, agrees, difference)
    return out


def _disk_is_full(error: Exception) -> bool:
    """Return whether it is the OSError or for what the Rust writers (safetensors, tokenizers) raise instead of it."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def check_push(repository: str) -> None:
    """Raise ``ConfigError`` where a push cannot succeed, before anything is converted. No network."""
    from huggingface_hub import constants, get_token

    if not is_hub_id(repository) or "@" in repository:
        raise ConfigError(f"--push {repository!r}: a repository of the hub is USER/NAME")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("--push: the hub client is offline (HF_HUB_OFFLINE); unset it")
    if get_token() is None:
        raise ConfigError("--push needs a login at the hub: `hf auth login`, or HF_TOKEN with a token that may write")


def push(folder: Path, repository: str, *, private: bool = True) -> str:
    """Upload ``folder`` to the model repository ``repository``, made if need be; returns its address.

    A repository that exists keeps its visibility and its other files.

    Raises:
        ConfigError: the hub refuses or cannot be reached; ``folder`` stays as it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    api = HfApi()
    try:
        address = api.create_repo(repository, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, repo_type="model", commit_message="Export from CAPT")
    except HfHubHTTPError as error:  # its text may quote the request
        problem = f"the hub answers with status {error.response.status_code}"
    except (HTTPError, OSError) as error:
        problem = f"the hub cannot be reached ({type(error).__name__})"
    else:
        logger.info("%s: pushed to %s", folder, address)
        return str(address)
    raise ConfigError(
        f"--push {repository}: {problem}; {folder} is written: hf upload {quoted(repository)} {quoted(folder)}"
    )
