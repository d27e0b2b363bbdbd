"""``${...}`` in a configuration of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config import load_mapping
from capt.pretrain.config.interpolation import interpolate

JOB = {"run": {"dir": "runs/x", "seed": 3}, "files": ["a", "b"], "alias": "${run}"}


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ("${run.seed}", 3),
        ("${run.dir}/log-${run.seed}.txt", "runs/x/log-3.txt"),
        ("${run}", {"dir": "runs/x", "seed": 3}),
        ("${files}", ["a", "b"]),
        ("${files.1}", "b"),
        ("${alias.seed}", 3),
        (r"\${run.seed} costs $5", "${run.seed} costs $5"),
        ("${oc.env:PLACE}/x", "/scratch/x"),
        ("${oc.env:NOWHERE, here}", "here"),
    ],
)
def test_references(value: str, result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/scratch")
    assert interpolate({**JOB, "x": value}, "job.yaml")["x"] == result


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${run.sed}", "there is no 'sed'; did you mean 'seed'?"),
        ("${x}", "refers to itself: x -> x"),
        ("${run.seed", "is not closed by }"),
        ("${a.${run.seed}}", "is not closed by }, or holds another ${"),
        ("${now:%Y}", "is neither ${a.b} nor ${oc.env:NAME}"),
        ("${oc.create:[]}", "neither"),
        ("a ${run} b", "is a section or a list"),
        ("${oc.env:NOWHERE}", "is not set, and there is no default"),
        ("${oc.env:}", "is not set"),
        ("${run.seed.x}", "there is no 'x'"),
    ],
)
def test_mistakes_are_named(value: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        interpolate({**JOB, "x": value}, "job.yaml")
    assert message in str(error.value)


SECRETS = [
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SESSION_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
    "GITHUB_PAT",
    "GITLAB_TOKEN",
    "DB_PASS",
    "DB_PASSWORD",
    "PASSWD",
    "MY_PASSPHRASE",
    "MYSQL_PWD",
    "MY_SESSION",
    "SLACK_WEBHOOK",
    "HF_COOKIE",
    "AUTH_BEARER",
    "AZURE_SAS",
    "GCP_CREDS",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "SSH_PRIVATE_KEY",
    "NPM_AUTH",
    "X_SIGNATURE",
    "SENTRY_DSN",
    "COMET_API_KEY",
    "MLFLOW_TRACKING_TOKEN",
    "KAGGLE_KEY",
    "AZURE_CLIENT_SECRET",
    "API_KEY",
    "SECRET",
    "PASSWORD",
    "TOKEN",
    "SECRETS_2",
    "S3_APIKEY",
    "PIP_AUTHORIZATION",
    "SIGNING_KEYS",
    "ACCESS_TOKEN_1",
    "SESSIONID",
    "CI_JOB_TOKEN",
    "PGPASSWORD",
    "GHTOKEN",
    "VAULTTOKEN",
    "CLIENTSECRET",
    "SSHPASS",
    "ROOT_PW",
]


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_not_written_into_runs_and_model_cards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "canary")
    with pytest.raises(ConfigError, match="looks like a secret") as error:
        interpolate({"x": "${oc.env:" + name + "}"}, "job.yaml")
    assert "canary" not in str(error.value)


@pytest.mark.parametrize(
    "value",
    [
        "https://me:canary@host/x",
        "hf_abcdefghijklmnopq",
        "AKIAABCDEFGHIJKLMNOP",
        "Bearer abcdefghij",
        "u=me;password=x",
    ],
)
def test_nor_is_a_value_that_looks_like_one(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", value)
    with pytest.raises(ConfigError, match="holds what looks like a secret") as error:
        interpolate({"x": "${oc.env:PLACE}"}, "job.yaml")
    assert value not in str(error.value)


@pytest.mark.parametrize("name", ["HOME", "PWD", "SCRATCH", "SLURM_JOB_ID", "TMPDIR", "COMPASS"])
def test_an_ordinary_variable_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/x")
    assert interpolate({"x": "${oc.env:" + name + "}"}, "job.yaml") == {"x": "/x"}


def test_references_that_multiply_are_bounded() -> None:
    bomb = {f"k{i}": f"${{k{i + 1}}}" * 2 for i in range(40)} | {"k40": "x"}
    with pytest.raises(ConfigError, match=r"over 3,000,000 characters once every \$\{...\} is replaced"):
        interpolate(bomb, "job.yaml")
    chain = {f"k{i}": f"${{k{i + 1}}}" for i in range(99)} | {"k99": "x"}
    with pytest.raises(ConfigError, match="a chain of 50 references"):
        interpolate(chain, "job.yaml")
    deep = {f"k{i}": {"a": {"b": f"${{k{i + 1}}}"}} for i in range(20)} | {"k20": "x"}
    with pytest.raises(ConfigError, match="nested over 30 deep"):
        interpolate(deep, "job.yaml")
    lists = {f"k{i}": [f"${{k{i + 1}}}"] * 9 for i in range(19)} | {"k19": "x"}
    with pytest.raises(ConfigError, match="over 3,000,000"):
        interpolate(lists, "job.yaml")


def test_a_file_and_an_override_refer_to_one_another(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: {dir: 'runs/${run.seed}', seed: 1}\n")
    assert load_mapping(tmp_path / "a.yaml", ["run.seed=7"])["run"]["dir"] == "runs/7"
