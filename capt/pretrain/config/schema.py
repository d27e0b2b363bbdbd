"""The sections that every pretraining and fine-tuning job has. A task adds its own
(``capt.pretrain.language.config``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from capt.pretrain.base.errors import ConfigError, did_you_mean, shown
from capt.pretrain.base.stores import WRITABLE, is_url
from capt.pretrain.config.base import NonNegativeInt, PathField, PositiveInt, Section, StoreText
from capt.pretrain.config.ramp import BatchSizeSchedule


class LoaderSection(Section):
    """Background processes that assemble batches; their number never changes what is trained on."""

    workers: NonNegativeInt = Field(
        1, le=1024, description="background processes per rank; 0 = in the training process"
    )
    prefetch: PositiveInt = Field(4, le=65_536, description="batches that each worker makes in advance")
    timeout_minutes: PositiveFloat = Field(
        10.0, description="how long a step's data may take before the run ends with an error that says so"
    )


class GuardSection(Section):
    """Guards that watch a job for faults that raise no error (page Reliability)."""

    checksum: NonNegativeInt = Field(
        100, description="steps between two comparisons of what all ranks must hold alike, before the update of a step "
        "and before each save; 0 = never"
    )  # fmt: skip
    spike: Literal["off", "warn", "skip", "rollback", "stop"] = Field(
        "warn", description="when the loss or the gradient norm jumps: say so; skip the update of that step; roll back "
        "to the newest checkpoint and leave out the samples from there to that step; or stop, saving nothing"
    )  # fmt: skip
    spike_threshold: PositiveFloat = Field(
        10.0, description="deviations above the median of the last 128 steps from which a value is a spike"
    )
    spikes: NonNegativeInt = Field(
        10, description="spikes of a run that are skipped, or gone back for; the next one ends the run"
    )


SCHEMA_VERSION = 1


class TaskSection(Section):
    """The type of the job: a key of ``capt.pretrain.registry.TASKS``."""

    type: str = Field(
        description="the type of the job: capt_language, capt_pairs, capt_vl, latent, ace, glue, labels, rerank, or "
        "that of an entry point"
    )


class RunSection(Section):
    """The place of a run, and its seed."""

    dir: PathField = Field(Path("runs/run"), description="the run's folder; a new run needs an unused one")
    resume: Literal["never", "auto"] = Field(
        "never",
        description="auto = begin the run, or resume it where run.dir holds one of the same job; never = refuse that",
    )
    branch_from: PathField | None = Field(
        None, description="a run, or a checkpoint of it, which this run continues in a folder of its own with the keys "
        "of this job: weights, moments, queue and counters; the other run stays as it is"
    )  # fmt: skip
    seed: NonNegativeInt = Field(1, description="seed of initialisation, data order, noise and dropout")
    log_every: PositiveInt = Field(10, description="steps between two lines of metrics.jsonl and of the log")
    tensorboard: bool = Field(True, description="also write TensorBoard files")
    ledger: bool = Field(True, description="record which samples every step used, for capt ledger check")
    deterministic: bool = Field(False, description="torch.use_deterministic_algorithms (slower on GPUs)")
    threads: NonNegativeInt = Field(
        0,
        le=4096,
        description="CPU threads per process; 0 = OMP_NUM_THREADS where it is set, else the cores that the process may "
        "use (affinity, CPU quota of the container), shared with the job's other processes on this host",
    )
    profile_step: PositiveInt | None = Field(None, description="record this step with torch.profiler into the run")
    callbacks: dict[str, dict[str, Any]] = Field(
        {},
        description="callbacks to add, with settings: wandb, mlflow, prometheus, entry points of capt.callbacks",
    )


class BatchSection(Section):
    """Sequences an optimizer step (``global``) and a forward pass on one rank (``micro``).

    Pretraining with the contrast shares ``global`` among any number of ranks, and a rank's part among as few forward
    passes of at most ``micro`` as it takes. Other tasks need ``global = micro x accumulation x ranks``. Without
    ``micro`` a rank takes its part in one pass.
    """

    global_: PositiveInt = Field(
        256, le=2**31 - 1, alias="global", description="sequences per optimizer step, over all ranks"
    )
    micro: PositiveInt | None = Field(
        32, le=65_536, description="most sequences of a forward pass on one rank; null = batch.global / ranks"
    )
    ramp: list[tuple[PositiveInt, PositiveInt]] = Field(
        [], description="smaller steps first: [[tokens, sequences], ...], each the sequences of a step until the run "
        "has seen these tokens, in whole steps; then batch.global"
    )  # fmt: skip

    @model_validator(mode="after")
    def _ramp_grows(self) -> BatchSection:
        sizes = [sequences for _, sequences in self.ramp] + [self.global_]
        tokens = [tokens for tokens, _ in self.ramp]
        if any(a >= b for numbers in (sizes, tokens) for a, b in pairwise(numbers)):
            raise ValueError(
                f"batch.ramp {[list(stage) for stage in self.ramp]} with batch.global {self.global_}: tokens and "
                "sequences grow from stage to stage, and the last sequences are fewer than batch.global"
            )
        return self


AnySchedule = TypeVar("AnySchedule", bound="ScheduleSection")


class ScheduleSection(Section):
    """Learning-rate schedule: linear warmup from 0 over ``warmup_steps``, then ``type`` until ``max_steps``."""

    max_steps: PositiveInt = Field(1000, description="optimizer steps of the whole job")
    warmup_steps: NonNegativeInt = Field(0, description="steps of linear warmup")
    type: Literal["linear", "cosine", "constant", "wsd"] = Field(
        "linear", description="decay after the warmup; wsd = constant, then a decay over the last decay_steps"
    )
    decay_steps: NonNegativeInt = Field(
        0, description="wsd: steps of the decay, the last ones; 0 = none: a run from which others branch off to decay; "
        "a run with branch_from decays immediately, and max_steps follows from it"
    )  # fmt: skip
    decay: Literal["sqrt", "linear"] = Field(
        "sqrt", description="wsd: how the rate falls over a share u of the decay: 1 - sqrt(u), or 1 - u"
    )
    final: NonNegativeFloat = Field(0.0, le=1, description="share of the peak learning rate at which the decay ends")
    stop_after: PositiveInt | None = Field(
        None, description="stop at this step, resumably, with exit code 75; the schedules still aim at max_steps"
    )

    @model_validator(mode="after")
    def _warmup_fits(self) -> ScheduleSection:
        if self.warmup_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} is longer than max_steps {self.max_steps}; "
                "lower schedule.warmup_steps, or raise schedule.max_steps"
            )
        if self.decay_steps and self.type != "wsd":
            raise ValueError(f"decay_steps {self.decay_steps} is a key of type wsd, not of {self.type}")
        return self

    def with_steps(self: AnySchedule, max_steps: int, warmup_steps: int) -> AnySchedule:
        """The same schedule with these steps. Raises ``ConfigError``: warmup and decay are longer than the whole."""
        made = self.model_copy(update={"max_steps": max_steps, "warmup_steps": warmup_steps})
        try:
            made.check_decay()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return made

    def check_decay(self) -> None:
        """Raise ``ValueError`` where warmup and decay are longer together than the whole."""
        if self.warmup_steps + self.decay_steps > self.max_steps:
            raise ValueError(
                f"schedule.warmup_steps {self.warmup_steps} and schedule.decay_steps {self.decay_steps} are longer "
                f"than schedule.max_steps {self.max_steps}; lower one of them"
            )


_WHOLE_PARAMETERS = {
    "lamb": "its trust ratio is a norm per parameter",
    "sparse_adam": "it updates the rows that a batch has looked up",
}
"""Optimizers whose update of an element depends on its place in the parameter, and why."""


class OptimizerSection(Section):
    """The optimizer. ``clip`` bounds the global gradient norm (0 = off)."""

    type: Literal["adamw", "stable_adamw", "bert_adam", "lamb", "adagrad", "sgd", "muon", "sparse_adam"] = Field(
        "adamw", description="lamb and sparse_adam need ZeRO 0; bert_adam has no bias correction; stable_adamw "
        "takes shorter steps of tensors whose gradient surprises it"
    )  # fmt: skip
    backend: Literal["auto", "torch", "deepspeed", "apex"] = Field("auto", description="whose implementation")
    lr: PositiveFloat = Field(5e-4, description="peak learning rate")
    betas: tuple[float, float] = Field(
        (0.9, 0.98), description="decay of Adam's two moments; of all kinds of Adam, and of lamb and muon"
    )
    momentum: NonNegativeFloat = Field(0.95, lt=1, description="of sgd and of muon's matrices")
    eps: PositiveFloat = Field(1e-6, ge=1e-37, description="added to the root of the squared gradients")
    weight_decay: NonNegativeFloat = Field(
        0.01,
        description="of matrices; vectors do not decay, but for bert_adam's (adagrad and sgd add it to the gradient)",
    )
    clip: NonNegativeFloat = Field(0.0, description="largest global gradient norm; 0 = off")
    layer_decay: PositiveFloat = Field(
        1.0, le=1, description="each layer learns at this share of the rate of the one above it, the embeddings below "
        "the lowest layer, the heads at the full rate; 1 = all alike"
    )  # fmt: skip
    freeze: PositiveInt | Literal["none", "embeddings"] = Field(
        "none",
        description="keep the weights of the embeddings, and with a number those of the lowest layers too",
    )

    @model_validator(mode="after")
    def _betas_in_range(self) -> OptimizerSection:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must be in [0, 1)")
        return self

    @model_validator(mode="after")
    def _implementation_exists(self) -> OptimizerSection:
        if self.backend in ("deepspeed", "apex") and self.type not in ("adamw", "lamb"):
            raise ValueError(f"optimizer.backend {self.backend} has no {self.type} here; set optimizer.backend=torch")
        if self.layer_decay < 1 and self.type in ("bert_adam", "muon", "sparse_adam"):
            raise ValueError(
                f"layer_decay: optimizer.type {self.type} has one rate for all layers; set optimizer.type=adamw"
            )
        if self.type == "sparse_adam" and self.weight_decay:
            raise ValueError(
                f"optimizer.type sparse_adam does not decay, which would touch every row of the table: "
                f"set optimizer.weight_decay=0, not {self.weight_decay}"
            )
        return self

    def moments(self, parameters: int, matrices: int) -> int:
        """Elements of the state of ``parameters`` elements, of which ``matrices`` are in matrices of the layers."""
        if self.type == "muon":
            # Muon keeps one moment of the matrices, Adam two of everything else.
            return 2 * parameters - matrices
        return {"adagrad": 1, "sgd": int(self.momentum > 0)}.get(self.type, 2) * parameters

    def check_sharding(self, zero_stage: int) -> None:
        """Raise ``ValueError`` where this type of optimizer cannot work on ZeRO's flat partitions."""
        if zero_stage and self.type in _WHOLE_PARAMETERS:
            raise ValueError(
                f"optimizer.type {self.type} needs engine.zero_stage 0, got {zero_stage}: "
                f"{_WHOLE_PARAMETERS[self.type]}, and ZeRO's flat partitions have no parameters"
            )


