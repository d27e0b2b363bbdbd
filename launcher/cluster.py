"""The settings of a Slurm cluster: a small YAML file (``configs/cluster/slurm.yaml`` shows them all)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError, field_validator

from launcher.address import Slots
from pretrain.base.errors import ConfigError
from pretrain.config.base import Section
from pretrain.config.load import explain, load_mapping

_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:&|()*=+@/-]{1,200}$")]


_Line = Annotated[str, Field(max_length=10_000)]
_Count = Annotated[int, Field(ge=0, le=100_000)]


class SlurmCluster(Section):
    """Nodes, ranks and limits of a Slurm job. What is None or 0 is left to the cluster's own defaults."""

    model_config = ConfigDict(strict=True)

    nodes: Annotated[int, Field(ge=1, le=100_000)] = 1
    ranks_per_node: Slots = 1
    cpus_per_rank: _Count = 0
    gpus_per_node: _Count = 0
    time: _Word | None = None
    partition: _Word | None = None
    account: _Word | None = None
    qos: _Word | None = None
    constraint: _Word | None = None
    save_before_end: int = Field(
        120, ge=1, le=65535, description="seconds before the time limit at which the job saves and stops"
    )
    requeue: bool = Field(True, description="queue the job again when it stopped early or failed, so that it continues")
    restarts: int = Field(
        3,
        ge=0,
        le=1000,
        description="times that a job which failed is queued again, each after at least one more step",
    )
    setup: list[_Line] = Field(
        [], max_length=1000, description="shell lines run before the job (module load, source venv/bin/activate)"
    )

    @field_validator("setup")
    @classmethod
    def _one_line_each(cls, lines: list[str]) -> list[str]:
        for line in lines:
            if not line.replace("\t", " ").isprintable() or line.lstrip().startswith("#SBATCH"):
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
