"""A small trained-looking model and a real tokenizer for the tests of all exports."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch

from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.config import RobertaConfig
from capt.tokenizer.encode import TextTokenizer, load_tokenizer
from capt.tokenizer.train import train
from tests.unit.tokenizer.corpus import docstrings

CARD = "---\ntags:\n- capt\n---\n# card\n"
WORDS = ("the", "a", "cat", "sat", "on", "mat", "and", "nobody", "minded", "why", "not", "is", "it", "in", "for", "of")


@functools.cache
def tokenizer(kind: str = "unigram") -> TextTokenizer:
    """A SentencePiece tokenizer trained on docstrings (padding id 1), or BERT's kind of vocabulary (padding id 0)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / kind
        if kind == "wordpiece":
            folder.mkdir()
            letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
            pieces = [*WORDS, *letters, *(f"##{letter}" for letter in letters), *".,?!"]
            vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(pieces)]
            (folder / "vocab.txt").write_text("\n".join(vocabulary))
        else:
            train(docstrings()[:600], folder, vocab_size=600, type=kind)
        return load_tokenizer(folder)


def config(kind: str = "unigram", **changes: object) -> RobertaConfig:
    """A configuration whose numbers are all different, so that no two axes can be confused."""
    used = tokenizer(kind)
    shape = {
        "size": "custom",
        "layers": 3,
        "hidden": 48,
        "heads": 3,
        "ffn": 80,
        "max_positions": 37,
        "pad_vocab_to": 64,
    }
    return RobertaConfig(pad_id=used.special.pad, **shape | changes).for_tokenizer(used.vocab_size, used.special.pad)


def model(config: RobertaConfig, *, contrast: bool = True, seed: int = 0) -> CaptModel:
    """All parameters random, biases and LayerNorms too: a swapped or forgotten one changes the output."""
    torch.manual_seed(seed)
    made = CaptModel(config, contrast=contrast)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.eval()
