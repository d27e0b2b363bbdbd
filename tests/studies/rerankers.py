"""The study behind docs/results/rerankers.md: which loss makes a reranker, and do its scores help the encoder?

``CAPT_DATA=... python -m tests.studies.rerankers --encoder FOLDER --out runs/rerankers`` mines negatives for questions
of QNLI, trains rerankers from MiniLM and from two layers of it, orders BM25's first 100 of Cranfield and of held-out
QNLI by each, and trains the two layers as an encoder with and without the scores of MiniLM's reranker. ``--long`` is
the second part: rerankers from MiniLM that train longer, on longer texts and more questions. Every measured
trial is a file in ``trials/``; after each the command writes ``trials.csv`` and ``tables.md``. What is there is never
run again, so the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.realdata import real_data
from tests.studies.pairs_data import write_files
from tests.studies.seeds import seeds_compared, spread
from tests.studies.support import capt, finish, same_settings, table, write_trials

LENGTH = 64
"""Tokens of a text of an encoder."""
NEGATIVES, RANKS = 3, 30
"""Negatives of a question, drawn once from this number of the nearest sentences."""
SEARCHED = ("cranfield", "qnli")
SETS = {"cranfield": "Cranfield, nDCG@10", "qnli": "QNLI held out, MRR@10"}
LOSSES = ("infonce", "bce", "margin_mse")
TEACHER = ("minilm infonce", 1)
"""The reranker, and its seed, whose scores ``margin_mse`` and the distilled encoder learn."""
STUDENTS = ("labels", "distilled", "labels-equal-compute")
STUDENT_STEPS, STUDENT_BATCH = 60, 16
FIRST, REST = (1, 2, 3), (4, 5)
SMALL = tuple(f"small {loss}" for loss in LOSSES)
PARTS: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
    (("minilm infonce",), FIRST),
    (SMALL, FIRST),
    (STUDENTS, FIRST),
    (("minilm infonce", *SMALL, *STUDENTS), REST),
    (("minilm bce", "minilm margin_mse"), FIRST),
)
"""Arms and their seeds, in the order of their runs: each part ends before the next begins."""
LARGE = tuple(f"minilm {loss}" for loss in LOSSES)
LONG_PARTS: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
    (LARGE, (1,)),
    (STUDENTS, (1,)),
    (LARGE, (2, 3)),
    (STUDENTS, (2, 3)),
    ((*LARGE, *STUDENTS), REST),
)
COMPARED = (
    *((f"{encoder} {loss}", "bm25") for encoder in ("minilm", "small") for loss in LOSSES),
    *((f"{encoder} {loss}", f"{encoder} infonce") for encoder in ("small", "minilm") for loss in LOSSES[1:]),
    ("small margin_mse", "small bce"), ("labels", "start"), ("distilled", "start"), ("distilled", "labels"),
    ("distilled", "labels-equal-compute"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reranking:
    """The size of the training of an encoder's rerankers."""

    steps: int
    queries: int
    lr: str


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a part: of the training from each encoder, of its texts, and of what it is measured on.

    ``length`` is tokens of a pair, ``rows`` questions that are trained on (all where there are fewer), and
    ``questions`` those of each set that rerankers are measured on.
    """

    encoders: Mapping[str, Reranking]
    length: int
    rows: int
    questions: int


SHORT = Size({"small": Reranking(60, 8, "2e-4"), "minilm": Reranking(40, 8, "2e-4")}, 64, 480, 20)
LONG = Size({"minilm": Reranking(200, 8, "1e-4")}, 128, 10**6, 40)


class Trial(NamedTuple):
    """Figures x 100 of an arm with a seed; BM25 has seed 0."""

    arm: str
    seed: int
    cranfield: float
    qnli: float


@dataclasses.dataclass(frozen=True)
class Study:
    """Folders of the study."""

    out: Path
    data: Path
    encoder: Path
    size: Size = SHORT

    def run(self, name: str, seed: int) -> Path:
        """The folder of a run."""
        return self.out / "runs" / f"{name.replace(' ', '-')}-seed{seed}"

    def start(self, encoder: str) -> Path:
        """The encoder from which rerankers are trained."""
        return self.encoder if encoder == "minilm" else self.out / "small"

    @property
    def mined(self) -> Path:
        """Rows with negatives, the same for all arms and seeds."""
        return self.out / "mined" / "train.jsonl"

    @property
    def scored(self) -> Path:
        """The same rows with the teacher's scores."""
        return self.out / "scored" / "pairs.jsonl"

    @property
    def first(self) -> list[Path]:
        """The first questions of both sets, as BEIR folders."""
        return [self.out / "files" / name for name in SEARCHED]

    @property
    def whole(self) -> list[Path]:
        """Both sets."""
        return [self.data / "retrieval" / "cranfield", self.out / "files" / "qnli_held_out.jsonl"]

    def trial(self, arm: str, seed: int) -> Path:
        """The file of a measured trial."""
        return self.out / "trials" / f"{arm.replace(' ', '-')}-seed{seed}.json"


