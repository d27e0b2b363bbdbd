"""The study behind docs/results/pretexts.md: what should an encoder learn from text before it learns from pairs?

``CAPT_DATA=... python -m tests.studies.pretexts --out runs/pretexts`` pretrains `capt_tiny` on books by every arm, seed
by seed, trains each start on the pairs of the study of pairs, and measures it before and at two points of that.
Every measured trial is a file in ``trials/``; after each the command writes ``trials.csv`` and ``tables.md``, and what
is there is never run again, so the same command continues after an interruption and with more ``--seeds``. ``--tables``
writes both of what there is, and ``--kept-back`` shows MRPC as well, which is measured with the others and looked at
last.

``--encoder FOLDER`` is the second part: a published sentence encoder, continued on the documents of Cranfield (a user's
text, no query and no judgement of it), and then on the pairs.
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
from typing import Any

import numpy as np

from capt.pretrain.data.sts_files import Pairs, find_sets
from tests.realdata import real_data
from tests.runs import rows_of
from tests.studies.pairs_data import SOURCES, write_files, write_kept_back
from tests.studies.pretexts_tables import Trial, write_tables
from tests.studies.support import finish, same_settings, write_trials

SPANS = ["data.passage=128", "batch.global=50", "batch.micro=50"]
"""Spans are 41 tokens in the mean, <s> and </s> included: 50 of them have the tokens of 32 windows of 64."""
CONTRAST = ["contrast.queue=0", "contrast.temperature={type: constant, value: 0.05}"]
NO_CONTRAST = ["contrast.weight=0", "contrast.queue=0"]
CROP, NEIGHBOUR = ([f"data.view={view}", *SPANS, *CONTRAST] for view in ("crop", "neighbour"))
EQUAL_COMPUTE, DEAREST = "mlm-equal-compute", "crop+both"
ARMS: dict[str, list[str]] = {
    "none": [*NO_CONTRAST, "optimizer.lr=1e-12"],
    "mlm": NO_CONTRAST,
    "capt": CONTRAST,
    "crop": [*CROP, "mlm.weight=0"],
    "neighbour": [*NEIGHBOUR, "mlm.weight=0"],
    "crop+mlm": CROP,
    "mlm+bow": [*NO_CONTRAST, "bottleneck.head=bow"],
    "mlm+decoder": [*NO_CONTRAST, "bottleneck.head=decoder"],
    "mlm+both": [*NO_CONTRAST, "bottleneck.head=both"],
    DEAREST: [*CROP, "bottleneck.head=both"],
    EQUAL_COMPUTE: NO_CONTRAST,
}
"""Arm -> what differs from ``capt_tiny``. ``none`` takes one step, which moves no weight by more than 1e-12."""
_MASKS = ["mlm.weight=1", "corruption.type=mask_tokens", "corruption.rate=0.15"]
PUBLIC: dict[str, list[str]] = {
    "none": [],
    "mlm": [*_MASKS, "contrast.weight=0"],
    "mlm+bow": [*_MASKS, "contrast.weight=0", "bottleneck.head=bow"],
    "mlm+decoder": [*_MASKS, "contrast.weight=0", "bottleneck.head=decoder"],
    "capt": _MASKS,
    "crop": ["data.view=crop", "data.passage=128"],
}
"""Arm -> what differs from ``capt_adapt``, of a published encoder; ``none`` is the encoder as it is published."""
STEPS, PUBLIC_STEPS = 200, 60
BATCH, LENGTH = 32, 64
STAGES = (0, 200, 800)
"""Steps of pairs after which a start is measured."""
PUBLIC_STAGES = (0, 200)


@dataclasses.dataclass(frozen=True)
class Study:
    """Folders of the study, and how long the arms are trained.

    ``encoder`` is that of the second part.
    """

    out: Path
    data: Path
    steps: int
    batch: int
    encoder: Path | None

    @property
    def arms(self) -> dict[str, list[str]]:
        """The arms of this part."""
        return PUBLIC if self.encoder else ARMS

    @property
    def stages(self) -> tuple[int, ...]:
        """The steps of pairs at which this part measures."""
        return PUBLIC_STAGES if self.encoder else STAGES

    def folder(self, kind: str, arm: str, seed: int) -> Path:
        """The folder of a run on ``text`` or on ``pairs``."""
        return self.out / kind / f"{arm}-seed{seed}"

    def trial(self, arm: str, seed: int, stage: int) -> Path:
        """The file of a measured trial."""
        return self.out / "trials" / f"{arm}-seed{seed}-pairs{stage}.json"


def pretrain(study: Study, arm: str, seed: int) -> Path:
    """Train an arm on text; its folder."""
    folder, corpus = study.folder("text", arm, seed), study.data / "corpus"
    shared = [
        "run.threads=1", "run.log_every=10", "run.tensorboard=false", f"run.seed={seed}", "model.pooling=mean",
        f"data.cache={study.out / 'cache'}", f"data.sequence_length={LENGTH}", f"batch.global={study.batch}",
        f"batch.micro={study.batch}", "validate.every=0", "validate.first=false", "validate.samples=64",
        "checkpoint.every=0", "checkpoint.keep=1",
    ]  # fmt: skip
    if study.encoder:
        if arm == "none":
            return study.encoder
        finish(
            folder, "pretrain", "capt_adapt", *shared, f"model.init={study.encoder}", "data.document_start=.",
            f"data.files={study.out / 'files' / 'documents.txt'}", f"schedule.max_steps={study.steps}",
            f"schedule.warmup_steps={round(0.1 * study.steps)}", *PUBLIC[arm],
        )  # fmt: skip
        return folder
    steps = {"none": 1, EQUAL_COMPUTE: 0}.get(arm, study.steps) or steps_of_equal_compute(study, seed)
    finish(
        folder, "pretrain", "capt_tiny", *shared, "tokenizer.vocab_size=4096", "optimizer.lr=1e-3",
        f"data.files=[{','.join(map(str, sorted(corpus.glob('books.train.*'))))}]",
        f"data.validation_files=[{corpus / 'books.valid.txt.gz'}]", f"schedule.max_steps={steps}",
        f"schedule.warmup_steps={round(0.12 * steps)}", *ARMS[arm],
    )  # fmt: skip
    return folder


def steps_of_equal_compute(study: Study, seed: int) -> int:
    """Steps of MLM with the FLOP of the dearest arm, as the engine counts both; the same for all seeds."""
    note = study.out / "compute.json"
    if not note.exists():
        measured = {arm: _read(study.trial(arm, seed, 0)) for arm in ("mlm", DEAREST)}
        flops = {arm: trial["flops"] / trial["steps"] for arm, trial in measured.items()}
        steps = round(study.steps * flops[DEAREST] / flops["mlm"])
        note.write_text(json.dumps({"flops_per_step": flops, "steps": steps}, indent=1) + "\n")
    return int(_read(note)["steps"])


def train_on_pairs(study: Study, arm: str, seed: int, start: Path, stage: int) -> Path:
    """Train a start on the four sources of the study of pairs up to a stage; the checkpoint of that.

    Every stage is a part of one run, whose rate falls until the last one.
    """
    folder, files, last = study.folder("pairs", arm, seed), study.out / "files", study.stages[-1]
    checkpoint = folder / "checkpoints" / f"step-{stage:08d}"
    if checkpoint.exists():
        return checkpoint
    sources: list[dict[str, Any]] = [{"name": name, "files": str(files / f"{name}.jsonl")} for name in SOURCES]
    sources[0]["negatives"] = 1
    finish(
        folder, "pretrain", "capt_pairs", "run.threads=1", "run.log_every=10", "run.tensorboard=false",
        f"run.seed={seed}", f"model.init={start}", "model.pooling=mean", f"data.cache={study.out / 'cache'}",
        f"data.sequence_length={LENGTH}", "data.query_length=48", "data.validation_fraction=0",
        f"batch.global={study.batch}", f"batch.micro={study.batch}", f"schedule.max_steps={last}",
        f"schedule.warmup_steps={last // 10}", f"optimizer.lr={'5e-5' if study.encoder else '1e-3'}",
        f"checkpoint.every={study.stages[1]}", f"checkpoint.keep={last}", f"data.sources={json.dumps(sources)}",
        f"schedule.stop_after={study.stages[1]}", stops=stage < last,
    )  # fmt: skip
    return checkpoint


def measure(study: Study, model: Path) -> tuple[dict[str, float], float]:
    """The figures of an encoder x 100, and that which is kept back; all texts are cut to `LENGTH` tokens."""
    from capt.pretrain.language.sts import score
    from capt.pretrain.retrieval.encoders import load_text_encoder
    from capt.pretrain.retrieval.evaluate import evaluate
    from capt.pretrain.retrieval.options import EncodeOptions, EncoderOptions, RetrievalSettings

    options = EncoderOptions(length=LENGTH)
    encoder = load_text_encoder(model, options)
    scored = [score(pairs, lambda texts: encoder.encode(texts, "text"))["spearman"] for pairs in scored_sets(study)]
    with tempfile.TemporaryDirectory() as store:
        found = evaluate(model, retrieval_sets(study), EncodeOptions(str(store)), options, RetrievalSettings())
    cranfield, qnli = (section["poolers"]["full"] for section in found["sections"])
    figures = {"stsb": scored[0], "qnli": qnli["mrr@10"], "cranfield": cranfield["ndcg@10"]}
    return {name: 100 * value for name, value in figures.items()}, 100 * scored[1]


def scored_sets(study: Study) -> tuple[Pairs, Pairs]:
    """STS-B's test set, and MRPC's with its labels as scores."""
    stsb = next(pairs for pairs in find_sets(study.data / "glue" / "STS-B") if pairs.split == "test")
    rows = [json.loads(line) for line in (study.out / "files" / "mrpc.jsonl").read_text().splitlines()]
    first, second, gold = ([row[key] for row in rows] for key in ("sentence1", "sentence2", "score"))
    return stsb, Pairs("MRPC", "test", first, second, np.array(gold))


def retrieval_sets(study: Study) -> list[Path]:
    """Cranfield, and the held-out questions of QNLI."""
    return [study.data / "retrieval" / "cranfield", study.out / "files" / "qnli_held_out.jsonl"]


def counting_words(study: Study) -> dict[str, dict[str, float]]:
    """Figures of TF-IDF and BM25 on whole texts, without any model; BM25 does not score pairs."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    from capt.pretrain.language.sts import word_figures
    from capt.pretrain.retrieval.data import read_collections
    from capt.pretrain.retrieval.metrics import mean_metrics, query_metrics
    from capt.pretrain.retrieval.rankings import SearchCorpus, bm25_rankings

    stsb, mrpc = ((word_figures(pairs)["spearman/tf-idf"] or 0.0) for pairs in scored_sets(study))
    found: dict[str, dict[str, float]] = {"TF-IDF": {"stsb": stsb, "mrpc": mrpc}, "BM25": {}}
    for name, path, metric in zip(("cranfield", "qnli"), retrieval_sets(study), ("ndcg@10", "mrr@10"), strict=True):
        (collection,) = read_collections(path)
        corpus, texts = SearchCorpus.of(collection), [text for _, text in collection.documents()]
        counts = TfidfVectorizer(token_pattern=r"(?u)\b\w+\b")
        documents = counts.fit_transform(texts)
        cosines = (counts.transform([text for _, text in collection.queries]) @ documents.T).toarray()
        by_cosine = [corpus.without_self("", row) for row in np.argsort(-cosines, axis=1, kind="stable")]
        for system, rankings in (("TF-IDF", by_cosine), ("BM25", bm25_rankings(collection, corpus))):
            each = [
                query_metrics(ranking, collection.judged[query])
                for (query, _), ranking in zip(collection.queries, rankings, strict=True)
            ]
            found[system][name] = mean_metrics(each)[metric] or 0.0
    return {system: {name: 100 * value for name, value in figures.items()} for system, figures in found.items()}