class EngineSection(Section):
    """DeepSpeed's settings. ``deepspeed_extra`` is merged last into the generated DeepSpeed configuration."""

    zero_stage: Literal[0, 1, 2, 3] = Field(1, description="what is sharded: 1 optimizer, 2 gradients, 3 weights")
    precision: Literal["auto", "fp32", "bf16", "bf16_pure", "fp16"] = Field(
        "fp32",
        description="precision of the forward pass; weights stay fp32; auto = bf16 on a GPU that has it, else fp32; "
        "bf16_pure (ZeRO 1 to 3): weights are cast once a step, and all that is between the products is bf16",
    )
    offload_optimizer: bool = Field(False, description="keep the optimizer state in host memory (ZeRO 1 to 3)")
    offload_param: bool = Field(False, description="keep the weights in host memory (ZeRO 3)")
    timeout_minutes: PositiveFloat = Field(10.0, le=525_600, description="how long a collective may wait")
    deepspeed_extra: dict[str, Any] = Field({}, description="merged last into DeepSpeed's configuration")

    @model_validator(mode="after")
    def _offload_needs_zero(self) -> EngineSection:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        if self.offload_param and self.zero_stage != 3:
            raise ValueError("offload_param needs zero_stage 3")
        if self.precision == "bf16_pure" and self.zero_stage == 0:
            raise ValueError("precision bf16_pure has its fp32 weights in ZeRO's partitions: set zero_stage 1, 2 or 3")
        return self

    @property
    def casts_weights(self) -> bool:
        """True if the module has weights of 16 bits, of which ZeRO keeps the fp32 ones."""
        return self.precision == "bf16_pure" or (self.precision == "fp16" and self.zero_stage > 0)


