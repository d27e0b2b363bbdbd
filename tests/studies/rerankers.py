"""The study behind docs/results/rerankers.md: which loss makes a reranker, and do its scores help the encoder?

``CAPT_DATA=... python -m tests.studies.rerankers --out runs/rerankers`` trains an encoder of 2 layers on questions of
QNLI, mines negatives with it, trains rerankers by three losses from it and from MiniLM, orders BM25's first 100 of
Cranfield and of held-out QNLI by each, and trains the encoder on with and without the scores of the rerankers. Every
measured trial is a file in ``trials/``; after each the command writes ``trials.csv`` and ``tables.md``. What is there
is never run again, so the same command goes on after an interruption and with more ``--seeds``.
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

LENGTH, NEGATIVES = 64, 3
SEARCHED = ("cranfield", "qnli")
SETS = {"cranfield": "Cranfield, nDCG@10", "qnli": "QNLI held out, MRR@10"}
LOSSES = ("infonce", "bce", "margin_mse")
"""The losses of rerankers; the teacher of ``margin_mse`` is the reranker of ``infonce`` of its encoder and seed."""
PAIRS_STEPS, STUDENT_STEPS, BATCH = 200, 100, 32
COMPARED = (
    *((f"{encoder} {loss}", "bm25") for encoder in ("small", "minilm") for loss in LOSSES),
    *((f"{encoder} {loss}", f"{encoder} infonce") for encoder in ("small", "minilm") for loss in LOSSES[1:]),
    ("distilled", "labels"), ("distilled", "labels-equal-compute"), ("distilled-minilm", "labels"), ("labels", "start"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reranking:
    """The size of the training of an encoder's rerankers, and of their measurement."""

    steps: int
    queries: int
    lr: str
    questions: int


ENCODERS = {"small": Reranking(120, 16, "5e-4", 60), "minilm": Reranking(25, 8, "1e-4", 20)}


class Trial(NamedTuple):
    """Figures x 100 of an arm with a seed; BM25 has seed 0."""

    arm: str
    seed: int
    cranfield: float
    qnli: float


@dataclasses.dataclass(frozen=True)
class Study:
    """Where everything is."""

    out: Path
    data: Path
    encoder: Path

    def run(self, name: str, seed: int) -> Path:
        """The folder of a run."""
        return self.out / "runs" / f"{name.replace(' ', '-')}-seed{seed}"

    def start(self, encoder: str, seed: int) -> Path:
        """The encoder from which rerankers of a seed are trained."""
        return self.encoder if encoder == "minilm" else self.run("start", seed)

    def sets(self, encoder: str) -> list[Path]:
        """The BEIR folders that rerankers of an encoder are measured on."""
        return [self.out / "files" / encoder / name for name in SEARCHED]

    def trial(self, arm: str, seed: int) -> Path:
        """The file of a measured trial."""
        return self.out / "trials" / f"{arm.replace(' ', '-')}-seed{seed}.json"


def prepare(study: Study) -> None:
    """Write the pairs, and the first questions of both sets as BEIR folders."""
    files = study.out / "files"
    (study.out / "trials").mkdir(parents=True, exist_ok=True)
    if (files / "done").exists():
        return
    write_files(study.data, files)
    whole = [study.data / "retrieval" / "cranfield", files / "qnli_held_out.jsonl"]
    for encoder, size in ENCODERS.items():
        for path, folder in zip(whole, study.sets(encoder), strict=True):
            write_first(path, folder, size.questions)
    (files / "done").touch()


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


def train_start(study: Study, seed: int) -> None:
    """Train the small encoder, from random weights, on the pairs of QNLI."""
    random = study.run("random", seed)
    finish(
        random, "pretrain", "mlm_tiny", *_shared(study, seed), "schedule.max_steps=1", "schedule.warmup_steps=0",
        "optimizer.lr=1e-12", "batch.global=8", "batch.micro=8", "validate.samples=8", "tokenizer.vocab_size=4096",
        f"data.files=[{','.join(map(str, sorted((study.data / 'corpus').glob('books.valid.*'))))}]",
    )  # fmt: skip
    train_pairs(study, study.run("start", seed), seed, random, PAIRS_STEPS, study.out / "files" / "qnli.jsonl")