def prepare(study: Study) -> None:
    """Write the pairs with their negatives, the first questions of both sets, and the small encoder."""
    files, mined = study.out / "files", study.mined.parent
    (study.out / "trials").mkdir(parents=True, exist_ok=True)
    if not (files / "done").exists():
        write_files(study.data, files)
        for path, folder in zip(study.whole, study.first, strict=True):
            write_first(path, folder, study.size.questions)
        (files / "done").touch()
    if not study.start("small").exists():
        capt("shrink", study.encoder, study.start("small"), "--layers", "0,5")
    if not study.mined.exists():
        shutil.rmtree(mined, ignore_errors=True)
        capt(
            "mine", "--pairs", files / "qnli.jsonl", "--model", study.encoder, "--number", str(NEGATIVES),
            "--last", str(RANKS), "--choice", "random", "--store", study.out / "vectors", "--out", mined,
        )  # fmt: skip
        rows = (mined / "pairs.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        study.mined.write_text("".join(rows[: study.size.rows]), encoding="utf-8")


def write_first(path: Path, folder: Path, questions: int) -> None:
    """Write a BEIR folder with the whole corpus of ``path`` and its first questions that have an answer."""
    from capt.pretrain.retrieval.data import read_collections

    (collection,) = read_collections(path)
    answered = [row for row in collection.queries if max(collection.judged[row[0]].values()) > 0][:questions]
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, rows in (("corpus", collection.documents()), ("queries", iter(answered))):
        lines = (json.dumps({"_id": key, "text": text}) + "\n" for key, text in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    judged = [f"{query}\t{name}\t{grade}" for query, _ in answered for name, grade in collection.judged[query].items()]
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")


def score(study: Study) -> Path:
    """Have the teacher score every text of the rows, which stay as they are; the file."""
    if not study.scored.exists():
        shutil.rmtree(study.scored.parent, ignore_errors=True)
        teacher = train_reranker(study, *TEACHER)
        capt(
            "mine", "--pairs", study.mined, "--model", study.encoder, "--cross-encoder", teacher,
            "--number", "0", "--last", "1", "--store", study.out / "vectors", "--out", study.scored.parent,
        )  # fmt: skip
    return study.scored


def _shared(study: Study, seed: int) -> list[str]:
    return [
        "run.threads=1", "run.tensorboard=false", f"run.seed={seed}", f"data.cache={study.out / 'cache'}",
        f"data.negatives={NEGATIVES}", "data.validation_fraction=0",
        "model.dropout=0", "model.attention_dropout=0", "validate.every=0", "checkpoint.every=0",
    ]  # fmt: skip


def train_reranker(study: Study, arm: str, seed: int) -> Path:
    """Train a reranker; its run."""
    encoder, loss = arm.split()
    size, folder = study.size.encoders[encoder], study.run(arm, seed)
    finish(
        folder, "finetune", "rerank", *_shared(study, seed), f"model.init={study.start(encoder)}",
        f"data.train={score(study) if loss == 'margin_mse' else study.mined}", f"loss.type={loss}",
        f"batch.global={size.queries}", "schedule.epochs=null", f"schedule.max_steps={size.steps}",
        f"optimizer.lr={size.lr}", "validate.per_epoch=null", "checkpoint.per_epoch=null", "checkpoint.best=null",
        f"data.sequence_length={study.size.length}", "batch.micro_tokens=2048",  # less padding, the same gradients
    )  # fmt: skip
    return folder


def measure_reranker(study: Study, model: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The figures x 100 of BM25's first 100 in the order of a reranker, and of BM25 itself."""
    from capt.pretrain.retrieval.options import EncodeOptions, RerankSettings
    from capt.pretrain.retrieval.rerank_evaluate import evaluate_reranker

    with tempfile.TemporaryDirectory() as store:
        found = evaluate_reranker(model, study.first, EncodeOptions(str(store)), RerankSettings())
    both = [_figures(found, system) for system in ("reranked", "bm25")]
    return both[0], both[1]


def measure_encoder(sets: Sequence[Path], model: Path) -> dict[str, float]:
    """The figures x 100 of an encoder that searches on its own."""
    from capt.pretrain.retrieval.evaluate import evaluate
    from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RetrievalSettings

    with tempfile.TemporaryDirectory() as store:
        found = evaluate(model, sets, EncodeOptions(str(store)), EncoderOptions(length=LENGTH), RetrievalSettings())
    return _figures(found, "full")


def _figures(found: Mapping[str, Any], system: str) -> dict[str, float]:
    cranfield, qnli = (section["poolers"][system] for section in found["sections"])
    return {"cranfield": 100 * cranfield["ndcg@10"], "qnli": 100 * qnli["mrr@10"]}


def steps_of_equal_compute(study: Study) -> int:
    """Steps on labels with the FLOP of the distilled student, its teacher and the scoring; the same for all seeds."""
    from capt.pretrain.engine.checkpoint import find_best, read_job
    from capt.pretrain.registry import task_class

    note = study.out / "compute.json"
    if not note.exists():
        flops = {}
        for name, seed in (("labels", TEACHER[1]), TEACHER):
            run = study.run(name, seed)
            job = read_job(find_best(run))
            flops[name] = task_class(job.task.type)(job, run).flops_per_step()
        size = study.size.encoders["minilm"]
        # A forward pass is a third of a step. The document that mining finds beside those of a row is not needed.
        scoring = len(study.mined.read_text(encoding="utf-8").splitlines()) / size.queries / 3
        more = (size.steps + scoring) * flops[TEACHER[0]] / flops["labels"]
        note.write_text(json.dumps({"flops_per_step": flops, "steps": round(STUDENT_STEPS + more)}, indent=1) + "\n")
    return int(json.loads(note.read_text())["steps"])


def run_reranker(study: Study, arm: str, seed: int) -> None:
    """Train and measure a reranker, and BM25 beside the first one."""
    if not study.trial(arm, seed).exists():
        found, bm25 = measure_reranker(study, train_reranker(study, arm, seed))
        keep(study, "bm25", 0, lambda: bm25)
        keep(study, arm, seed, lambda: found)


def run_student(study: Study, arm: str, seed: int) -> None:
    """Train the two layers as an encoder, and measure it."""
    folder = study.run(arm, seed)
    if study.trial(arm, seed).exists():
        return
    steps = steps_of_equal_compute(study) if arm == "labels-equal-compute" else STUDENT_STEPS
    finish(
        folder, "pretrain", "capt_pairs", *_shared(study, seed), f"model.init={study.start('small')}",
        f"data.files={score(study)}", "data.form=flagembedding", "model.pooling=mean", f"data.query_length={LENGTH}",
        f"data.sequence_length={LENGTH}",
        f"batch.global={STUDENT_BATCH}", f"batch.micro={STUDENT_BATCH}", "schedule.epochs=null",
        f"schedule.max_steps={steps}", f"schedule.warmup_steps={steps // 10}", "optimizer.lr=5e-5",
        # The scores of the file are read where distillation asks for them alone.
        *(["distillation.weight=1"] if arm == "distilled" else []),
    )  # fmt: skip
    keep(study, arm, seed, lambda: measure_encoder(study.whole, folder))


def keep(study: Study, arm: str, seed: int, measure: Any) -> None:
    """Measure a trial where it is missing, and write the tables of all."""
    path = study.trial(arm, seed)
    if path.exists():
        return
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"arm": arm, "seed": seed, **measure()}) + "\n")
    part.rename(path)
    write_results(study)


