"""Every command that the documentation shows is run in small, started dry, or listed below with the reason why not.

Those of pictures, latent variables and words: tests/families/test_documented_commands.py.
"""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.engine.run import run_job
from tests.documented import ROOT, blocks, reason_of, require_reasons, run_shown, shown
from tests.finetune import glue_mapping, write_encoder, write_task
from tests.language import language_mapping, write_corpus
from tests.support import run_ranks

pytestmark = pytest.mark.timeout(600)

SMALLER = {"50265": "370", "step-00000200": "step-00000002", "/shared/runs/large": "runs/large", "128": "16"}
SMALLER |= {"sentence-transformers/all-MiniLM-L6-v2": "exported-st"}
"""Words of the commands that are made smaller, or moved, for the small world of this test."""

SMALL_MIXTURE = """base: capt_tiny
run: {dir: runs/my_mixture}
tokenizer: {vocab_size: 370, type: bpe}
schedule: {max_steps: 40, warmup_steps: 4}"""
"""The head of the page's mixture for the small world, in which a source has a few windows."""

TOKENIZER = ["tokenizer", "train", "my.txt", "--out", "tok", "--vocab-size", "370", "--type", "bpe"]
SHARDS = ["data", "prepare", "capt_small", "data.files=my.txt", "tokenizer.path=tok", "--out", "shards"]
EXPORT = ["convert", "runs/first", "exported-st", "--to", "sentence-transformers"]
INDEX = ["search", "build", "documents", "--model", "exported-st", "--out", "index"]
MADE_BY = {
    "tok": ("tok", TOKENIZER),
    "tokenizer.path=tok": ("tok", TOKENIZER),
    "shards/train": ("shards", SHARDS),
    "data.shards=shards": ("shards", SHARDS),
    "exported-st": ("exported-st", EXPORT),
    "index": ("index", INDEX),
    "runs/first/export/st": ("runs/first/export/st", [*EXPORT[:2], "runs/first/export/st", *EXPORT[3:]]),
}
"""A word of a command -> the folder that it needs, and the command that makes it."""