def _facts(run: Path) -> dict[str, Any]:
    """Costs of a run on text, and how many samples found their other view before and after it."""
    from capt.pretrain.engine.checkpoint import find_best, read_job
    from capt.pretrain.language.config import LanguageJob
    from capt.pretrain.language.task import LanguageTask

    rows = rows_of(run)
    pretext = [row["pretext/accuracy"] for row in rows if "pretext/accuracy" in row]
    last = [row for row in rows if "tokens" in row][-1]
    job = read_job(find_best(run))
    assert isinstance(job, LanguageJob)
    return {
        "steps": last["step"], "tokens": last["tokens"],
        "flops": last["step"] * LanguageTask(job, run).flops_per_step(),
        "pretext": pretext[0] if pretext else None,
    }  # fmt: skip


def run_trial(study: Study, arm: str, seed: int, stage: int) -> None:
    """Train and measure an arm with a seed at a stage; weights that no stage needs any more are removed."""
    if study.trial(arm, seed, stage).exists():
        return
    start = pretrain(study, arm, seed)
    if not stage:
        _measure(study, arm, seed, stage, start, {} if start == study.encoder else _facts(start))
        return
    checkpoint = train_on_pairs(study, arm, seed, start, stage)
    _measure(study, arm, seed, stage, checkpoint, {})
    if stage == study.stages[-1]:
        shutil.rmtree(checkpoint.parent)
        if start != study.encoder:
            shutil.rmtree(start / "checkpoints")


