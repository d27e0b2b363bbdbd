"""The commands of pictures, latent variables and words that the documentation shows, as those of the core are run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from capt.pretrain.engine.run import run_job
from tests.documented import reason_of, require_reasons, run_shown, shown
from tests.families.words.unit.runs import make_run, tables
from tests.language import write_corpus
from tests.latent import small_job, write_text
from tests.support import run_ranks

pytestmark = pytest.mark.timeout(600)

SMALLER = {"--pictures=2000": "--pictures=60", "128": "16"}
MICROWORLD = ["regions", "microworld", "--out", "world", "--pictures", "60"]
IMPORT = ["regions", "import", "world/pictures/train.tsv", "--out", "store"]
AS_TEXT = ["convert", "runs/words", "words.txt", "--to", "word2vec"]
MADE_BY = {
    "world/pictures/train.tsv": ("world", MICROWORLD),
    "store": ("store", IMPORT),
    "data.regions=store": ("store", IMPORT),
    "words.txt": ("words.txt", AS_TEXT),
    "model.init=words.txt": ("words.txt", AS_TEXT),
    "words.bin": ("words.bin", ["convert", "runs/words", "words.bin", "--to", "gensim"]),
}

NOT_RUN = {
    "capt plan": "takes most of a minute; tests/unit/plan",
    "capt report runs/latent_table1": "needs a sweep that has run; tests/families/latent/unit",
    "capt evaluate $run": "a loop over trials of a sweep that has run; tests/families/latent/unit/test_evaluate.py",
    "capt regions import train2014": "needs LXMERT's feature files; the same as of the microworld's, which is run",
    "capt regions extract": "needs models of vision; tests/families/pictures/regions/extract",
    "capt regions inspect store_detr": "needs a store that a detector made; tests/families/pictures/regions",
    "capt pretrain capt_vl data.regions": "needs LXMERT's files; the same as of capt_vl_small, which is run",
    "capt pretrain lxmert data.regions": "needs LXMERT's files; the same as of capt_vl_small, which is run",
    "capt finetune vqa data.regions": "needs the files of VQA v2; tests/families/pictures/visual",
    "capt finetune vqa model.init": "needs a run of capt_vl; tests/families/pictures/visual",
    "capt finetune gqa": "needs the files of GQA; tests/families/pictures/visual",
    "capt finetune nlvr": "needs the files of NLVR; tests/families/pictures/visual",
    "capt evaluate runs/vqa": "needs a fine-tuned run; tests/families/pictures/visual",
    "capt evaluate runs/nlvr2": "needs a fine-tuned run; tests/families/pictures/visual",
    "capt predict runs/vqa": "needs a fine-tuned run; tests/families/pictures/e2e/test_visual.py",
    "capt predictions check": "needs a result file; tests/families/pictures/visual",
    "capt sweep vqa": "needs the files of VQA v2; tests/families/pictures/visual",
    "capt convert runs/capt_vl": "needs a run of capt_vl; tests/parity",
    "capt convert runs/vqa": "needs a fine-tuned run; tests/parity",
    "python -c from transformers": "needs the hub; tests/families/pictures/lxmert/test_read.py",
}
"""The beginning of each command that is not run -> why, and what tests the same."""

SHOWN = shown(of_families=True)
RUN = [command for command in SHOWN if reason_of(command, NOT_RUN) is None]


def _latent_run(folder: Path) -> None:
    run_job(small_job("vae", folder / "PTB", folder / "runs/ptb_vae", "schedule.max_steps=2", "validate.every=0"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the texts and runs of which the pages speak, in small."""
    folder = tmp_path_factory.mktemp("world")
    write_corpus(folder / "my.txt", documents=200)
    for name in ("PTB", "yahoolike", "yelplike"):
        (folder / name).mkdir()
        write_text(folder / name)
    with (folder / "PTB/toy.train.txt").open("a") as train:
        train.write("prices fell\nthe board approved the plan\nthe company said it expects a profit\n" * 3)
    _words(folder)
    run_ranks(_latent_run, 1, folder)
    return folder


def _words(folder: Path) -> None:
    """Runs of word embeddings, one of them with a generator, a set of word pairs and a file of analogies."""
    words = ("river", "stone", "queen", "king", "man", "woman")
    make_run(folder / "runs/words", {"discriminator": tables(1, words=len(words))}, words)
    with_generator = {"discriminator": tables(1), "generator": tables(2)}
    make_run(folder / "runs/ace", with_generator)
    (folder / "wordsim").mkdir()
    (folder / "wordsim/EN-RG-65.txt").write_text("river\tstone\t1\nking\tqueen\t9\nman\tking\t5\n")
    (folder / "questions-words.txt").write_text(": family\nman king woman queen\n")


def test_every_command_is_run_or_has_a_reason() -> None:
    require_reasons(SHOWN, NOT_RUN)
    assert {shlex.split(command)[0] for command in RUN} == {"capt"}, "a program without an entry in NOT_RUN"


@pytest.mark.parametrize("command", RUN)
def test_command(
    command: str, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    run_shown(command, SMALLER, MADE_BY, monkeypatch, capsys)
