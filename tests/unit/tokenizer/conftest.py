from __future__ import annotations

from pathlib import Path

import pytest

from capt.tokenizer.train import train
from tests.unit.tokenizer.corpus import docstrings


@pytest.fixture(scope="session", params=["unigram", "bpe"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer trained on docstrings, once for each kind."""
    out = tmp_path_factory.mktemp("trained") / request.param
    train(docstrings()[:1500], out, vocab_size=1500, type=request.param)
    return out