def _measure(study: Study, arm: str, seed: int, stage: int, model: Path, facts: Mapping[str, Any]) -> None:
    figures, kept_back = measure(study, model)
    row = {"arm": arm, "seed": seed, "pairs": stage, **facts, "figures": figures, "kept_back": kept_back}
    part = study.trial(arm, seed, stage).with_suffix(".part")
    part.write_text(json.dumps(row, indent=1) + "\n")
    part.rename(part.with_suffix(".json"))
    write_results(study)


def _read(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def write_results(study: Study, *, kept_back: bool = False) -> None:
    """Write ``trials.csv`` and ``tables.md`` of the trials that there are, without MRPC unless it is asked for."""
    rows = [_read(path) for path in sorted((study.out / "trials").glob("*.json"))]
    rows.sort(key=lambda row: (list(study.arms).index(row["arm"]), row["seed"], row["pairs"]))
    taken = ("arm", "seed", "pairs", "steps", "tokens", "flops", "pretext")
    trials = []
    for row in rows:
        fields = {name: row.get(name) for name in taken} | row["figures"]
        trials.append(Trial(**fields, mrpc=row["kept_back"] if kept_back else None))
    if trials:
        write_trials(trials, study.out / "trials.csv")
        write_tables(trials, _read(study.out / "words.json"), study.out / "tables.md")


def prepare(study: Study) -> None:
    """Write the files that all trials read, and what counting words gives."""
    files = study.out / "files"
    (study.out / "trials").mkdir(parents=True, exist_ok=True)
    if (study.out / "words.json").exists():
        return
    files.mkdir(exist_ok=True)
    counts = write_files(study.data, files)
    write_kept_back(study.data, files / "mrpc.jsonl")
    corpus = (study.data / "retrieval" / "cranfield" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    documents = [" ".join(json.loads(line)["text"].split()) for line in corpus]
    (files / "documents.txt").write_text("".join(f"{text}\n" for text in documents if text), encoding="utf-8")
    (study.out / "counts.json").write_text(json.dumps(counts) + "\n")
    (study.out / "words.json").write_text(json.dumps(counting_words(study), indent=1) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    """Train and measure what is missing, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="run these alone (all)")
    parser.add_argument("--steps", type=int, help="on text, of every arm of equal tokens")
    parser.add_argument("--batch", type=int, default=BATCH, help="windows, and then pairs, of a step")
    parser.add_argument("--encoder", type=Path, help="folder of a published sentence encoder: the second part")
    parser.add_argument("--tables", action="store_true", help="write trials.csv and tables.md of what there is")
    parser.add_argument("--kept-back", action="store_true", help="the same with MRPC, once the other tables are final")
    options = parser.parse_args(words)
    data = real_data(parser, "corpus", "glue", "retrieval", "vl")
    steps = options.steps or (PUBLIC_STEPS if options.encoder else STEPS)
    study = Study(options.out.resolve(), data, steps, options.batch, options.encoder)
    if options.tables or options.kept_back:
        write_results(study, kept_back=options.kept_back)
        return 0
    same_settings(study.out, {"steps": steps, "batch": options.batch, "encoder": str(options.encoder)})
    prepare(study)
    arms = [arm for arm in study.arms if options.arms is None or arm in options.arms]
    near, far = study.stages[:2], study.stages[2:]  # few pairs of all seeds come before many of any
    order = [(seed, arm, stage) for seed in options.seeds for arm in arms for stage in near]
    order += [(seed, arm, stage) for seed in options.seeds for arm in arms for stage in far]
    for seed, arm, stage in order:
        run_trial(study, arm, seed, stage)
    return 0


if __name__ == "__main__":
    sys.exit(main())
