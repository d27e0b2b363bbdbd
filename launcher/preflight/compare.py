"""Judges the answers of all hosts. Pure functions: a survey goes in, checks come out, one line for each fault.

A check that finds no fault on any host is one line for all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from capt.launcher.preflight.facts import Facts, Findings, Survey
from capt.launcher.preflight.limits import interfaces, limits, rendezvous
from capt.launcher.preflight.probe import PACKAGES
from capt.launcher.preflight.report import Check
from capt.pretrain.base.errors import counted

_CLOCK_WARN, _CLOCK_FAIL = 0.5, 5.0
"""Seconds by which a clock is surely off: file times mislead above the first, leases and locks above the second."""
_KEY_CHANGED = re.compile(r"HOST IDENTIFICATION HAS CHANGED")
_KEY_UNKNOWN = re.compile(r"Host key verification failed|host key is known")
_LOGIN = re.compile(r"Permission denied|Too many authentication failures|Authenticated? failed", re.I)
_NO_SSH = re.compile(r"^ssh cannot be started")


def compare(survey: Survey) -> list[Check]:
    """All checks of the hosts together, each fault with its remedy; nothing is good that no host has answered."""
    groups: tuple[tuple[str, Callable[[Survey], Iterator[Check]]], ...] = (
        ("reachable", reach),
        ("versions", versions),
        ("working folder", working_folder),
        ("run folder", run_folder),
        ("rendezvous", rendezvous),
        ("interfaces", interfaces),
        ("clocks", clocks),
        ("GPUs", same_gpus),
        ("limits of each host", each_host),
    )
    found = []
    for name, judge in groups:
        checks = list(judge(survey))
        if not checks and _judged(name, survey):
            checks = [Check(name, "ok", _FINE[name](survey))]
        found += checks or [Check(name, "warn", "not looked at: too few hosts have answered", "first reach them")]
    return found


def _judged(name: str, survey: Survey) -> bool:
    """Whether a check without a fault has seen what it is about: hosts that answer, and a rendezvous that was tried."""
    return any(one.meeting for one in survey.hosts) if name == "rendezvous" else any(_known(survey))


def _known(survey: Survey) -> Iterator[tuple[Findings, Facts]]:
    return ((one, one.facts) for one in survey.hosts if one.facts is not None)


def reach(survey: Survey) -> Iterator[Check]:
    """A host that does not answer, by what ssh has said."""
    for one in survey.hosts:
        host, said = one.host.name, one.lost
        if not said:
            continue
        if _NO_SSH.search(said):
            yield Check(
                "ssh", "fail", said, "install the client (Debian and Ubuntu: apt-get install openssh-client)", host
            )
        elif _KEY_CHANGED.search(said):
            advice = (
                f"if {host} was set up anew: ssh-keygen -R {host}, then ssh {host} true; else somebody is in between"
            )
            yield Check("host key", "fail", f"another one than before: {said}", advice, host)
        elif _KEY_UNKNOWN.search(said):
            advice = f"ssh {host} true once by hand, and compare the fingerprint"
            yield Check("host key", "fail", f"not known: {said}", advice, host)
        elif _LOGIN.search(said):
            yield Check("login", "fail", said, f"ssh-copy-id {host}; the login must ask nothing", host)
        elif one.exit_code in (126, 127):
            yield Check("Python", "fail", said, "the same environment at the same path on every host", host)
        elif one.exit_code in (None, 255):
            advice = f"is it on, and its sshd? then ssh {host} true; or take it out of the hostfile"
            yield Check("reachable", "fail", said, advice, host)
        else:
            advice = "the same environment at the same path on every host, and a login shell that ends nothing"
            yield Check("Python", "fail", f"it does not run there: {said}", advice, host)


def versions(survey: Survey) -> Iterator[Check]:
    """The same Python, torch, DeepSpeed and files of ours as on the host that asks."""
    here = survey.here
    for one, facts in _known(survey):
        host = one.host.name
        if facts.python != here.python:
            other = facts.python.split(".")[:2] != here.python.split(".")[:2]
            advice = "the same Python on every host"
            yield Check("python", "fail" if other else "warn", f"{facts.python}, here {here.python}", advice, host)
        for name in PACKAGES:
            there, mine = facts.packages.get(name, ""), here.packages.get(name, "")
            if there != mine:
                advice = f"pip install '{name}=={mine}' there" if mine else f"pip uninstall {name} there"
                yield Check(name, "fail", f"{there or 'not installed'}, here {mine or 'not installed'}", advice, host)
        if facts.sources != here.sources and facts.packages.get(PACKAGES[-1]) == here.packages.get(PACKAGES[-1]):
            finding = "other files of the same release" if facts.sources else "pretrain cannot be imported"
            yield Check("sources", "fail", finding, "the same commit on every host, or one checkout that all see", host)


def working_folder(survey: Survey) -> Iterator[Check]:
    """Ranks start in the folder in which the launch was typed."""
    for one, facts in _known(survey):
        if not facts.folder:
            advice = "start from a folder that every host has at the same path"
            yield Check("working folder", "fail", "it is not there", advice, one.host.name)


def run_folder(survey: Survey) -> Iterator[Check]:
    """Every host writes there, and sees what this host writes, and the other way round."""
    folder = survey.folder
    if survey.here_writes:
        advice = "run.dir in a folder that is yours"
        yield Check("run folder", "fail", f"{folder} cannot be written from here: {survey.here_writes}", advice)
        return
    shared = "run.dir on a file system that all hosts mount at the same path"
    for one in survey.hosts:
        host = one.host.name
        if one.writes:
            yield Check("run folder", "fail", f"{folder} there: {one.writes}", shared, host)
        elif one.blind:
            yield Check("run folder", "fail", f"what is written here into {folder} is not seen there", shared, host)
        elif one.unseen:
            yield Check("run folder", "fail", f"what is written there into {folder} is not seen here", shared, host)


def clocks(survey: Survey) -> Iterator[Check]:
    """Clocks that are surely off: the offset less the bound of its error, which is half the round trip."""
    for one in survey.hosts:
        clock = one.clock
        if clock is None or (sure := abs(clock.offset) - clock.bound) <= _CLOCK_WARN:
            continue
        finding = f"{clock.offset:+.2f} s against this host's clock (within {clock.bound:.3f} s)"
        yield Check(
            "clock",
            "fail" if sure > _CLOCK_FAIL else "warn",
            finding,
            "chrony or systemd-timesyncd on every host: timedatectl set-ntp true",
            one.host.name,
        )


def same_gpus(survey: Survey) -> Iterator[Check]:
    """GPUs on all hosts or on none, of one model, with one driver."""
    hosts = [(one.host.name, facts) for one, facts in _known(survey) if not facts.gpu_problem]
    without = [name for name, facts in hosts if not facts.gpus]
    if len(without) not in (0, len(hosts)):
        advice = "take it out of the hostfile, or start it with its GPUs (docker run --gpus all)"
        yield from (Check("GPUs", "fail", "none, but other hosts have some", advice, name) for name in without)
    for column, what in ((0, "model"), (2, "driver")):
        kinds = {
            name: {card[column] for card in facts.gpus if len(card) > column} for name, facts in hosts if facts.gpus
        }
        common = Counter(kind for each in kinds.values() for kind in each).most_common(1)
        for name, each in kinds.items():
            if others := sorted(each - {common[0][0]}):
                finding = f"{what} {', '.join(others)}, elsewhere {common[0][0]}"
                advice = "all ranks wait for the slowest" if column == 0 else "the same driver on every host"
                yield Check("GPUs", "warn", finding, advice, name)


def each_host(survey: Survey) -> Iterator[Check]:
    """Shared memory, open files, apex and the number of GPUs of every host."""
    for one, facts in _known(survey):
        yield from limits(facts, one.host.slots, one.host.name)
    kinds = {one.host.name: facts.apex for one, facts in _known(survey) if facts.apex != "unrelated"}
    if len(set(kinds.values())) > 1:
        finding = "apex is " + ", ".join(f"{kind} on {name}" for name, kind in kinds.items())
        yield Check("apex", "warn", finding, "the same on every host, or set optimizer.backend=torch")


def _hosts(survey: Survey) -> str:
    return counted(len([*_known(survey)]), "host")


_FINE: dict[str, Callable[[Survey], str]] = {
    "reachable": lambda survey: f"{_hosts(survey)}, by known host keys",
    "versions": lambda survey: ", ".join(
        [f"python {survey.here.python}", *(f"{name} {version}" for name, version in survey.here.packages.items())]
    ),
    "working folder": lambda survey: f"on {_hosts(survey)}",
    "run folder": lambda survey: f"{survey.folder} is shared and writable",
    "rendezvous": lambda survey: f"{survey.address} port {survey.port} is free and reached by {_hosts(survey)}",
    "interfaces": lambda survey: ", ".join(
        sorted({one.meeting.interface or one.meeting.own for one in survey.hosts if one.meeting})
    ),
    "clocks": lambda survey: f"within {_CLOCK_WARN} s of this host's",
    "GPUs": lambda survey: (
        ", ".join(
            f"{n} x {card}"
            for card, n in Counter(card[0] for _, facts in _known(survey) for card in facts.gpus).items()
        )
        or "none; jobs run on the processors over gloo"
    ),
    "limits of each host": lambda survey: f"shared memory, open files, apex, GPUs of {_hosts(survey)}",
}
