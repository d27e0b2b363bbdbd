"""Tables whose rows are shared out over the ranks: updates, gradient norms and checkpoints at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capt.pretrain.base import distributed
from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.engine.checkpoint import (
    begin_save,
    load_engine,
    load_module_weights,
    load_module_weights_together,
    read_metadata,
    read_weights,
)
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.engines.local import LocalEngine
from capt.pretrain.engine.engines.places import RowShard, row_range
from capt.pretrain.engine.optim.settings import ModuleOptimizer
from capt.pretrain.engine.task import Progress
from tests.support import run_ranks
from tests.toy.config import ToyJob
from tests.toy.task import ToyTask

_ROWS, _WIDTH = 11, 3
_TABLES = {"first": (_ROWS, _WIDTH), "second": (2, _WIDTH)}
"""Eleven rows leave ranks unequal parts, and of two rows the last ranks have none."""

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"type": "sgd", "momentum": 0.0},
    "adagrad": {"type": "adagrad"},
    "sparse_adam": {"type": "sparse_adam"},
}


class _Tables(nn.Module):
    """Two tables, of which this rank holds its rows."""

    def __init__(self, tables: dict[str, tuple[int, int]] = _TABLES) -> None:
        super().__init__()
        for name, (rows, width) in tables.items():
            start, end = row_range(rows, distributed.rank(), distributed.world_size())
            whole = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
            parameter: Any = nn.Parameter(whole[start:end].clone())
            parameter.rows_of = RowShard(start, rows)
            self.register_parameter(name, parameter)


def _gradient(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """The rows that an update touches, some of them twice, and their gradients."""
    generator = torch.Generator().manual_seed(100 * step + rows)
    return torch.randint(rows, (7,), generator=generator), torch.randn(7, _WIDTH, generator=generator)


def _job(optimizer: dict[str, Any], **engine: Any) -> ToyJob:
    return ToyJob.model_validate(
        {
            "task": {"type": "toy"},
            "batch": {"global": 8, "micro": 8 // distributed.world_size()},
            "engine": {"zero_stage": 0, **engine},
            "optimizer": {"lr": 0.1, "clip": 0.5, "weight_decay": 0.0, **optimizer},
        }
    )


def _train(
    optimizer: dict[str, Any], folder: str, steps: int, save_at: int | None, source: str | None
) -> tuple[list[float], dict[str, tuple[int, np.ndarray]]]:
    """Gradient norms of each update, and this rank's rows at the end."""
    quiet_libraries(debug=False)
    job = _job(optimizer)
    tables = _Tables()
    if source:
        with torch.no_grad():
            for parameter in tables.parameters():
                parameter.fill_(float("nan"))
        load_module_weights_together(Path(source), "tables", tables)
    engines = build_engines({"tables": tables}, job, {})
    engine = engines["tables"]
    assert isinstance(engine, LocalEngine)
    progress = Progress()
    if source:
        state = read_metadata(Path(source))
        load_engine(Path(source), engine, state.engines["tables"])
        progress = Progress(**state.progress.model_dump())
    norms = []
    while progress.step < steps:
        for parameter in tables.parameters():
            shard: RowShard = parameter.rows_of  # type: ignore[attr-defined]
            rows, values = _gradient(progress.step, shard.rows)
            mine = (rows >= shard.start_row) & (rows < shard.start_row + len(parameter))
            parameter.grad = torch.sparse_coo_tensor(
                (rows[mine] - shard.start_row)[None], values[mine], tuple(parameter.shape)
            )
        engine.step()
        norms.append(float(engine.gradient_norm()))
        progress.step += 1
        if progress.step == save_at:
            begin_save(Path(folder), job, engines, ToyTask(job, Path(folder)), progress, asynchronous=False).commit()
    return norms, {
        name: (p.rows_of.start_row, p.detach().numpy().copy())  # type: ignore[attr-defined]
        for name, p in tables.named_parameters()
    }


def _all(args: list[tuple[Any, ...]]) -> list[Any]:
    return [_train(*each) for each in args]


def _joined(per_rank: list[dict[str, tuple[int, np.ndarray]]]) -> dict[str, np.ndarray]:
    for name in _TABLES:
        starts = [held[name][0] for held in per_rank]
        ends = [start + len(held[name][1]) for start, held in zip(starts, per_rank, strict=True)]
        assert ([0, *ends[:-1]], ends[-1]) == (starts, _TABLES[name][0]), "each row lies on one rank"
    return {name: np.concatenate([held[name][1] for held in per_rank]) for name in _TABLES}


