"""A Hugging Face RoBERTa or XLM-R folder as a model in memory, for evaluation beside our own checkpoints."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from pretrain.config.load import job_from_mapping
from pretrain.convert.hf_folder import read_config, read_json, read_tensor_file, read_tensors
from pretrain.convert.huggingface import HEAD_FILE
from pretrain.language.config import LanguageJob
from pretrain.language.restore import Restored
from pretrain.models.capt import CaptModel
from pretrain.models.config import RobertaConfig
from pretrain.models.hf_map import initialise_from_hf
from tokenizer.encode import load_tokenizer


def is_hf(folder: Path) -> bool:
    """True for a folder with a ``config.json``, which our checkpoints and runs do not have."""
    return (folder / "config.json").is_file()


def load_hf(folder: Path) -> Restored:
    """The masked-language model in ``folder``, in evaluation mode; its windows are as long as its position table.

    It has an aggregation head only where ``capt_head.safetensors`` (our own exports) brings one: nothing is made up.

    Raises:
        CheckpointError: ``folder`` is not such a model, is damaged or hostile.
        DataError: its tokenizer cannot be read.
        ConfigError: tokenizer and model do not fit.
    """
    described = read_config(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            read_json(folder / name)
    tokenizer = load_tokenizer(folder)
    config = RobertaConfig.from_hf(described).for_tokenizer(tokenizer.vocab_size, tokenizer.special.pad)
    head = None
    if (folder / HEAD_FILE).exists():
        head = read_tensor_file(folder / HEAD_FILE)
        with safe_open(folder / HEAD_FILE, framework="pt") as file:
            config = config.model_copy(update={"pooling": (file.metadata() or {}).get("pooling", "cls")})
    model = CaptModel(config, contrast=head is not None)
    initialise_from_hf(model, config, described, read_tensors(folder), head, str(folder))
    mapping = {
        "task": {"type": "capt_language"},
        "data": {"sequence_length": config.max_positions},
        "model": config.model_dump(mode="json", by_alias=True),
        "contrast": {"weight": float(head is not None)},
    }
    job = job_from_mapping(mapping, str(folder))
    assert isinstance(job, LanguageJob)
    return Restored(folder, model.eval(), tokenizer, job)
