"""Answers of the hosts as checked records, and the findings of asking them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

from capt.launcher.ssh import Host


class Answer(BaseModel):
    """The answer of a host to a question."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Done(Answer):
    """The answer of a host that has done what it was asked."""


class Facts(Answer):
    """A host's own answer (``capt.launcher.preflight.probe.facts``). Sizes are bytes; -1 is none, or no limit."""

    python: str
    packages: dict[str, str]
    sources: str
    folder: bool
    interfaces: dict[str, str]
    name: str
    name_address: str
    gpus: list[list[str]]
    gpu_problem: str
    apex: Literal["absent", "unrelated", "plain", "compiled"]
    apex_place: str
    shm_total: int
    shm_free: int
    descriptors: int


class Meeting(Answer):
    """The rendezvous as a host reached it: the words heard there, its address, the host's own and its interface."""

    said: str
    peer: str
    own: str
    interface: str


class ClockAnswer(Answer):
    """A host's clock, in seconds since 1970."""

    time: float


class FileFound(Answer):
    """The answer of a host that looked for a file."""

    found: bool


@dataclass(frozen=True)
class Clock:
    """A host's clock minus this host's, in seconds: ``offset``, wrong by at most ``bound``, half the round trip."""

    offset: float
    bound: float


@dataclass
class Findings:
    """Findings of asking one host. A text that is not empty is a problem."""

    host: Host
    lost: str = ""
    """Reason why the host does not answer, in the words of ssh; nothing else is known from there on."""
    exit_code: int | None = None
    """The exit code of ssh, where it has ended."""
    facts: Facts | None = None
    clock: Clock | None = None
    writes: str = ""
    """Problem that the host has with writing into the run folder; empty if there is none."""
    blind: bool = False
    """The host does not see what this host wrote into the run folder."""
    unseen: bool = False
    """This host does not see what the host wrote."""
    meeting: Meeting | None = None
    no_meeting: str = ""


@dataclass
class Survey:
    """The answers of all hosts; ``here`` is the host that asks, and the rendezvous is on the first of ``hosts``."""

    here: Facts
    hosts: list[Findings]
    address: str
    port: int
    token: str
    folder: str
    here_writes: str = ""
    port_problem: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    """The variables that are forwarded to every host."""
