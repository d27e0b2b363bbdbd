"""The configuration of a sweep: studies, space, search, scheduler, and what a trial needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, ValidationError, field_validator, model_validator

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config import flatten
from capt.pretrain.config.base import NonNegativeInt, PathField, PositiveInt, Section
from capt.pretrain.config.load import explain, load_mapping, resolve_path
from capt.pretrain.config.reader import to_yaml
from capt.pretrain.engine.judgement import direction

Value = bool | int | float | str | None | list[Any]
Amount = Annotated[float, Field(gt=0, le=1e6)]


class Dimension(Section):
    """The values that one key of a job may take: exactly one of the kinds below."""

    grid: Annotated[list[Value], Field(min_length=1)] | None = Field(None, description="every one of these values")
    choice: Annotated[list[Value], Field(min_length=1)] | None = Field(None, description="one of these values")
    uniform: tuple[float, float] | None = Field(None, description="a number between two bounds")
    loguniform: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="a number between two bounds, uniform in its logarithm"
    )
    randint: tuple[int, int] | None = Field(None, description="an integer, the upper bound included")

    @model_validator(mode="after")
    def _one_kind(self) -> Dimension:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"name exactly one of {', '.join(type(self).model_fields)}")
        bounds = self.bounds
        if bounds and not bounds[0] < bounds[1]:
            raise ValueError(f"{self.kind} {list(bounds)}: the first bound must be less than the second")
        grid = [(isinstance(value, bool), value) for value in self.grid or []]  # True equals 1
        if twice := [value for i, (_, value) in enumerate(grid) if grid[i] in grid[:i]]:
            raise ValueError(
                f"grid has {twice[0]!r} twice, which would run the same trials again; name each value once"
            )
        return self

    @property
    def kind(self) -> str:
        """The name of its kind."""
        return next(iter(self.model_fields_set))

    @property
    def values(self) -> list[Value] | None:
        """The listed values; None for a range."""
        return self.grid if self.grid is not None else self.choice

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The bounds of a range; None for listed values."""
        return self.uniform or self.loguniform or self.randint


