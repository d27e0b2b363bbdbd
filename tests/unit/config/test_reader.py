"""Configuration files that somebody wrote to do harm, or by mistake: refused early, in one line that says what."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config import load_job, load_mapping
from capt.pretrain.config.reader import NotYamlError, read_yaml
from capt.pretrain.engine.engines.deepspeed_config import deepspeed_config

_LAUGH = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_LAUGH, "over 10,000 values"),
        ("".join(f"k{i}: 1\n" for i in range(40_000)), "over 10,000 values"),
        ("a: " + "[" * 900 + "]" * 900, "line 1: nested over 30 deep"),
        ("a: " + "{b: " * 900 + "}" * 900, "line 1: nested over 30 deep"),
        ("a: 1\n" * 200_000 + "a: 2", "over 1,000,000 characters"),
        ("a: " + "9" * 5000, "a number has at most 19 digits"),
        ("a: 1e999", "too large for a number"),
        ("? [a, b]\n: 1", "line 1: a key must be a word"),
        ("a: &a {b: 1}\nc: {<<: *a}", "<< is not read here; base: names what to build on"),
        ("a: 1\n---\nb: 1", "a second document (---) begins"),
        ('a: "x\\0y"', "holds a character that is not text"),
        ('a: "\\ud800"', "holds a character that is not text"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_too_much_is_refused_at_once(text: str, message: str) -> None:
    begin = time.process_time()
    with pytest.raises(ConfigError) as error:
        read_yaml(text, "job.yaml")
    assert message in str(error.value)
    assert time.process_time() - begin < 3


@pytest.mark.parametrize(
    "text",
    ["a: !!int x", "a: !!binary aGk=", "a: !!set {b}", "a: *nowhere", 'a: "\\U00110000"', "a: &a [*a]", "[", "!x y"],
)
def test_what_is_no_yaml_of_ours_is_said_to_be_none(text: str) -> None:
    with pytest.raises(NotYamlError):
        read_yaml(text, "job.yaml")


def test_what_yaml_has_is_read() -> None:
    text = "a: &x [1, +2, -3, 1_000, '1', !!str 1, !!float 1]\nb: *x\n1: ~\n'': {c: null, d: }\n"
    text += "e: |\n  two\n  lines\nf: 1_\n"
    numbers = [1, 2, -3, 1000, "1", "1", 1.0]
    expected = {"a": numbers, "b": numbers, "1": None, "": {"c": None, "d": None}, "e": "two\nlines\n", "f": "1_"}
    assert read_yaml(text, "job.yaml") == expected
    assert read_yaml("# nothing\n", "job.yaml") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: 3\n", "base: 3: it names a file or a shipped job, or a list of them"),
        ("base: [[a]]\n", "base: [['a']]"),
        ("base: {a: 1}\n", "base: {'a': 1}"),
        (f"base: {'x' * 5000}\n", "no configuration file 'xxx"),
        ('base: "a\\tb"\n', "no configuration file 'a\\tb'"),
    ],
)
def test_a_base_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_mapping(tmp_path / "a.yaml")
    assert message in str(error.value)


def test_bases_that_multiply_are_bounded(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.yaml").write_text(f"base: [{number + 1}.yaml, {number + 1}.yaml]\n")
    (tmp_path / "20.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="over 50 files are read through base:"):
        load_mapping(tmp_path / "0.yaml")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["contrast=3"], "contrast: 3: it is a section; set a key of it, such as contrast.weight"),
        (
            ["contrast.temperature=constant"],
            "'constant': it is a section; set a key of it, such as contrast.temperature.type",
        ),
        (
            ["schedule.max_steps=20", "schedule.warmup_steps=40"],
            "warmup_steps 40 is longer than max_steps 20; lower schedule.warmup_steps, or raise schedule.max_steps",
        ),
        (["run.seed=1_"], "run.seed: '1_': input should be a valid integer"),
        (["contrast.cached=maybe"], "contrast.cached: 'maybe': input should be a valid boolean"),
        (["run.seed=9223372036854775808"], "run.seed: 9223372036854775808: a whole number is at most"),
        (["batch.global=1e12"], "batch.global: 1000000000000.0: input should be less than or equal to 2147483647"),
        (["model.hidden=1000000000001"], "model.hidden: 1000000000001: input should be less than or equal to 65536"),
        (["data.validation_fraction=1"], "fraction: 1: input should be less than 1 and greater than or equal to 0"),
        (["data.sequence_length=0"], "0: input should be greater than or equal to 8 and less than or equal to 1048576"),
        (["checkpoint.local.every=-1"], "checkpoint.local.every: -1: input should be greater than"),
        (["loader.workers=100000"], "less than or equal to 1024"),
        (["engine.timeout_minutes=1e300"], "less than or equal to 525600"),
        (["engine.deepspeed_extra.zero_optimization=null"], "zero_optimization: None: it is a section"),
        (["engine.deepspeed_extra.fp16=1"], "fp16: 1: it is a section"),
        (["engine.deepspeed_extra.dump_state={}"], "dump_state: {}: it is one value"),
        (["run.dir=a\nb"], "holds a line break"),
        (["run.dir=a\0b"], "holds a line break or another character that is not text"),
        (['run.dir="a\\nb"'], "run.dir: 'a\\nb': a path holds no line break"),
        (["run.dir=''"], "run.dir: '': is empty"),
        ([f"run.dir={'x/' * 3000}"], "a path has at most 4096 bytes"),
        ([f"data.cache={'x' * 300}"], "a name in it 255"),
        (["data.files=[ftp://bucket/x]"], "data.files.0: 'ftp://bucket/x': is a URL of an unknown store"),
        (["run..seed=1"], "'run..seed' is not a key"),
        (["a" + ".a" * 900 + "=1"], "is not a key"),
        (["run.seed=" + "[" * 900], "nested over 30 deep"),
        (["x" * 5000 + "=1"], "unknown key"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_beyond_all_bounds_are_one_short_line(overrides: list[str], message: str) -> None:
    begin = time.process_time()
    with pytest.raises(ConfigError) as error:
        deepspeed_config(load_job("capt_tiny", overrides), 1)
    assert message in str(error.value)
    assert len(str(error.value)) < 600
    assert time.process_time() - begin < 3


def test_a_key_of_several_types_names_what_each_of_them_takes() -> None:
    with pytest.raises(ConfigError, match=r"input should be 'auto' or less than 1 and greater than or equal to 0$"):
        load_job("capt_pairs", ["model.init=x", "data.files=y", "data.validation_fraction=1"])
