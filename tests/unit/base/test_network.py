"""Hosts that gloo cannot join are found before they meet, and the line that helps is named."""

from __future__ import annotations

import socket
from itertools import product
from typing import Any

import pytest

from capt.pretrain.base import network
from capt.pretrain.base.network import Announced, unreachable

PROBLEMS = ("", "gloo would announce 127.0.1.1, which the host's name stands for")


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_ranks_are_refused_where_another_host_cannot_reach_one(hosts: int) -> None:
    """Two ranks a host, each host with or without a fault, the same interfaces or others."""
    for problems, alike in product(product(PROBLEMS, repeat=hosts), (True, False)):
        ranks = [
            Announced(f"place-{n}", f"host-{n}", problem, "eth0" if alike or n == 0 else "ib0")
            for n, problem in enumerate(problems)
            for _ in range(2)
        ]
        said = unreachable(ranks)
        first = next((n for n, problem in enumerate(problems) if problem), None)
        assert bool(said) == (hosts > 1 and first is not None), (problems, said)
        if said:
            assert said.startswith(f"rank {2 * first} on host-{first}")  # type: ignore[operator]
            assert ("GLOO_SOCKET_IFNAME=eth0 into .deepspeed_env" in said) == alike
            assert ("/etc/hosts (their interfaces: eth0, ib0)" in said) == (not alike)
            assert ("more of" in said) == (sum(map(bool, problems)) > 1)


def names(host: str, address: str) -> Any:
    def getaddrinfo(name: str, port: Any, *_: Any, **__: Any) -> Any:
        if name != host or not address:
            raise OSError("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    return getaddrinfo


@pytest.mark.parametrize(
    ("address", "variable", "says"),
    [
        ("127.0.1.1", "", "gloo would announce 127.0.1.1"),
        ("", "", "gloo would announce 127.0.0.1"),  # a name without an address
        ("192.0.2.1", "", "gloo would announce 127.0.0.1"),  # or for an address of another machine
        ("127.0.1.1", "lo", "GLOO_SOCKET_IFNAME=lo is the loopback interface"),
        ("127.0.1.1", "eth77", "GLOO_SOCKET_IFNAME=eth77: there is no such interface (eth0, lo)"),
        ("127.0.1.1", "eth0", ""),
        ("127.0.1.1", "eth0,lo", "GLOO_SOCKET_IFNAME=lo"),
    ],
)
def test_what_gloo_announces(address: str, variable: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    monkeypatch.setattr(socket, "getaddrinfo", names("node-1", address))
    monkeypatch.setattr(network, "_interfaces", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.1.2.3"]})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    found = Announced.here("127.0.0.1", 29500)
    assert found.problem.startswith(says)
    assert bool(found.problem) == bool(says)
    assert found.interface == "eth0"
    assert Announced.from_json(found.to_json()) == found


def test_the_interfaces_of_this_host_are_those_of_the_system() -> None:
    found = network._interfaces()
    assert found.keys() == {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in found["lo"]
