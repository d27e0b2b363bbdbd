"""Messages between the head and the supervisor of a node, a JSON object a line.

They speak over the stdin and stdout of ssh or srun.

The node speaks first, and at least twice a second (``now`` is its clock). The head sends every ``now`` back: a *lease*.
A node whose own words of ``LEASE`` seconds ago have not come back is alone, kills its ranks and ends. The head, which
hears nothing for ``SILENCE`` seconds, knows by then that it has: a word of the node that it had answered was said, and
the lease counted from, before it was heard. No clocks are compared, and what was under way in a cable that is plugged
in again counts from when it was sent.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from capt.pretrain.base.records import Count, Record

MARK = "capt-node "
"""Begins every line of the node, so that what a login shell prints is none of them."""
REPORT = 0.5
"""Seconds between two words of a node."""
LEASE = 10.0
SILENCE = LEASE + 2.0
"""Seconds after which the head gives a silent node up: its lease is over, and its ranks have had 2 s to be killed."""
LONGEST = 1 << 21

_Text = Annotated[str, Field(max_length=2000)]
_Beat = tuple[_Text, Count, float, Count, float, float | None]


class Up(Record):
    """The first message of a node: its supervisor runs."""

    pid: Count
    born: Count
    started: _Text
    """Boot id of the host: together with it, a process and its beginning are one process."""


class RankNews(Record):
    """A rank: its process, exit code and pulse, and whether it is suspended or waits for a file system."""

    pid: Count
    born: Count
    code: int | None = Field(None, ge=-128, le=255)
    pulse: _Beat | None = None
    suspended: bool = False
    waits: bool = False


class Stacks(Record):
    """The answer to a question for stacks."""

    text: str = Field(max_length=1 << 18)
    suspended: _Text


class Met(Record):
    """The answer of a node that was asked to listen for the others, or to call the one that listens."""

    port: Count = 0
    problem: _Text = ""


class GPUs(Record):
    """The GPUs of a node: ``count``, or ``problem``; both are empty when unknown."""

    count: Count | None = None
    problem: _Text = ""


class News(Record):
    """A word of a node."""

    now: float
    up: Up | None = None
    ranks: tuple[RankNews, ...] | None = Field(None, max_length=512)
    idle: float = 0.0
    asked: int = Field(0, ge=0, le=64)
    """The stop signal that the node was sent, not by the head."""
    stacks: Stacks | None = None
    met: Met | None = None
    gpus: GPUs | None = None
    problem: _Text = ""
    """Reason why the node ends."""


def packed(message: dict[str, Any]) -> bytes:
    """A message of the head as a line."""
    return json.dumps(message).encode() + b"\n"
