import logging
import os
import subprocess
from pathlib import Path

import pytest

from capt.launcher.environment import forwarded_env, forwarded_to_hosts, visible_gpus
from capt.pretrain.base.errors import ConfigError


def test_only_listed_variables_travel() -> None:
    here = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "HOME": "/root", "EDITOR": "vi"}
    assert forwarded_to_hosts(here, ()) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("name", ["HF_TOKEN", "CAPT_API_KEY", "CAPT_PASSWORD", "NCCL_MY_SECRET", "CAPT_AUTH"])
def test_secrets_stay_and_their_values_are_not_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert forwarded_to_hosts({name: "canary"}, ()) == {}
    assert name in caplog.text
    assert "canary" not in caplog.text


def test_a_url_with_a_password_stays() -> None:
    assert forwarded_to_hosts({"HF_ENDPOINT": "https://me:canary@mirror.example"}, ()) == {}
    assert forwarded_to_hosts({"HF_ENDPOINT": "https://mirror.example"}, ()) == {
        "HF_ENDPOINT": "https://mirror.example"
    }


def test_tokenizers_parallelism_is_no_secret() -> None:
    assert forwarded_to_hosts({"TOKENIZERS_PARALLELISM": "true"}, ()) == {"TOKENIZERS_PARALLELISM": "true"}


def test_how_threads_wait_travels_and_the_count_of_capt_itself_does_not(tmp_path: Path) -> None:
    """A rank sets that count itself, where neither its host nor a file says another."""
    (tmp_path / ".deepspeed_env").write_text("OMP_WAIT_POLICY=passive\n")
    assert forwarded_to_hosts({"GOMP_SPINCOUNT": "30000"}, (tmp_path,)) == {"OMP_WAIT_POLICY": "passive"}
    given = {"GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": "active"}
    assert forwarded_to_hosts(given, ()) == given


@pytest.mark.parametrize(
    "value", ["$(touch X)", "`touch X`", "a;b", "a|b", "a&b", 'a"b', "a'b", "a\\b", "a\nb", "a>b", "*"]
)
def test_what_a_shell_would_execute_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="NCCL_DEBUG"):
        forwarded_to_hosts({"NCCL_DEBUG": value}, (), through_shell=True)
    assert forwarded_to_hosts({"NCCL_DEBUG": value}, ()) == {"NCCL_DEBUG": value}, "ssh's ranks get it without a shell"


def test_later_files_win_over_earlier_ones_and_the_environment(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "NCCL_DEBUG=home\nCAPT_SETTING=1\n\n"), (here, "NCCL_DEBUG = here\n")):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text(text)
    assert forwarded_to_hosts({"NCCL_DEBUG": "env"}, (home, here)) == {"NCCL_DEBUG": "here", "CAPT_SETTING": "1"}


