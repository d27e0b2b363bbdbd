"""Jobs on shards in a bucket (moto's S3 on the loopback): each id once an epoch over kills, evictions and world sizes.

``CAPT_STORE_KILLS`` sets the number of kills (1).
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.stores import chunks, tree
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.data.filters import DocumentFilters
from capt.pretrain.data.prepare import open_corpus, prepare, prepare_folder, verifier_of
from capt.pretrain.data.shard_writer import write_shards
from capt.pretrain.language.prepare import tokenizer_folder
from capt.pretrain.reliability.ledger.check import check
from capt.pretrain.reliability.uploads import _complete
from capt.tokenizer.encode import load_tokenizer
from tests.language import language_mapping, write_corpus
from tests.support import run_capt, run_ranks, start_ranks
from tests.unit.data.s3 import put_tree, s3_bucket

KILLS = int(os.environ.get("CAPT_STORE_KILLS", "1"))
SHARD = 300
STEPS = 18


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


@pytest.fixture(scope="module")
def prepared(bucket: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Shards of text in the bucket, here and there, and a job that reads those here."""
    folder = tmp_path_factory.mktemp("prepared")
    put_tree(write_corpus(folder / "text.txt", documents=120), f"{bucket}/text/part.txt")
    mapping = language_mapping(folder, data={"files": [f"{bucket}/text/*.txt"], "validation_fraction": 0.0})
    job: Any = job_from_mapping(mapping, "test")
    tokenizer = tokenizer_folder(job)
    corpus = open_corpus(job.data, "train")
    assert corpus is not None
    write_shards(
        corpus, load_tokenizer(tokenizer), folder / "shards/train", key="k", options={}, workers=1, shard_tokens=SHARD,
        verifier=verifier_of(job.data),
    )  # fmt: skip
    put_tree(folder / "shards", f"{bucket}/shards")
    data = {"files": [], "shards": str(folder / "shards"), "shards_at_once": 3}
    mapping = language_mapping(
        folder, data={**mapping["data"], **data}, tokenizer={"path": str(tokenizer)},
        schedule={"max_steps": STEPS, "warmup_steps": 2}, checkpoint={"every": 4, "keep": 99}, batch={"global": 12},
    )  # fmt: skip
    return folder, mapping


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def _train(mapping: dict[str, Any], resume: bool, environment: Mapping[str, str], kill_at: int = 0) -> int:
    import signal

    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.engine.run import run_job
    from capt.pretrain.reliability.sample_ledger import SampleLedger

    os.environ.update(environment)
    quiet_libraries(debug=False)
    append = SampleLedger.after_step

    def after_step(self: SampleLedger, run: Any, report: Any) -> None:
        append(self, run, report)
        if run.progress.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    SampleLedger.after_step = after_step  # type: ignore[method-assign]
    return run_job(job_from_mapping(mapping, "test"), resume=resume)


