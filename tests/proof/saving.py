"""The moves of ranks: taking the folder, training, and the commit of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from tests.proof.moves import Move, move

from tests.proof.state import (  # isort: skip
    BOOT, COMMIT, DONE, DURABLE, EXITED, FAILED, MANIFEST, POINT, PRUNE, PRUNED, READY, REFUSED, RENAME, SYNCED, TORN,
    TRAIN, WAITING, WRITE, WROTE, Checkpoint, Rank, Settings, State,
)  # fmt: skip


def _ended(state: State, rank: Rank, how: int) -> State:
    """A process ends, and the kernel frees its lock."""
    lock = None if rank.index == 0 and state.lock == (rank.node, rank.gen) else state.lock
    return state._replace(ranks=state.put(rank._replace(at=how)), lock=lock)


def _named(rank: Rank) -> str:
    return f"rank {rank.index} of attempt {rank.gen} on node {rank.node}"


def _whole_worlds(state: State) -> Iterator[list[Rank]]:
    """Attempts none of whose ranks is missing."""
    for gen in dict.fromkeys(rank.gen for rank in state.ranks):
        ranks = state.of(gen)
        if len(ranks) == ranks[0].world:
            yield ranks


def _folder(state: State, rank: Rank, settings: Settings) -> int | None:
    """Place of the temporary folder of a rank's save: its name is the attempt's own, or only the step's."""
    for number, partial in enumerate(state.partial):
        if partial.step == rank.step and (partial.gen == rank.gen or settings.without == "private folder"):
            return number
    return None


def _with_file(state: State, number: int, rank: Rank, place: int) -> tuple[Checkpoint, ...]:
    partial = state.partial[number]
    if rank.index >= len(partial.files):
        return state.partial
    files = (*partial.files[: rank.index], (rank.gen, place), *partial.files[rank.index + 1 :])
    return (*state.partial[:number], partial._replace(files=files), *state.partial[number + 1 :])


@move("capt.pretrain.engine.run_status:RunStatus.lock", "capt.pretrain.engine.run:choose_checkpoint",
      "capt.pretrain.engine.checkpoint.layout:remove_leftovers")  # fmt: skip
def take(state: State, settings: Settings) -> Iterator[Move]:
    """Rank 0 takes the lock, chooses the newest checkpoint and sweeps what killed saves left."""
    for rank in state.ranks:
        if rank.at == BOOT and rank.index == 0 and (state.lock is None or settings.without == "lock"):
            ranks = state.put(rank._replace(at=READY, step=0 if settings.without == "newest" else state.newest))
            taken = state._replace(ranks=ranks, lock=(rank.node, rank.gen), partial=())
            yield f"{_named(rank)} takes the folder at step {state.newest}", taken


@move("capt.pretrain.base.locks:file_lock")
def refuse(state: State, settings: Settings) -> Iterator[Move]:
    """Rank 0 has waited for longer than a file server keeps the lock of a lost node, and another job still trains."""
    for rank in state.ranks:
        if rank.at == BOOT and rank.index == 0 and state.lock is not None and settings.without != "lock":
            holders = [each for each in state.ranks if (each.node, each.gen) == state.lock and each.alive]
            if settings.without == "wait" or any(state.serves(each) for each in holders):
                yield f"{_named(rank)} is refused: the folder is locked", _ended(state, rank, REFUSED)


@move(
    "capt.pretrain.engine.run_status:open_run_folder",
    "capt.pretrain.engine.callbacks.checkpointer:Checkpointer.on_start",
)
def meet(state: State, settings: Settings) -> Iterator[Move]:
    """All ranks are there, and load the checkpoint that rank 0 has chosen."""
    for ranks in _whole_worlds(state):
        if ranks[0].at == READY and all(rank.at == BOOT for rank in ranks[1:]):
            moved = (rank._replace(at=TRAIN, step=ranks[0].step) for rank in ranks)
            yield f"attempt {ranks[0].gen} trains from step {ranks[0].step}", state._replace(ranks=state.put(*moved))


@move("capt.pretrain.engine.loop:train", "capt.pretrain.engine.checkpoint.save:begin_save",
      "capt.pretrain.engine.checkpoint.save:_prepare_folder")  # fmt: skip
def train(state: State, settings: Settings) -> Iterator[Move]:
    """A step, after which rank 0 makes the temporary folder of its checkpoint; or the end."""
    for ranks in _whole_worlds(state):
        if any(rank.at != TRAIN for rank in ranks):
            continue
        gen, step = ranks[0].gen, ranks[0].step + 1
        if step > settings.steps:
            over = state._replace(ranks=state.put(*(rank._replace(at=DONE) for rank in ranks)))
            yield f"attempt {gen} has done all steps", over
            continue
        moved = state.put(*(rank._replace(at=WRITE, step=step) for rank in ranks))
        shared = settings.without == "private folder"
        others = tuple(each for each in state.partial if not (each.step == step and (shared or each.gen == gen)))
        new = Checkpoint(step, gen, ((gen, TORN),) * len(ranks))
        yield f"attempt {gen} makes step {step} and begins to save", state._replace(ranks=moved, partial=(*others, new))


@move("capt.pretrain.engine.durable:write_tensors", "capt.pretrain.engine.checkpoint.save:_save_task")
def write(state: State, settings: Settings) -> Iterator[Move]:
    """A rank writes its files, which are then in the memory of its node."""
    for rank in state.ranks:
        if rank.at != WRITE:
            continue
        number = _folder(state, rank, settings)
        if number is None:
            yield f"{_named(rank)} finds its temporary folder gone", _ended(state, rank, FAILED)
            continue
        partial = _with_file(state, number, rank, rank.node)
        yield f"{_named(rank)} writes", state._replace(ranks=state.put(rank._replace(at=WROTE)), partial=partial)