class ValidateSection(Section):
    """Validation during training: ``every`` steps (0 = only at the end)."""

    every: NonNegativeInt = Field(500, description="steps between two validations; 0 = only at the end")
    first: bool = Field(False, description="validate before the first step as well: the baseline of the run")
    also: list[PositiveInt] = Field([], description="further steps to validate after: the beginning of a curve")


class LocalSection(Section):
    """Local checkpoints, in the memory of the hosts, for a fast restart: the newest one, a replica on the next host."""

    every: NonNegativeInt | Literal["auto"] = Field(
        0,
        description="steps between two local checkpoints; 0 = none; auto = as often as they cost at most 1% of the "
        "time",
    )
    dir: PathField | None = Field(
        None,
        description="folder of each host for them; null = /dev/shm, or where that is missing the temporary files",
    )


class CheckpointSection(Section):
    """Checkpoints: ``every`` steps (0 = only at the end); the newest ``keep``, each ``keep_every``, the best stay."""

    every: NonNegativeInt | Literal["auto"] = Field(
        500,
        description="steps between two checkpoints; 0 = only at the end; auto = as often as they cost at most 1% of "
        "the time, and at least every 15 minutes",
    )
    keep: PositiveInt = Field(3, description="how many of the newest checkpoints are kept")
    keep_every: NonNegativeInt = Field(
        0, description="checkpoints at multiples of this many steps are kept for good; 0 = none"
    )
    best: str | None = Field(
        None, description="validation metric whose best checkpoint is kept, linked as checkpoints/best"
    )
    best_mode: Literal["max", "min"] = Field("max", description="whether more or less of checkpoint.best is better")
    average: NonNegativeInt = Field(
        0, description="average the weights of this number of the last checkpoints, those of every checkpoint.every "
        "steps, at the end of the run into its folder average, which evaluates and exports as a run; 0 = no"
    )  # fmt: skip
    ema: PositiveFloat | None = Field(
        None, lt=1, description="keep an exponential moving average of the weights with this decay, and write it into "
        "the folder average at the end of the run; null = none"
    )  # fmt: skip
    asynchronous: bool = Field(False, alias="async", description="write in a background thread")
    upload: StoreText | None = Field(
        None,
        description="address in a store (s3://, gs://, az://) to which every checkpoint is copied in the background; "
        "with --resume auto a fresh machine continues from there",
    )
    local: LocalSection = LocalSection()

    @field_validator("upload")
    @classmethod
    def _upload_is_url(cls, value: str | None) -> str | None:
        if value is not None and not is_url(value):
            raise ValueError(
                "is not an address in a store, such as s3://bucket/folder; run.dir is the folder of this host"
            )
        if value is not None and value.partition("://")[0].lower() not in WRITABLE:
            raise ValueError(f"cannot be written to; known: {', '.join(f'{name}://' for name in WRITABLE)}")
        return value

    @property
    def fixed_distance(self) -> int:
        """The steps between two checkpoints that ``every`` fixes; 0 where it fixes none."""
        return 0 if self.every == "auto" else self.every

    def averaged_steps(self, max_steps: int) -> list[int]:
        """Return the steps whose checkpoints ``average`` averages, whenever the run was interrupted."""
        if not self.average:
            return []
        regular = range(self.fixed_distance, max_steps + 1, self.fixed_distance) if self.fixed_distance else range(0)
        # The last step is among them even where it is no multiple of the distance.
        return sorted({*regular[-self.average :], max_steps})[-self.average :]

    @model_validator(mode="after")
    def _average_is_one(self) -> CheckpointSection:
        if self.average == 1:
            raise ValueError("average 1 is the last checkpoint; take 2 or more, or 0")
        if self.average and self.ema is not None:
            raise ValueError("average and ema are two kinds of the same folder; choose one")
        if self.average and self.every == "auto":
            raise ValueError("average needs checkpoints at known steps: set checkpoint.every to a number, not to auto")
        return self


