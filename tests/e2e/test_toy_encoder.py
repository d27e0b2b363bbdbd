"""An encoder of another distribution: trained, resumed, exported, imported and evaluated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from capt.finetune.load import load_backbone
from capt.pretrain import registry
from capt.pretrain.base.errors import CheckpointError, ConfigError
from capt.pretrain.config.load import job_from_mapping
from capt.pretrain.config.reader import job_to_yaml
from capt.pretrain.language.evaluate import evaluate
from capt.pretrain.language.export import command as export
from capt.pretrain.language.import_hf import command as import_hf
from capt.pretrain.language.load import load_hf, load_model
from capt.pretrain.models.architecture import ENCODERS, encoder_class
from capt.pretrain.models.capt import CaptModel
from capt.pretrain.models.config import RobertaConfig
from capt.pretrain.models.hf_map import HEAD, TIED, from_hf, to_hf
from tests.language import language_mapping, write_corpus
from tests.runs import rows_of
from tests.support import run_ranks, stopped_at

ENTRIES = """[capt.encoders]
toy = tests.toy_encoder.config:ToyConfig
absent = tests.toy_encoder.config:Nothing
other = tests.toy_encoder.encoder:ToyEncoder
"""


def _use(folder: Path) -> None:
    """Make this process see what is installed in ``folder``."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    registry.entry_point_values.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An installed distribution with one good encoder, and two entry points that lead to none."""
    folder = tmp_path_factory.mktemp("packages")
    info = folder / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    _use(folder)
    yield folder
    sys.path.remove(str(folder))
    registry.entry_point_values.cache_clear()


OWN: dict[str, dict[str, Any]] = {"toy": {"segments": 3}}
"""Keys of an encoder that others do not have."""
CLASSES = {"toy": "ErnieForMaskedLM"}


def _mapping(folder: Path, arch: str) -> dict[str, Any]:
    mapping = language_mapping(folder, schedule={"max_steps": 2, "warmup_steps": 1}, checkpoint={"every": 1})
    mapping["model"] = {**mapping["model"], "arch": arch, **OWN[arch]}
    return mapping


def _run(packages: Path, mapping: dict[str, Any], resume: bool) -> int:
    from capt.pretrain.engine.run import run_job

    _use(packages)
    return run_job(job_from_mapping(mapping, "test"), resume=resume)