def test_each_id_once_an_epoch_from_a_bucket(
    bucket: str, prepared: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The cache holds two groups of three shards of a set of ten times that; it is emptied, in part, at each kill."""
    folder, mapping = prepared
    limit = 6 * SHARD * 2
    size = sum(path.stat().st_size for path in (folder / "shards/train").glob("shard-*.bin"))
    assert size > 10 * limit / 2
    draw = random.Random(7)
    there = {
        **mapping, "run": {**mapping["run"], "dir": str(tmp_path / "run")},
        "data": {**mapping["data"], "shards": f"{bucket}/shards", "cache": str(tmp_path / "cache"),
                 "cache_bytes": limit},
    }  # fmt: skip
    stored = tmp_path / "cache/stored"
    step = 0
    for number in range(KILLS):
        step = min(step + draw.randint(1, 6), STEPS - 1)
        ranks, results = start_ranks(_train, draw.choice([1, 2, 3]), there, number > 0, _environment(), step)
        for rank in ranks:
            rank.join(120)
            assert rank.exitcode == -9, results.get()
        step = max(int(path.name[5:]) for path in [Path("step-0"), *(tmp_path / "run/checkpoints").glob("step-*")])
        assert sum(path.stat().st_size for path in stored.glob("*.bin")) <= limit
        for path in stored.glob("*.bin"):
            if draw.random() < 0.5:
                path.unlink()
    done = run_capt(
        "resume", str(tmp_path / "run"), "loader.workers=2", "--nproc", "2", "--no-preflight",
        cwd=tmp_path, env=dict(os.environ), warm=False,  # the threads of a store do not live on in a fork
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = check(tmp_path / "run")
    assert report.faults == []
    assert sum((each.last - each.first + 1) * each.used for each in report.epochs) == STEPS * 12
    here = {**mapping, "run": {**mapping["run"], "dir": str(tmp_path / "here")}}
    assert run_ranks(_train, 2, here, False, {}) == [0, 0]
    assert _contents(tmp_path / "run") == _contents(tmp_path / "here")
    shutil.rmtree(stored)
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"hunter2" not in written
    assert b"AKIATEST" not in written


def _contents(run: Path) -> list[int]:
    """A digest of what each step was trained on, over all ranks."""
    found: dict[int, int] = {}
    for launch in check(run).launches:
        for number in range(launch.kept):
            found[launch.head.step + number] = int(launch.contents[number])
    return [found[step] for step in sorted(found)]


def _average(run: Path) -> dict[str, bytes]:
    folder = run / "average"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    return {name: re.sub(rb'"created": "[^"]*"', b"", content) for name, content in found.items()}


def _toy(run: Path, url: str) -> dict[str, Any]:
    return {
        "task": {"type": "toy"},
        "run": {"dir": str(run), "resume": "auto", "log_every": 5, "tensorboard": False, "threads": 1},
        "batch": {"global": 6, "micro": None},
        "schedule": {"max_steps": 30},
        "optimizer": {"lr": 1e-3},
        "validate": {"every": 0},
        "checkpoint": {"every": 3, "keep": 2, "upload": url},
    }


def _train_toy(mapping: dict[str, Any], environment: Mapping[str, str], what: str = "") -> int | str:
    """Train; ``killed`` dies at step 20, once a checkpoint is in the store; of ``failing`` no upload succeeds."""
    import signal
    import time

    from capt.pretrain.base.errors import DataError, RunFailedError, UserError
    from capt.pretrain.base.quiet import quiet_libraries
    from capt.pretrain.engine.run import run_job
    from capt.pretrain.registry import TASKS
    from capt.pretrain.reliability import uploads
    from capt.pretrain.reliability.sample_ledger import SampleLedger

    TASKS["toy"] = "tests.toy"
    os.environ.update(environment)
    quiet_libraries(debug=False)
    append, put_file = SampleLedger.after_step, uploads.put_file

    def after_step(self: SampleLedger, run: Any, report: Any) -> None:
        append(self, run, report)
        if what == "killed" and run.progress.step == 20:
            while not uploads._complete(mapping["checkpoint"]["upload"]):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    def put(path: Path, url: str) -> None:
        if what == "failing" or (what == "failing once" and "step-00000003" in url):
            raise DataError(f"{url} could not be written")
        put_file(path, url)

    SampleLedger.after_step = after_step  # type: ignore[method-assign]
    uploads.put_file = put
    try:
        return run_job(job_from_mapping(mapping, "test"))
    except (UserError, RunFailedError) as error:
        return f"{type(error).__name__}: {error}"


def test_a_run_whose_machine_is_gone_continues_from_the_bucket_alone(bucket: str, tmp_path: Path) -> None:
    url, run = f"{bucket}/runs/one", tmp_path / "run"
    environment = _environment()
    ranks, results = start_ranks(_train_toy, 2, _toy(run, url), environment, "killed")
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == -9, results.get()
    shutil.rmtree(run)
    assert run_ranks(_train_toy, 1, _toy(run, url), environment) == [0]
    report = check(run)
    assert report.faults == []
    assert [launch.head.world for launch in report.launches] == [2, 1]
    assert report.launches[1].head.step in range(3, 21, 3)
    assert report.recorded_to == 30
    assert 30 in _complete(url)
    fetched = report.launches[1].head.step
    assert {step for step in _complete(url) if step > fetched} <= {27, 30}  # what the run folder keeps
    whole = _toy(tmp_path / "whole", f"{bucket}/runs/whole")
    whole["checkpoint"]["average"] = 4
    assert run_ranks(_train_toy, 2, whole, environment, "failing once") == [0, 0]
    assert _contents(run) == _contents(tmp_path / "whole")
    assert {21, 24, 27, 30} <= set(_complete(f"{bucket}/runs/whole"))
    made = _average(tmp_path / "whole")
    assert {file.url.partition("/average/")[2] for file in tree(f"{bucket}/runs/whole/average")} == made.keys()
    shutil.rmtree(tmp_path / "whole")
    assert run_ranks(_train_toy, 2, whole, environment) == [0, 0]  # made again of the checkpoints in the store
    assert _average(tmp_path / "whole") == made
    # a second run must not be mixed with the first one, nor an older copy of it continued
    never = _toy(tmp_path / "other", url)
    never["run"]["resume"] = "never"
    (told,) = run_ranks(_train_toy, 1, never, environment)
    assert "holds a run already; continue it with --resume auto" in told
    shutil.rmtree(run / "checkpoints/step-00000030")
    assert run_ranks(_train_toy, 1, _toy(run, url), environment) == [0]  # this folder has had it
    shutil.rmtree(run / "checkpoints/step-00000030")
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[:-3]))
    (told,) = run_ranks(_train_toy, 1, _toy(run, url), environment)
    assert "has the run's step 30" in told
    assert "another machine has continued it" in told
    (told,) = run_ranks(_train_toy, 1, _toy(tmp_path / "lost", f"{bucket}/runs/lost"), environment, "failing")
    assert "UploadError" in told
    assert (tmp_path / "lost/checkpoints/step-00000030/manifest.json").is_file()
    assert run_ranks(_train_toy, 1, _toy(tmp_path / "lost", f"{bucket}/runs/lost"), environment) == [0]
    assert 30 in _complete(f"{bucket}/runs/lost")


def test_nothing_is_fetched_into_the_run_of_another_job(
    bucket: str, prepared: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Two young runs, neither with a row of metrics yet: a rank that no launcher has checked before finds out."""
    _, mapping = prepared
    run, box = tmp_path / "run", tmp_path / "box"
    (box / "checkpoints/step-00000010").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/step-00000010/manifest.json"):
        (box / name).write_text("")
    put_tree(box, f"{bucket}/another")
    run.mkdir()
    mapping = {**mapping, "run": {**mapping["run"], "dir": str(run), "resume": "auto"}}
    (run / "config.yaml").write_text(job_to_yaml(job_from_mapping({**mapping, "optimizer": {"lr": 0.5}}, "test")))
    (run / "metrics.jsonl").write_text("")
    mapping["checkpoint"] = {**mapping["checkpoint"], "upload": f"{bucket}/another"}
    with pytest.raises(AssertionError, match=r"holds a run of another job: .*optimizer\.lr 0\.5"):
        run_ranks(_train, 1, mapping, False, _environment())
    assert not (run / "checkpoints").exists()


def test_shards_are_prepared_into_the_bucket(bucket: str, tmp_path: Path) -> None:
    """By two processes, from text in the bucket: the bytes of a folder, which a job then reads."""
    put_tree(write_corpus(tmp_path / "text.txt", documents=120), f"{bucket}/raw/part.txt")
    mapping = language_mapping(tmp_path, data={"files": [f"{bucket}/raw/*.txt"], "validation_fraction": 0.1})
    job: Any = job_from_mapping(mapping, "test")
    tokenizer = load_tokenizer(folder := tokenizer_folder(job))
    prepare_folder(job.data, tokenizer, tmp_path / "folder", filters=DocumentFilters(exact=True))
    (tmp_path / "job.yaml").write_text(json.dumps(mapping))
    done = run_capt(
        "data", "prepare", str(tmp_path / "job.yaml"), f"tokenizer.path={folder}", "--out", f"{bucket}/made", "--work",
        "work", "--filter", "exact=true", "--workers", "2", cwd=tmp_path, env=dict(os.environ), warm=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"use them with: data.shards={bucket}/made tokenizer.path={folder}" in done.stdout
    files = {file.url.removeprefix(f"{bucket}/made/"): b"".join(chunks(file)) for file in tree(f"{bucket}/made")}
    here = [path for path in (tmp_path / "folder").rglob("*") if path.is_file()]
    expected = {path.relative_to(tmp_path / "folder").as_posix(): path.read_bytes() for path in here}
    assert files.keys() == expected.keys() >= {"card.md", "train/manifest.json", "validation/manifest.json"}
    assert all(files[name] == content for name, content in expected.items() if not name.startswith("card."))
    assert list((tmp_path / "work").iterdir()) == []
    data = job.data.model_copy(update={"files": [], "shards": f"{bucket}/made"})
    for split in ("train", "validation"):
        shards = prepare(data, tokenizer, split)
        assert shards is not None
        assert f"{shards.documents} documents, {shards.tokens} tokens" in done.stdout