def write_results(study: Study) -> None:
    """Write ``trials.csv`` and ``tables.md`` of the trials that there are."""
    trials = [Trial(**json.loads(path.read_text())) for path in sorted((study.out / "trials").glob("*.json"))]
    write_trials(trials, study.out / "trials.csv")
    (study.out / "tables.md").write_text(tables(trials, study.size.questions), encoding="utf-8")


def tables(trials: Sequence[Trial], questions: int) -> str:
    """Figures of each arm, those of encoders that search all questions apart, and paired differences over the seeds."""
    values = {
        (arm, name): {trial.seed: getattr(trial, name) for trial in trials if trial.arm == arm}
        for arm in dict.fromkeys(trial.arm for trial in trials)
        for name in SETS
    }
    arms = list(dict.fromkeys(arm for arm, _ in values))

    def figures(title: str, chosen: Sequence[str]) -> str:
        rows = [
            [arm, str(len(values[arm, "qnli"])), *(spread(list(values[arm, name].values())) for name in SETS)]
            for arm in chosen
        ]
        return table([title, "seeds", *SETS.values()], rows)

    encoders = [arm for arm in ("start", *STUDENTS) if arm in arms]
    differences = [
        [f"{first} - {second}", *(difference(values[first, name], values[second, name]) for name in SETS)]
        for first, second in COMPARED
        if first in arms and second in arms
    ]
    parts = (
        figures(f"the first {questions} questions", [arm for arm in arms if arm not in encoders]),
        figures("all questions", encoders),
        table(["difference", *SETS.values()], differences),
    )
    return "\n\n".join(filter(None, parts)) + "\n"


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> str:
    """Mean, t interval and wins over the seeds that both have; what was not trained is the same for every seed."""
    partners = {seed: second.get(seed, second.get(0)) for seed in sorted(first)}
    gains = [first[seed] - partner for seed, partner in partners.items() if partner is not None]
    return seeds_compared(gains) if gains else ""


def main(words: Sequence[str] | None = None) -> int:
    """Train and measure what is missing, part by part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--long", action="store_true", help="the second part: 200 steps of MiniLM's three rerankers")
    options = parser.parse_args(words)
    data, size = real_data(parser, "glue", "retrieval", "vl"), LONG if options.long else SHORT
    study = Study(options.out.resolve(), data, options.encoder.resolve(), size)
    same_settings(study.out, {
        "size": dataclasses.asdict(size), "student": [STUDENT_STEPS, STUDENT_BATCH], "negatives": [NEGATIVES, RANKS],
        "encoder": str(study.encoder),
    })  # fmt: skip
    prepare(study)
    keep(study, "minilm alone", 0, lambda: measure_encoder(study.first, study.encoder))
    keep(study, "start", 0, lambda: measure_encoder(study.whole, study.start("small")))
    for arms, seeds in LONG_PARTS if options.long else PARTS:
        for seed in seeds:
            for arm in arms:
                (run_student if arm in STUDENTS else run_reranker)(study, arm, seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
