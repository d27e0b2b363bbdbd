"""Each fault of a cluster, made up, is one red or yellow line that names host and remedy; a healthy one has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from capt.launcher.preflight.facts import Clock, Facts, Findings, Meeting, Survey
from capt.launcher.preflight.limits import interfaces
from capt.launcher.preflight.report import Check
from capt.launcher.preflight.run import compare
from capt.launcher.ssh import Host

GIB = 1 << 30
CARD = ["NVIDIA H200", "143771 MiB", "600.1"]


def facts(**changes: object) -> Facts:
    healthy = {
        "python": "3.12.4",
        "packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "capt-pretraining": "0.1.0"},
        "sources": "aaaa",
        "folder": True,
        "interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.1"},
        "name": "node",
        "name_address": "10.0.0.1",
        "gpus": [],
        "gpu_problem": "",
        "apex": "absent",
        "apex_place": "",
        "shm_total": 24 * GIB,
        "shm_free": 24 * GIB,
        "descriptors": 1 << 20,
    }
    return Facts.model_validate({**healthy, **changes})


def survey() -> Survey:
    """Two healthy hosts of two slots."""
    hosts = []
    for name in ("node-1", "node-2"):
        meeting = Meeting(said="token", peer="10.0.0.1", own="10.0.0.1", interface="eth0")
        hosts.append(Findings(Host(name, 2), facts=facts(), clock=Clock(0.01, 0.001), meeting=meeting))
    return Survey(facts(), hosts, "node-1", 29500, "token", "/shared/runs", environment={"GLOO_SOCKET_IFNAME": "eth0"})


def lost(said: str, code: int | None = 255) -> Callable[[Survey], None]:
    def change(one: Survey) -> None:
        one.hosts[1] = Findings(Host("node-2", 2), lost=said, exit_code=code)

    return change


def there(**changes: object) -> Callable[[Survey], None]:
    def change(one: Survey) -> None:
        one.hosts[1].facts = facts(**changes)

    return change


def finding(**changes: object) -> Callable[[Survey], None]:
    def change(one: Survey) -> None:
        for name, value in changes.items():
            setattr(one.hosts[1], name, value)

    return change


def met(**changes: str) -> Callable[[Survey], None]:
    meeting = {"said": "token", "peer": "10.0.0.1", "own": "10.0.0.2", "interface": "eth0", **changes}
    return finding(meeting=Meeting.model_validate(meeting))


def everywhere(**changes: object) -> Callable[[Survey], None]:
    def change(one: Survey) -> None:
        for name, value in changes.items():
            setattr(one, name, value)

    return change


def faults(one: Survey) -> list[Check]:
    return [check for check in compare(one) if check.level in ("warn", "fail")]


def test_a_healthy_cluster_has_a_good_line_for_each_check() -> None:
    checks = compare(survey())
    assert {check.level for check in checks} == {"ok"}
    assert len(checks) == 9
    said = " ".join(check.finding for check in checks)
    for part in ("2 hosts", "torch 2.13.0", "/shared/runs is shared", "node-1 port 29500 is free", "eth0"):
        assert part in said


def test_nothing_is_good_where_no_host_has_answered() -> None:
    """A free port, and clocks that agree, were told of hosts that nobody had reached."""
    one = survey()
    one.hosts = [Findings(Host(name, 2), lost="Connection refused", exit_code=255) for name in ("node-1", "node-2")]
    levels = {check.name: check.level for check in compare(one)}
    assert (levels.pop("reachable"), set(levels.values())) == ("fail", {"warn"})
    assert {"rendezvous", "clocks", "run folder"} <= levels.keys()


OLD_TORCH = {"torch": "2.12.0", "deepspeed": "0.19.8", "capt-pretraining": "0.1.0"}
NO_TORCH = {"torch": "", "deepspeed": "0.19.8", "capt-pretraining": "0.1.0"}
FAULTS = {
    "no route": (lost("ssh: connect to host node-2 port 22: Connection timed out"), "reachable", "ssh node-2 true"),
    "no answer": (lost("no answer to 'facts' in 60 s", None), "reachable", "sshd"),
    "unknown key": (lost("No ED25519 host key is known; Host key verification failed."), "host key", "fingerprint"),
    "changed key": (
        lost("WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!; Host key verification failed."),
        "host key",
        "ssh-keygen -R node-2",
    ),
    "no login": (lost("me@node-2: Permission denied (publickey)."), "login", "ssh-copy-id node-2"),
    "no ssh": (lost("ssh cannot be started: No such file or directory", None), "ssh", "openssh-client"),
    "no Python": (lost("bash: /venv/bin/python: No such file", 127), "Python", "same path"),
    "broken Python": (lost("ImportError: libpython", 1), "Python", "same environment"),
    "another Python": (there(python="3.11.9"), "python", "same Python"),
    "another torch": (there(packages=OLD_TORCH), "torch", "pip install 'torch==2.13.0'"),
    "no torch": (there(packages=NO_TORCH), "torch", "pip install 'torch==2.13.0'"),
    "other sources": (there(sources="bbbb"), "sources", "same commit"),
    "no sources": (there(sources=""), "sources", "same commit"),
    "no working folder": (there(folder=False), "working folder", "same path"),
    "not written there": (finding(writes="Permission denied", blind=True), "run folder", "run.dir"),
    "not shared, blind": (finding(blind=True), "run folder", "mount"),
    "not shared, unseen": (finding(unseen=True), "run folder", "mount"),
    "not written here": (everywhere(here_writes="Read-only file system"), "run folder", "run.dir"),
    "port in use": (everywhere(port_problem="Address already in use"), "rendezvous port", "--master-port"),
    "firewall": (finding(meeting=None, no_meeting="timed out"), "rendezvous", "firewall"),
    "another machine": (met(said="", peer="127.0.1.1"), "rendezvous", "--master-addr"),
    "no interface": (there(interfaces={"lo": "127.0.0.1", "ib0": "10.1.0.1"}), "interface", "ib0"),
    "web toolkit": (there(apex="unrelated", apex_place="/venv/apex"), "apex", "pip uninstall apex"),
    "no shared memory": (there(shm_total=64 << 20, shm_free=40 << 20), "shared memory", "--shm-size"),
    "few files": (there(descriptors=128), "open files", "ulimit -n"),
    "broken driver": (there(gpu_problem="driver mismatch"), "GPUs", "driver"),
    "clock": (finding(clock=Clock(-60.0, 0.01)), "clock", "set-ntp"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_red_line_with_its_remedy(name: str) -> None:
    change, check, advice = FAULTS[name]
    one = survey()
    change(one)
    (found,) = faults(one)
    assert (found.name, found.level) == (check, "fail")
    assert advice in found.advice
    assert found.finding
    where = {"not written here": "", "port in use": "node-1"}.get(name, "node-2")
    assert found.host == where


def test_gpus_are_counted_against_the_slots_and_wanted_on_all_hosts() -> None:
    one = survey()
    one.hosts[0].facts, one.hosts[1].facts = facts(gpus=[CARD, CARD]), facts(gpus=[CARD])
    (few,) = faults(one)
    assert (few.level, few.host, few.finding, few.advice) == (
        *("fail", "node-2", "1 for 2 slots"),
        "slots=1 in the hostfile",
    )
    one.hosts[1].facts = facts()
    (none,) = faults(one)
    assert (none.level, none.host) == ("fail", "node-2")
    assert "other hosts have some" in none.finding


@pytest.mark.parametrize(
    ("card", "says"),
    [(["NVIDIA A100", *CARD[1:]], "model NVIDIA A100, elsewhere NVIDIA H200"), ([*CARD[:2], "580.2"], "driver 580.2")],
)
def test_other_gpus_or_drivers_are_a_warning(card: list[str], says: str) -> None:
    one = survey()
    one.hosts[0].facts, one.hosts[1].facts = facts(gpus=[CARD] * 3), facts(gpus=[card] * 2)
    (found,) = faults(one)
    assert (found.level, found.host) == ("warn", "node-2")
    assert says in found.finding


WARNINGS = {
    "loopback": (met(peer="127.0.0.1", own="127.0.0.1"), "rendezvous", "--master-addr"),
    "two networks": (met(peer="192.168.0.1"), "rendezvous", "one network"),
    "gloo on the loopback": (everywhere(environment={"GLOO_SOCKET_IFNAME": "lo"}), "interface", "eth0"),
    "patch release": (there(python="3.12.3"), "python", "same Python"),
    "small shared memory": (there(shm_total=256 << 20, shm_free=250 << 20), "shared memory", "--ipc=host"),
    "some files": (there(descriptors=512), "open files", "ulimit -n"),
    "apex on one": (there(apex="compiled", apex_place="/venv/apex"), "apex", "optimizer.backend=torch"),
    "clock": (finding(clock=Clock(1.0, 0.01)), "clock", "set-ntp"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_what_some_jobs_suffer_from_is_a_warning(name: str) -> None:
    change, check, advice = WARNINGS[name]
    one = survey()
    change(one)
    found = faults(one)
    assert found
    assert {(each.name, each.level) for each in found} == {(check, "warn")}
    assert all(advice in each.advice for each in found)


def test_gloo_on_the_loopback_is_refused_where_another_machine_has_to_reach_it() -> None:
    one = survey()
    one.environment = {}
    assert faults(one) == []
    one.hosts[1].facts = facts(name_address="127.0.1.1")
    (found,) = faults(one)
    assert (found.level, found.advice) == ("fail", "GLOO_SOCKET_IFNAME=eth0 in .deepspeed_env")
    met(peer="127.0.0.1", own="127.0.0.1", interface="lo")(one)  # the same machine by two names, as far as is seen
    assert {check.level for check in faults(one)} == {"warn"}


def test_nothing_is_called_right_that_no_host_has_shown() -> None:
    one = survey()
    one.hosts[0] = Findings(Host("node-1", 2), lost="no route to host", exit_code=255)
    one.hosts[1].meeting = None
    assert {check.name: check.level for check in compare(one)}["rendezvous"] == "warn"


def test_a_slow_answer_is_no_wrong_clock() -> None:
    """The offset is known to half the round trip only."""
    one = survey()
    one.hosts[1].clock = Clock(8.0, 7.6)
    assert faults(one) == []
    one.hosts[1].clock = Clock(8.0, 2.0)
    assert [check.level for check in faults(one)] == ["fail"]


@pytest.mark.parametrize(
    ("rule", "there"),
    [("eth", True), ("=eth", False), ("=eth0", True), ("ib", False), ("^lo", True), ("^lo,eth", False)],
)
def test_nccl_interfaces_are_prefixes(rule: str, there: bool) -> None:
    one = survey()
    one.environment["NCCL_SOCKET_IFNAME"] = rule
    for host in one.hosts:
        host.facts = facts(gpus=[CARD, CARD])
    assert [check.name for check in interfaces(one)] == [] if there else ["interface"] * 2
