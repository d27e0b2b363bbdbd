"""The study behind docs/results/distillation.md: how near does a small model come to a teacher?

``CAPT_DATA=... python -m tests.studies.distillation --teacher FOLDER --out runs/distillation`` encodes the texts of the
study of pairs once, trains every student by every loss, seed by seed, and measures each. Every measured trial is a file
in ``trials/``; after each the command writes ``trials.csv`` and ``tables.md``, and what is there is never run again, so
the same command continues after an interruption and with more ``--seeds``. ``--speed`` measures the texts a second of
all students and the teacher in one run, ``--tables`` writes both files and the plot of what there is, and
``--kept-back`` shows MRPC as well, which is measured with the others and looked at last.

``--long`` is a second part: layers of the teacher learn by the cosine for many steps, and by pairs at equal compute.
``--precisions`` is a third one: vectors in int8 and in bits, of the teacher and of a model that is trained for them.
Each part has an ``--out`` of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.data.sts_files import Pairs, find_sets
from tests.realdata import real_data
from tests.runs import rows_of
from tests.studies.distillation_tables import FASTER, QUANTIZED, Trial, plot_speed, write_tables
from tests.studies.pairs_data import SOURCES, write_files, write_kept_back
from tests.studies.support import capt, finish, newest_checkpoint, same_settings, write_trials

LAYERS = {"layers 0 2 4": "0,2,4", "layers 0 5": "0,5", "layers 0 2 5": "0,2,5"}
"""Student -> the layers of the teacher that it begins with."""
THREE, TWO, LAST = LAYERS
SMALL = ("random 2 x 128", "text 2 x 128")
"""Students of two layers of 128: random weights, and those of two crops of a passage of books."""
LOSSES: dict[str, list[str]] = {
    "cosine": ["distillation.cosine=1"],
    "listwise": ["distillation.cosine=0", "distillation.listwise=1"],
    "pairs": [],
    FASTER: [],
    QUANTIZED: ["contrast.precisions=[float,int8,binary]"],
}
PAIRS = ("pairs", FASTER, QUANTIZED)
"""The losses of pairs, which have no teacher."""
ARMS = [(student, loss) for student in (THREE, *SMALL) for loss in ("cosine", "listwise", "pairs")] + [(TWO, "cosine")]
TEXTS, BATCH, STEPS, LENGTH = 6000, 32, 72, 64
"""Texts that the teacher encodes, texts of a step, steps, and tokens that texts are cut to."""
LONG = 600
LONG_ARMS = [(THREE, "cosine"), (TWO, "cosine"), (LAST, "cosine"), (TWO, "pairs"), (TWO, FASTER)]
BRIEF = 200
PRECISION_ARMS = [(TWO, "pairs"), (TWO, QUANTIZED)]
UNTRAINED = [(student, "none") for student in ("teacher", *LAYERS)]
RATES = {"cosine": 3e-4, "listwise": 3e-4, "pairs": 5e-5, FASTER: 3e-4, QUANTIZED: 5e-5}
"""The rates for layers of the teacher, by the loss; 2 x 128 has another one."""
SMALL_RATE = 1e-3
MRPC = 500
"""Pairs of MRPC that are kept back, the first ones."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Folders of the study, and how long the arms are trained."""

    out: Path
    data: Path
    teacher: Path
    steps: int

    def trial(self, student: str, loss: str, seed: int) -> Path:
        """The file of a measured trial."""
        return self.out / "trials" / f"{_name(student)}-{_name(loss)}-seed{seed}.json"

    @property
    def files(self) -> Path:
        """Input of all trials."""
        return self.out / "files"

    @property
    def store(self) -> Path:
        """The teacher's vectors."""
        return self.out / "vectors"


def _name(words: str) -> str:
    return words.replace(" ", "-")


def _shared(study: Study, seed: int) -> list[str]:
    return [
        "run.threads=1", "run.log_every=10", "run.tensorboard=false", f"run.seed={seed}", "model.pooling=mean",
        f"data.cache={study.out / 'cache'}", f"data.sequence_length={LENGTH}", "checkpoint.every=0",
        "checkpoint.keep=1", "validate.every=0", "validate.first=false",
    ]  # fmt: skip


def start_of(study: Study, student: str) -> Path:
    """The model that a student begins with, made once for all seeds."""
    if student in LAYERS:
        folder = study.out / "starts" / _name(student)
        if not folder.exists():
            capt("shrink", study.teacher, folder, "--layers", LAYERS[student])
        return folder
    folder = study.out / "starts" / "text"
    corpus = study.data / "corpus"
    finish(
        folder, "pretrain", "capt_text", *_shared(study, 1), "tokenizer.vocab_size=4096", "optimizer.lr=1e-3",
        f"data.files=[{corpus / 'books.train.00.txt.gz'}]", f"data.validation_files=[{corpus / 'books.valid.txt.gz'}]",
        "data.passage=128", "batch.global=50", "batch.micro=50", "schedule.max_steps=100", "schedule.warmup_steps=12",
        "mlm.weight=0", "bottleneck.head=none", "validate.samples=64",
    )  # fmt: skip
    return folder


