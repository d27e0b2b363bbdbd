"""What the language task refuses before it prepares anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pretrain.config.load import job_from_mapping
from pretrain.language.task import LanguageTask
from tests.language import language_mapping
from tokenizer.errors import ConfigError


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has TF32")
def test_tf32_without_a_gpu_is_refused_before_data_is_prepared(tmp_path: Path) -> None:
    job = job_from_mapping(language_mapping(tmp_path, contrast={"precision": "tf32"}), "test")
    with pytest.raises(ConfigError, match=r"contrast\.precision tf32"):
        LanguageTask(job, tmp_path / "run")
    assert not (tmp_path / "cache").exists()
