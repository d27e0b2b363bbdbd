"""Every script of the recipes on two ranks: the first loss of a resumed run is that of an uninterrupted one."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertModel, BertTokenizer

from tests.documented import ROOT, blocks
from tests.support import run_ranks

PAGE = ROOT / "docs" / "guide" / "recipes.md"
WORLD, SAVED, STEPS = 2, 2, 3


def _train(code: str, folder: str, steps: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> float:
    """The last loss of a rank that ``torchrun`` has started."""
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", LOCAL_WORLD_SIZE=str(WORLD), ACCELERATE_USE_CPU="1")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(code, str(PAGE), "exec"), names)
    return float(names["train"](folder, steps, *arguments, **options)[-1])


def _train_each(code: str, runs: list[tuple[str, int]], *more: Any) -> list[float | str]:
    """The last loss of each of several runs in one process, whose imports are most of the time; or its error."""
    found: list[float | str] = []
    for folder, steps in runs:
        try:
            found.append(_train(code, folder, steps, *more))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _check_resume(folder: Path, word: str, *arguments: Any, **options: Any) -> None:
    """Runs of three steps, and of two and then one more; a checkpoint without its queue is refused."""
    (code,) = (body for body in blocks(PAGE, "python") if word in body)
    whole, parts, without = (str(folder / name) for name in ("whole", "parts", "without"))

    def run(*runs: tuple[str, int]) -> Any:
        return zip(*run_ranks(_train_each, WORLD, code, runs, arguments, options), strict=True)

    expected, begun = run((whole, STEPS), (parts, SAVED))
    shutil.copytree(parts, without)
    assert all(isinstance(loss, float) for loss in (*expected, *begun)), (expected, begun)
    assert begun != expected
    shards = list(Path(without).rglob("queue-*.safetensors"))
    assert len(shards) == WORLD
    for shard in shards:
        shard.unlink()
    resumed, refused = run((parts, STEPS), (without, STEPS))
    assert resumed == pytest.approx(expected, rel=1e-5)
    assert all("holds no queue shard" in str(each) for each in refused), refused


def _start_twice(code: str, folder: str) -> list[list[str]]:
    """Run a script to its end and start it again in ``folder``: the checkpoints after each time."""
    os.chdir(folder)
    seen = []
    for _ in range(2):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
        seen.append(sorted(path.name for path in Path("runs").glob("*/step-*")))
    return seen


@pytest.mark.parametrize("word", ["DistributedDataParallel(", "fully_shard(model"])
def test_a_script_saves_on_its_way_and_may_be_started_again(word: str, tmp_path: Path) -> None:
    (code,) = (body for body in blocks(PAGE, "python") if word in body)
    for line in ("dist.init_process_group()", "dist.destroy_process_group()"):  # the test has done it
        assert line in code
        code = code.replace(line, "")
    for seen in run_ranks(_start_twice, WORLD, code, str(tmp_path)):
        assert seen == [["step-000050", "step-000100"]] * 2


def test_ddp(tmp_path: Path) -> None:
    _check_resume(tmp_path, "DistributedDataParallel(")


def test_fsdp(tmp_path: Path) -> None:
    _check_resume(tmp_path, "fully_shard(model")


def test_trainer_of_transformers(tmp_path: Path) -> None:
    _check_resume(tmp_path, "class ContrastTrainer")


def test_trainer_of_sentence_transformers(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers (the extra export)")
    words = [f"w{number}" for number in range(40)]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    encoder = str(tmp_path / "encoder")
    BertTokenizer(str(vocabulary)).save_pretrained(encoder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=45, max_position_embeddings=32, **sizes)).save_pretrained(encoder)
    texts = [(" ".join(words[i : i + 6]), " ".join(words[i + 1 : i + 7])) for i in range(32)]
    _check_resume(tmp_path, "CaptLoss", encoder, texts)


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="needs pytorch-lightning, which no extra installs")
    _check_resume(tmp_path, "class Contrast(pl", devices=WORLD, strategy="ddp", accelerator="cpu")
