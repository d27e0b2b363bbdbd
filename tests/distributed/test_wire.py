"""Traffic of each shipped job in a step: every gradient once, in fp32, however many micro-batches there are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.config.load import load_job
from capt.pretrain.engine.engines.build import build_engines
from capt.pretrain.engine.task import Progress
from capt.pretrain.plan.predict import Stage, zero_received
from capt.pretrain.plan.simulated import Wire
from tests.language import write_corpus
from tests.latent import write_text
from tests.support import run_ranks
from tests.toy.config import ToyJob
from tests.toy.task import ToyTask
from tests.vision_language import write_sentences, write_small_store
from tests.wire import Traffic, small_job, traffic

_SHIPPED = Path(__file__).parents[2] / "configs" / "pretrain"
_OTHERS = ("_", "capt_pairs", "capt_distil", "pairs_", "simcse_", "denseon_")
JOBS = sorted(
    path
    for path in _SHIPPED.rglob("*.yaml")
    if not path.stem.startswith(_OTHERS) and path.parent.name not in ("ace", "yahoo", "yelp")
)
"""Without those of Yahoo and Yelp, which are Penn Treebank's with other texts and sizes, and those whose tables are
shared out by rows: these send rows, not gradients (test_row_shards). Jobs of pairs need an encoder; their step is that
of `ContrastTask`, as capt_language's (tests/e2e/test_pairs.py, at every stage)."""
_OF_FAMILIES = [
    path for path in JOBS if path.stem.startswith(("capt_vl", "lxmert")) or "latent" in path.relative_to(_SHIPPED).parts
]
_SMALL = 64
"""Elements at most of what is no gradient: norms."""


def _all_traffic(paths: list[Path], folder: Path) -> dict[Path, Traffic]:
    return {path: traffic(small_job(path, folder, 2)) for path in paths}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Traffic]:
    """The traffic of a job, which is found with that of the others of the core, or of the others of families."""
    folder = tmp_path_factory.mktemp("wire")
    write_corpus(folder / "text.txt")
    write_text(folder)
    write_small_store(folder / "store")
    write_sentences(folder / "pairs.json", 0, 30)

    @functools.cache
    def of_all(in_families: bool) -> dict[Path, Traffic]:
        paths = [path for path in JOBS if (path in _OF_FAMILIES) == in_families]
        traffic_of: dict[Path, Traffic] = run_ranks(_all_traffic, 2, paths, folder, timeout=300)[0]
        return traffic_of

    return lambda path: of_all(path in _OF_FAMILIES)[path]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.family if path in _OF_FAMILIES else (), id=path.stem) for path in JOBS],
)
def test_each_gradient_is_reduced_once_a_step(found: Any, path: Path) -> None:
    step, stage = found(path), load_job(path).engine.zero_stage
    reduced = [sent for sent in step.updates() if sent.reduces and sent.elements > _SMALL]
    assert {sent.dtype for sent in reduced} == {"float32"}
    assert sum(sent.elements for sent in reduced) == step.parameters
    gathered = sum(2 * sent.elements for sent in step.updates() if not sent.reduces)
    assert step.parameters <= gathered <= 1.1 * step.parameters + 64 if stage else gathered == 0


_BUCKET_OF_TEST = 4000


def _sizes(folder: Path, stage: int) -> tuple[int, list[tuple[str, int]]]:
    """Weights, and the collectives of a step of two micro-batches at a ZeRO stage, in small buckets."""
    job = small_job(_SHIPPED / "capt_tiny.yaml", folder, 4)  # of four ranks: here are two
    extra = {"zero_optimization": {"reduce_bucket_size": _BUCKET_OF_TEST}}
    engine = job.engine.model_copy(update={"zero_stage": stage, "deepspeed_extra": extra})
    found = traffic(job.model_copy(update={"engine": engine}))
    return found.parameters, [(sent.name, sent.received) for sent in found.updates() if sent.elements > _SMALL]


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_sends_what_the_prediction_of_its_time_takes_it_to_send(tmp_path: Path, stage: Stage) -> None:
    """All-reduces of buckets and one gather of the weights: not the reduce-scatter that ZeRO's name promises."""
    write_corpus(tmp_path / "text.txt")
    weights, sent = run_ranks(_sizes, 2, tmp_path, stage)[0]
    formula = zero_received(weights, stage, 2, 2, cached=True, bucket=_BUCKET_OF_TEST)
    for name in ("allreduce_", "_allgather_base_", "_reduce_scatter_base_"):
        real, predicted = ([size for each, size in which if each == name] for which in (sent, formula))
        assert sum(real) == pytest.approx(sum(predicted), rel=0.02), name
        if name == "allreduce_":
            assert len(real) == pytest.approx(len(predicted), rel=0.2)  # a bucket is not always full


def _types(stage: int, wire_type: str | None) -> set[str]:
    """Types in which a step of the toy task reduces its gradients, forward passes under bf16 autocast."""
    quiet_libraries(debug=False)
    extra = {} if wire_type is None else {"communication_data_type": wire_type}
    job = ToyJob.model_validate(
        {
            "task": {"type": "toy"},
            "batch": {"global": 8, "micro": 2},
            "engine": {"zero_stage": stage, "precision": "bf16", "deepspeed_extra": extra},
        }
    )
    task, progress = ToyTask(job, Path()), Progress()
    engines = build_engines(task.build_modules(), job, task.optimizers())
    with Wire() as wire:
        task.step(engines, next(task.build_batches(progress)), progress)
    return {sent.dtype for sent in wire.sent if sent.reduces and sent.elements > 2}


def _all_types() -> dict[tuple[int, str | None], set[str]]:
    # an engine of another type comes first: DeepSpeed keeps a setting in the process
    return {(stage, name): _types(stage, name) for stage in (0, 1, 2, 3) for name in ("bf16", None, "fp32")}


def test_gradients_travel_in_fp32_under_bf16_unless_another_type_is_asked_for() -> None:
    for (_, name), types in run_ranks(_all_types, 2)[0].items():
        assert types == {"bfloat16" if name == "bf16" else "float32"}
