"""Fate of a job whose hosts cannot all be reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from capt.launcher.ssh import Host
from capt.launcher.supervisor import remote as room
from capt.launcher.supervisor.messages import Up
from capt.launcher.supervisor.remote import Gathering, NotReachedError, Policy

A, B, C, SMALL, BIG = Host("a", 2), Host("b", 2), Host("c", 2), Host("small", 1), Host("big", 4)


class Line:
    """A line to a host that answers immediately, or is lost immediately."""

    def __init__(self, host: str, reason: str) -> None:
        self.host, self.lost = host, reason
        self.up = None if reason else Up(pid=1, born=1, started="now")
        self.open = True

    def register(self, selector: object) -> None: ...

    def judge(self) -> None: ...

    def hang_up(self) -> None: ...

    def is_ending(self) -> bool:
        return False

    def close(self) -> None:
        self.open = False


class Cluster:
    """Hosts of which some do not answer; how often each was called, and the lines that are open."""

    def __init__(self, *dead: Host, answers_at: int = 10**9, cut: tuple[Host, ...] = ()) -> None:
        self.dead, self.answers_at = {host.name for host in dead}, answers_at
        self.cut = {host.name for host in cut}
        """Hosts that answer, and reach no other one of them."""
        self.lines: list[Line] = []
        self.meetings = 0

    def connect(self, host: Host) -> Line:
        calls = 1 + sum(line.host == host.name for line in self.lines)
        reason = "No route to host" if host.name in self.dead and calls < self.answers_at else ""
        self.lines.append(Line(host.name, reason))
        return self.lines[-1]

    def meet(self, hosts: Sequence[Host], lines: Mapping[Host, Line]) -> dict[Host, str]:
        assert set(hosts) <= set(lines), "all have answered"
        self.meetings += 1
        if self.meetings >= self.answers_at:
            return {}
        first, *others = hosts
        return {host: "no way" for host in others if {first.name, host.name} & self.cut}

    def open(self) -> list[str]:
        return sorted(line.host for line in self.lines if line.open)

    def gather(
        self,
        policy: Policy | None,
        *,
        spares: tuple[Host, ...] = (),
        fits: Callable[[int], str] = lambda world: "",
        patience: float = 60.0,
        of: tuple[Host, ...] = (),
    ) -> list[Host]:
        made = Gathering(self.connect, spares, policy, patience, fits, lambda: False, self.meet)  # type: ignore[arg-type]
        hosts, lines = made.gather(of or (A, B))
        assert [line.host for line in lines] == [host.name for host in hosts]
        return hosts


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_AGAIN", 0.01)
    monkeypatch.setattr(room, "_POLL", 0.001)


@pytest.mark.parametrize("policy", [None, "wait", "spare", "shrink"])
def test_hosts_that_answer_run_the_job(policy: Policy | None) -> None:
    cluster = Cluster()
    assert cluster.gather(policy, spares=(C,)) == [A, B]
    assert cluster.open() == ["a", "b"]


def test_at_the_first_start_a_host_that_does_not_answer_is_an_error() -> None:
    cluster = Cluster(B)
    with pytest.raises(NotReachedError, match="b cannot be used: No route to host"):
        cluster.gather(None, spares=(C,))
    assert cluster.open() == []


def test_a_spare_takes_the_place_of_a_lost_host_and_its_ranks() -> None:
    cluster = Cluster(A)
    assert cluster.gather("spare", spares=(SMALL, BIG, C)) == [Host("big", 2), B]  # the first that has the slots
    assert cluster.open() == ["b", "big"]


def test_a_spare_that_does_not_answer_is_passed_over() -> None:
    assert Cluster(B, BIG).gather("spare", spares=(BIG, C)) == [A, C]


def test_without_a_spare_that_is_left_the_host_is_waited_for() -> None:
    cluster = Cluster(B, answers_at=3)
    assert cluster.gather("spare", spares=(SMALL,)) == [A, B]
    assert cluster.open() == ["a", "b"]


def test_a_host_is_waited_for_until_it_answers_or_time_is_up() -> None:
    assert Cluster(B, answers_at=4).gather("wait") == [A, B]
    cluster = Cluster(B)
    with pytest.raises(NotReachedError, match=r"not reached in .* minutes: b: No route to host"):
        cluster.gather("wait", patience=0.1)
    assert cluster.open() == []


def test_a_job_shrinks_to_the_hosts_that_are_left_and_fit() -> None:
    cluster = Cluster(A)
    assert cluster.gather("shrink") == [B]
    assert cluster.open() == ["b"]


@pytest.mark.parametrize("dead", [(A,), (A, B)])
def test_a_job_that_does_not_fit_on_what_is_left_says_so(dead: tuple[Host, ...]) -> None:
    cluster = Cluster(*dead)
    why = "no host is left" if len(dead) == 2 else "batch.global 12 is not for 2 ranks"
    with pytest.raises(NotReachedError, match=f"the job cannot shrink: {why}"):
        cluster.gather("shrink", fits=lambda world: f"batch.global 12 is not for {world} ranks")
    assert cluster.open() == []


D = Host("d", 2)


@pytest.mark.parametrize(
    ("cut", "left"), [((B,), [A]), ((A,), [B, C, D]), ((C,), [A, B, D]), ((B, D), [A, C]), ((A, B), [C, D])]
)
def test_hosts_that_answer_and_do_not_reach_each_other_are_lost(cut: tuple[Host, ...], left: list[Host]) -> None:
    hosts = (A, B) if cut == (B,) else (A, B, C, D)
    cluster = Cluster(cut=cut)
    assert cluster.gather("shrink", of=hosts) == left
    assert cluster.open() == [host.name for host in left]


def test_a_spare_takes_the_place_of_a_host_that_does_not_reach_the_first() -> None:
    cluster = Cluster(cut=(B, SMALL))
    assert cluster.gather("spare", spares=(SMALL, C)) == [A, C]
    assert cluster.open() == ["a", "c"]


def test_a_host_that_does_not_reach_the_first_is_waited_for_until_it_does_or_time_is_up() -> None:
    assert Cluster(cut=(B,), answers_at=3).gather("wait") == [A, B]
    cluster = Cluster(cut=(B,))
    with pytest.raises(NotReachedError, match=r"not reached in .* minutes: b: no way"):
        cluster.gather("wait", patience=0.1)
    assert cluster.open() == []
    with pytest.raises(NotReachedError, match="b cannot be used: no way"):
        cluster.gather(None)
