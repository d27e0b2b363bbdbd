"""Hosts that gloo cannot join, found before their ranks meet.

Gloo announces the first address of the host's name, or that of ``GLOO_SOCKET_IFNAME``. Where that is a loopback address
(Debian writes ``127.0.1.1 NAME`` into /etc/hosts), every other host connects to itself.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

from capt.pretrain.base.process import boot_id

VARIABLE = "GLOO_SOCKET_IFNAME"


class Announced(NamedTuple):
    """A rank's word on its host."""

    place: str
    """The host and its network: ranks of one place reach each other by loopback addresses."""
    host: str
    problem: str
    """The reason why ranks of other places do not reach it; empty where nothing is known against it."""
    interface: str
    """The interface by which it reaches the rendezvous, where that can be told."""

    @classmethod
    def here(cls, master: str, port: int) -> Announced:
        """The word of this process, whose ranks meet at a port of the host ``master``."""
        network = os.readlink("/proc/self/ns/net") if os.path.exists("/proc/self/ns/net") else ""
        interfaces = _interfaces()
        towards = _interface_of(_own_address(master, port), interfaces)
        return cls(f"{boot_id()} {network}", socket.gethostname(), _problem(interfaces), towards)

    def to_json(self) -> str:
        """The fields as text."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Announced:
        """The inverse of ``to_json``."""
        return cls(*map(str, json.loads(text)))


def unreachable(ranks: Sequence[Announced]) -> str:
    """The reason why ranks on several hosts will not reach each other, with its remedy; empty where they may."""
    if len({rank.place for rank in ranks}) == 1:
        return ""
    faults = {rank.place: (number, rank) for number, rank in reversed(list(enumerate(ranks))) if rank.problem}
    if not faults:
        return ""
    number, first = min(faults.values())
    interfaces = {rank.interface for rank in ranks}
    more = f" (and {len(faults) - 1} more of {len({rank.place for rank in ranks})} hosts)" if len(faults) > 1 else ""
    if len(interfaces) == 1 and first.interface:
        remedy = (
            f"write {VARIABLE}={first.interface} into .deepspeed_env, in your home or in the folder of the start; "
            f"torchrun: export {VARIABLE}={first.interface} on every host"
        )
    else:
        names = ", ".join(sorted(filter(None, interfaces))) or "none is known"
        remedy = f"give each host's name its address of the network in /etc/hosts (their interfaces: {names})"
    return f"rank {number} on {first.host}{more}: {first.problem}, where other hosts do not reach it: {remedy}"


def _problem(interfaces: dict[str, list[str]]) -> str:
    """The fault of the address that gloo announces."""
    chosen = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    for name in chosen:
        if name not in interfaces:
            return f"{VARIABLE}={name}: there is no such interface ({', '.join(sorted(interfaces))})"
        if all(map(is_loopback, interfaces[name])):
            return f"{VARIABLE}={name} is the loopback interface"
    if not chosen and is_loopback(address := _announced()):
        return f"gloo would announce {address}, which the host's name stands for"
    return ""


def _announced() -> str:
    """The address that gloo takes of the host's name: the first that is its own, else the loopback address."""
    with suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as tried:
                tried.bind(where)
                return str(where[0])
    return "127.0.0.1"


def _own_address(master: str, port: int) -> str:
    """The address of this host from which it calls another; nothing is sent."""
    with suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as calling:
                calling.connect(where)
                return str(calling.getsockname()[0])
    return ""


def _interfaces() -> dict[str, list[str]]:
    """The network interfaces of this host and their addresses."""
    import psutil  # type: ignore[import-untyped]  # comes with DeepSpeed

    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [each.address.partition("%")[0] for each in addresses if each.family in kinds]
        for name, addresses in psutil.net_if_addrs().items()
    }


def _interface_of(address: str, interfaces: dict[str, list[str]]) -> str:
    """The interface with this address or, where it is a loopback address, the only other one; else empty."""
    if address and not is_loopback(address):
        return next((name for name, own in interfaces.items() if address in own), "")
    others = [name for name, own in interfaces.items() if own and not all(map(is_loopback, own))]
    return others[0] if len(others) == 1 else ""


def is_loopback(address: str) -> bool:
    """Return whether an address, a zone after it or not, is one of the loopback interface; a name is not."""
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