@move("capt.pretrain.engine.checkpoint.save:PendingSave.seal", "capt.pretrain.base.atomic:sync")
def seal(state: State, settings: Settings) -> Iterator[Move]:
    """A rank makes its files durable and hashes them."""
    for rank in state.ranks:
        if rank.at != WROTE:
            continue
        number, sealed = _folder(state, rank, settings), rank._replace(at=SYNCED)
        partial = state.partial
        if number is not None and settings.without != "fsync":
            partial = _with_file(state, number, rank, DURABLE)
        yield f"{_named(rank)} seals its files", state._replace(ranks=state.put(sealed), partial=partial)


@move("capt.pretrain.engine.checkpoint.save:PendingSave.commit")
def agree(state: State, settings: Settings) -> Iterator[Move]:
    """All ranks have written; rank 0 has their hashes."""
    for ranks in _whole_worlds(state):
        ready = {WRITE, WROTE, SYNCED} if settings.without == "marker last" else {SYNCED}
        if all(rank.at in ready for rank in ranks):
            moved = state.put(*(rank._replace(at=COMMIT if rank.index else MANIFEST) for rank in ranks))
            visible = state.visible
            if settings.without == "commit before pruning":
                visible = visible[len(visible) - settings.keep + 1 :] if settings.keep > 1 else ()
            yield f"all ranks of attempt {ranks[0].gen} have sealed", state._replace(ranks=moved, visible=visible)


@move("capt.pretrain.engine.checkpoint.save:PendingSave._finish", "capt.pretrain.engine.checkpoint.layout:put_in_place")
def finish(state: State, settings: Settings) -> Iterator[Move]:
    """Rank 0 writes the manifest, durably, into the temporary folder, and then renames the folder."""
    for rank in state.ranks:
        if rank.at not in (MANIFEST, RENAME):
            continue
        number = _folder(state, rank, settings)
        if number is None:
            yield f"{_named(rank)} finds its temporary folder gone", _ended(state, rank, FAILED)
        elif rank.at == MANIFEST:
            yield f"{_named(rank)} writes the manifest", state._replace(ranks=state.put(rank._replace(at=RENAME)))
        else:
            others = state.partial[:number] + state.partial[number + 1 :]
            visible = (*state.visible, state.partial[number]._replace(gen=rank.gen))
            moved = state.put(rank._replace(at=POINT))
            yield (
                f"{_named(rank)} commits step {rank.step}",
                state._replace(ranks=moved, partial=others, visible=visible),
            )


@move("capt.pretrain.engine.checkpoint.save:PendingSave._finish", "capt.pretrain.engine.checkpoint.layout:point")
def report(state: State, settings: Settings) -> Iterator[Move]:
    """Rank 0 makes the new name durable, lets the link ``latest`` lead there, and returns from the commit."""
    for rank in state.ranks:
        if rank.at == POINT:
            lasts = settings.without != "durable name"
            visible = tuple(each._replace(synced=lasts) for each in state.visible)
            moved = state.put(rank._replace(at=PRUNE))
            reported = max(state.reported, rank.step)
            yield (
                f"{_named(rank)} reports step {rank.step}",
                state._replace(ranks=moved, visible=visible, reported=reported),
            )


@move("capt.pretrain.engine.callbacks.checkpointer:Checkpointer._prune",
      "capt.pretrain.engine.checkpoint.layout:remove_checkpoint")  # fmt: skip
def prune(state: State, settings: Settings) -> Iterator[Move]:
    """Rank 0 hides what is no longer kept, durably, and then removes it."""
    for rank in state.ranks:
        if rank.at != PRUNE:
            continue
        moved, kept = state.put(rank._replace(at=PRUNED)), state.visible[-settings.keep :]
        if settings.without == "hiding" and len(kept) < len(state.visible) and state.visible[0].whole:
            torn = state.visible[0]._replace(files=((0, TORN),) * len(state.visible[0].files))
            yield (
                f"{_named(rank)} removes files of step {torn.step}",
                state._replace(visible=(torn, *state.visible[1:])),
            )
            continue
        yield f"{_named(rank)} prunes", state._replace(ranks=moved, visible=kept)


@move("capt.pretrain.base.distributed:synchronize_errors")
def go_on(state: State, settings: Settings) -> Iterator[Move]:
    """The other ranks hear that the checkpoint is committed."""
    for ranks in _whole_worlds(state):
        if ranks[0].at == PRUNED and all(rank.at == COMMIT for rank in ranks[1:]):
            moved = state.put(*(rank._replace(at=TRAIN) for rank in ranks))
            yield f"attempt {ranks[0].gen} goes on", state._replace(ranks=moved)


@move("capt.pretrain.engine.run:_train")
def leave(state: State, settings: Settings) -> Iterator[Move]:
    """A rank that has done all steps ends with 0."""
    for rank in state.ranks:
        if rank.at == DONE:
            yield f"{_named(rank)} exits with 0", _ended(state, rank, EXITED)


@move("capt.pretrain.base.distributed:gather_objects")
def break_off(state: State, settings: Settings) -> Iterator[Move]:
    """A rank in a collective notices that another one is gone."""
    for rank in state.ranks:
        if rank.at in WAITING or (rank.at == BOOT and rank.index):
            fellows = state.of(rank.gen)
            if len(fellows) < rank.world or any(each.at in (FAILED, REFUSED) for each in fellows):
                yield f"{_named(rank)} misses another rank", _ended(state, rank, FAILED)
