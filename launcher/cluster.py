"""The settings of a Slurm cluster: a small YAML file (``configs/cluster/slurm.yaml`` shows them all)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from pretrain.config.base import NonNegativeInt, PositiveInt, Section
from pretrain.config.load import explain, load_mapping
from tokenizer.errors import ConfigError

_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:&|()*=+@/-]{1,200}$")]


class SlurmCluster(Section):
    """Nodes, ranks and limits of a Slurm job. What is None or 0 is left to the cluster's own defaults."""

    nodes: Annotated[int, Field(ge=1, le=100_000)] = 1
    ranks_per_node: Annotated[int, Field(ge=1, le=512)] = 1
    cpus_per_rank: NonNegativeInt = 0
    gpus_per_node: NonNegativeInt = 0
    time: _Word | None = None
    partition: _Word | None = None
    account: _Word | None = None
    qos: _Word | None = None
    constraint: _Word | None = None
    save_before_end: PositiveInt = Field(
        120, description="seconds before the time limit at which the job saves and stops"
    )
    requeue: bool = Field(True, description="queue the job again when it stopped early, so that it continues")
    setup: list[str] = Field([], description="shell lines run before the job (module load, source venv/bin/activate)")

    @field_validator("setup")
    @classmethod
    def _one_line_each(cls, lines: list[str]) -> list[str]:
        for line in lines:
            if "\n" in line or line.lstrip().startswith("#SBATCH"):
                raise ValueError(f"setup line {line!r}: one shell line an entry, and no #SBATCH directives")
        return lines


def load_cluster(path: Path) -> SlurmCluster:
    """Read a cluster file, or the shipped one of a bare name such as ``slurm``.

    Raises:
        ConfigError: the file is missing or malformed, or a key or value is not valid.
    """
    mapping = load_mapping(path)
    try:
        return SlurmCluster.model_validate(mapping)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, SlurmCluster)}") from None
