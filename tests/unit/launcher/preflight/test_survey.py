"""All hosts are asked through a stand-in for ssh that runs a shell here, or fails as ssh does."""

from __future__ import annotations

import os
import resource
import socket
import time
from pathlib import Path

import pytest

from capt.launcher.preflight import probe
from capt.launcher.preflight import survey as room
from capt.launcher.preflight.facts import Survey
from capt.launcher.preflight.run import compare
from capt.launcher.preflight.survey import survey
from capt.launcher.ssh import Host, allow_hosts
from tests.support import free_port

ROOT = Path(__file__).parents[4]
SSH = r"""#!/bin/sh
echo "$*" >> "$(dirname "$0")/ssh.log"
while :; do case "$1" in -o) shift 2;; -*) shift;; *) break;; esac; done
host=$1
shift
printf 'hello\nwelcome to %s' "$host"
case "$host" in
    unknown) echo "No ED25519 host key is known for unknown" >&2; echo "Host key verification failed." >&2; exit 255;;
    cut) echo "ssh: connect to host cut port 22: Connection timed out" >&2; exit 255;;
    silent*) exec sleep 60;;
    rude) exec yes "capt-preflight []";;
    barren) exec sh -c "/no/python -c pass";;
esac
exec sh -c "$*"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "shared").mkdir()
    return tmp_path


def test_more_hosts_may_have_more_files_open() -> None:
    """Some hundreds of hosts were too many open files under the usual soft limit of 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
        allow_hosts(5)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        allow_hosts(20)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256 + 4 * 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "MY_TOKEN": "canary"}


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", environment(folder)["PATH"])


def ask(folder: Path, *names: str, port: int | None = None, path: str = os.environ["PATH"]) -> Survey:
    return survey(
        tuple(Host(name, 1) for name in names),
        run_dir=folder / "shared" / "runs" / "first",
        address="127.0.0.1",
        port=port or free_port(),
        environment={**environment(folder), "PATH": f"{folder / 'bin'}:{path}"},
        forwarded={"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
    )


def faults(found: Survey) -> dict[str, str]:
    return {check.host: check.name for check in compare(found) if check.level == "fail"}


def test_a_folder_is_listed_only_where_a_file_is_not_seen_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 hosts together would list the million files that lie beside a run folder."""
    (tmp_path / "file").write_text("token")
    listed: list[str] = []
    monkeypatch.setattr(os, "listdir", listed.append)
    assert probe.sees(str(tmp_path / "file"), "token") == {"found": True}
    assert listed == []
    assert probe.sees(str(tmp_path / "none"), "token", patience=0.1) == {"found": False}
    assert listed


def test_hosts_that_do_not_answer_are_left_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end together: of 128 behind a switch that fails each is given two seconds to end."""
    monkeypatch.setattr(room, "_LOGIN", 0.5)
    begun = time.monotonic()
    found = ask(folder, *(f"silent-{number}" for number in range(6)))
    assert all("no answer" in one.lost for one in found.hosts)
    assert time.monotonic() - begun < 8


def test_hosts_answer_and_nothing_is_left(folder: Path) -> None:
    found = ask(folder, "a", "b", "c")
    assert faults(found) == {}
    assert [one.lost for one in found.hosts] == [""] * 3
    for one in found.hosts:
        assert one.facts is not None
        assert one.facts.sources == found.here.sources
        assert one.clock is not None
        assert abs(one.clock.offset) <= one.clock.bound + 0.01
        assert one.meeting is not None
        assert (one.meeting.said, one.meeting.peer) == (found.token, "127.0.0.1")
    assert list((folder / "shared").iterdir()) == []
    log = (folder / "bin" / "ssh.log").read_text()
    assert "canary" not in log
    assert found.token not in log
    assert log.count("BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5") == 3


def test_what_ssh_says_of_each_lost_host_is_told_and_the_others_are_still_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_LOGIN", 5.0)
    begun = time.monotonic()
    found = ask(folder, "a", "unknown", "cut", "silent", "rude", "barren")
    assert time.monotonic() - begun < 60
    assert faults(found) == {
        "unknown": "host key",
        "cut": "reachable",
        "silent": "reachable",
        "rude": "reachable",
        "barren": "Python",
    }
    lost = {one.host.name: one.lost for one in found.hosts}
    assert lost["unknown"] == "No ED25519 host key is known for unknown; Host key verification failed."
    assert lost["silent"] == "no answer to 'now' in 5 s"
    assert found.hosts[0].meeting is not None


def test_a_lost_first_host_is_no_lost_rendezvous_of_the_others(folder: Path) -> None:
    assert faults(ask(folder, "cut", "b")) == {"cut": "reachable"}


def test_a_used_port_is_named(folder: Path) -> None:
    with socket.create_server(("", 0)) as other:
        found = ask(folder, "a", "b", port=other.getsockname()[1])
    assert found.port_problem == "Address already in use"
    assert faults(found) == {"a": "rendezvous port"}


def test_a_folder_that_cannot_be_written_is_told_before_the_hosts_are_blamed(folder: Path) -> None:
    (folder / "shared" / "runs").touch()
    found = ask(folder, "a")
    assert found.here_writes == "Not a directory"
    assert faults(found) == {"": "run folder"}


def test_without_ssh_every_host_says_so(folder: Path) -> None:
    (folder / "bin" / "ssh").unlink()
    found = ask(folder, "a", "b", path="")
    assert [one.lost for one in found.hosts] == ["ssh cannot be started: No such file or directory"] * 2
    assert faults(found) == {"a": "ssh", "b": "ssh"}


def test_what_would_steer_a_terminal_is_not_repeated(folder: Path) -> None:
    (folder / "bin" / "ssh").write_text("#!/bin/sh\nprintf '\\033]0;title\\007bad\\r\\n' >&2\nexit 255\n")
    (asked,) = ask(folder, "a").hosts
    assert asked.lost.isprintable()
    assert "bad" in asked.lost
    assert asked.exit_code == 255