def train_pairs(study: Study, folder: Path, seed: int, start: Path, steps: int, file: Path, *words: str) -> None:
    """Train an encoder on pairs."""
    finish(
        folder, "pretrain", "pairs_tiny", *_shared(study, seed), f"model.init={start}", f"data.files={file}",
        f"data.sequence_length={LENGTH}", "data.query_length=48", "data.validation_fraction=0",
        f"batch.global={BATCH}", f"batch.micro={BATCH}", f"schedule.max_steps={steps}",
        f"schedule.warmup_steps={steps // 10}", "optimizer.lr=1e-3", *words,
    )  # fmt: skip


def _shared(study: Study, seed: int) -> list[str]:
    return [
        "run.threads=1", "run.tensorboard=false", f"run.seed={seed}", f"data.cache={study.out / 'cache'}",
        "validate.every=0", "checkpoint.every=0",
    ]  # fmt: skip


def mine(study: Study, encoder: str, seed: int, reranker: Path | None = None) -> Path:
    """Mine negatives with the start of a seed, or have them scored by a reranker as well; the file of pairs."""
    out = study.out / "mined" / f"{f'{encoder}-scored' if reranker else 'negatives'}-seed{seed}"
    if not out.exists():
        scores = ["--cross-encoder", reranker] if reranker else []
        capt(
            "mine", "--pairs", study.out / "files" / "qnli.jsonl", "--model", study.start("small", seed), *scores,
            "--number", str(NEGATIVES), "--last", str(NEGATIVES + 1), "--store", study.out / "vectors", "--out", out,
        )  # fmt: skip
    return out / "pairs.jsonl"


def train_reranker(study: Study, encoder: str, loss: str, seed: int) -> Path:
    """Train a reranker; its run."""
    size, folder = ENCODERS[encoder], study.run(f"{encoder} {loss}", seed)
    teacher = study.run(f"{encoder} infonce", seed) if loss == "margin_mse" else None
    finish(
        folder, "finetune", "rerank", "run.threads=1", "run.tensorboard=false", f"run.seed={seed}",
        f"model.init={study.start(encoder, seed)}", f"data.train={mine(study, encoder, seed, teacher)}",
        f"data.negatives={NEGATIVES}", f"data.sequence_length={LENGTH}", "data.validation_fraction=0",
        f"batch.global={size.queries}", "schedule.epochs=null",
        f"schedule.max_steps={size.steps}", f"optimizer.lr={size.lr}", f"loss.type={loss}", "checkpoint.best=null",
    )  # fmt: skip
    return folder


