"""A sentence-transformers folder that somebody else may have written, loaded without running anything in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.base.quiet import quiet_transformers
from capt.pretrain.models.hf_config import SENTENCE_FILES, local_folder
from capt.pretrain.models.hf_folder import PICKLES, modules_of, read_json, require_regular

_MAX_FILES = 1000


def load_sentence_model(path: Path) -> Any:
    """The ``SentenceTransformer`` in a folder, or of the hub model it names, on the CPU.

    Raises:
        CheckpointError: no such folder, not sentence-transformers', pickles or code in it, or damaged.
    """
    folder = local_folder(path, SENTENCE_FILES)
    if not (folder / "modules.json").is_file():
        what = "no modules.json; capt convert --to sentence-transformers writes such a folder"
        raise CheckpointError(f"{path}: {what if folder.is_dir() else 'no such folder'}")
    _check(folder)
    from sentence_transformers import SentenceTransformer

    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        with quiet_transformers():
            model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"use_safetensors": True}, **options)
            model.encode(["a text"], show_progress_bar=False)
        return model
    except Exception as error:  # what its many readers raise for a file that they do not like
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: sentence-transformers cannot use it: {type(error).__name__}: {text}") from None


def _check(folder: Path) -> None:
    modules_of(folder)
    for number, path in enumerate(folder.rglob("*")):
        if number > _MAX_FILES:
            raise CheckpointError(f"{folder}: over {_MAX_FILES} files")
        if path.suffix in PICKLES:
            raise CheckpointError(f"{path}: a pickle, which could run code when it is opened; remove it")
        if not path.is_dir() or path.is_symlink():
            require_regular(path)
        if path.name in ("config.json", "tokenizer_config.json", "special_tokens_map.json"):
            read_json(path)
