"""Every shipped YAML loads, fits its world sizes, can be launched; and no mistyped key of it passes."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LxmertConfig

from capt.finetune.glue.tasks import GLUE
from capt.finetune.visual.config import TASKS as VISUAL
from capt.launcher.backends.slurm import load_cluster
from capt.launcher.commands.config import _table
from capt.launcher.kubernetes.settings import KubernetesCluster, load_kubernetes
from capt.launcher.plan import Options, job_file
from capt.launcher.start import begin
from capt.launcher.sweep.config import load_sweep
from capt.launcher.sweep.run import run_sweep
from capt.launcher.sweep.trials import trial_specs
from capt.pretrain.base.errors import ConfigError, UserError
from capt.pretrain.config.load import job_from_mapping, load_job, load_mapping, resolve_path, shipped_jobs
from capt.pretrain.config.reader import to_yaml
from capt.pretrain.config.schema import Job
from capt.pretrain.engine.engines.deepspeed_config import deepspeed_config
from capt.pretrain.regions.writer import write_store
from tests.families.pictures.regions.pictures import random_pictures
from tests.finetune import write_encoder, write_vocabulary
from tests.support import Capt

CONFIGS = Path(__file__).parents[2] / "capt" / "configs"
FILES = sorted(path for kind in ("pretrain", "finetune") for path in (CONFIGS / kind).rglob("*.yaml"))
JOBS = [path for path in FILES if not path.stem.startswith("_")]
BASES = [path for path in FILES if path.stem.startswith("_")]
SWEEPS = sorted((CONFIGS / "sweep").glob("*.yaml"))
_OF_FAMILIES = ("vqa", "gqa", "nlvr2", "latent_")
TRIED = [
    pytest.param(path, marks=pytest.mark.family if path.stem.startswith(_OF_FAMILIES) else (), id=path.stem)
    for path in SWEEPS
]
CLUSTERS = sorted((CONFIGS / "cluster").glob("*.yaml"))
WORLDS = (1, 2, 8)
PICTURES = [
    *("data.regions=@/store", "data.train=@/train.json", "data.validation=@/validation.json", "model.init=@/lxmert")
]
# What a shipped job or sweep leaves to its user, by its name or its task; @ is the folder that ``here`` makes.
NEEDS = {
    "capt_tiny": [],
    "capt_pairs": ["data.files=@/pairs.jsonl", "model.init=@/encoder"],
    "capt_distil": ["data.files=@/text.txt", "model.init=@/encoder", "distillation.vectors=@/vectors"],
    "capt_vl": ["data.regions=@/store", "data.train=@/train.json"],
    "capt_vl_small": [],
    "capt_vl_microworld": [],
    "capt_text": [],
    "mlm_tiny": [],
    "modernbert_tiny": [],
    "capt_language": ["data.files=@/text.txt"],
    **{
        key: ["data.files=@/text.txt", "model.init=USER/NAME"]
        for key in ("capt_continue", "capt_adapt", "capt_text_continue", "modernbert_continue")
    },
    "glue": ["data.path=@/glue", "model.init=@/encoder"],
    "labels": ["data.train=@/mine.csv", "model.init=@/encoder"],
    "rerank": ["data.train=@/pairs.jsonl", "model.init=@/encoder"],
    "ace": ["data.files=@/text.txt"],
    "finetune": ["data.files=@/text.txt", "model.init=@/vectors.txt"],
    "latent": ["data.path=@/ptb"],
    "capt_tiny_sweep": [],
    "capt_figure3_left": ["data.files=@/text.txt"],
    "capt_figure3_right": ["data.files=@/text.txt"],
    "glue_small": ["data.path=@/glue", "model.init=@/encoder"],
    **dict.fromkeys(VISUAL, PICTURES),
    **{key: ["data.path=@/ptb"] for key in ("latent_table1", "latent_table2_yahoo", "latent_table2_yelp")},
}

LOADS: dict[str, Callable[[Path], Any]] = {"slurm": load_cluster, "kubernetes": load_kubernetes}


def test_every_shipped_file_is_looked_at() -> None:
    assert set(CONFIGS.rglob("*.yaml")) == {*JOBS, *BASES, *SWEEPS, *CLUSTERS}
    assert {f"{kind}_{size}" for kind in ("capt", "mlm") for size in ("tiny", "small", "base", "large")} <= {
        path.stem for path in JOBS
    }


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of every kind, as far as a dry run looks."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "text.txt").write_text("some text\n")
    (folder / "mine.csv").write_text("text,label\na text,yes\n")
    (folder / "pairs.jsonl").write_text('{"query": "a question", "pos": ["an answer"]}\n')
    (folder / "vectors.txt").write_text("some 1 2 3\n")
    for task in GLUE.values():
        (folder / "glue" / task.folder).mkdir(parents=True)
        for split in task.splits:
            (folder / "glue" / task.folder / f"{split}.tsv").write_text("index\n")
    write_store(folder / "store", random_pictures(2), features_of={"backend": "test"})
    for split in ("train", "validation"):
        (folder / f"{split}.json").write_text("[]\n")
    write_encoder(folder / "encoder", max_position_embeddings=514)
    vocabulary = write_vocabulary(folder / "lxmert", bert=True)
    (folder / "lxmert" / "config.json").write_text(LxmertConfig(vocab_size=vocabulary).to_json_string(use_diff=False))
    (folder / "ptb").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "ptb" / f"ptb.{split}.txt").write_text("a sentence\n")
    return folder


def _needs(path: Path, here: Path | str = "nowhere") -> list[str]:
    return [text.replace("@", str(here)) for text in _unfilled(path)]


@functools.cache
def _unfilled(path: Path) -> list[str]:
    mapping = load_mapping(path)
    if mapping.get("data", {}).get("clusters"):
        return []
    return NEEDS[path.stem if path.stem in NEEDS else mapping["task"]["type"]]


@functools.cache
def _job(path: Path) -> Job:
    """A shipped job, which no test changes."""
    return load_job(path, _needs(path))


def test_job_loads_by_name() -> None:
    for path in JOBS:
        assert resolve_path(_name(path)).samefile(path)
        job = _job(path)
        assert job.run.dir.parts[0] == "runs"
        assert job.run.dir.name.endswith(path.stem)
    assert load_job(_name(path), _needs(path)) == job


def test_no_two_shipped_jobs_share_a_run_folder() -> None:
    folders = [_job(path).run.dir for path in JOBS]
    assert len(set(folders)) == len(folders)


def _name(path: Path) -> str:
    """The shortest name that no other shipped file has."""
    parts = path.relative_to(CONFIGS).with_suffix("").parts
    names = ["/".join(parts[start:]) for start in reversed(range(len(parts)))]
    return next(name for name in names if sum(f"/{other}".endswith(f"/{name}.yaml") for other in FILES) == 1)


@pytest.mark.parametrize("path", TRIED)
def test_sweep_loads_and_its_jobs_are_valid(path: Path, tmp_path: Path, here: Path) -> None:
    needs = [*_needs(path, here), f"sweep.dir={tmp_path / 'out'}"]
    shown: list[str] = []
    assert run_sweep(path.stem, needs, show=shown.append) == 0
    sweep = load_sweep(path.stem, needs)
    trials = sum(len(trial_specs(sweep, study)) for study in sweep.studies)
    assert f"# {trials} trials of" in shown[0]
    assert path.stem != "glue" or trials == 8 * 6 * 5
    assert not (tmp_path / "out").exists()


def test_a_job_of_the_paper_contrasts_the_same_rows_on_any_number_of_ranks() -> None:
    """Its "size of 128" without a queue: both views of the 64 sequences of one of 32 devices, 2,048 in all."""
    for size in ("small", "base", "large"):
        section = load_job(f"capt_{size}_paper", ["data.files=x.txt"]).model_dump(by_alias=True)["contrast"]
        assert (section["in_batch"], section["cached"], section["queue"]) == ("local", False, 8192)
        assert (section["drift"], section["queue_share"]) == ("none", None)
    batch = load_job("capt_small_paper", ["data.files=x.txt"]).batch
    assert (2 * (batch.micro or 0), batch.global_ // (batch.micro or 1)) == (128, 32)


def test_batches_fit_the_world_or_are_refused() -> None:
    for path, world in itertools.product(JOBS, WORLDS):
        job = _job(path)
        size, most = job.batch.global_, job.micro_batch(world)
        if size % (most * world) and not job.shares_unevenly:
            with pytest.raises(ConfigError, match=r"batch\.global .* x accumulation x"):
                deepspeed_config(job, world)
            continue
        generated = deepspeed_config(job, world)
        accumulation = generated["gradient_accumulation_steps"]
        assert generated["train_micro_batch_size_per_gpu"] * accumulation * world == generated["train_batch_size"]
        assert size <= generated["train_batch_size"] < size + most * world
        assert generated["zero_optimization"]["stage"] == job.engine.zero_stage
        assert ("torch_autocast" in generated) == (job.engine.precision == "bf16")


def test_precision_is_chosen() -> None:
    """The default, fp32, is many times slower on a GPU than the products of an encoder need to be."""
    for path in JOBS:
        job = _job(path)
        assert "precision" in job.engine.model_fields_set or job.task.type in ("ace", "latent")


def test_job_can_be_launched(tmp_path: Path, here: Path) -> None:
    for path in JOBS:
        shown: list[str] = []
        job = load_job(path, _needs(path, here))
        assert job.check_inputs()
        overrides = [*_needs(path, here), f"run.dir={tmp_path / 'run'}"]
        if job.batch.micro is not None:
            overrides.append(f"batch.micro={job.batch.global_ // 2}")
        assert begin("capt.pretrain", str(path), overrides, Options(nproc=2), debug=False, show=shown.append) == 0
        (plan,) = shown
        merged = to_yaml(load_mapping(path, overrides))
        file = job_file(tmp_path / "run", merged)
        assert f"-m capt.pretrain {file} --merged" in plan
        assert f"# file that would be written: {file}\n{merged.rstrip()}\n" in plan
        assert f"batch.global {job.batch.global_} = " in plan
        assert f"# {job.check_inputs()[0]}\n" in plan
        assert not (tmp_path / "run").exists(), "a dry run writes nothing"


@pytest.mark.parametrize("path", [each for each in TRIED if NEEDS[str(each.id)]])
def test_a_sweep_without_its_data_is_refused_before_anything_starts(path: Path, tmp_path: Path) -> None:
    overrides = [*_needs(path, tmp_path / "nowhere"), f"sweep.dir={tmp_path / 'sweep'}"]
    with pytest.raises(UserError, match="nowhere"):
        run_sweep(path.stem, overrides, show=lambda text: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large"])
def test_baseline_differs_in_the_contrast_alone(size: str) -> None:
    capt, mlm = (load_job(f"{kind}_{size}").model_dump(by_alias=True) for kind in ("capt", "mlm"))
    assert {key for key in capt if capt[key] != mlm[key]} == {"run", "contrast"}
    assert capt["run"] | {"dir": mlm["run"]["dir"]} == mlm["run"]
    assert capt["contrast"] | {"weight": 0.0, "queue": 0} == mlm["contrast"]


def test_paper_hyperparameters() -> None:
    """CAPT, Appendix A."""
    for name, batch, steps, warmup, lr in (
        ("capt_small", 2048, 200_000, 10_000, 5e-4),
        ("capt_large", 8192, 500_000, 30_000, 6e-4),
    ):
        job = load_job(name).model_dump(by_alias=True)
        assert job["batch"]["global"] == batch
        assert job["schedule"] | {"max_steps": steps, "warmup_steps": warmup, "type": "linear"} == job["schedule"]
        adam = {"type": "adamw", "lr": lr, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.01}
        assert job["optimizer"] | adam == job["optimizer"]
        assert job["contrast"]["queue"] == 8192
        assert job["contrast"]["temperature"]["type"] == "inverted_triangle"
        assert job["model"]["dropout"] == job["model"]["attention_dropout"] == 0.1


def test_no_shipped_queue_is_without_a_guard_but_those_of_the_paper() -> None:
    """A plain queue has collapsed every small encoder that it was tried on; only the letter of the paper ships it."""
    plain = set()
    for path in JOBS:
        contrast = getattr(_job(path), "contrast", None)
        if contrast is None or not contrast.weight or not contrast.queue or not hasattr(contrast, "drift"):
            continue
        guarded = (contrast.drift, contrast.queue_share) == ("moments", 1)
        if not guarded and not contrast.queue_start:
            plain.add(path.stem)
    assert plain == {"capt_small_paper", "capt_base_paper", "capt_large_paper", "capt_vl_paper"}


@pytest.mark.family
def test_vision_language_baseline_differs_in_the_contrast_alone() -> None:
    """Beside what LXMERT itself does otherwise: its batch, the length that follows from it, and BERT's Adam."""
    capt, lxmert = (load_job(name).model_dump(by_alias=True) for name in ("capt_vl_qa", "lxmert"))
    differ = {key for key in capt if capt[key] != lxmert[key]}
    assert differ == {"run", "contrast", "batch", "schedule", "optimizer"}
    assert capt["contrast"] | {"weight": 0.0, "queue": 0} == lxmert["contrast"]
    assert capt["optimizer"] | {"type": "bert_adam"} == lxmert["optimizer"]
    assert capt["schedule"] | {"max_steps": 717_188, "warmup_steps": 35_859} == lxmert["schedule"]
    for job in (capt, lxmert):  # 20 epochs of 9.18 million sentences, 5% of warmup
        steps = job["schedule"]["max_steps"]
        assert steps == round(20 * 9_180_000 / job["batch"]["global"])
        assert job["schedule"]["warmup_steps"] == round(0.05 * steps)


