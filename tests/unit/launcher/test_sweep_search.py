"""A search that is killed at any moment tries the settings that it would have tried, and none twice."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from capt.launcher.sweep.config import Sweep
from capt.launcher.sweep.search import METRIC, OptunaSettings, Population, scheduler
from capt.launcher.sweep.trial_log import DrawnSettings
from capt.launcher.sweep.trials import StudyPlan, TrialSpec, setting_key, trial_specs

RANGES = {
    "optimizer.lr": {"loguniform": [1e-4, 1e-2]},
    "contrast.queue": {"randint": [0, 5000]},
    "model.size": {"choice": ["a", "b"]},
}
FEW = {"contrast.queue": {"randint": [1, 3]}, "model.size": {"choice": ["a", "b"]}}


def a_sweep(space: Mapping[str, Any], samples: int, kind: str = "optuna", seeds: int = 2, **parts: Any) -> Sweep:
    study = {"base": "capt_tiny", "metric": "accuracy"}
    search = {"type": kind, "samples": samples, "seed": 3}
    section = {"seeds": list(range(seeds))}
    return Sweep.model_validate({"sweep": section, "studies": {"s": study}, "space": space, "search": search, **parts})


class Search:
    """Runs the trials of a study as Tune does, some at a time, and is killed as often as ``kills`` says."""

    def __init__(self, folder: Path, sweep: Sweep, at_once: int, kills: float, seed: int = 0) -> None:
        self.folder, self.sweep, self.at_once, self.kills = folder, sweep, at_once, kills
        self.random = random.Random(seed)
        self.seeds = sweep.sweep.seeds
        self.over: dict[str, dict[int, float]] = {}
        self.killed = 0

    def run(self) -> list[str]:
        """Run all trials; the settings that were tried, in the order in which they were begun."""
        begun: dict[str, None] = {}
        while not self.ends(begun):
            self.killed += 1
            if self.random.random() < 0.5:  # the line that was being written is torn
                path = self.folder / "drawn.jsonl"
                with path.open("a") as file:
                    file.write('{"study": "s", "par')
        return list(begun)

    def ends(self, begun: dict[str, None]) -> bool:
        """Start once, until a kill or the end."""
        drawn = DrawnSettings(self.folder, StudyPlan("s", "accuracy", "max", {}, self.folder / "trials"))
        search = OptunaSettings(self.sweep, "s", drawn, self.seeds)
        running: dict[str, tuple[str, int]] = {}
        number, left = 0, search.left
        while True:
            while len(running) < self.at_once and left:
                trial = search.suggest(str(number))
                if isinstance(trial, str):
                    left = 0
                    break
                number, left = number + 1, left - 1
                spec = trial["trial"]["spec"]
                key = setting_key(spec.params)
                assert trial["trial"]["params"] == spec.params
                begun.setdefault(key)
                running[str(number - 1)] = key, spec.seed
            again = any(seed in self.over.get(key, {}) for key, seed in running.values())  # over before a kill
            if not again and self.random.random() < self.kills:
                return False
            if not running:
                return True
            name = self.random.choice(list(running))
            key, seed = running.pop(name)
            score = math.sin(len(key) + hash_of(key)) + seed
            self.over.setdefault(key, {})[seed] = score
            search.on_trial_complete(name, {METRIC: score})


def hash_of(text: str) -> float:
    return float(sum(map(ord, text)) % 97)


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_killed_search_continues_its_sequence(tmp_path: Path, seeds: int) -> None:
    """Beyond ten settings TPE learns from the results, which come in one order where trials run one after the other."""
    for number, (space, samples, at_once) in enumerate(
        [(RANGES, 1, 1), (RANGES, 2, 1), (RANGES, 9, 4), (RANGES, 16, 1), (FEW, 6, 1), (FEW, 20, 1)]
    ):
        sweep = a_sweep(space, samples, seeds=seeds)
        folders = [tmp_path / f"{number}-{name}" for name in ("whole", "killed")]
        for folder in folders:
            folder.mkdir()
        whole = Search(folders[0], sweep, at_once, 0.0).run()
        assert len(whole) == min(samples, 6) if space is FEW else len(whole) == samples, "as many different ones"
        killed = Search(folders[1], sweep, at_once, 0.3)
        assert set(killed.run()) == set(whole)
        assert killed.killed or samples < 3
        assert all(len(found) == seeds for found in killed.over.values()), "every seed of each"


def test_what_an_older_sweep_has_begun_counts(tmp_path: Path) -> None:
    """Its folder has no list of settings: the trials' own folders tell."""
    from capt.launcher.sweep.trial_log import write_spec

    study = StudyPlan("s", "accuracy", "max", {}, tmp_path / "trials" / "s")
    params = {"optimizer.lr": 2e-4, "contrast.queue": 7, "model.size": "a"}
    other = {"optimizer.lr": 0.5}  # of another space
    for each in (params, other):
        spec = TrialSpec("s", each, 0)
        study.run_dir(spec).mkdir(parents=True)
        write_spec(study.run_dir(spec), spec)
    search = OptunaSettings(a_sweep(RANGES, 2), "s", DrawnSettings(tmp_path, study), [0])
    first, second = search.suggest("1"), search.suggest("2")
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert first["trial"]["spec"] == TrialSpec("s", params, 0) != second["trial"]["spec"]
    assert search.left == 0


def test_more_samples_keep_the_settings_of_before() -> None:
    few, many = ([spec.key for spec in trial_specs(a_sweep(RANGES, n, "random"), "s")] for n in (3, 8))
    assert few == many[: len(few)]


def test_a_population_that_is_continued_draws_its_own_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws belong to the member and its time, whatever else was drawn before; two times have other ones."""
    monkeypatch.setattr(
        Population.__mro__[1], "_checkpoint_or_exploit", lambda self, trial, *_: draws.append(random.random())
    )
    sweep = a_sweep({"optimizer.lr": RANGES["optimizer.lr"]}, 4, "random", scheduler={"type": "pbt"})
    draws: list[float] = []

    class Member:
        def __init__(self, number: int) -> None:
            self.config = {"trial": {"spec": TrialSpec("s", {"optimizer.lr": 1e-3}, number)}}

    class State:
        last_train_time = 0

    members = [Member(number) for number in range(2)]
    for times in ((1, 2, 3), (2, 3)):  # the second one was killed after its first change
        population = scheduler(sweep, "s")
        assert isinstance(population, Population)
        for time in times:
            for member in members:
                population._trial_state = {member: type("At", (State,), {"last_train_time": time})()}
                population._checkpoint_or_exploit(member, None, [], [])
    assert draws[2:6] == draws[6:]
    assert len(set(draws[:6])) == 6