@pytest.fixture(scope="module", params=OWN)
def run(request: pytest.FixtureRequest, distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that was interrupted after its first step."""
    folder = tmp_path_factory.mktemp(request.param)
    mapping = _mapping(folder, request.param)
    stopped = stopped_at(mapping, 1)
    assert run_ranks(_run, 2, distribution, stopped, False) == [75, 75]
    assert run_ranks(_run, 2, distribution, mapping, True) == [0, 0]
    return folder / "run"


def test_it_is_pretrained_and_resumed(run: Path) -> None:
    assert [row["step"] for row in rows_of(run) if "loss/capt" in row] == [1, 2]
    written = yaml.safe_load((run / "config.yaml").read_text())["model"]
    assert written.items() >= OWN[written["arch"]].items()
    config = load_model(run).model.config
    assert config.arch == written["arch"]
    assert config.model_dump().items() >= OWN[config.arch].items()


def test_a_resumed_run_is_the_uninterrupted_one(run: Path, distribution: Path, tmp_path: Path) -> None:
    mapping = _mapping(run.parent, load_model(run).model.config.arch)
    mapping["run"] = {**mapping["run"], "dir": str(tmp_path / "whole")}
    assert run_ranks(_run, 2, distribution, mapping, False) == [0, 0]
    weights, whole = load_model(run).model.state_dict(), load_model(tmp_path / "whole").model.state_dict()
    assert all(torch.equal(weights[name], whole[name]) for name in whole)


def test_its_names_cover_the_model_both_ways(run: Path) -> None:
    model = load_model(run).model
    state = {name: x for name, x in model.state_dict().items() if not name.startswith(HEAD)}
    assert set(model.config.hf_names()) | TIED == set(state)
    back = from_hf(to_hf(state, model.config), model.config)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_it_is_exported_imported_and_evaluated(run: Path, tmp_path: Path) -> None:
    """The exports compare themselves with transformers, and refuse a difference above 1e-5."""
    from transformers import AutoModelForMaskedLM

    folder = export(run, tmp_path / "hf", to="hf")
    arch = load_model(run).model.config.arch
    assert type(AutoModelForMaskedLM.from_pretrained(folder)).__name__ == CLASSES[arch]
    export(run, tmp_path / "st", to="sentence-transformers", pooling="mean")
    import_hf(folder, tmp_path / "imported")
    ours, again, there = load_model(run).model, load_model(tmp_path / "imported").model, load_hf(folder).model
    assert again.config.arch == there.config.arch == arch
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(there.state_dict()[name], tensor, rtol=0, atol=0)
    text = write_corpus(tmp_path / "held_out.txt", seed=3)
    sections = evaluate(run, text=[text], samples=8, poolers=["mean"])["sections"]
    assert sections[0]["metrics"]["loss/mlm"] > 0


def test_what_is_fine_tuned_is_what_was_trained(run: Path) -> None:
    model = load_model(run).model
    backbone = load_backbone(run)
    tokens = torch.randint(5, 300, (3, 20))
    tokens[1, 15:] = model.config.pad_id
    with torch.no_grad():
        theirs = backbone.encoder.eval()(tokens, padded=True)
        ours = model.encode(tokens, padded=True)
    real = tokens != model.config.pad_id
    torch.testing.assert_close(theirs[real], ours[real], rtol=1e-5, atol=1e-5)


def test_one_without_a_classifier_is_an_encoder_of_pairs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.toy_encoder.config import ToyConfig
    from tests.toy_encoder.encoder import ToyEncoder

    monkeypatch.setattr(ToyConfig, "hf", replace(ToyConfig.hf, classifier=None))
    assert isinstance(load_backbone(run).encoder, ToyEncoder)


def test_other_weights_than_the_jobs_are_named(run: Path, tmp_path: Path) -> None:
    from capt.pretrain.language.prepare import prepare

    folder, arch = export(run, tmp_path / "hf", to="hf"), load_model(run).model.config.arch
    mapping = language_mapping(run.parent)
    mapping["model"] = {"init": str(folder), "arch": "roberta"}
    with pytest.raises(
        CheckpointError, match=rf"model\.arch is {arch} there but roberta in this job; set it to {arch}"
    ):
        prepare(job_from_mapping(mapping, "test"))
    for given in ({"arch": arch}, {}):  # unset it is that of the folder
        mapping["model"] = {"init": str(folder), **given}
        assert prepare(job_from_mapping(mapping, "test")).model_config.model_dump().items() >= OWN[arch].items()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"arch": "toi"}, "model: arch: unknown encoder 'toi'; did you mean 'toy'?"),
        ({"arch": "absent"}, "the entry point 'tests.toy_encoder.config:Nothing' of capt.encoders cannot be imported"),
        ({"arch": "other"}, "'tests.toy_encoder.encoder:ToyEncoder' of capt.encoders is not a subclass of Encoder"),
        ({"arch": 3}, "model: arch: 3 is not a name of an encoder"),
        ({"arch": "toy", "size": "large"}, "model: size 'large' is unknown to model.arch 'toy'; valid: small, custom"),
        ({"arch": "toy", "segmnts": 2}, "model.segmnts: unknown key; did you mean 'segments'?"),
        ({"arch": "roberta", "segments": 2}, "model.segments: a key of another kind of model, not of"),
    ],
)
def test_what_is_no_encoder_is_one_sentence(tmp_path: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        job_from_mapping(language_mapping(tmp_path) | {"model": model}, "test")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_documents_are_refused_where_attention_cannot_be_kept_inside_them(tmp_path: Path) -> None:
    mapping = _mapping(tmp_path, "toy")
    mapping["data"]["cross_document_attention"] = False
    with pytest.raises(ConfigError, match=r"model\.arch toy cannot keep attention inside documents; set it to true"):
        job_from_mapping(mapping, "test")


def test_a_job_without_the_key_is_roberta(tmp_path: Path) -> None:
    """Configurations that older releases wrote have no ``model.arch``."""
    mapping = language_mapping(tmp_path)
    job: Any = job_from_mapping(mapping, "test")
    assert type(job.model) is RobertaConfig
    written = yaml.safe_load(job_to_yaml(job))
    assert written["model"].pop("arch") == "roberta"
    assert job_from_mapping(written, "test") == job


@pytest.mark.parametrize("name", [*ENCODERS, "toy"])
def test_every_encoder_is_whole(name: str) -> None:
    config: Any = encoder_class(name)
    small = config(size="small", layers=3, vocab_size=99, max_positions=16)
    assert config.from_hf(small.to_hf(bos_id=0, eos_id=2)) == small.model_copy(update={"size": "custom"})
    state = CaptModel(small).state_dict()
    assert set(small.hf_names()) | TIED == {key for key in state if not key.startswith(HEAD)}
    assert all(state[tensor].shape[axis] for tensor, axis in config.hf.sizes.values())
    assert 0.5 * sum(x.numel() for x in state.values()) < small.elements
    code = f"import sys, {config.__module__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