def test_cluster_loads() -> None:
    for path in CLUSTERS:
        loaded = LOADS[path.stem](path)
        assert (loaded.pods if isinstance(loaded, KubernetesCluster) else loaded.nodes) >= 1
        left_out = type(loaded).model_fields.keys() - yaml.safe_load(path.read_text()).keys()
        assert not left_out, "the shipped file shows every key"


def _keys(value: Any, parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*parents, key)
        yield from _keys(inner, (*parents, key))


def _typos(path: tuple[str, ...]) -> set[str]:
    """The last key with a letter left out, typed twice, and swapped with the next: at a place that the path decides."""
    key, chance = path[-1], zlib.crc32(".".join(path).encode())
    i, j = chance % len(key), chance % max(len(key) - 1, 1)
    typos = {key[:i] + key[i + 1 :], key[:i] + key[i] + key[i:], key[:j] + key[j + 1 : j + 2] + key[j] + key[j + 2 :]}
    return typos - {key, ""}


def _renamed(mapping: dict[str, Any], path: tuple[str, ...], name: str) -> dict[str, Any]:
    changed = copy.deepcopy(mapping)
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[name] = node.pop(path[-1])
    return changed


def _message_of(mapping: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        job_from_mapping(mapping, "job.yaml")
    return str(caught.value)


def test_typos_of_every_key_are_refused_and_named() -> None:
    """Keys still required without the mistyped one are named instead of it (``task``, ``data``).

    A key that several jobs of a task set is mistyped in the first of them.
    """
    tried: set[tuple[str, ...]] = set()
    for path in JOBS:
        mapping = load_mapping(path, _needs(path))
        own = yaml.safe_load(path.read_text())
        own.pop("base", None)
        for keys in _keys(own):
            if (key := (mapping["task"]["type"], *keys)) in tried:
                continue
            tried.add(key)
            for typo in sorted(_typos(keys)):
                if typo in (node := _at(mapping, keys[:-1])):
                    raise AssertionError(f"{typo} is a key of {node}: the test needs another word")
                message = _message_of(_renamed(mapping, keys, typo))
                wrong, right = ".".join([*keys[:-1], typo]), ".".join(keys)
                assert wrong in message or right in message, message
                assert "\n" not in message


def _at(mapping: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    for key in keys:
        mapping = mapping[key]
    return mapping


def test_nearest_key_is_suggested() -> None:
    message = _message_of(_renamed(load_mapping("capt_tiny"), ("contrast", "queue"), "qeue"))
    assert message == "job.yaml: contrast.qeue: unknown key; did you mean 'queue'?"


def test_typo_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: capt_tiny\noptimizer: {leraning_rate: 1.0e-3}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: optimizer\.leraning_rate: unknown key"):
        load_job(file)


def test_typo_in_an_override_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lrr: unknown key; did you mean 'lr'"):
        load_job("capt_tiny", ["optimizer.lrr=1e-3"])


def test_typo_in_a_cluster_file_is_refused(tmp_path: Path) -> None:
    for path in CLUSTERS:
        mapping = yaml.safe_load(path.read_text())
        file = tmp_path / "cluster.yaml"
        required = {key: mapping[key] for key in mapping if key == "image"}  # without it that is the first error
        for key in mapping:
            file.write_text(yaml.safe_dump({**_renamed(mapping, (key,), key[:-1]), **required}))
            with pytest.raises(ConfigError, match=f"{key[:-1]}: unknown key; did you mean '{key}'"):
                LOADS[path.stem](file)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("validate.samples=1", "validation compares samples"),
        ("data.validation_files=text.txt", "training text too"),
        ("run.dir=text.txt/run", "run.dir text.txt/run: text.txt is a file"),
        ("data.cache=text.txt", "data.cache text.txt: text.txt is a file"),
        ("checkpoint.local.dir=text.txt", "checkpoint.local.dir text.txt"),
        ("run.callbacks={wandb: {}}", "the package wandb is not installed"),
    ],
)
@pytest.mark.parametrize("command", [["config", "validate"], ["pretrain", "--dry-run"]])
def test_what_a_job_refuses_without_torch_its_check_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capt: Capt, command: list[str], override: str, says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    (tmp_path / "text.txt").write_text("some words\n\nand more\n" * 50)
    code, _, err = capt(*command, "capt_tiny", "data.files=text.txt", override)
    assert code == 2
    assert says in err


@pytest.mark.parametrize("columns", [80, 200])
def test_the_list_of_jobs_fits_a_terminal_and_has_one_line_a_job_elsewhere(columns: int) -> None:
    jobs = shipped_jobs()
    plain, wrapped = _table(jobs, None).splitlines(), _table(jobs, columns).splitlines()
    assert [line.split(maxsplit=1) for line in plain] == [[name, text] for name, text in jobs.items()]
    assert max(map(len, wrapped)) <= columns
    assert [line.split()[0] for line in wrapped if not line.startswith(" ")] == list(jobs)
    assert " ".join(wrapped).split() == " ".join(plain).split()