NOT_RUN = {
    "capt bench": "takes minutes, and is for an idle machine; tests/unit/launcher/test_bench.py",
    "capt cache prune": "removes what this machine keeps; tests/unit/launcher/test_cache.py",
    "capt convert FacebookAI": "needs the hub; tests/unit/models/test_hub.py",
    "capt convert runs/first exported-int8": "takes most of a minute; tests/unit/convert/test_dispatch.py",
    "capt convert runs/first exported-onnx": "takes most of a minute; tests/parity/test_export_onnx.py",
    "capt doctor --hostfile": "starts ssh; tests/multihost/test_preflight.py",
    "capt doctor my_job.yaml": "starts ssh; tests/multihost/test_preflight.py",
    "capt convert runs/pairs": "needs a run of pairs; tests/e2e/test_pairs.py",
    "capt convert runs/rerank": "needs a run of rerank; tests/e2e/test_contract.py",
    "capt evaluate runs/rerank": "needs a run of rerank; tests/e2e/test_contract.py",
    "capt neighbors exported --text": "needs a model of pairs; tests/unit/retrieval",
    "capt plan": "takes most of a minute; tests/unit/plan",
    "hf download": "needs the hub",
    "capt pretrain weak.yaml": "needs sets of the hub; tests/unit/pairs/test_candidates.py",
    "capt pretrain hard.yaml": "needs sets of the hub; tests/unit/pairs/test_candidates.py",
    "capt convert runs/denseon_hard": "needs a run of days; tests/e2e/test_pairs.py",
    "capt evaluate exported-st --retrieval": "needs a BEIR folder; tests/unit/retrieval",
    "capt evaluate runs/first --retrieval": "needs a BEIR folder; tests/unit/retrieval",
    "capt evaluate runs/pairs --retrieval": "needs a BEIR folder; tests/unit/retrieval",
    "capt finetune rerank data.train=mined": "needs a sentence encoder; tests/e2e/test_quickstart_retrieval.py",
    "capt pretrain capt_pairs model.init=runs/pairs data.files=scored": (
        "needs a reranker; tests/e2e/test_quickstart_retrieval.py"
    ),
    "capt evaluate runs/distilled": "needs a BEIR folder; tests/e2e/test_quickstart_retrieval.py",
    "capt evaluate RERANKER --rerank": "needs a BEIR folder and a reranker; tests/unit/retrieval/test_rerankers.py",
    "capt neighbors exported-st what is asked": "needs a reranker; tests/unit/retrieval/test_rerankers.py",
    "capt evaluate other-model --retrieval": "needs another model; tests/unit/retrieval",
    "capt encode texts.jsonl --model TEACHER": "needs a teacher; tests/unit/pairs/test_teacher.py",
    "capt shrink TEACHER student": "needs a teacher; tests/unit/convert/test_shrink.py",
    "capt pretrain capt_distil": "needs a teacher's vectors; tests/unit/pairs/test_teacher.py",
    "capt convert runs/capt_distil": "needs a teacher's vectors; tests/unit/pairs/test_teacher.py",
    "capt encode exported-st --text beir": "needs a BEIR folder; tests/unit/retrieval",
    "capt encode exported-st --text corpus.jsonl": "needs a bucket; tests/unit/retrieval/test_bucket.py",
    "capt evaluate exported-st --mteb": "needs the package mteb and its data; tests/unit/retrieval/test_mteb.py",
    "capt pretrain capt_pairs data.files=pairs.jsonl model.init=runs/first validate.retrieval": (
        "needs a BEIR folder; tests/unit/retrieval/test_validation.py"
    ),
    "capt pretrain capt_pairs data.files=mined": "needs mined pairs; tests/unit/retrieval/test_mine.py",
    "capt compare": "needs the figures of an evaluation; tests/unit/retrieval",
    "capt evaluate sentence-transformers/": "needs a stock encoder; tests/unit/retrieval/test_evaluate.py",
    "capt pretrain capt_pairs data.files=articles.csv": "needs a stock encoder; tests/e2e/test_pairs.py",
    "capt pretrain capt_pairs data.files=pairs.csv": "needs a stock encoder; tests/e2e/test_pairs.py",
    "capt convert runs/titles": "needs a run of pairs; tests/e2e/test_pairs.py",
    "uvicorn": "starts a service; tests/unit/test_serve.py",
    "capt search build documents --model exported ": "needs a run of pairs; tests/e2e/test_pairs.py",
    "capt search build documents --model exported-titles": "needs a run of pairs; tests/e2e/test_pairs.py",
    "capt search index what is asked --rerank": "needs a reranker; tests/unit/retrieval/test_index.py",
    "capt search measure index questions.csv --rerank": "needs a reranker; tests/unit/retrieval/test_index.py",
    "capt search index --json": "reads the standard input; tests/unit/retrieval/test_index.py",
    "capt mine": "needs pairs; tests/unit/retrieval",
    "capt pretrain my_job.yaml --launcher ray": "needs a core for every rank; tests/sweep/test_cluster.py",
    "capt report runs/capt-1": "the same as of runs/first, which is run; tests/unit/report",
    "capt report runs/first runs/second": "the same as of runs/first, which is run; tests/unit/report",
    "capt tokenizer export my.model": "tests/unit/tokenizer",
    "capt convert runs/first exported-st --to sentence-transformers --license": "--push needs the hub; tests/parity",
    "capt resume imported": "needs the run imported from the hub; tests/e2e/test_model_init.py",
    "capt pretrain capt_tiny run.callbacks": "needs trackers; tests/distributed/test_callbacks.py",
    "capt pretrain capt_continue": "model.init is asked for at the hub; tests/e2e/test_model_init.py",
    "capt pretrain modernbert_continue": "model.init is asked for at the hub; tests/parity/test_modernbert_hf.py",
    "capt pretrain capt_text_continue": "model.init is another's encoder; tests/e2e/test_bottleneck.py",
    "capt pretrain pairs_tiny model.init=runs/capt_text": "needs such a run; tests/e2e/test_quickstart_retrieval.py",
    "capt pretrain capt_pairs model.init=runs/capt_text": "needs such a run; tests/e2e/test_bottleneck.py",
    "capt data inspect --job capt_text": "as of my_mixture.yaml, which is run, and of a text for 4,096 ids",
    "capt resume runs/ettin_17m": "needs a run of days; tests/e2e/test_modernbert.py",
    "capt pretrain capt_adapt": "needs a sentence encoder; tests/parity/test_families_hf.py",
    "capt evaluate runs/capt_adapt": "needs a run that was adapted; tests/parity/test_families_hf.py",
    "capt convert runs/capt_adapt": "needs a run that was adapted; tests/parity/test_families_hf.py",
    "capt shrink all-MiniLM-L6-v2": "needs a sentence encoder; tests/unit/convert/test_shrink.py",
    "capt merge FOLDER adapted": "needs a run that was adapted; tests/unit/convert/test_merge.py",
    "capt pretrain capt_small data.name=Salesforce": "needs the hub; tests/unit/data",
    "capt sweep capt_figure3_left": "needs the shards of the page; tests/e2e/test_papers.py",
    "capt data prepare capt_small data.files=[web": "needs text packed by zstd; tests/unit/data/test_bulk.py",
    "capt data prepare capt_small data.files=s3": "needs a bucket; tests/distributed/test_stores.py",
    "capt pretrain capt_small data.shards=s3": "needs a bucket; tests/distributed/test_stores.py",
    "capt sweep glue ": "the job's address is a Ray cluster, which is looked for first; tests/sweep/test_sweep.py",
    "capt sweep my_sweep.yaml --resume": "continues a sweep that has run; tests/sweep/test_sweep.py",
    "capt sweep my_sweep.yaml --address": "needs a Ray cluster; tests/sweep/test_sweep.py",
    "capt report runs/glue": "needs a sweep that has run; tests/unit/report",
    "python -m tests.studies.papers": "needs two sweeps that have run; tests/e2e/test_papers.py",
    "capt report runs/sweep": "needs a sweep that has run; tests/unit/report",
    "capt glue-submission": "needs a sweep over eight tasks; tests/e2e/test_glue.py",
    "capt finetune rte model.init=runs/first model.lora": "needs peft, the extra lora; tests/e2e/test_labels.py",
    "capt evaluate runs/mine": "needs a fine-tuned run; tests/e2e/test_labels.py",
    "capt predict runs/mine": "needs a fine-tuned run; tests/e2e/test_labels.py",
    "capt predict export/mine": "needs a fine-tuned run; tests/unit/finetune/test_predict.py",
    "capt convert runs/mine": "needs a fine-tuned run; tests/e2e/test_labels.py",
    "deepspeed": "starts ssh; its arguments are parsed in tests/unit/test_docs.py, tests/multihost runs it",
    "torchrun": "tests/unit/launcher/test_torchrun.py",
    "apptainer": "needs Apptainer; tests/unit/test_docker.py",
    "export": "a word of the shell",
    ". .venv": "a word of the shell",
    "kubectl": "needs a cluster; tests/unit/launcher/test_kubernetes.py",
    "ray": "starts a cluster on this machine; tests/sweep/test_sweep.py",
    "docker": "needs a container engine; tests/unit/test_docker.py",
    "git clone": "needs the network, and apex",
    "python -m pip": "installs packages; tests/unit/test_packaging.py",
    ".venv/bin/python -m pytest": "runs tests",
    ".venv/bin/pre-commit": "changes the checkout; tests/unit/test_docs.py checks its configuration",
    "pip": "installs packages; tests/unit/test_packaging.py",
    "ssh-keygen": "a program of the system",
    "mkdir": "a program of the system",
    "cp": "a program of the system",
    "printf": "a program of the system",
    "echo": "a program of the system",
    "awk": "a program of the system",
    "for": "a word of the shell",
    "done": "a word of the shell",
}
"""The beginning of each command that is not run -> why, and what tests the same."""

