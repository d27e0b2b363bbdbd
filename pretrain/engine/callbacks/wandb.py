"""``run.callbacks.wandb`` sends the run to Weights & Biases. It needs ``wandb login``, or ``WANDB_MODE=offline``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.base.errors import ConfigError
from pretrain.engine.callbacks.tracking import Tracker, title
from pretrain.engine.loop import Run


class WeightsAndBiases(Tracker):
    """Keeps one W&B run for a run folder. No code, console output, command line or host name is sent.

    A resumed run does some steps again; W&B keeps the rows that it has already.

    Args:
        project: the W&B project.
        entity: the W&B user or team; unset = the default of the login.
        name: the run's name; unset = that of the run folder.
    """

    key = "wandb"

    def __init__(self, *, project: str, entity: str | None = None, name: str | None = None) -> None:
        super().__init__()
        self._project, self._entity, self._name = project, entity, name

    def start(self, run: Run, config: Mapping[str, Any], known: str | None) -> str:
        import wandb

        quiet = wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_meta=True, silent=True)
        try:
            self._run: Any = wandb.init(
                project=self._project, entity=self._entity, name=self._name or title(run), dir=str(run.dir),
                config=dict(config), id=known, resume="allow" if known else None, settings=quiet,
            )  # fmt: skip
        except wandb.Error as error:
            raise ConfigError(f"run.callbacks.wandb: {error}") from error
        return str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, done: bool, stopped: bool) -> None:
        self._run.finish(exit_code=0 if done or stopped else 1)