def measure_reranker(study: Study, encoder: str, model: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The figures x 100 of BM25's first 100 in the order of a reranker, and of BM25 itself."""
    from capt.pretrain.retrieval.encode import EncodeOptions
    from capt.pretrain.retrieval.rerank_evaluate import RerankSettings, evaluate_reranker

    with tempfile.TemporaryDirectory() as store:
        found = evaluate_reranker(model, study.sets(encoder), EncodeOptions(Path(store)), RerankSettings())
    both = [_figures(found, system) for system in ("reranked", "bm25")]
    return both[0], both[1]


def measure_encoder(study: Study, model: Path) -> dict[str, float]:
    """The figures x 100 of an encoder that searches on its own, for the questions of the small rerankers."""
    from capt.pretrain.retrieval.encode import EncodeOptions
    from capt.pretrain.retrieval.evaluate import RetrievalSettings, evaluate
    from capt.pretrain.retrieval.options import EncoderOptions

    with tempfile.TemporaryDirectory() as store:
        options = EncodeOptions(Path(store))
        found = evaluate(model, study.sets("small"), options, EncoderOptions(), RetrievalSettings())
    return _figures(found, "full")


def _figures(found: Mapping[str, Any], system: str) -> dict[str, float]:
    cranfield, qnli = (section["poolers"][system] for section in found["sections"])
    return {"cranfield": 100 * cranfield["ndcg@10"], "qnli": 100 * qnli["mrr@10"]}


def steps_of_equal_compute(study: Study, seed: int) -> int:
    """Steps on labels with the FLOP of the distilled student, its reranker and the scoring; the same for all seeds."""
    from capt.pretrain.engine.checkpoint import find_best, read_job
    from capt.pretrain.registry import task_class

    note = study.out / "compute.json"
    if not note.exists():
        flops = {}
        for name in ("labels", "small infonce"):
            run = study.run(name, seed)
            job = read_job(find_best(run))
            flops[name] = task_class(job.task.type)(job, run).flops_per_step()
        size = ENCODERS["small"]
        rows = len(mine(study, "small", seed).read_text().splitlines())
        # A forward pass is a third of a step; a row has its positive and every document that was found.
        scoring = rows * (NEGATIVES + 2) / (size.queries * (NEGATIVES + 1)) / 3
        more = (size.steps + scoring) * flops["small infonce"] / flops["labels"]
        note.write_text(json.dumps({"flops_per_step": flops, "steps": round(STUDENT_STEPS + more)}, indent=1) + "\n")
    return int(json.loads(note.read_text())["steps"])


def run_seed(study: Study, seed: int) -> None:
    """Train and measure what is missing of a seed."""
    train_start(study, seed)
    start = study.start("small", seed)
    keep(study, "start", seed, lambda: measure_encoder(study, start))
    for encoder in ENCODERS:
        for loss in LOSSES:
            arm = f"{encoder} {loss}"
            if not study.trial(arm, seed).exists():
                found, bm25 = measure_reranker(study, encoder, train_reranker(study, encoder, loss, seed))
                keep(study, f"bm25 of {encoder}", 0, lambda found=bm25: found)
                keep(study, arm, seed, lambda found=found: found)
        scored = mine(study, encoder, seed, study.run(f"{encoder} infonce", seed))
        arm = "distilled" if encoder == "small" else "distilled-minilm"
        train_student(study, arm, seed, STUDENT_STEPS, scored, "distillation.weight=1")
        if encoder == "small":
            train_student(study, "labels", seed, STUDENT_STEPS, scored)
            train_student(study, "labels-equal-compute", seed, steps_of_equal_compute(study, seed), scored)


def train_student(study: Study, arm: str, seed: int, steps: int, file: Path, *words: str) -> None:
    """Train the start of a seed on, and measure it."""
    folder = study.run(arm, seed)
    if study.trial(arm, seed).exists():
        return
    # The scores of the file are read where distillation asks for them alone.
    words = ("data.form=flagembedding", f"data.negatives={NEGATIVES}", *words)
    train_pairs(study, folder, seed, study.start("small", seed), steps, file, *words)
    keep(study, arm, seed, lambda: measure_encoder(study, folder))


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
    (study.out / "tables.md").write_text(tables(trials), encoding="utf-8")


def tables(trials: Sequence[Trial]) -> str:
    """Figures of each arm, and paired differences over the seeds."""
    values = {
        (arm, name): {trial.seed: getattr(trial, name) for trial in trials if trial.arm == arm}
        for arm in dict.fromkeys(trial.arm for trial in trials)
        for name in SETS
    }
    arms = list(dict.fromkeys(arm for arm, _ in values))
    rows = [
        [arm, str(len(values[arm, "qnli"])), *(spread(list(values[arm, name].values())) for name in SETS)]
        for arm in arms
    ]
    differences = []
    for first, second in COMPARED:
        if second == "bm25":
            second = f"bm25 of {first.partition(' ')[0]}"
        if first in arms and second in arms:
            cells = [difference(values[first, name], values[second, name]) for name in SETS]
            differences.append([f"{first} - {second}", *cells])
    return (
        table(["arm", "seeds", *SETS.values()], rows)
        + "\n\n"
        + table(["difference", *SETS.values()], differences)
        + "\n"
    )


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> str:
    """Mean, t interval and seeds above 0 of a paired difference; BM25 is the same for every seed."""
    return seeds_compared(
        [value - second.get(seed, second.get(0, float("nan"))) for seed, value in sorted(first.items())]
    )


def main(words: Sequence[str] | None = None) -> int:
    """Train and measure what is missing, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args(words)
    data = real_data(parser, "corpus", "glue", "retrieval", "vl")
    study = Study(options.out.resolve(), data, options.encoder.resolve())
    sizes = {name: dataclasses.asdict(size) for name, size in ENCODERS.items()}
    same_settings(study.out, {"sizes": sizes, "steps": [PAIRS_STEPS, STUDENT_STEPS], "encoder": str(study.encoder)})
    prepare(study)
    for seed in options.seeds:
        run_seed(study, seed)
        shutil.rmtree(study.out / "vectors", ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
