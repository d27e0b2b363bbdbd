import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.hostfile import Host, is_this_host, read_hostfile
from pretrain.base.errors import ConfigError


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "hosts"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_reads_hosts_in_order_with_comments_and_crlf(tmp_path: Path) -> None:
    text = "# the cluster\r\nnode-1 slots=8\r\n\r\n  node-2.local\tslots=4  # slower\r\n10.0.0.3 slots=1"
    assert read_hostfile(write(tmp_path, text)) == (Host("node-1", 8), Host("node-2.local", 4), Host("10.0.0.3", 1))


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("node-1 slots=2\nnode-1 slots=2", 2, "already stands on line 1"),
        ("node-1 slots=2\n# x\nNODE-1 slots=2", 3, "already stands on line 1"),
        ("node-1", 1, "host slots=N"),
        ("node-1 slots=two", 1, "host slots=N"),
        ("node-1 slots=2 junk", 1, "host slots=N"),
        ("node-1 slots=2 slots=3", 1, "host slots=N"),
        ("node-1 slots = 2", 1, "host slots=N"),
        ("node-1 slots=0", 1, "1 to 512"),
        ("ok slots=1\nnode-1 slots=-1", 2, "1 to 512"),
        ("node-1 slots=1000000000", 1, "1 to 512"),
        ("-oProxyCommand=id slots=1", 1, "not a host"),
        ("a;b slots=1", 1, "not a host"),
        ("$(id) slots=1", 1, "not a host"),
        ("`id` slots=1", 1, "not a host"),
        ("user@node slots=1", 1, "not a host"),
        ("node[1-3] slots=1", 1, "not a host"),
        ("node-1,node-2 slots=1", 1, "not a host"),
        ("node- slots=1", 1, "not a host"),
        ("fe80::1 slots=1", 1, "not a host"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_hostfile(path)
    assert f"{path}, line {line}: " in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "names no host"),
        (b"# only a comment\n\n", "names no host"),
        (b"\xef\xbb\xbfnode slots=1", "not plain ASCII"),
        (b"n\xc3\xb6de slots=1", "not plain ASCII"),
        (b"node slots=\xd9\xa3", "not plain ASCII"),
        (b"#" * 1_000_001, "over 1,000,000 bytes"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=says) as error:
        read_hostfile(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_an_error_and_not_a_local_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no hostfile"):
        read_hostfile(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_hostfile(tmp_path)


def test_a_fifo_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_hostfile(tmp_path / "hosts")


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet=st.characters(max_codepoint=0x250), max_size=60))
def test_any_text_is_hosts_or_one_readable_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = write(tmp_path_factory.mktemp("h"), text)
    hosts: tuple[Host, ...] = ()
    error = ""
    try:
        hosts = read_hostfile(path)
    except ConfigError as refusal:
        error = str(refusal)
    assert bool(hosts) != bool(error)
    assert "\n" not in error
    for host in hosts:
        assert not host.name.startswith("-")
        assert set(host.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def test_names_of_this_host() -> None:
    assert is_this_host("localhost")
    assert not is_this_host("surely-another-host.example")
