"""The text and the job of tests that break jobs, on one host or several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
_WORDS = "the cat sat on a mat while the old dog ran over green hills and far away birds sang in the morning light"


def write_job(folder: Path, **changes: Any) -> Path:
    """Write a text and a job of a very small model, with these sections changed, into a folder of all hosts."""
    folder.mkdir(exist_ok=True)
    words = _WORDS.split()
    lines = [" ".join(words[(i * j) % len(words)] for j in range(1, 8 + i % 9)) for i in range(1, 400)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    job = {
        "base": "capt_tiny",
        "run": {"log_every": 1, "threads": 1, "tensorboard": False},
        "data": {"files": ["text.txt"], "sequence_length": 32, "cache": str(folder / "cache"), "workers": 1},
        "tokenizer": {"vocab_size": 370},
        "model": {"layers": 1, "hidden": 32, "heads": 2, "ffn": 64},
        "batch": {"global": 8, "micro": 2},
        "contrast": {"queue": 37},  # odd, so that the shards differ in size
        "validate": {"every": 0, "samples": 8},
        **changes,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder
