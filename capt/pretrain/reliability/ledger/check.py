"""Checks the history of a run: each id once an epoch, no gap, no step done again with other contents.

Each epoch's order is a permutation of its ids (`capt.pretrain.data.sampler`). So if the kept steps follow one another
without a gap, each begins at the sample after the last one, and each used just the ids whose turn it was
(`capt.pretrain.reliability.ledger.order`), then every id was used exactly once an epoch. The file of one rank after the
other is read, once, so that it takes the memory of one file and a few bytes a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from capt.pretrain.base.errors import ConfigError, counted, quoted
from capt.pretrain.data.mixture import MixtureSampler
from capt.pretrain.data.sampler import BlockMixtureSampler
from capt.pretrain.reliability.ledger.files import Header, launches_of, read_launch
from capt.pretrain.reliability.ledger.history import (
    Fault,
    Launch,
    Newest,
    first_step,
    newest_checkpoint,
    read_history,
    remedy_for_files,
)
from capt.pretrain.reliability.ledger.order import check_launch, go_back, rank_of


@dataclass(frozen=True)
class Epochs:
    """Epochs ``first .. last``, of each of whose ``ids`` ids ``used`` were used (not one of them twice).

    Of a mixture they are those of a ``source``.
    """

    first: int
    last: int
    used: int
    ids: int
    source: str = ""


@dataclass
class Report:
    """Report on the ledger of a run. ``faults`` are in the order of their steps; none = the promise was kept."""

    run: Path
    newest: Newest
    launches: list[Launch] = field(default_factory=list)
    epochs: list[Epochs] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def left_out(self) -> int:
        """Samples that the model has not learnt from, because the loss had a spike in them (``guard.spike``)."""
        return sum(launch.left_out for launch in self.launches)

    @property
    def recorded_to(self) -> int:
        """The last step that all ranks have recorded, in the history as it counts."""
        return max((launch.head.step + launch.kept for launch in self.launches), default=0)


def check(run: Path, since: int = 1) -> Report:
    """Check the ledger of a run from step ``since`` on.

    Raises:
        ConfigError: there is no ledger. CheckpointError: the newest checkpoint cannot be read.
    """
    newest = newest_checkpoint(run)  # before the ledger, which may grow meanwhile
    if not launches_of(run):
        raise ConfigError(
            f"{run / 'ledger'}: there is no ledger: the run has run.ledger=false, has a task whose samples are not "
            "recorded, has not begun, or comes from an earlier version"
        )
    report = Report(run, newest)
    report.launches, faults = read_history(run, newest, since)
    for launch in report.launches:
        wrong, notes = check_launch(run, launch, since)
        faults += wrong
        report.notes += notes
    report.notes += [note for launch in report.launches for note in _left_out(launch)]
    faults += _check_joints(report, since)
    faults += _check_repetitions(report, since)
    faults += _check_newest(report) if report.launches else _check_absence(report, since, faults)
    report.epochs = list(_epochs(report.launches))
    report.faults = sorted(faults, key=lambda fault: (fault.step or 0, fault.rank or 0))
    return report


def _kept(report: Report) -> list[Launch]:
    return [launch for launch in report.launches if launch.kept_to > launch.head.step]


def _left_out(launch: Launch) -> list[str]:
    """Describe what ``guard.spike`` has left out in the kept steps of a launch."""
    head, notes = launch.head, []
    if not launch.kept:
        return []
    if head.left_out:
        begin = head.samples - head.left_out
        text = f"samples {begin} to {head.samples - 1} are left out before step {head.step + 1}"
        notes.append(f"{text} (launch {launch.number}): the loss had a spike in them (guard.spike=rollback)")
    if steps := [step for step in launch.unlearnt if step <= head.step + launch.kept]:
        text = f"{counted(launch.samples_of(steps), 'sample')} of {counted(len(steps), 'step')} changed nothing"
        shown = ", ".join(map(str, steps[:10])) + (", ..." if len(steps) > 10 else "")
        notes.append(f"{text} (launch {launch.number}, {shown}): the update was left out (guard.spike=skip)")
    return notes


def _check_joints(report: Report, since: int) -> list[Fault]:
    """Find the launches that do not continue where the history ended."""
    faults = []
    before: Launch | None = None
    begun = first_step(report.run)
    for launch in _kept(report):
        head, file = launch.head, launch.folder / "rank-00000.ledger"
        if before is None:
            if begun and head.step == begun:
                report.notes.append(f"the first {begun} steps are those of the run that this one has branched from")
            elif head.step >= since:
                text = f"the first {head.step} steps are in no ledger: launch {launch.number} begins after them"
                rest = f"capt ledger check {quoted(report.run)} --since {quoted(head.step + 1)}"
                remedy = f"where they were trained without run.ledger: {rest}"
                faults.append(Fault("hole", text, remedy, 1, None, None, file))
            before = launch
            continue
        # A launch begins at the sample that comes next, but for those that a rollback leaves out.
        samples, order = before.samples_at(head.step) + head.left_out, before.head.order
        if head.samples != samples and head.step + 1 >= since:
            text = f"launch {launch.number} begins step {head.step + 1} at sample {head.samples}, not {samples}"
            faults.append(Fault("position", text, go_back(report.run, head.step + 1), head.step + 1, file=file))
        if (head.order.data, head.order.samples) != (order.data, order.samples):
            report.notes.append(f"from step {head.step + 1} (launch {launch.number}) on other data: epochs begin anew")
        # Between two epochs another order is right.
        elif (head.order.seed, head.order.shuffle) != (order.seed, order.shuffle) and head.samples % order.samples:
            text = f"launch {launch.number} has another order of the samples (run.seed {head.order.seed}, before "
            text += f"{order.seed}) in the middle of an epoch: some ids come twice in it, some never"
            remedy = f"capt resume {quoted(report.run)} --checkpoint with run.seed={order.seed} does these steps again"
            faults.append(Fault("order", text, remedy, head.step + 1, file=file))
        before = launch
    return faults


def _check_repetitions(report: Report, since: int) -> list[Fault]:
    """Find the steps that several launches have done with different contents."""
    faults: list[Fault] = []
    done: list[Launch] = []
    for launch in report.launches:
        for earlier in done:
            ours, sums, theirs = launch.head, launch.contents, earlier.contents
            if earlier.head.order != ours.order or earlier.head.batch_sizes != ours.batch_sizes:
                continue  # then other contents are meant
            # The steps that both have done, up to anything wrong in either.
            first = max(earlier.head.step, ours.step, since - 1)
            last = min(earlier.head.step + len(theirs), ours.step + len(sums), earlier.right_to, launch.right_to)
            a = theirs[first - earlier.head.step : max(first, last) - earlier.head.step]
            b = sums[first - ours.step : max(first, last) - ours.step]
            if earlier.samples_at(first) != launch.samples_at(first) or not (a != b).any():
                continue  # the first is a fault of the position
            step = first + 1 + int(np.flatnonzero(a != b)[0])
            rank = _differing_rank(earlier, launch, step)
            text = f"step {step} was done with other contents by launch {launch.number} than by launch {earlier.number}"
            remedy = (
                "the ids are the same, but not what was made of them: compare the configuration, the versions and the "
                f"data of the two launches ({report.run / 'config.yaml'}, manifest.json of the checkpoints)"
            )
            file = launch.folder / f"rank-{rank or 0:05d}.ledger"
            faults.append(Fault("contents", text, remedy, step, None, rank, file))
            break
        done.append(launch)
    return faults


def _differing_rank(a: Launch, b: Launch, step: int) -> int | None:
    """The first rank whose contents differ; None between launches of different numbers of ranks."""
    if a.head.world != b.head.world:
        return None
    for one, other in zip(read_launch(a.folder), read_launch(b.folder), strict=True):
        if one.rows["contents"][step - 1 - a.head.step] != other.rows["contents"][step - 1 - b.head.step]:
            return rank_of(one)
    return None


def _check_absence(report: Report, since: int, faults: list[Fault]) -> list[Fault]:
    """Find a checkpoint that contains steps though no launch has a row, and no damage says why."""
    last = report.newest.step
    if last < since or faults or last == (first_step(report.run) or -1):
        return []
    text = f"no step is recorded, but a checkpoint contains steps up to {last}"
    return [Fault("hole", text, remedy_for_files(report.run), since)]


def _check_newest(report: Report) -> list[Fault]:
    """Find a newest checkpoint that has used another number of samples than the ledger says."""
    newest = report.newest
    last = next((x for x in _kept(report) if x.head.step <= newest.step <= max(x.needed_to, x.head.step)), None)
    if newest.step == 0 or last is None or last.samples_at(newest.step) == newest.samples:
        return []
    text = f"the checkpoint of step {newest.step} has used {newest.samples} samples, the ledger says"
    text += f" {last.samples_at(newest.step)}"
    return [Fault("position", text, go_back(report.run, newest.step), newest.step)]


def _epochs(launches: list[Launch]) -> Iterator[Epochs]:
    """The epochs of the kept steps; those that are whole in one row."""
    # Launches that continue one another over the same data are one stretch of samples: [begin, end) of the order.
    stretches: list[tuple[Header, int, int]] = []
    for launch in launches:
        if not launch.kept:
            continue
        begin, end = launch.head.samples, launch.samples_at(launch.head.step + launch.kept)
        same = stretches and (stretches[-1][0].order.data, stretches[-1][0].order.samples) == (
            launch.head.order.data,
            launch.head.order.samples,
        )
        if same and stretches[-1][2] == begin:
            stretches[-1] = (stretches[-1][0], stretches[-1][1], end)
        else:
            stretches.append((launch.head, begin, end))
    # In a mixture each source has epochs of its own: what it gave before ``begin`` follows from the order alone.
    for head, begin, end in stretches:
        sampler = head.order.sampler()
        if isinstance(sampler, MixtureSampler):
            spans = zip(
                sampler.names, sampler.counts_before(begin), sampler.counts_before(end), sampler.sizes, strict=True
            )
            for name, first, last, size in spans:
                yield from (replace(epochs, source=name) for epochs in _epochs_between(first, last, size))
        elif isinstance(sampler, BlockMixtureSampler):
            used = (sampler.used(samples // sampler.block) for samples in (begin, end))
            for of_source in zip(*used, sampler.sizes, strict=True):
                yield from _epochs_between(*of_source)
        else:
            yield from _epochs_between(begin, end, head.order.samples)


def _epochs_between(begin: int, end: int, ids: int) -> Iterator[Epochs]:
    """The epochs of the samples from ``begin`` to before ``end``; those that are whole in one row."""
    if end > begin:
        # The rest of an epoch, whole epochs, the beginning of one: any of them may be missing.
        whole = range(-(-begin // ids), end // ids)
        if begin % ids:
            yield Epochs(begin // ids, begin // ids, min(end, (begin // ids + 1) * ids) - begin, ids)
        if whole:
            yield Epochs(whole[0], whole[-1], ids, ids)
        if end % ids and end // ids * ids >= begin:
            yield Epochs(end // ids, end // ids, end % ids, ids)


# A report on a ledger as text and as JSON.


def as_text(report: Report) -> str:
    """Tables of launches and epochs, notes, and the verdict with the first fault and its remedy."""
    lines = [f"{'launch':>6}  {'ranks':>5}  {'recorded':>17}  {'in the model':>17}"]
    for launch in report.launches:
        recorded = _steps(launch.head.step + 1, launch.recorded_to)
        kept = _steps(launch.head.step + 1, launch.head.step + launch.kept)
        lines.append(f"{launch.number:>6}  {launch.head.world:>5}  {recorded:>17}  {kept:>17}")
    lines += ["", f"{'epoch':>9}  {'ids':>13}  {'used':>13}"]
    for epochs in report.epochs:
        span = f"{epochs.first}" if epochs.first == epochs.last else f"{epochs.first}-{epochs.last}"
        source = f"  {epochs.source}" if epochs.source else ""
        lines.append(f"{span:>9}  {epochs.ids:>13,}  {epochs.used:>13,}{source}")
    lines += ["", *report.notes]
    ahead = report.recorded_to - report.newest.step
    lines.append(
        f"steps up to {report.newest.step} are in a checkpoint"
        + (f", {ahead} more are recorded, which a restart does again" if ahead > 0 else "")
    )
    if not report.faults:
        left_out = f", but for {counted(report.left_out, 'sample')} left out by guard.spike" if report.left_out else ""
        lines.append(f"right: every step used the samples whose turn it was, each id once an epoch{left_out}")
        return "\n".join(lines)
    first = report.faults[0]
    more = f" ({len(report.faults) - 1} more)" if len(report.faults) > 1 else ""
    return "\n".join([*lines, f"WRONG{more}: {first.text}", f"  {first.remedy}"])


def as_json(report: Report) -> dict[str, Any]:
    """The same for programs; ``faults`` is empty where all is right."""
    return {
        "run": str(report.run),
        "right": not report.faults,
        "committed_to": report.newest.step,
        "recorded_to": report.recorded_to,
        "left_out": report.left_out,
        "launches": [_launch(launch) for launch in report.launches],
        "epochs": [_show_epochs(epochs) for epochs in report.epochs],
        "notes": report.notes,
        "faults": [_fault(fault) for fault in report.faults],
    }


def _steps(first: int, last: int) -> str:
    return f"{first}-{last}" if first <= last else "none"


def _launch(launch: Launch) -> dict[str, Any]:
    return {
        "launch": launch.number,
        "ranks": launch.head.world,
        "begins_after": launch.head.step,
        "recorded_to": launch.recorded_to,
        "in_the_model": launch.kept,
    }


def _show_epochs(epochs: Epochs) -> dict[str, int | str]:
    shown: dict[str, int | str] = {"first": epochs.first, "last": epochs.last, "used": epochs.used, "ids": epochs.ids}
    return {**shown, "source": epochs.source} if epochs.source else shown


def _fault(fault: Fault) -> dict[str, Any]:
    return {
        "kind": fault.kind,
        "text": fault.text,
        "remedy": fault.remedy,
        "step": fault.step,
        "id": fault.id,
        "rank": fault.rank,
        "file": None if fault.file is None else str(fault.file),
    }
