"""The settings of a Slurm cluster: a small YAML file (``configs/cluster/slurm.yaml`` shows them all)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from capt.launcher.ssh import Slots
from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.base import Section
from capt.pretrain.config.load import explain, load_mapping

_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:&|()*=+@/-]{1,200}$")]


_Line = Annotated[str, Field(max_length=10_000)]
_Argument = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=4096)]
_Directive = Annotated[str, Field(pattern=r"^--?[A-Za-z][^\x00-\x1f\x7f]*$", max_length=4096)]
_OWN_DIRECTIVES = {
    **{name: name for name in ("nodes", "time", "partition", "account", "qos", "constraint", "array")},
    "N": "nodes", "t": "time", "p": "partition", "A": "account", "q": "qos", "C": "constraint", "a": "array",
    "ntasks-per-node": "ranks_per_node", "gpus-per-node": "gpus_per_node", "cpus-per-task": "cpus_per_rank",
    "c": "cpus_per_rank", "requeue": "requeue", "no-requeue": "requeue", "signal": "save_before_end",
    "output": "", "o": "", "open-mode": "", "export": "", "wrap": "",
}  # fmt: skip
"""Options of sbatch that other keys set, and those on which the script relies."""
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

    extra: list[_Directive] = Field(
        [], max_length=1000, description="further options of sbatch, one each (--mem=0, --exclusive, --mail-type=END)"
    )
    array: Annotated[str, Field(pattern=r"^[0-9,:-]{1,200}(%[1-9][0-9]{0,5})?$")] | None = Field(
        None,
        description="tasks of a job array (sbatch --array): 1-8%1 continues one run after the other, where a cluster "
        "queues no job again; with array_key each task is a run of its own",
    )
    array_key: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,200}$")] | None = Field(
        None, description="key that each task sets to its number, such as run.seed; its run folder is run.dir/NUMBER"
    )
    srun: list[_Directive] = Field(
        [], max_length=1000, description="further options of srun on each node (--container-image=... of pyxis)"
    )
    container: list[_Argument] = Field(
        [], max_length=1000, description="words before Python on each node: [apptainer, exec, --nv, capt.sif]"
    )
    python: _Argument | None = Field(None, description="Python on the nodes, in the container; null = the same path")

    @model_validator(mode="after")
    def _array_shares_no_folder(self) -> SlurmCluster:
        if self.array_key is not None and self.array is None:
            raise ValueError("array_key needs array: the numbers of the tasks")
        if self.array is not None and self.array_key is None and not self.array.endswith("%1"):
            raise ValueError(
                f"array {self.array}: its tasks share a run folder: write %1 after it, so that one runs after the "
                "other, or set array_key"
            )
        return self

    @field_validator("extra")
    @classmethod
    def _own_directives_stay(cls, lines: list[str]) -> list[str]:
        for line in lines:
            name = line.lstrip("-").partition("=")[0].partition(" ")[0]
            if name in _OWN_DIRECTIVES:
                where = f"set {_OWN_DIRECTIVES[name]}" if _OWN_DIRECTIVES[name] else "the script relies on its own"
                raise ValueError(f"{line!r}: {where}")
        return lines

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
