"""Judges what a host has (shared memory, open files, GPUs, the run folder's disk), and how hosts reach each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from capt.launcher.preflight.facts import Facts, Survey
from capt.launcher.preflight.report import Check
from capt.pretrain.base.network import is_loopback

_SHM_SLOT = 32 << 20
"""Free bytes of ``/dev/shm`` below which a rank's collectives or loader workers end in a bus error."""
_SHM_MIN = 512 << 20
_DESCRIPTORS_MIN, _DESCRIPTORS_USUAL = 256, 1024


def limits(facts: Facts, slots: int, host: str = "") -> Iterator[Check]:
    """Report what ``slots`` processes on a host would lack; nothing where all is in order."""
    yield from shared_memory(facts.shm_total, facts.shm_free, slots, host)
    yield from descriptors(facts.descriptors, host)
    yield from apex(facts.apex, facts.apex_place, host)
    yield from gpus(facts, slots, host)


def shared_memory(total: int, free: int, slots: int, host: str = "") -> Iterator[Check]:
    """``/dev/shm`` must have room for every process; systems without one (``total`` -1) are left alone."""
    finding = f"/dev/shm has {size(free)} free of {size(total)} for {slots} processes"
    if 0 <= free < slots * _SHM_SLOT:
        advice = "in a container --ipc=host or --shm-size=16g; else remove what is in /dev/shm"
        yield Check("shared memory", "fail", finding, advice, host)
    elif 0 <= total < _SHM_MIN:
        advice = "NCCL and data workers need more: docker run --ipc=host, or --shm-size=16g"
        yield Check("shared memory", "warn", finding, advice, host)


def descriptors(limit: int, host: str = "") -> Iterator[Check]:
    """Check the number of files that a process may have open; -1 is no limit."""
    if 0 <= limit < _DESCRIPTORS_USUAL:
        level, least = ("fail" if limit < _DESCRIPTORS_MIN else "warn"), _DESCRIPTORS_USUAL
        advice = f"ulimit -n {least} in the shell that starts the ranks, or nofile in /etc/security/limits.conf"
        yield Check("open files", level, f"a process may have {limit} files open (ulimit -n)", advice, host)  # type: ignore[arg-type]


def apex(kind: str, place: str, host: str = "") -> Iterator[Check]:
    """PyPI's unrelated project is where libraries look for NVIDIA's."""
    if kind == "unrelated":
        advice = "pip uninstall apex; NVIDIA's is built from github.com/NVIDIA/apex, or comes with its PyTorch images"
        yield Check("apex", "fail", f"{place} is PyPI's unrelated web toolkit, not NVIDIA's", advice, host)


def gpus(facts: Facts, slots: int, host: str = "") -> Iterator[Check]:
    """A process needs a GPU of its own where there are any."""
    if facts.gpu_problem:
        yield Check("GPUs", "fail", f"nvidia-smi: {facts.gpu_problem}", "check the driver", host)
    elif facts.gpus and slots > len(facts.gpus):
        advice = f"slots={len(facts.gpus)} in the hostfile"
        yield Check("GPUs", "fail", f"{len(facts.gpus)} for {slots} slots", advice, host)


def queue_memory(need: int, have: int) -> Iterator[Check]:
    """Room for the queue of a job whose ranks are all on this host."""
    if need > have:
        advice = "a shorter contrast.queue, contrast.queue_dtype=bf16, or more hosts"
        yield Check("memory", "fail", f"contrast.queue takes {size(need)}, and this host has {size(have)}", advice)


def disk(free: int, one: int | None, copies: int, folder: str) -> Check:
    """Room for ``copies`` more checkpoints of ``one`` bytes; None where the configuration does not tell their size."""
    has = f"{size(free)} free at {folder}"
    if one is None:
        return Check("disk", "note", f"{has}; the size of a checkpoint is not known from the configuration")
    plural = f"{copies} checkpoints" if copies > 1 else "one more checkpoint"
    finding = f"{has}; {plural} of about {size(one)}"
    if free < one * copies:
        advice = f"free {size(one * copies - free)}, lower checkpoint.keep, or set run.dir on a larger disk"
        return Check("disk", "fail", f"{finding} need {size(one * copies)}", advice)
    return Check("disk", "ok", finding)


def size(count: int) -> str:
    """A number of bytes for a person."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "bytes" or value >= 10 else f"{value:.1f} {unit}"


# Judges how the hosts reach each other: the rendezvous, and the interfaces that gloo and NCCL will use.


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
    # Several addresses of one first host work, over networks that may differ in speed: a warning.
    peers = Counter(one.meeting.peer for one in survey.hosts if one.meeting and not is_loopback(one.meeting.peer))
    for one in survey.hosts:
        if one.meeting and one.meeting.said == survey.token and is_loopback(one.meeting.peer):
            finding = f"{survey.address} is {one.meeting.peer} there, which only that machine reaches"
            yield Check(
                "rendezvous", "warn", finding, f"--master-addr, or /etc/hosts of {one.host.name}", one.host.name
            )
    if len(peers) > 1:
        finding = f"{survey.address} is " + ", ".join(f"{peer} for {n}" for peer, n in peers.most_common()) + " hosts"
        yield Check("rendezvous", "warn", finding, "--master-addr with one address, so that all use one network")


def interfaces(survey: Survey) -> Iterator[Check]:
    """Check that the interfaces set for gloo and NCCL exist on all hosts; gloo's default is the host name's address."""
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
            elif len(survey.hosts) > 1 and is_loopback(facts.interfaces[name]):
                advice = f"the interface of the network; there: {has}"
                yield Check("interface", "warn", f"GLOO_SOCKET_IFNAME={name} is the loopback", advice, host)
        if nccl and facts.gpus and not _nccl_finds(nccl, facts.interfaces):
            advice = f"one that every host has; there: {has}"
            yield Check("interface", "fail", f"NCCL_SOCKET_IFNAME={nccl} is not there", advice, host)
        if not gloo and len(survey.hosts) > 1 and (not facts.name_address or is_loopback(facts.name_address)):
            used = one.meeting.interface if one.meeting and not is_loopback(one.meeting.own) else ""
            finding = f"gloo would use {facts.name_address or 'no address'}, that of the name {facts.name}"
            advice = f"GLOO_SOCKET_IFNAME={used or 'INTERFACE'} in .deepspeed_env"
            yield Check("interface", "fail" if used else "warn", finding, advice, host)  # no other machine reaches it


def _nccl_finds(rule: str, names: dict[str, str]) -> bool:
    """NCCL's rule: prefixes, after ``=`` whole names, after ``^`` what is left out."""
    words = rule.lstrip("^=").split(",")
    exact = "=" in rule[:2]
    hits = {name for name in names if any(name == word if exact else name.startswith(word) for word in words)}
    return bool(set(names) - hits) if rule.startswith("^") else bool(hits)
