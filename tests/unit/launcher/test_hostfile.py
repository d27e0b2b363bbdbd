import os
import random
from pathlib import Path

import pytest

from capt.launcher.ssh import Host, is_this_host, read_hostfile
from capt.pretrain.base.errors import ConfigError


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
        ("node-1 slots=2\nnode-1 slots=2", 2, "is already on line 1"),
        ("node-1 slots=2\n# x\nNODE-1 slots=2", 3, "is already on line 1"),
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
        ("fe80::1%eth0 slots=1", 1, "without a zone"),
        ("[node-1] slots=1", 1, "not a host"),
        ("1:2:3 slots=1", 1, "not a host"),
        ("2001:db8::1 slots=1\n[2001:DB8:0::1] slots=1", 2, "is already on line 1"),
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


def test_names_of_this_host() -> None:
    assert is_this_host("localhost")
    assert not is_this_host("surely-another-host.example")


def test_addresses_of_ipv6_stand_as_they_are_or_in_brackets(tmp_path: Path) -> None:
    path = write(tmp_path, "2001:db8::1 slots=2\n[2001:DB8::2] slots=4\n::ffff:10.0.0.1 slots=1\n")
    hosts = read_hostfile(path)
    assert [(host.name, host.slots) for host in hosts] == [("2001:db8::1", 2), ("2001:db8::2", 4), ("::ffff:a00:1", 1)]
    assert read_hostfile(path, "[2001:db8::2]:1,3@2001:DB8::1") == (hosts[0], Host("2001:db8::2", 2, (1, 3)))
    assert is_this_host("::1")


HOSTS = {"worker-0": 4, "worker-1": 2, "10.0.0.3": 8}


def _filters(draw: random.Random) -> str:
    """A filter of a few hosts, some with slots; some name what is not there."""
    names = draw.sample([*HOSTS, "worker-9"], draw.choice([1, 1, 2, 3]))
    parts = []
    for name in names:
        slots = draw.sample(range(HOSTS.get(name, 2) + (draw.random() < 0.1)), draw.choice([0, 0, 1, 2]))
        parts.append(f"{name}:{','.join(map(str, slots))}" if slots else name)
    return "@".join(parts)


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_filters_mean_what_they_mean_to_deepspeed(tmp_path: Path, option: str) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner", reason="the oracle is DeepSpeed's own function")
    path, draw = write(tmp_path, "".join(f"{name} slots={slots}\n" for name, slots in HOSTS.items())), random.Random(7)
    resources = {name: list(range(slots)) for name, slots in HOSTS.items()}
    taken = 0
    for _ in range(300):
        text = _filters(draw)
        try:
            theirs = runner.parse_resource_filter(resources, **{f"{option}_str": text})
        except ValueError:
            theirs = {}
        try:
            found = read_hostfile(path, **{option: text})
        except ConfigError:
            found = ()
        ours = {host.name: list(host.devices or range(host.slots)) for host in found}
        assert list(ours.items()) == [(name, sorted(slots)) for name, slots in theirs.items()], text
        assert all(host.slots == len(ours[host.name]) for host in found)
        taken += bool(found)
    assert 50 < taken < 300


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"include": "worker-0", "exclude": "worker-1"}, "do not go together"),
        ({"include": "worker-7"}, "names no host 'worker-7'"),
        ({"include": "worker-0:4"}, "has the slots 0 to 3"),
        ({"include": "worker-0:"}, "not of the form"),
        ({"include": "worker-0:0-2"}, "not of the form"),
        ({"include": "worker-0@"}, "not of the form"),
        ({"include": "worker-0@worker-0"}, "occurs twice"),
        ({"exclude": "worker-0@worker-1@10.0.0.3"}, "leaves no host"),
    ],
)
def test_a_wrong_filter_is_named(tmp_path: Path, options: dict[str, str], says: str) -> None:
    path = write(tmp_path, "".join(f"{name} slots={slots}\n" for name, slots in HOSTS.items()))
    with pytest.raises(ConfigError, match=says):
        read_hostfile(path, **options)
