"""Fine-tuning is compared with a Trainer whose batches hold examples of like lengths, and with one in random order."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForSequenceClassification

from tests.benchmarks.bench_finetune import EXAMPLES, TASKS, TURNS, make_trainer


def _padded_tokens(folder: Path, *, grouped: bool) -> tuple[int, int]:
    """Tokens of an epoch's batches with and without padding."""
    config = RobertaConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "a": 1}, unk_token="a")), pad_token="<pad>"
    )
    rows = [{"input_ids": [1] * (1 + i % 32), "label": i % 2} for i in range(1024)]
    model = RobertaForSequenceClassification(config)
    training = make_trainer(model, tokenizer, rows, str(folder), 8, grouped=grouped)
    batches = list(training.get_train_dataloader())
    return sum(batch["input_ids"].numel() for batch in batches), sum(int(b["attention_mask"].sum()) for b in batches)


def test_the_grouped_trainer_hardly_pads(tmp_path: Path) -> None:
    random, real = _padded_tokens(tmp_path, grouped=False)
    grouped, same = _padded_tokens(tmp_path, grouped=True)
    assert real == same == 1024 * 33 // 2
    assert random > 1.5 * real
    assert grouped < 1.2 * real


@pytest.mark.parametrize("task", TASKS)
def test_the_turns_are_an_epoch(task: str) -> None:
    assert TURNS * TASKS[task].steps * TASKS[task].batch == EXAMPLES