def _by_hand(name: str, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same updates of whole tables with dense float64 gradients; SparseAdam's rows without a gradient stay."""
    tables = {n: torch.randn(rows, w, generator=torch.Generator().manual_seed(rows)).double()
              for n, (rows, w) in _TABLES.items()}  # fmt: skip
    first = {n: torch.zeros_like(t) for n, t in tables.items()}
    second = {n: torch.zeros_like(t) for n, t in tables.items()}
    norms = []
    for step in range(steps):
        dense = {}
        for n, table in tables.items():
            rows, values = _gradient(step, len(table))
            dense[n] = torch.zeros_like(table).index_add_(0, rows, values.double())
        norm = sum(float(g.square().sum()) for g in dense.values()) ** 0.5
        norms.append(norm)
        for n, table in tables.items():
            g = dense[n] * min(1.0, 0.5 / (norm + 1e-6))
            touched = torch.zeros(len(table), 1, dtype=torch.float64)
            touched[_gradient(step, len(table))[0]] = 1.0
            if name == "sgd":
                table -= 0.1 * g
            elif name == "adagrad":
                second[n] += g * g
                table -= touched * 0.1 * g / (second[n].sqrt() + 1e-6)
            else:
                first[n] = torch.where(touched > 0, 0.9 * first[n] + 0.1 * g, first[n])
                second[n] = torch.where(touched > 0, 0.98 * second[n] + 0.02 * g * g, second[n])
                rate = 0.1 * (1 - 0.98 ** (step + 1)) ** 0.5 / (1 - 0.9 ** (step + 1))
                table -= touched * rate * first[n] / (second[n].sqrt() + 1e-6)
    return norms, {n: table.numpy() for n, table in tables.items()}


def test_every_world_updates_as_one_process_does_and_resumes_at_any_other(tmp_path: Path) -> None:
    worlds = (1, 2, 4)
    for world in worlds:
        made = run_ranks(_all, world, [(o, str(tmp_path / f"{n}{world}"), 6, 3, None) for n, o in _OPTIMIZERS.items()])
        for i, name in enumerate(_OPTIMIZERS):
            norms, tables = _by_hand(name, 6)
            for found, _ in (rank[i] for rank in made):
                np.testing.assert_allclose(found, norms, rtol=1e-6)
            for table, rows in _joined([rank[i][1] for rank in made]).items():
                np.testing.assert_allclose(rows, tables[table], rtol=1e-5, atol=2e-6, err_msg=f"{name} {world}")
    for world, other in ((1, 4), (2, 1), (4, 2), (2, 2)):
        sources = [str(tmp_path / f"{name}{world}" / "checkpoints" / "step-00000003") for name in _OPTIMIZERS]
        args = [(o, str(tmp_path), 6, None, s) for o, s in zip(_OPTIMIZERS.values(), sources, strict=True)]
        made = run_ranks(_all, other, args)
        for i, name in enumerate(_OPTIMIZERS):
            norms, tables = _by_hand(name, 6)
            np.testing.assert_allclose(made[0][i][0], norms[3:], rtol=1e-6)
            for table, rows in _joined([rank[i][1] for rank in made]).items():
                where = f"{name} from {world} to {other}"
                np.testing.assert_allclose(rows, tables[table], rtol=1e-5, atol=2e-6, err_msg=where)


def test_a_checkpoint_holds_whole_tables(tmp_path: Path) -> None:
    made = run_ranks(_train, 4, _OPTIMIZERS["adagrad"], str(tmp_path), 2, 2, None)
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    whole = _joined([tables for _, tables in made])
    read = read_weights(checkpoint, "tables")
    assert {name: tuple(table.shape) for name, table in read.items()} == _TABLES
    for name in _TABLES:
        assert np.array_equal(read[name].numpy(), whole[name])
    alone = _Tables()
    load_module_weights(checkpoint, "tables", alone)
    for name, parameter in alone.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), whole[name])
    more = _Tables({"first": (_ROWS + 1, _WIDTH), "second": (2, _WIDTH)})
    with pytest.raises(CheckpointError, match=r"first has shape \(11, 3\), the configured model \(12, 3\)"):
        load_module_weights(checkpoint, "tables", more)


def test_what_cannot_update_shared_out_rows_is_refused() -> None:
    tables = _Tables()
    for settings, message in (
        ({"type": "adamw"}, "type adamw has none"),
        ({"type": "sgd", "momentum": 0.9}, r"set optimizer\.momentum=0"),
        ({"type": "adagrad", "weight_decay": 0.1}, r"set optimizer\.weight_decay=0"),
    ):
        job = _job(settings)
        with pytest.raises(ConfigError, match=message):
            build_engines({"tables": tables}, job, {"tables": ModuleOptimizer(job.optimizer)})
    with pytest.raises(ConfigError, match=r"set engine\.precision=fp32"):
        build_engines({"tables": tables}, _job(_OPTIMIZERS["adagrad"], precision="fp16"))
