"""Before anything starts: is what a job reads there, and is it what it is said to be?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError, UserError
from capt.pretrain.base.verification import Verifier
from capt.pretrain.config import load_job
from capt.pretrain.data.files import FileCorpus
from capt.pretrain.data.shard_writer import ShardOptions, write_shards
from capt.tokenizer.encode import load_tokenizer
from capt.tokenizer.train import train
from tests.finetune import write_encoder
from tests.language import write_corpus

LARGE = ["capt_large", "capt_base", "mlm_small"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, a tokenizer, shards of both, and a folder of GLUE's RTE."""
    root = tmp_path_factory.mktemp("inputs")
    text = write_corpus(root / "text.txt")
    train(text.read_text().splitlines(), root / "tokenizer", vocab_size=400, type="bpe")
    tokenizer = load_tokenizer(root / "tokenizer")
    corpus = FileCorpus([text], "text", None)
    options: ShardOptions = {"text_column": "text", "document_start": None, "held_out": None, "split": None}
    shards = root / "shards" / "train"
    write_shards(corpus, tokenizer, shards, key="k", options=options, workers=1, verifier=Verifier(root / ".cache"))
    (root / "glue" / "RTE").mkdir(parents=True)
    for split in ("train", "dev"):
        (root / "glue" / "RTE" / f"{split}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n")
    write_encoder(root / "encoder", max_position_embeddings=514)
    (root / "bare").mkdir()
    (root / "bare" / "config.json").write_text("{}")
    return root


def _lines(name: str, *overrides: str) -> list[str]:
    return load_job(name, overrides).check_inputs()


@pytest.mark.parametrize("name", LARGE)
def test_only_the_tiny_jobs_bring_their_text(name: str) -> None:
    with pytest.raises(ConfigError, match=r"data names no text: set data\.files .* data\.shards .* data\.name"):
        _lines(name)
    assert "docstrings" in _lines("capt_tiny")[0]
    assert "docstrings" in _lines("mlm_tiny")[0]


def test_inputs_that_are_there_are_described(folder: Path) -> None:
    size = (folder / "text.txt").stat().st_size
    text = [f"data.files={folder}/*.txt"]
    assert _lines("capt_large", *text) == [
        f"corpus: 1 file, {size:,} bytes",
        "tokenizer: bpe of 50265 ids, trained on the corpus",
    ]
    given = [f"data.shards={folder}/shards", f"tokenizer.path={folder}/tokenizer"]
    corpus, tokenizer = _lines("capt_large", *given)
    assert corpus.startswith(f"corpus: {folder}/shards/train, 60 documents, ")
    assert tokenizer == f"tokenizer: {folder}/tokenizer, 400 ids"
    assert _lines("capt_tiny", f"data.files={folder}/text.txt")[0].startswith("corpus: 1 file")
    assert (
        _lines("rte", f"data.path={folder}/glue", f"model.init={folder}/encoder")[1] == f"model.init: {folder}/encoder"
    )


@pytest.mark.parametrize(
    ("name", "overrides", "error", "message"),
    [
        ("capt_large", ["data.files=@/*.md"], DataError, r"data\.files: .*does not exist"),
        ("capt_large", ["data.files=@/text.txt", "data.validation_files=@/no.txt"], DataError, "data.validation_files"),
        ("capt_large", ["data.shards=@/nowhere"], DataError, r"no manifest\.json"),
        ("capt_large", ["data.shards=@/shards"], DataError, "tokenizer.path is missing"),
        ("capt_large", ["data.shards=@/shards", "tokenizer.path=@/nowhere"], DataError, "no such folder; a tokenizer"),
        ("capt_large", ["data.files=@/text.txt", "tokenizer.path=@/glue"], DataError, "no tokenizer in it"),
        ("capt_large", ["data.files=@/text.txt", "model.init=@/nowhere"], CheckpointError, "model.init: no folder"),
        (
            "capt_large",
            ["data.files=@/text.txt", "model.init=@/bare"],
            CheckpointError,
            r"model\.init: .*: no such file",
        ),
        ("capt_large", ["data.name=@/text.txt"], DataError, r"data\.name: "),
        ("rte", ["data.path=@/nowhere", "model.init=@/encoder"], DataError, r"no such folder; it should hold RTE"),
        ("cola", ["data.path=@/glue", "model.init=@/encoder"], DataError, r"no train\.tsv"),
        ("capt_continue", ["data.files=@/text.txt"], CheckpointError, "model.init: no folder FOLDER_OR_HUB_ID; name a"),
        ("rte", ["data.path=@/glue", "model.init=@/nowhere"], CheckpointError, "model.init: no folder"),
        ("rte", ["data.path=@/glue", "model.init=@/glue"], CheckpointError, "neither a run or checkpoint"),
        *(
            pytest.param("ptb/vae", overrides, DataError, message, marks=pytest.mark.family)
            for overrides, message in (
                ([], r"data\.path: no folder data/ptb"),
                (["data.path=@/glue"], "no .txt file whose name says train"),
            )
        ),
    ],
)
def test_inputs_that_are_not_there_are_named(
    folder: Path, name: str, overrides: list[str], error: type[UserError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        _lines(name, *(text.replace("@", str(folder)) for text in overrides))
    assert "\n" not in str(caught.value)


def test_shards_of_another_tokenizer_are_found_before_the_start(folder: Path, tmp_path: Path) -> None:
    train((folder / "text.txt").read_text().splitlines(), tmp_path / "other", vocab_size=410, type="bpe")
    with pytest.raises(DataError, match="was tokenized with the tokenizer"):
        _lines("capt_large", f"data.shards={folder}/shards", f"tokenizer.path={tmp_path}/other")


def test_a_shard_that_is_missing_is_found_before_the_start(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "shards", tmp_path / "shards")
    (tmp_path / "shards" / "train" / "shard-00000.bin").unlink()
    with pytest.raises(DataError, match=r"shard-00000\.bin is missing"):
        _lines("capt_large", f"data.shards={tmp_path}/shards", f"tokenizer.path={folder}/tokenizer")