SHOWN = shown(of_families=False)
RUN = [command for command in SHOWN if reason_of(command, NOT_RUN) is None]


def _language_run(folder: Path) -> None:
    changes = {"schedule": {"max_steps": 2, "warmup_steps": 1}, "checkpoint": {"every": 0}}
    run_job(job_from_mapping(language_mapping(folder, run={"dir": str(folder / "runs/first")}, **changes), "test"))


def _finetuned_run(folder: Path) -> None:
    glue = {"data": {"path": str(folder / "GLUE")}, "model": {"init": str(folder / "roberta-base-folder")}}
    mapping = glue_mapping(folder, run={"dir": str(folder / "runs/rte")}, schedule={"epochs": 1}, **glue)
    run_job(job_from_mapping({**mapping, "batch": {"global": 8, "micro": 8}}, "test"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the pages speak of: texts, tokenizers, runs, jobs and hosts, all of them small."""
    folder = tmp_path_factory.mktemp("world")
    text = write_corpus(folder / "my.txt", documents=200)
    for name in ("text", "books", "my"):
        (folder / name).mkdir()
        shutil.copy(text, folder / name / "sample.txt")
        (folder / name / "sample.txt.gz").write_bytes(gzip.compress(text.read_bytes()))
    shutil.copy(text, folder / "held_out.txt")
    rows = [json.dumps({"body": line}) for line in text.read_text().split("\n\n")]
    (folder / "news.jsonl").write_text("\n".join(rows))
    (folder / "configs").symlink_to(ROOT / "configs")
    for task in ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"):
        write_task(folder / "GLUE", task)
    labelled = [("The river opens.", 0.5), ("The stone falls.", 1.5), ("No bird sings.", 2.0), ("A king reads.", 2.5)]
    (folder / "reviews.csv").write_text("text,label\n" + "".join(f"{text},{int(score)}\n" for text, score in labelled))
    for name in ("ratings.jsonl", "held_out.jsonl"):
        lines = [json.dumps({"text": text, "label": score}) + "\n" for text, score in labelled]
        (folder / name).write_text("".join(lines))
    write_encoder(folder / "roberta-base-folder", max_position_embeddings=514)
    shutil.copytree(folder / "roberta-base-folder", folder / "path/to/a/hugging-face-folder")
    pairs = "".join(f"main-news\theadlines\t2016\t{n}\t{n % 5}.0\tThe river {n}.\tThe stone {n}.\n" for n in range(20))
    for home in (_folder(folder / "STS-B"), _folder(folder / "glue/STS-B")):
        (home / "sts-test.csv").write_text(pairs)
    _pairs(folder)
    hosts = "node-1 slots=8\nnode-2 slots=8\n"
    (folder / "hosts").write_text(hosts)
    (folder / "HOSTS").write_text(hosts)
    mixture = next(block for block in blocks(ROOT / "docs/guide/data.md", "yaml") if "mixture" in block)
    (folder / "my_mixture.yaml").write_text(mixture.replace("base: capt_small", SMALL_MIXTURE))
    (folder / "my_job.yaml").write_text("{base: capt_small, data: {files: [my.txt]}, run: {dir: runs/my_job}}\n")
    shutil.copy(ROOT / "capt/configs/cluster/slurm.yaml", folder / "my_cluster.yaml")
    pods = (ROOT / "capt/configs/cluster/kubernetes.yaml").read_text().replace("cpus_per_pod: 0 ", "cpus_per_pod: 8 ")
    pods = pods.replace("network_policy: true ", "network_policy: false ")  # as a sweep needs it
    (folder / "my_kubernetes.yaml").write_text(pods)
    sweep = {
        "sweep": {"dir": "runs/rates", "seeds": [1]},
        "studies": {"tiny": {"base": "capt_tiny", "metric": "retrieval/to_corrupted"}},
        "space": {"optimizer.lr": {"grid": [5.0e-4, 1.0e-3]}},
    }
    (folder / "my_sweep.yaml").write_text(yaml.safe_dump(sweep))
    run_ranks(_language_run, 1, folder)
    run_ranks(_finetuned_run, 1, folder)
    shutil.copytree(folder / "runs/first", folder / "runs/quickstart", symlinks=True)
    return folder


def _pairs(folder: Path) -> None:
    """Pairs of texts in three forms, and a file with texts to compare them with."""
    texts = [f"The river {number} runs over stone {number}." for number in range(40)]
    rows = [{"query": f"Where is river {n}?", "pos": [text]} for n, text in enumerate(texts)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "articles.csv").write_text("title,body\na cat,a cat sat on the mat\na dog,a dog ran in the rain\n")
    for name, text in (("billing.md", "Invoices are cancelled here.\n"), ("errors/41.txt", "The disk is full.\n")):
        (folder / "documents" / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / "documents" / name).write_text(text)
    asked = "query,document\nhow are invoices cancelled,documents/billing.md\nerror 41,documents/errors/41.txt\n"
    (folder / "questions.csv").write_text(asked)
    (folder / "qa.csv").write_text("title,body\n" + "".join(f"Where is {n}?,{text}\n" for n, text in enumerate(texts)))
    for name, key in (("corpus", "d"), ("queries", "q")):
        lines = [json.dumps({"_id": f"{key}{n}", "title": "", "text": f"{text} {key}"}) for n, text in enumerate(texts)]
        (folder / "beir/nfcorpus").mkdir(parents=True, exist_ok=True)
        (folder / f"beir/nfcorpus/{name}.jsonl").write_text("\n".join(lines))
    judged = "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in range(40))
    for split in ("train", "test"):
        (folder / "beir/nfcorpus/qrels").mkdir(exist_ok=True)
        (folder / f"beir/nfcorpus/qrels/{split}.tsv").write_text(judged)
    (_folder(folder / "sts") / "test.tsv").write_text(f"sentence1\tsentence2\tscore\n{texts[0]}\tA stone.\t3\n")


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_every_command_is_run_or_has_a_reason() -> None:
    require_reasons(SHOWN, NOT_RUN, {"capt bench", "torchrun", "pip"})
    assert {shlex.split(command)[0] for command in RUN} == {"capt", "make"}, "a program without an entry in NOT_RUN"


@pytest.mark.parametrize("command", [command for command in RUN if command.startswith("make ")])
def test_make_knows_what_to_do(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [command for command in RUN if command.startswith("capt ")])
def test_command(
    command: str, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    run_shown(command, SMALLER, MADE_BY, monkeypatch, capsys)