def test_ds_env_file_names_another_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("NCCL_A=1\n")
    assert forwarded_to_hosts({"DS_ENV_FILE": str(tmp_path / "mine")}, (tmp_path,)) == {"NCCL_A": "1"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("no equals", "NAME=value"),
        ("1A=2", "NAME=value"),
        ("A;B=2", "NAME=value"),
        ("MY_TOKEN=canary", "looks like a secret"),
        ("NCCL_DEBUG=$(id)", "is not expanded"),
        ('NCCL_DEBUG="`id`"', "is not expanded"),
        ("NCCL_DEBUG='INFO", "ends with the same quote"),
        ('NCCL_DEBUG="A" B', "ends with the same quote"),
        ("export MY_TOKEN=canary", "looks like a secret"),
        ("export", "NAME=value"),
    ],
)
def test_a_wrong_line_of_an_env_file_is_named(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / ".deepspeed_env").write_text(f"NCCL_DEBUG=INFO\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as error:
        forwarded_to_hosts({}, (tmp_path,))
    assert says in str(error.value)
    assert "canary" not in str(error.value)


def test_lines_of_an_env_file_are_read_as_a_shell_reads_them(tmp_path: Path) -> None:
    starts = ("", "export ", "  export\t", "  ")
    values = ("INFO", "a#b", "(x)", "", "'a b (c) $x'", '"a b; c"', "'#'", '""', "a=b")
    ends = ("", "  # why", "\t#why", "   ")
    lines = [f"{start}{{}}={value}{end}" for start in starts for value in values for end in ends]
    text = "".join(f"{line.format(f'NCCL_{number}')}\n# {number}\n\n" for number, line in enumerate(lines))
    (tmp_path / ".deepspeed_env").write_text(text)
    script = text.replace("=(x)", "='(x)'")  # which a shell takes for an array
    done = subprocess.run(
        ["bash", "-c", f"set -a\n{script}\nexec env -0"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        check=True,
    )
    shell = dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if line.startswith("NCCL_"))
    assert len(shell) == len(lines)
    assert forwarded_to_hosts({}, (tmp_path,)) == shell


def test_what_deepspeed_would_hand_to_a_shell_is_refused_in_a_file_too(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("NCCL_A='(x)'\n")
    assert forwarded_to_hosts({}, (tmp_path,)) == {"NCCL_A": "(x)"}
    with pytest.raises(ConfigError, match=r"\.deepspeed_env: NCCL_A holds '\(', .*--launcher ssh"):
        forwarded_to_hosts({}, (tmp_path,), through_shell=True)


CODE = (
    *("LD_PRELOAD=x.so", "LD_AUDIT=x", "LD_LIBRARY_PATH=.", "PATH=.", "BASH_ENV=x", "ENV=x", "IFS=x", "PS4=x"),
    *("PYTHONPATH=evil", "PYTHONSTARTUP=x.py", "PYTHONHOME=x", "PYTHONINSPECT=1", "PYTHONUSERBASE=x", "PERL5OPT=x"),
    *("NCCL_NET_PLUGIN=evil", "NCCL_CONF_FILE=x", "NCCL_DEBUG_FILE=config.yaml", "UCX_MODULE_DIR=x"),
    *("TORCH_EXTENSIONS_DIR=x", "TORCH_HOME=x", "HF_HOME=x", "HF_ENDPOINT=x", "CUDA_HOME=x", "CAPT_X=/tmp/evil"),
    *("HOME=x", "GIT_SSH_COMMAND=x", "PDSH_RCMD_TYPE=x", "DS_ENV_FILE=x", "TMPDIR=x", "MY_SETTING=1"),
)


@pytest.mark.parametrize("line", CODE)
def test_a_file_sets_no_variable_that_runs_code_or_names_a_file(tmp_path: Path, line: str) -> None:
    (tmp_path / ".deepspeed_env").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=r"line 1: .*CAPT_TRAVELS="):
        forwarded_to_hosts({}, (tmp_path,))


def test_the_users_own_list_of_names_lets_more_through_but_no_secret(tmp_path: Path) -> None:
    here = {"CAPT_TRAVELS": "MY_SETTING, LD_PRELOAD,MY_TOKEN", "MY_SETTING": "1", "MY_TOKEN": "x", "OTHER": "2"}
    (tmp_path / ".deepspeed_env").write_text("LD_PRELOAD=/opt/jemalloc.so\n")
    assert forwarded_to_hosts({**here, "CAPT_TRAVELS": "MY_SETTING"}, ())["MY_SETTING"] == "1"
    assert {*forwarded_to_hosts(here, (tmp_path,))} == {"CAPT_TRAVELS", "MY_SETTING", "LD_PRELOAD"}


@pytest.mark.parametrize(("value", "count"), [("0,1,3", 3), ("", 0), ("-1", 0), ("GPU-1a", 1)])
def test_visible_gpus_follow_the_variable(monkeypatch: pytest.MonkeyPatch, value: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert len(visible_gpus()) == count


def test_a_name_that_is_none_does_not_travel() -> None:
    """sbatch --export takes names between commas: of CAPT_A,ALL it would hand on everything."""
    assert forwarded_env({"CAPT_A,ALL": "1", "CAPT_B": "1"}) == {"CAPT_B": "1"}
