"""The prediction of a job on a cluster: memory of a rank by part, bytes on the wire, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.schema import EngineSection, Job
from capt.pretrain.contrastive.views import MARGIN
from capt.pretrain.engine.engines.deepspeed_config import BUCKET
from capt.pretrain.engine.optim.settings import offloads_optimizer
from capt.pretrain.plan.devices import (
    CASES,
    GIB,
    GPUS_OF_HOST,
    LL_BETWEEN_HOSTS,
    LL_SLOWER,
    NETWORK_STEP,
    NVLINK_STEP,
    START,
    Assumptions,
    Case,
    Cluster,
    Device,
    hosts,
)
from capt.pretrain.plan.rehearsal import completed
from capt.pretrain.plan.simulated import Work
from capt.pretrain.plan.step import RankStep, contrast_of, parts_of, rank_step

Stage = Literal[0, 1, 2, 3]


def zero_received(
    weights: int,
    stage: Stage,
    world: int,
    parts: int,
    cached: bool,
    bucket: int = BUCKET,
    *,
    trained: int | None = None,
    reduced: int = 4,
    gathered: int = 4,
) -> list[tuple[str, int]]:
    """Return the collectives of ZeRO in a step of ``parts`` micro-batches, and the bytes that a rank receives.

    Stages 1 and 2 all-reduce gradients, for DeepSpeed's buckets hold those of several owners, about one message a
    bucket; stage 3 reduce-scatters them. Stages 0 and 1 reduce once a step, stages 2 and 3 in every
    micro-batch, for they keep no whole gradient. Stages 1 and 2 then gather the weights; stage 3 does for each forward
    and each backward pass, and for the first pass of a cached contrast; recomputed layers are counted with their
    backward pass. An all-reduce is given by the size of the whole, which a ring receives twice. ``reduced`` and
    ``gathered`` are the bytes of an element of the gradients and of the weights on the wire. Where only ``trained`` of
    the weights are, the others have no gradients, and stage 3 alone gathers them.
    """
    if world == 1:
        return []
    trained = weights if trained is None else trained
    gather = ("_allgather_base_", gathered * (weights if stage == 3 else trained) * (world - 1) // world)
    if stage == 3:
        return [("_reduce_scatter_base_", reduced * trained * (world - 1) // world)] * parts + [gather] * (
            parts * (3 if cached else 2)
        )
    if stage == 0:
        return [("allreduce_", reduced * trained)]
    sizes = [bucket] * (trained // bucket) + [trained % bucket] * (trained % bucket > 0)
    return [("allreduce_", reduced * size) for size in sizes] * (parts if stage == 2 else 1) + [gather]


def collective_seconds(name: str, received: int, world: int, given: Assumptions, device: Device) -> float:
    """A collective's time by NCCL's own model of a ring, the faster of its protocols Simple and LL.

    ``start + steps on NVLink + steps on the network + bytes received / bandwidth``, with twice the steps and bytes in
    an all-reduce. The latencies are those of Hopper.
    """
    if world == 1 or received == 0:
        return 0.0
    several = hosts(world, device)
    twice = 2 if name == "allreduce_" else 1
    network, local, received = twice * (several - 1), twice * (world - several), twice * received
    bandwidth = given.links * device.link
    if several > 1:
        bandwidth = min(bandwidth, (GPUS_OF_HOST.value if given.rails else 1) * device.card)
    simple = START["Simple"].value + local * NVLINK_STEP["Simple"].value + network * NETWORK_STEP["Simple"].value
    between = LL_BETWEEN_HOSTS.value if several > 1 else 1.0
    ll = START["LL"].value + local * between * NVLINK_STEP["LL"].value + network * NETWORK_STEP["LL"].value
    # NCCL gives LL a third of the bandwidth on one host, a quarter between hosts and in every all-reduce.
    slower = LL_SLOWER[several == 1 and twice == 1].value
    return min(simple + received / bandwidth, ll + slower * received / bandwidth)


def traffic_seconds(sent: Sequence[tuple[str, int]], world: int, given: Assumptions, device: Device) -> float:
    """Time of collectives one after the other."""
    return sum((collective_seconds(name, received, world, given, device) for name, received in sent), 0.0)


PLAN = "plan.json"
"""The file of a run folder that holds its prediction."""
RESERVE = 2 * GIB
"""Bytes of a GPU that torch does not get: the context of CUDA, the buffers of NCCL. An assumption."""
STAGE_3_BUCKET = 500_000_000
"""Elements of the buffer of gradients that DeepSpeed makes at ZeRO 3, whatever the size of the model."""
STAGE_3_LIVE = 1_000_000_000 + 50_000_000
"""Weights that DeepSpeed gathers at ZeRO 3 before it gives some back, at most, with those that it fetches ahead."""
_BF16 = frozenset(("bfloat16", "float16"))


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at most, by part; ``activations`` is all that the others are not."""

    weights: int
    gradients: int
    optimizer: int
    buckets: int
    queue: int
    activations: int
    reserve: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(asdict(self).values())

    @property
    def of_weights(self) -> int:
        """Bytes that a batch of any size needs: all but activations and queue."""
        return self.total - self.activations - self.queue


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step's parts on one rank.

    Attributes:
        products: of matrix products on the device, those of Muon's update among them.
        between: of the operators between them, by the bytes that they move.
        launches: of the host, which starts all operators.
        update: of the optimizer, by the bytes that it moves.
        zero: of gradients and weights on the wire, as far as nothing hides it.
        contrast: of the task's own collectives.
        overlaps: whether the host runs ahead of the device.
    """

    products: float
    between: float
    launches: float
    update: float
    zero: float
    contrast: float
    overlaps: bool

    @property
    def compute(self) -> float:
        """Seconds of the passes: of the device, or of the host where that takes longer."""
        device = self.products + self.between
        return max(device, self.launches) if self.overlaps else device + self.launches

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.update + self.zero + self.contrast


@dataclass(frozen=True)
class Prediction:
    """Memory, traffic and time that are predicted of a job on a cluster.

    Attributes:
        cluster: the devices.
        step: what the simulation has found.
        memory: of a rank.
        wire: name -> bytes that a rank receives in a step, by a ring.
        times: of a step, in each case of the assumptions.
        samples: of a step over all ranks.
        tokens: of a step over all ranks; 0 for a task without.
        steps: to ``schedule.max_steps``, ``stop_after`` or the end of a branch; None where they follow from data that
            have not been read.
        whole_steps: steps of ``samples`` that hold the samples of all; fewer than ``steps`` with ``batch.ramp``, whose
            smaller steps are taken to last in proportion.
        kept: micro-batches of a cached step that keep their graph.
    """

    cluster: Cluster
    step: RankStep
    memory: Memory
    wire: Mapping[str, int]
    times: Mapping[Case, StepTime]
    samples: int
    tokens: int
    steps: int | None
    whole_steps: float | None
    kept: int

    @property
    def seconds(self) -> float:
        """The seconds of a step, in the central case."""
        return self.times["central"].total

    @property
    def bracket(self) -> tuple[float, float]:
        """The least and the most seconds of a step."""
        return self.times["fast"].total, self.times["slow"].total

    def mfu(self, case: Case = "central") -> float:
        """Model FLOP divided by the peak of bf16 products in the time of a step."""
        return self.step.flops / (self.cluster.count * self.cluster.device.bf16 * self.times[case].total)

    @property
    def fits(self) -> bool:
        """Return true where a rank has the memory."""
        return self.memory.total <= self.cluster.device.memory

    def to_json(self) -> dict[str, Any]:
        """The prediction as plain values: bytes, seconds, FLOP."""
        fast, slow = self.bracket
        whole = self.whole_steps
        return {
            "devices": self.cluster.device.name,
            "ranks": self.cluster.count,
            "parameters": self.step.weights,
            "memory": {**asdict(self.memory), "total": self.memory.total, "device": int(self.cluster.device.memory)},
            "fits": self.fits,
            "received_per_step": dict(self.wire),
            "micro_batches": self.step.parts,
            "kept_graphs": self.kept,
            "seconds_per_step": {"predicted": self.seconds, "least": fast, "most": slow},
            "parts_of_a_step": {**asdict(self.times["central"]), "compute": self.times["central"].compute},
            "tokens_per_second": self.tokens / self.seconds if self.tokens else None,
            "samples_per_second": self.samples / self.seconds,
            "flops_per_step": self.step.flops,
            "mfu": {"predicted": self.mfu(), "least": self.mfu("slow"), "most": self.mfu("fast")}
            if self.cluster.device.is_gpu
            else None,
            "steps": self.steps,
            "training_tokens": round(whole * self.tokens) if self.tokens and whole is not None else None,
            "days": None if whole is None else whole * self.seconds / 86_400,
            "device_hours": None if whole is None else whole * self.seconds / 3600 * self.cluster.count,
            "assumed": list(self.step.assumed),
        }


def predict(
    job: Job,
    cluster: Cluster,
    cases: Mapping[Case, Assumptions] = CASES,
    step: RankStep | None = None,
) -> Prediction:
    """Simulate a step of ``job`` on ``cluster`` and predict memory and time.

    ``step`` is a simulation of the same job, with ``model.compile`` or without, where there is one already.

    Raises:
        ConfigError: the batch sizes do not fit the number of ranks, or the task cannot be planned.
    """
    job = completed(job)
    step = step or rank_step(job, cluster.count, gpu=cluster.device.is_gpu)
    engine = job.engine
    zero = zero_received(
        step.weights, engine.zero_stage, cluster.count, step.parts, step.cached,
        trained=step.trained, reduced=_bytes_of_gradients(engine), gathered=2 if engine.casts_weights else 4,
    )  # fmt: skip
    wire: dict[str, int] = {}
    for name, sent in (("ZeRO", zero), ("contrast", parts_of(step.sent))):
        for collective, received in sent:
            key = f"{name}, {_WORDS.get(collective, collective)}"
            twice = collective == "allreduce_"  # given by the size of the whole
            wire[key] = wire.get(key, 0) + (2 * received * (cluster.count - 1) // cluster.count if twice else received)
    kept, memory = _kept(job, cluster, step)
    step_of = replace(step, encoder=step.encoder - step.again * kept)
    return Prediction(
        cluster, step, memory, wire,
        {case: _time(job, cluster, step_of, zero, given) for case, given in cases.items()},
        job.batch.global_, step.tokens, _steps(job), _whole_steps(job), kept,
    )  # fmt: skip


def _steps(job: Any) -> int | None:
    """The steps that a start of the job takes; None where ``schedule.epochs`` counts passes over data."""
    schedule = job.schedule
    if getattr(schedule, "epochs", None):
        return None
    if job.run.branch_from is not None and schedule.decay_steps:
        return int(schedule.decay_steps)
    return int(min(schedule.max_steps, schedule.stop_after or schedule.max_steps))


def _whole_steps(job: Any) -> float | None:
    steps = _steps(job)
    if steps is None or job.run.branch_from is not None:  # a branch begins after the ramp
        return None if steps is None else float(steps)
    return float(job.batch_sizes.samples_before(steps) / job.batch.global_)


def _kept(job: Job, cluster: Cluster, step: RankStep) -> tuple[int, Memory]:
    """Return the number of graphs that `KeptGraphs` will keep, and the memory with them."""
    memory = _memory(job, cluster, step)
    if not step.cached or job.engine.zero_stage == 3:
        return 0, memory
    keep: int | str = job.contrast.keep  # type: ignore[attr-defined]  # a job that is cached has the section
    if keep == "auto" and not cluster.device.is_gpu:
        return 0, memory
    if keep == "auto":
        spare = (1 - MARGIN) * (cluster.device.memory - RESERVE) - (memory.total - RESERVE)
        # One graph is in the simulated peak already.
        keep = 1 + max(0, int(spare // max(1, step.graph)))
    kept = min(int(keep), step.parts)
    # Either the backward pass of the first graph is the peak, which the step without kept ones has as well, or the
    # contrast, while all of them are there.
    peak = max(step.peak + max(0, kept - 1) * step.graph, step.contrast_peak + kept * step.graph)
    return kept, replace(memory, activations=memory.activations + peak - step.peak)


_WORDS = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}


def _bytes_of_gradients(engine: EngineSection) -> int:
    """Bytes of an element of a gradient on the wire; see `deepspeed_config`."""
    usual = "fp16" if engine.precision == "fp16" and engine.zero_stage else "fp32"
    return 4 if engine.deepspeed_extra.get("communication_data_type", usual) == "fp32" else 2


def _memory(job: Job, cluster: Cluster, step: RankStep) -> Memory:
    """Weights and gradients as the engines keep them; what DeepSpeed adds to them are formulas."""
    engine, world, p, trained = job.engine, cluster.count, step.weights, step.trained
    stage = engine.zero_stage
    plain = world == 1 and stage == 0 and engine.precision != "fp16"
    size = 2 if engine.casts_weights else 4
    whole = size * p
    # At ZeRO 3 a rank's share of the weights, and all that are gathered at a time.
    weights = size * (min(p, STAGE_3_LIVE) + p // world) if stage == 3 else whole
    # From ZeRO 2 on a rank's share of the gradients, in fp32.
    gradients = size * trained if stage < 2 else 4 * trained // world
    section = contrast_of(job)
    momentum = section is not None and section.momentum is not None
    average = 4 * trained if momentum or job.checkpoint.ema is not None else 0
    optimizer = average + (4 * step.moments if stage == 0 else 4 * (step.moments + trained) // world)
    if offloads_optimizer(engine):
        optimizer = average
    if engine.offload_param:
        weights = min(weights, size * BUCKET)
    if stage == 3:
        buckets = _bytes_of_gradients(engine) * STAGE_3_BUCKET
    else:
        # DeepSpeed's two buckets in fp32, or at ZeRO 0 over several ranks a flat copy of all gradients.
        buckets = 0 if plain else 2 * 4 * min(BUCKET, trained) if stage else 4 * trained * (world > 1)
    kept = weights + gradients + step.queue
    # In the simulation whole weights are there from the beginning, and whole gradients before the last backward pass
    # ends; where the engine keeps parts of them, the rest is not there.
    during = step.peak - (whole - weights) - (size * trained - gradients if stage >= 2 else 0)
    activations = max(during - kept, 0)
    return Memory(weights, gradients, optimizer, buckets, step.queue, activations,
                  RESERVE if cluster.device.is_gpu else 0)  # fmt: skip


def compiles(job: Any, device: Device) -> bool:
    """Return true where the layers are compiled: ``model.compile=auto`` compiles on GPUs alone."""
    compile_: bool | str = getattr(getattr(job, "model", None), "compile", False)
    return device.is_gpu if compile_ == "auto" else bool(compile_)


def _time(job: Any, cluster: Cluster, step: RankStep, zero: Sequence[tuple[str, int]], given: Assumptions) -> StepTime:
    device, world = cluster.device, cluster.count
    encoder = step.encoder
    # The simulated step is eager: a compiler moves fewer bytes and starts fewer operators, and computes the same.
    if compiles(job, device):
        moved, operators = encoder.moved * given.fused_bytes, encoder.operators * given.fused_operators
        encoder = Work(encoder.flops_of, moved, operators)
    work = encoder + step.contrast
    section = contrast_of(job)
    fp32 = "fp32" if section is None else section.precision
    peaks = {name: device.peak("bf16" if name in _BF16 else "tf32" if fp32 == "tf32" else "fp32")
             for name in work.flops_of}  # fmt: skip
    bandwidth = given.memory * device.bandwidth
    # Gradients can be reduced behind the backward pass; the updated weights are gathered when nothing else is left.
    reductions = [each for each in zero if each[0] != "_allgather_base_"]
    gathers = [each for each in zero if each[0] == "_allgather_base_"]
    owners = world if job.engine.zero_stage else 1
    updates = step.update / owners / device.peak("bf16" if device.is_gpu else "fp32")
    products = updates + sum(flops / peaks[name] for name, flops in work.flops_of.items())
    return StepTime(
        products=products / given.products,
        between=work.moved / bandwidth,
        launches=given.launch * work.operators,
        # Weight, gradient and moments are read, weight and moments written, 4 bytes each.
        update=4 * (3 * step.trained + 2 * step.moments) / owners / bandwidth,
        zero=(1 - given.zero_hidden) * traffic_seconds(reductions, world, given, device)
        + traffic_seconds(gathers, world, given, device),
        contrast=traffic_seconds(parts_of(step.sent), world, given, device),
        overlaps=device.is_gpu,
    )


def require_fit(found: Prediction, job: Job, advice: Sequence[str] = ()) -> None:
    """Refuse a job that a rank has no memory for. Raises ``ConfigError``: by how much, and which keys would help."""
    if found.fits:
        return
    memory, device = found.memory, found.cluster.device
    section = contrast_of(job)
    alone = memory.of_weights > device.memory  # no smaller batch and no shorter queue would help
    if alone:
        key, part, size = f"engine.zero_stage={job.engine.zero_stage}", "weights and their states", memory.of_weights
        lower = "take more devices with engine.zero_stage=3, which share them"
    elif section is None or memory.activations >= memory.queue:
        key, part, size = f"batch.micro={job.micro_batch(found.cluster.count)}", "activations", memory.activations
        lower = "lower it"
    else:
        key, part, size = f"contrast.queue={section.queue}", "the queue", memory.queue
        lower = "lower it"
    need, have = memory.total / GIB, device.memory / GIB
    remedy = f"it fits with {advice[0]}" if advice else f"{lower}, or take smaller model.* sizes"
    most = "where all rows are as long as they may be, " if found.step.longest else ""
    raise ConfigError(
        f"{key}: {most}a rank needs {need:,.1f} GiB, {size / GIB:,.1f} of them for {part}; "
        f"{device.name} has {have:,.1f}: {need - have:,.1f} GiB too much; {remedy}"
    )
