"""Ranks prepare their data together: every byte is hashed by one of them, and what fails on one fails on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capt.pretrain.config.load import job_from_mapping
from tests.language import language_mapping
from tests.support import run_ranks


def _prepare(mapping: dict[str, Any], warm: bool) -> tuple[list[str], str, str]:
    """Files that this rank hashed, the key of its shards, the error."""
    from capt.pretrain.base import verification
    from capt.pretrain.base.errors import DataError
    from capt.pretrain.base.verification import all_ranks
    from capt.pretrain.language.prepare import prepare

    read: list[str] = []
    original = verification.hash_file

    def counted(path: Path, *rest: Any) -> str:
        read.append(path.name)
        return original(path, *rest)

    verification.hash_file = counted
    verification._LEAST_AGE = -1e9  # the files are seconds old
    try:
        prepared = prepare(job_from_mapping(mapping, "test"), ranks=all_ranks())  # type: ignore[arg-type]
        return read, prepared.train.shards.manifest.key, ""
    except DataError as error:
        return read, "", str(error)


def test_each_byte_is_hashed_once_over_all_ranks(tmp_path: Path) -> None:
    mapping = language_mapping(tmp_path)
    text = (tmp_path / "text.txt").read_text()
    names = ["text.txt", "second.txt", "third.txt"]
    for name in names[1:]:
        (tmp_path / name).write_text(text.replace("stone", name.partition(".")[0]))
    mapping["data"]["files"] = [str(tmp_path / name) for name in names]

    first = run_ranks(_prepare, 3, mapping, False)
    assert sorted(name for read, _, _ in first for name in read) == sorted(names)
    assert [len(read) for read, _, _ in first] == [1, 1, 1]
    assert len({key for _, key, _ in first}) == 1

    warm = run_ranks(_prepare, 3, mapping, True)
    assert [read for read, _, _ in warm] == [[]] * 3
    assert warm[0][1] == first[0][1]

    for memory in (tmp_path / "cache").glob("verified-*"):
        memory.unlink()
    again = run_ranks(_prepare, 3, mapping, True)
    shards = ["documents.bin", "shard-00000.bin"]
    assert sorted(name for read, _, _ in again for name in read) == sorted([*names, *shards, *shards])

    (shard,) = (tmp_path / "cache" / "shards" / first[0][1]).glob("shard-*.bin")
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    errors = [error for _, _, error in run_ranks(_prepare, 3, mapping, True)]
    assert len(set(errors)) == 1
    assert "shard-00000.bin is damaged: expected SHA-256" in errors[0]
