"""How this host calls the others: the options of every ssh, of pdsh's and of our own."""

from __future__ import annotations

from collections.abc import Mapping

USERS_OPTIONS = "PDSH_SSH_ARGS_APPEND"
"""The variable with which a user gives pdsh, and so every launch, further options of ssh."""
# A host that asks a question, does not answer or disappears is an error within seconds instead of a wait for ever.
_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"


def ssh_options(environment: Mapping[str, str]) -> str:
    """The options of ssh, in one line; of two for the same thing ssh takes the first, so the user's win."""
    return f"{environment.get(USERS_OPTIONS, '')} {_OPTIONS}".strip()