def train(study: Study, student: str, loss: str, seed: int) -> Path:
    """Train a student by a loss; its run. A step of pairs has the number of texts of a step of a teacher's vectors."""
    folder = study.out / "runs" / f"{_name(student)}-{_name(loss)}-seed{seed}"
    small = student in SMALL
    rate = SMALL_RATE if small else RATES[loss]
    settings = [
        *_shared(study, seed), f"model.init={start_of(study, student)}", f"schedule.max_steps={study.steps}",
        f"schedule.warmup_steps={study.steps // 10}", f"optimizer.lr={rate}",
        "model.dropout=0", "model.attention_dropout=0", *(["model.random=true"] if student == SMALL[0] else []),
    ]  # fmt: skip
    if loss in PAIRS:
        sources: list[dict[str, Any]] = [
            {"name": name, "files": [str(study.files / f"{name}.jsonl")]} for name in SOURCES
        ]
        finish(
            folder, "pretrain", "capt_pairs", *settings, f"batch.global={BATCH // 2}", f"batch.micro={BATCH // 2}",
            "data.validation_fraction=0", f"data.sources={json.dumps(sources)}", *LOSSES[loss],
        )  # fmt: skip
    else:
        finish(
            folder, "pretrain", "capt_distil", *settings, f"batch.global={BATCH}", f"batch.micro={BATCH}",
            f"data.files=[{study.files / 'taught.jsonl'}]", f"distillation.vectors={study.store}",
            f"distillation.projection={'export' if small else 'drop'}", "validate.samples=200", *LOSSES[loss],
        )  # fmt: skip
    return folder


def measure(study: Study, model: Path, *, in_its_space: bool) -> dict[str, Any]:
    """The figures of a model x 100: in float, int8 and bits, with documents by the teacher, and what is kept back."""
    from capt.pretrain.language.sts import score
    from capt.pretrain.retrieval.encoders import load_text_encoder
    from capt.pretrain.retrieval.evaluate import evaluate
    from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RetrievalSettings

    options = EncoderOptions(length=LENGTH)
    encoder = load_text_encoder(model, options)
    stsb, mrpc = (score(pairs, lambda texts: encoder.encode(texts, "text"))["spearman"] for pairs in scored_sets(study))
    store = study.out / "measured"
    cranfield = study.data / "retrieval" / "cranfield"
    sets = [cranfield, study.files / "qnli_held_out.jsonl"]
    settings = RetrievalSettings(precision="float,int8,binary", rescore=4)
    found = evaluate(model, sets, EncodeOptions(str(store)), options, settings)["sections"]
    by_system = {
        name: {system: 100 * each[metric] for system, each in section["poolers"].items()}
        for (name, metric), section in zip((("cranfield", "ndcg@10"), ("qnli", "mrr@10")), found, strict=True)
    }
    figures = {"stsb": 100 * stsb, **{name: by_system[name].pop("full") for name in ("qnli", "cranfield")}}
    asymmetric = None
    if in_its_space:
        kept, plain = EncodeOptions(str(store)), RetrievalSettings()
        crossed = evaluate(model, [cranfield], kept, options, plain, documents_by=study.teacher)["sections"][0]
        asymmetric = 100 * crossed["poolers"]["full"]["ndcg@10"]
    return {
        "figures": figures, "kept_back": 100 * mrpc, "asymmetric": asymmetric, "quantized": by_system,
    }  # fmt: skip


def scored_sets(study: Study) -> tuple[Pairs, Pairs]:
    """STS-B's test set, and the first pairs of MRPC's with its labels as scores."""
    stsb = next(pairs for pairs in find_sets(study.data / "glue" / "STS-B") if pairs.split == "test")
    rows = [json.loads(line) for line in (study.files / "mrpc.jsonl").read_text().splitlines()[:MRPC]]
    first, second, gold = ([row[key] for row in rows] for key in ("sentence1", "sentence2", "score"))
    return stsb, Pairs("MRPC", "test", first, second, np.array(gold))


def run_trial(study: Study, student: str, loss: str, seed: int) -> None:
    """Train and measure an arm with a seed; an untrained student and the teacher have the loss ``none``."""
    path = study.trial(student, loss, seed)
    if path.exists():
        return
    facts: dict[str, Any] = {"steps": 0}
    if loss == "none":
        model = study.teacher if student == "teacher" else start_of(study, student)
    else:
        run = train(study, student, loss, seed)
        model = newest_checkpoint(run)
        rows = rows_of(run)
        facts = {"steps": study.steps, **(next(row for row in reversed(rows) if row.get("split") == "validation")
                                          if loss not in PAIRS else {})}  # fmt: skip
    taken = {name: facts.get(name) for name in ("steps", "teacher/cosine", "teacher/cosine_p5")}
    row = {"student": student, "loss": loss, "seed": seed, **taken}
    row |= measure(study, model, in_its_space=loss == "cosine" or (loss == "none" and student in LAYERS))
    part = path.with_suffix(".part")
    part.write_text(json.dumps(row, indent=1) + "\n")
    part.rename(path)
    shutil.rmtree(study.out / "runs", ignore_errors=True)  # its weights are needed no more
    write_results(study)


