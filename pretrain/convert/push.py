"""``--push USER/NAME``: an export to the hub, by the login that its client has (``hf auth login``, ``HF_TOKEN``)."""

from __future__ import annotations

import logging
from pathlib import Path

from pretrain.base.errors import ConfigError
from pretrain.models.hub import is_hub_id

logger = logging.getLogger(__name__)


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
    raise ConfigError(f"--push {repository}: {problem}; {folder} is written: hf upload {repository} {folder}")