class SweepSection(Section):
    """The folder of the sweep and the seeds (``run.seed``) that every setting is run with."""

    dir: PathField = Field(Path("runs/sweep"), description="the sweep's folder; on a cluster, one that every node sees")
    resume: Literal["never", "auto"] = Field(
        "never",
        description="auto = begin the sweep, or continue the one of the same jobs in dir; never = refuse such a dir",
    )
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = Field(
        [1, 2, 3, 4, 5], description="values of run.seed; every setting runs with each of them"
    )
    initial: PathField | None = Field(
        None, description="a finished sweep, as of pretraining: every setting runs from the last checkpoint of each of "
        "its runs (model.init)"
    )  # fmt: skip

    @field_validator("seeds")
    @classmethod
    def _once_each(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("a seed occurs twice")
        return seeds


class StudySection(Section):
    """The base job, and the validation metric that ranks its trials."""

    base: str = Field(description="a job: a YAML file, or the name of a shipped one")
    metric: str = Field(description="a name that the job's validation reports")
    mode: Literal["max", "min"] = Field("max", description="whether more or less of it is better")
    overrides: dict[str, Any] = Field(
        {}, description="keys of this study's jobs, applied after the overrides of the sweep"
    )
    space: dict[str, Dimension] = Field({}, description="dimensions of this study, in addition to those of the sweep")

    @model_validator(mode="after")
    def _mode_fits(self) -> StudySection:
        if self.mode == "max" and direction(self.metric) < 0:
            raise ValueError(f"metric {self.metric} is the better the less it is: set mode to min")
        return self


class SearchSection(Section):
    """The choice of settings that are tried."""

    type: Literal["grid", "random", "optuna"] = Field("grid", description="grid needs listed values")
    samples: PositiveInt = Field(10, description="settings to try per study (not for grid)")
    seed: NonNegativeInt = Field(1, description="seed of the choice of settings")


class NoScheduler(Section):
    """Every trial runs to its end."""

    type: Literal["none"] = Field("none", description="every trial runs to its end")


class Asha(Section):
    """Asynchronous successive halving (Li et al. 2020): the worst settings end early. Time counts in validations.

    Settings are compared by the first seed. Those that reach the end are run with the other seeds, whole: a median over
    the seeds that survived would be none.
    """

    type: Literal["asha"] = Field(description="end the worst settings early, judged by the first seed")
    grace: PositiveInt = Field(1, description="validations before a trial may be ended")
    reduction: Annotated[float, Field(gt=1)] = Field(3, description="one trial out of this many continues at each rung")


class Pbt(Section):
    """Population based training (Jaderberg et al. 2017), synchronous: every ``interval`` validations the worst members
    continue from a copy of the best, with changed parameters.
    """

    type: Literal["pbt"] = Field(description="let the worst trials continue from a copy of the best")
    interval: PositiveInt = Field(
        1, description="validations between two exchanges; each needs a checkpoint at the same step"
    )
    quantile: Annotated[float, Field(gt=0, le=0.5)] = Field(0.25, description="share of the trials that is replaced")
    resample: Annotated[float, Field(ge=0, le=1)] = Field(
        0.25, description="probability to draw a value anew instead of changing it"
    )


class TrialSection(Section):
    """The resources of a trial: ``workers`` ranks of ``cpus`` cores, ``gpus`` GPUs and ``resources`` each.

    Parts of a core or of a GPU let all trials share it that fit; that their memory suffices is theirs to see to.
    """

    workers: PositiveInt = Field(1, description="ranks per trial")
    cpus: Amount = Field(1, description="cores per rank, or a part of one")
    gpus: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = Field(
        "auto", description="GPUs per rank: 0, 1 or a part of one; auto = 1 where there are any"
    )
    resources: dict[str, Amount] = Field(
        {}, description="other resources that a rank takes, as 'ray start --resources' named them"
    )
    threads: PositiveInt | None = Field(None, description="run.threads of a rank; null = its cores")
    retries: NonNegativeInt = Field(1, description="how many times a failed trial is continued")
    concurrent: PositiveInt | None = Field(None, description="trials at the same time; null = all that fit")

    @field_validator("gpus", mode="before")
    @classmethod
    def _one_gpu_a_rank(cls, gpus: Any) -> Any:
        if isinstance(gpus, int | float) and gpus > 1:
            raise ValueError("a rank drives one GPU; set trial.workers for more")
        return gpus

    @field_validator("resources")
    @classmethod
    def _not_the_named_ones(cls, resources: dict[str, float]) -> dict[str, float]:
        for name in resources:
            if name.lower() in ("cpu", "gpu", "memory", "object_store_memory") or not name.isprintable():
                raise ValueError(f"{name!r} is not a resource of one's own: cores are trial.cpus, GPUs trial.gpus")
        return resources

    @model_validator(mode="after")
    def _ranks_of_a_trial_share_no_gpu(self) -> TrialSection:
        if self.workers > 1 and self.gpus not in ("auto", 0, 1):
            raise ValueError(f"gpus {self.gpus}: the ranks of a trial cannot share a GPU; set workers: 1, or gpus: 1")
        return self


class Sweep(Section):
    """A whole sweep: studies, what to search, and what each trial may use."""

    sweep: SweepSection = SweepSection()
    studies: Annotated[dict[str, StudySection], Field(min_length=1)]
    space: dict[str, Dimension] = Field(
        {}, description="keys of the job and the values that each may take, for every study"
    )
    search: SearchSection = SearchSection()
    scheduler: NoScheduler | Asha | Pbt = Field(NoScheduler(), discriminator="type", description="what ends trials")
    trial: TrialSection = TrialSection()
    overrides: dict[str, Any] = Field({}, description="keys of every trial's job")
    keep_checkpoints: NonNegativeInt = Field(
        1,
        description="how many trials of a study keep their checkpoints: first the median seed of the best setting",
    )

    @field_validator("studies")
    @classmethod
    def _names_are_folders(cls, studies: dict[str, StudySection]) -> dict[str, StudySection]:
        for name in studies:
            if not name or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
                raise ValueError(f"study {name!r}: a name is a folder: letters, digits, '.', '-' and '_'")
        return studies

    @model_validator(mode="after")
    def _parts_fit(self) -> Sweep:
        for name, study in self.studies.items():
            space = self.space | study.space
            ranges = [key for key, dimension in space.items() if dimension.values is None]
            if self.search.type == "grid" and ranges and self.scheduler.type != "pbt":
                kind = space[ranges[0]].kind
                raise ValueError(f"space {ranges[0]} is {kind}: search.type grid needs grid or choice; use random")
            if not space and (self.search.type != "grid" or self.scheduler.type == "pbt"):
                raise ValueError(f"study {name!r} has no space to search in")
            set_too = sorted({*flatten(self.overrides), *flatten(study.overrides)} & space.keys())
            if set_too:
                raise ValueError(f"space {set_too[0]}: is set in the overrides too, which would not count; remove one")
            if self.sweep.initial and "model.init" in {*flatten(self.overrides), *flatten(study.overrides), *space}:
                raise ValueError("model.init: set by sweep.initial, one run after the other; remove one of the two")
            fixed = sorted({"run.seed", "run.dir"} & space.keys())
            if fixed:
                raise ValueError(f"space {fixed[0]}: set by the sweep (sweep.seeds, sweep.dir)")
        if self.search.type == "optuna" and self.scheduler.type == "pbt":
            raise ValueError("scheduler pbt changes the parameters itself; use search.type random")
        if self.scheduler.type == "pbt" and self.trial.concurrent:
            raise ValueError("trial.concurrent does not go with scheduler pbt: its members take turns by themselves")
        return self

    def space_of(self, study: str) -> dict[str, Dimension]:
        """Return the dimensions of a study, its own before the common ones."""
        return self.space | self.studies[study].space

    def to_yaml(self) -> str:
        """Return the sweep as a file that ``load_sweep`` reads."""
        return to_yaml(self.model_dump(mode="json", exclude_unset=True))


def load_sweep(config: str, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep; ``sweep.a.b=c`` sets its own keys, every other ``a.b=c`` a key of all trials' jobs.

    Raises:
        ConfigError: one line naming the file, the key, the value and what would be valid.
    """
    for text in overrides:
        if "=" not in text or text.startswith(("=", "-")):
            raise ConfigError(f"override {text!r} is not of the form a.b=value")
    mapping = load_mapping(config, [_own_key(text) for text in overrides], sweep=True)
    if "studies" not in mapping and "task" in mapping:
        raise ConfigError(f"{config} is a job, not a sweep; a sweep names its jobs under studies.<name>.base")
    folder = resolve_path(config, sweep=True).parent
    try:
        sweep = Sweep.model_validate(mapping)
    except ValidationError as error:
        raise ConfigError(f"{config}: {explain(error, Sweep)}") from None
    studies = {
        name: study.model_copy(update={"base": _base(folder, study.base)}) for name, study in sweep.studies.items()
    }
    folders = {"dir": sweep.sweep.dir, "initial": sweep.sweep.initial}
    where = sweep.sweep.model_copy(update={name: path.resolve() for name, path in folders.items() if path})
    return sweep.model_copy(update={"studies": studies, "sweep": where})


def _own_key(text: str) -> str:
    if not text.startswith("sweep."):
        return f"overrides.{text}"
    key = text.removeprefix("sweep.")
    return text if key.partition("=")[0] in SweepSection.model_fields else key


def _base(folder: Path, base: str) -> str:
    beside = folder / base
    if beside.is_file():
        return str(beside.resolve())
    found = resolve_path(base)
    return str(found.resolve()) if Path(base) == found else base