class SuperviseSection(Section):
    """Response of ``capt`` to processes that die or hang in a job that it started."""

    restarts: NonNegativeInt = Field(
        3, le=1000, description="times that it is started again from its newest checkpoint, each after at least one "
        "more step or the loss of a host; ten checkpoints or an hour of training give one back; 0 = never"
    )  # fmt: skip
    stall: PositiveFloat | None = Field(
        10.0,
        description="seconds, beyond three times the longest so far, after which a step, validation or save that does "
        "not end is a hang; null = only the time-out of the process group",
    )
    on_lost_node: Literal["wait", "spare", "shrink"] = Field(
        "wait", description="when a host of several cannot be reached, or has lost GPUs, at a restart: wait for it, "
        "take a spare host of the hostfile (--nodes), or continue with those that are left, where batch.global can be "
        "shared among them"
    )  # fmt: skip
    wait_minutes: PositiveFloat = Field(30.0, description="minutes for which a host is waited for")


class Job(Section):
    """A whole job. Subclasses add the sections of their task."""

    pretrains: ClassVar[bool] = False
    """True if it trains a model of its own, which ``capt finetune`` is not for."""
    shares_unevenly: ClassVar[bool] = False
    """True if ranks and micro-batches may have different numbers of sequences, each of the same weight in the loss."""

    schema_version: Literal[1] = Field(1, description="version of the configuration format; checked on load")
    task: TaskSection
    run: RunSection = RunSection()
    batch: BatchSection = BatchSection()
    schedule: ScheduleSection = ScheduleSection()
    optimizer: OptimizerSection = OptimizerSection()
    engine: EngineSection = EngineSection()
    validate_: ValidateSection = Field(ValidateSection(), alias="validate")
    checkpoint: CheckpointSection = CheckpointSection()
    supervise: SuperviseSection = SuperviseSection()
    guard: GuardSection = GuardSection()

    @model_validator(mode="after")
    def _optimizer_fits_sharding(self) -> Job:
        self.optimizer.check_sharding(self.engine.zero_stage)
        return self

    @model_validator(mode="after")
    def _ramp_counts_tokens(self) -> Job:
        if self.batch.ramp and self.sample_tokens is None:
            raise ValueError(
                f"batch.ramp counts tokens, and the sequences of a {self.task.type} job have no fixed number of them; "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_no_mean(self) -> Job:
        section = self.checkpoint
        if getattr(getattr(self, "model", None), "lora", None) is not None and (section.average or section.ema):
            raise ValueError(
                "checkpoint.average and checkpoint.ema average weights, and the mean of model.lora's products is not "
                "the product of their means; leave them out"
            )
        return self

    @model_validator(mode="after")
    def _decay_fits(self) -> Job:
        if self.run.branch_from is None:
            self.schedule.check_decay()
        elif getattr(self.schedule, "epochs", None) is not None:
            raise ValueError("run.branch_from: a branch counts steps: set schedule.epochs=null and schedule.max_steps")
        return self

    @model_validator(mode="after")
    def _best_is_reported(self) -> Job:
        best, names = self.checkpoint.best, self.metric_names()
        if best is not None and names is not None and not names:
            raise ValueError(f"checkpoint.best {shown(best)}: the validation of a {self.task.type} job reports nothing")
        if best is not None and names is not None and best not in names:
            raise ValueError(
                f"checkpoint.best: validation reports no {shown(best)}; {did_you_mean(best, sorted(names))}"
            )
        return self

    @classmethod
    def replaced_by(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """``below`` without the keys that a later file or an override, ``above``, means to replace by other keys."""
        return below

    def metric_names(self) -> frozenset[str] | None:
        """Metrics of the job's validation, for ``checkpoint.best``; None if the configuration does not tell."""
        return None

    def encoder_config(self) -> dict[str, Any] | None:
        """The text encoder in the job's checkpoints, as ``config.json`` describes it; None where they have none.

        It lets other jobs start from them. Tasks override it.
        """
        return None

    def check_inputs(self) -> list[str]:
        """Look whether the files that the job reads are there, without torch and without reading them through.

        Returns a line for each input (corpus, tokenizer, ``model.init``), for a person to check. Tasks override it.

        Raises:
            UserError: an input is not named, not there, or not what it should be; one line with the key.
        """
        return []

    def checkpoint_bytes(self) -> int | None:
        """About how large one checkpoint is; None where the configuration does not tell. Tasks override it."""
        return None

    def queue_bytes(self) -> int | None:
        """Bytes of the whole queue of the contrast; None where the configuration does not tell. Tasks override it."""
        return None

    @property
    def sample_tokens(self) -> int | None:
        """Tokens of every sequence of a batch; None where they differ. Tasks override it."""
        return None

    @property
    def batch_sizes(self) -> BatchSizeSchedule:
        """Number of sequences of every optimizer step."""
        return BatchSizeSchedule.of(self.batch.global_, self.batch.ramp, self.sample_tokens or 1)

    def micro_batch(self, world: int) -> int:
        """Return the most sequences of a forward pass on one of ``world`` ranks: ``batch.micro``, or its whole part."""
        return self.batch.micro or -(-self.batch.global_ // world)

    def accumulation(self, world: int, sequences: int | None = None) -> int:
        """Return the micro-batches per optimizer step on ``world`` ranks, the same on every rank.

        Args:
            world: number of ranks.
            sequences: of the step; None = ``batch.global``, once every stage of ``batch.ramp`` is known to fit.

        Raises:
            ValueError: a rank would have a micro-batch without a sequence, or, where the task does not share unevenly,
                one that is not ``batch.micro``.
        """
        if sequences is not None:
            key = "batch.global" if sequences == self.batch.global_ else "batch.ramp"
            return self._parts(world, sequences, key)
        for _, fewer in self.batch.ramp:
            self._parts(world, fewer, "batch.ramp")
        return self._parts(world, self.batch.global_, "batch.global")

    def _parts(self, world: int, sequences: int, key: str) -> int:
        micro = self.micro_batch(world)
        if self.shares_unevenly:
            parts = -(-sequences // (micro * world))
            if parts * world > sequences:
                enough = "batch.micro=2" if sequences >= world else f"{key}={world} or more"
                raise ValueError(
                    f"{key} {sequences} leaves one of {world} ranks without a sequence in one of its "
                    f"{parts} micro-batches of batch.micro {micro}; set {enough}"
                )
            return parts
        if sequences % (micro * world):
            fits = [] if sequences % world else _divisors(sequences // world)
            near = f"batch.micro may be one of {fits[-6:]}" if fits else f"{key} must be a multiple of {world}"
            raise ValueError(
                f"{key} {sequences} is not batch.micro {micro} x accumulation x {world} "
                f"ranks; with {world} ranks {near}"
            )
        return sequences // (micro * world)


def _divisors(number: int) -> list[int]:
    """Return the divisors in ascending order, found by trying numbers up to the square root (46,341 for 31 bits)."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
