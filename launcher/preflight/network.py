"""Judges how the hosts reach each other: the rendezvous, and the interfaces that gloo and NCCL will use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from ipaddress import ip_address

from launcher.check import Check
from launcher.preflight.facts import Survey


def rendezvous(survey: Survey) -> Iterator[Check]:
    """The port is free on the first host, and every host reaches that host by the address of the rendezvous."""
    first = survey.hosts[0].host.name
    if survey.port_problem:
        finding = f"port {survey.port}: {survey.port_problem}"
        yield Check("rendezvous port", "fail", finding, "end what uses it, or take another --master-port", first)
        return
    where = f"{survey.address} port {survey.port}"
    advice = f"--master-addr with an address of {first} that every host reaches; a firewall must let the port through"
    for one in survey.hosts:
        if one.no_meeting:
            yield Check("rendezvous", "fail", f"{where}: {one.no_meeting}", advice, one.host.name)
        elif one.meeting and one.meeting.said != survey.token:
            yield Check(
                "rendezvous", "fail", f"{where} is another machine there ({one.meeting.peer})", advice, one.host.name
            )
    peers = Counter(one.meeting.peer for one in survey.hosts if one.meeting and not _is_loopback(one.meeting.peer))
    for one in survey.hosts:
        if one.meeting and one.meeting.said == survey.token and _is_loopback(one.meeting.peer):
            finding = f"{survey.address} is {one.meeting.peer} there, which only that machine reaches"
            yield Check(
                "rendezvous", "warn", finding, f"--master-addr, or /etc/hosts of {one.host.name}", one.host.name
            )
    if len(peers) > 1:
        finding = f"{survey.address} is " + ", ".join(f"{peer} for {n}" for peer, n in peers.most_common()) + " hosts"
        yield Check("rendezvous", "warn", finding, "--master-addr with one address, so that all use one network")


def interfaces(survey: Survey) -> Iterator[Check]:
    """The interfaces that gloo and NCCL are told exist everywhere; without one, gloo takes the host name's address."""
    gloo = [name for name in survey.environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    nccl = survey.environment.get("NCCL_SOCKET_IFNAME", "")
    for one in survey.hosts:
        if (facts := one.facts) is None:
            continue
        host, has = one.host.name, ", ".join(sorted(facts.interfaces))
        for name in gloo:
            if name not in facts.interfaces:
                advice = f"one that every host has; there: {has}"
                yield Check("interface", "fail", f"GLOO_SOCKET_IFNAME={name} is not there", advice, host)
            elif len(survey.hosts) > 1 and _is_loopback(facts.interfaces[name]):
                advice = f"the interface of the network; there: {has}"
                yield Check("interface", "warn", f"GLOO_SOCKET_IFNAME={name} is the loopback", advice, host)
        if nccl and facts.gpus and not _nccl_finds(nccl, facts.interfaces):
            advice = f"one that every host has; there: {has}"
            yield Check("interface", "fail", f"NCCL_SOCKET_IFNAME={nccl} is not there", advice, host)
        if not gloo and len(survey.hosts) > 1 and (not facts.name_address or _is_loopback(facts.name_address)):
            used = one.meeting.interface if one.meeting and not _is_loopback(one.meeting.own) else ""
            finding = f"gloo would use {facts.name_address or 'no address'}, that of the name {facts.name}"
            advice = f"GLOO_SOCKET_IFNAME={used or 'INTERFACE'} in .deepspeed_env"
            yield Check("interface", "fail" if used else "warn", finding, advice, host)  # no other machine reaches it


def _nccl_finds(rule: str, names: dict[str, str]) -> bool:
    """NCCL's rule: prefixes, after ``=`` whole names, after ``^`` what is left out."""
    words = rule.lstrip("^=").split(",")
    exact = "=" in rule[:2]
    hits = {name for name in names if any(name == word if exact else name.startswith(word) for word in words)}
    return bool(set(names) - hits) if rule.startswith("^") else bool(hits)


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