def measure_speed(study: Study, rounds: int = 7) -> None:
    """Texts a second of the teacher and of each student, on one thread, in turns: the median over the rounds."""
    import torch

    from capt.pretrain.retrieval.encode import encode_in_batches
    from capt.pretrain.retrieval.encoders import load_text_encoder
    from capt.pretrain.retrieval.options import EncoderOptions

    torch.set_num_threads(1)
    models = {"teacher": study.teacher, **{student: start_of(study, student) for student in (*LAYERS, SMALL[1])}}
    encoders = {name: load_text_encoder(path, EncoderOptions(length=LENGTH)) for name, path in models.items()}
    texts = scored_sets(study)[0].first[:200]
    rates: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(rounds):
        for name, encoder in encoders.items():
            begin = time.process_time()
            encode_in_batches(encoder, texts, "text")
            rates[name].append(len(texts) / (time.process_time() - begin))
    found = {name: float(np.median(values)) for name, values in rates.items()}
    found[SMALL[0]] = found[SMALL[1]]
    (study.out / "speed.json").write_text(json.dumps(found, indent=1) + "\n")


def write_results(study: Study, *, kept_back: bool = False) -> None:
    """Write ``trials.csv`` and ``tables.md`` of the trials that there are, without MRPC unless it is asked for."""
    rows = [json.loads(path.read_text()) for path in sorted((study.out / "trials").glob("*.json"))]
    order = list(dict.fromkeys([*UNTRAINED, *ARMS, *LONG_ARMS, *PRECISION_ARMS]))
    rows.sort(key=lambda row: (order.index((row["student"], row["loss"])), row["seed"]))
    trials = [
        Trial(
            row["student"], row["loss"], row["seed"], **row["figures"], asymmetric=row["asymmetric"],
            mrpc=row["kept_back"] if kept_back else None, steps=row["steps"], cosine=row["teacher/cosine"],
            p5=row["teacher/cosine_p5"], **_quantized(row),
        )
        for row in rows
    ]  # fmt: skip
    note = study.out / "speed.json"
    speed = json.loads(note.read_text()) if note.exists() else {}
    write_trials(trials, study.out / "trials.csv")
    write_tables(trials, speed, study.out / "tables.md")
    if speed:
        plot_speed(trials, speed, study.out / "speed.png")


def _quantized(row: dict[str, Any]) -> dict[str, float]:
    """The figures of a trial in int8 and in bits, by the names of columns."""
    return {
        f"{name}_{system.replace(' ', '_')}": value
        for name, systems in row.get("quantized", {}).items()
        for system, value in systems.items()
    }


def prepare(study: Study) -> None:
    """Write the texts that are taught and measured, and encode the former by the teacher."""
    (study.out / "trials").mkdir(parents=True, exist_ok=True)
    taught = study.files / "taught.jsonl"
    if not taught.exists():
        write_files(study.data, study.files)
        write_kept_back(study.data, study.files / "mrpc.jsonl")
        texts = [json.loads(line)["text"] for line in (study.files / "texts.jsonl").read_text().splitlines()]
        texts.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
        part = taught.with_suffix(".part")
        part.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:TEXTS]))
        part.rename(taught)
    capt("encode", taught, "--model", study.teacher, "--out", study.store, "--length", str(LENGTH))


def main(words: Sequence[str] | None = None) -> int:
    """Train and measure what is missing, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=STEPS, help="of every arm")
    parser.add_argument("--long", action="store_true", help=f"the second part: layers of the teacher, {LONG} steps")
    parser.add_argument("--precisions", action="store_true", help=f"the third part: int8 and bits, {BRIEF} steps")
    parser.add_argument("--speed", action="store_true", help="measure the texts a second, in one run")
    parser.add_argument(
        "--tables", action="store_true", help="write trials.csv, tables.md and the plot of what there is"
    )
    parser.add_argument("--kept-back", action="store_true", help="the same with MRPC, once the other tables are final")
    options = parser.parse_args(words)
    data = real_data(parser, "corpus", "glue", "retrieval", "vl")
    arms, steps = ARMS, options.steps
    if options.long:
        arms, steps = LONG_ARMS, LONG
    elif options.precisions:
        arms, steps = PRECISION_ARMS, BRIEF
    study = Study(options.out.resolve(), data, options.teacher.resolve(), steps)
    if options.tables or options.kept_back:
        write_results(study, kept_back=options.kept_back)
        return 0
    same_settings(study.out, {"steps": steps, "texts": TEXTS, "batch": BATCH})
    prepare(study)
    if options.speed:
        measure_speed(study)
        write_results(study)
        return 0
    for student, loss in UNTRAINED:
        run_trial(study, student, loss, 0)
    for seed in options.seeds:
        for student, loss in arms:
            run_trial(study, student, loss, seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
