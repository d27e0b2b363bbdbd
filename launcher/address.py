"""Names and numbers that reach a remote shell or a rendezvous: one validator for each, wherever they come from.

Options, ``launch.json``, hostfiles and cluster files give hosts, ports and numbers of processes; multi-host launchers
put them into command lines that a shell reads on every host. What is not plainly one of these is refused.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import Annotated

from pydantic import AfterValidator, Field

MAX_SLOTS = 512
"""Processes that one host may run."""

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9_])?")


def check_host(name: str) -> str:
    """``name``, if it is a host name or an IPv4 address; else ``ValueError``."""
    if not _HOST.fullmatch(name):
        raise ValueError(
            "not a host: a name of letters, digits, '.', '-' and '_' that does not begin with '-', "
            "or an IP address without a zone"
        )
    return name


def check_address(name: str) -> str:
    """``name``, if it is a host (``check_host``) or an IPv6 address without a zone; else ``ValueError``."""
    if ":" in name and re.fullmatch(r"[0-9A-Fa-f:.]{2,45}", name):
        try:
            return str(IPv6Address(name))
        except ValueError:
            pass
    return check_host(name)


Address = Annotated[str, AfterValidator(check_address)]
Port = Annotated[int, Field(ge=1, le=65535)]
Slots = Annotated[int, Field(ge=1, le=MAX_SLOTS)]
