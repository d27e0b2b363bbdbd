"""Credentials of a store are in no command line, file or log of a preparation and a training that use it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from capt.pretrain.base.stores import chunks, tree
from capt.tokenizer.train import train
from tests.language import language_mapping, write_corpus
from tests.unit.data.s3 import put_tree, s3_bucket

_NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class Processes(threading.Thread):
    """Watches the processes of this host: the command lines of all, and of those that inherit the variable ``mark``."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark, self._done = mark.encode(), threading.Event()
        self.lines: set[str] = set()
        self.own: set[str] = set()

    def run(self) -> None:
        while not self._done.wait(0.1):
            for folder in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # it has ended
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    self.lines.add(line)
                    if self._mark in (folder / "environ").read_bytes():
                        self.own.add(line)

    def __enter__(self) -> Processes:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self.join()


@pytest.mark.parametrize("given", ["environment", pytest.param("file", marks=pytest.mark.slow)])
def test_credentials_stay_where_they_are(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in variables, or in the file of fsspec; with all that ``--debug`` logs."""
    values = {name: f"canary{secrets.token_hex(16)}" for name in _NAMES}
    with s3_bucket() as bucket:
        (texts := tmp_path / "texts").mkdir()
        for number in range(65):  # more than share a unit, so that both workers have one
            write_corpus(texts / f"{number}.txt", 2, seed=number)
        put_tree(texts, f"{bucket}/text")
        write_corpus(tmp_path / "text.txt", 40)
        environment = {name: value for name, value in os.environ.items() if name not in _NAMES}
        environment["CAPT_MARK"] = mark = secrets.token_hex(16)
        if given == "environment":
            environment |= values
        else:
            keys = dict(zip(("key", "secret", "token"), values.values(), strict=True))
            (folder := tmp_path.with_name(f"{tmp_path.name}-fsspec")).mkdir()
            (folder / "conf.json").write_text(json.dumps({"s3": keys}))
            environment["FSSPEC_CONFIG_DIR"] = str(folder)
        mapping = language_mapping(tmp_path, data={"files": [f"{bucket}/text/*.txt"]}, loader={"workers": 1})
        mapping["checkpoint"]["upload"] = f"{bucket}/run"
        (tmp_path / "job.yaml").write_text(json.dumps(mapping))
        train((tmp_path / "text.txt").read_text().splitlines(), tmp_path / "tok", vocab_size=420, type="bpe")

        def capt(*words: str) -> str:
            command = [sys.executable, "-m", "capt.launcher", *words, "--debug"]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout + done.stderr

        prepare = ["data", "prepare", "job.yaml", "tokenizer.path=tok", "--out", f"{bucket}/set", "--work", "work"]
        pretrain = ["pretrain", "job.yaml", "data.files=[]", f"data.shards={bucket}/set", "tokenizer.path=tok"]
        with Processes(mark) as seen:
            said = capt(*prepare, "--workers", "2") + capt(*pretrain, "--nproc", "1", "--no-preflight")
        assert any("capt.pretrain" in line for line in seen.own), "the ranks were not seen"
        assert any("spawn_main" in line for line in seen.own), "the workers of the preparation were not seen"
        there = {file.url.removeprefix(f"{bucket}/"): b"".join(chunks(file)) for file in tree(bucket)}
    assert {"set/train/manifest.json", "run/checkpoints/step-00000006/manifest.json"} <= there.keys()
    files = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any("/run/" in name for name in files)
    assert "Found credentials" not in said
    places = {**files, **there, "log": said.encode(), **{line: line.encode() for line in seen.lines}}
    for name, value in values.items():
        assert [place for place, content in places.items() if value.encode() in content] == [], name
