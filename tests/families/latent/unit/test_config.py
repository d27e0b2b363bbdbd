"""Presets, and what a job may not ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.config.load import load_job
from capt.pretrain.latent.config import LatentJob, ObjectiveSection
from capt.pretrain.latent.task import LatentTask
from capt.pretrain.latent.text_files import DataSection
from capt.pretrain.latent.training import beta_at
from tests.latent import PAPER, PRESETS, PTB

CLUSTERS = PTB.parent


def _load(name: str, *overrides: str) -> LatentJob:
    job = load_job(PTB / f"{name}.yaml", list(overrides))
    assert isinstance(job, LatentJob)
    return job


@pytest.mark.parametrize("name", sorted({*PRESETS, *PAPER}))
def test_presets_load_into_folders_of_their_own(name: str) -> None:
    assert _load(name).run.dir == Path(f"runs/ptb_{name}")


def test_every_preset_is_looked_at() -> None:
    assert {path.stem for path in PTB.glob("[!_]*.yaml")} == {*PRESETS, *PAPER}


@pytest.mark.parametrize("text", ["yahoo", "yelp"])
def test_rows_on_larger_text(text: str) -> None:
    files = sorted((PTB.parent / text).glob("[!_]*.yaml"))
    assert len(files) == 12
    for path in files:
        job = load_job(path)
        assert isinstance(job, LatentJob)
        assert job.run.dir == Path(f"runs/{text}_{path.stem}")
        assert (job.model.embedding, job.model.hidden, job.model.init_range) == (512, 1024, 0.01)
        assert (job.optimizer.lr, job.optimizer.clip, job.data.unknown) == (8e-4, 5.0, "_UNK")
        assert job.model.encoder_dropout == (0.1 if job.objective.views == 2 else 0.0)
        assert (job.critic.loss == "circle") == (path.stem in ("clvae_plus_mi", "clvae_plus_mi_paper"))


@pytest.mark.parametrize("text", ["ptb", "yahoo", "yelp"])
def test_every_implicit_row_comes_as_the_paper_writes_it(text: str) -> None:
    folder = PTB.parent / text
    rows = {path.stem: load_job(path) for path in folder.glob("[!_]*.yaml") if not path.stem.endswith("_code")}
    papers = {row.removesuffix("_paper") for row in rows if row.endswith("_paper")}
    released = {row: job for row, job in rows.items() if not row.endswith("_paper")}
    assert papers == {row for row, job in released.items() if isinstance(job, LatentJob) and job.has_critics}
    for row in papers:
        code, paper = released[row], rows[f"{row}_paper"]
        assert isinstance(code, LatentJob)
        assert isinstance(paper, LatentJob)
        assert (code.model.posterior, paper.model.posterior) == ("linear", "mlp")
        plus = paper.critic.loss == "circle"
        assert paper.critic.circle == ("sum_inside" if plus else "code")
        assert paper.critic.squared == ("posterior" if plus else "none")
        assert not paper.critic.squared_in_encoder
        assert not paper.contrast.mean_pair
        assert paper.contrast.prior_negatives == 0
        assert paper.schedule == code.schedule
        # Eq. 10: a sentence is told from the first views of the others; Eq. 15 and 16: what the encoder minimises.
        assert (code.contrast.negatives, code.objective.critic_term) == ("other_view", "mean")
        assert paper.contrast.negatives == ("own_view" if paper.contrast.weight else "other_view")
        term = "mean_inside" if plus else "mean"
        assert paper.objective == code.objective.model_copy(update={"critic_term": term})
        # Eq. 17: L_SQ is of the critic that represents the KL.
        assert not plus or paper.critic.squared_on == paper.objective.regularizer


def test_rows_of_the_table_differ_in_what_they_are_named_for() -> None:
    assert (_load("ivae").objective.regularizer, _load("ivae_mi").objective.regularizer) == ("f", "g")
    assert _load("clvae").contrast.weight == 1.0
    assert _load("clvae").contrast.temperature == 0.05
    for row in ("clvae_plus", "clvae_plus_mi"):
        job = _load(row)
        assert (job.critic.loss, job.critic.circle, job.critic.squared) == ("circle", "code", "all")
        assert job.contrast.mean_pair
        assert job.critic.squared_in_encoder == (row == "clvae_plus_mi")
        assert job.contrast.prior_negatives == (0 if row == "clvae_plus_mi" else 3)
    for row in PRESETS:
        job = _load(row)
        assert (job.optimizer.lr, job.optimizer.betas, job.optimizer.clip) == (1e-3, (0.9, 0.999), 5.0)
        assert (job.critic.lr, job.critic.updates) == (1e-5, 5)
        assert job.schedule.epochs == 40


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("vae", "objective.regularizer=f", r"regularizer f does not fit model\.posterior gaussian: it takes exact"),
        ("clvae", "objective.views=1", r"set objective\.views=2"),
        ("ivae", "objective.svi_steps=3", r"set model\.posterior=gaussian"),
        ("ivae", "critic.squared=all", r"critic\.squared compares two views"),
        ("ivae", "critic.squared_in_encoder=true", r"critic\.squared_in_encoder compares two views"),
        ("clvae_plus", "contrast.over=h", r"vectors of z: set contrast\.over=z"),
        ("vae", "engine.zero_stage=1", r"engine\.zero_stage"),
        ("vae", "data.clusters=1", r"data\.clusters"),
        ("vae", "model.latent=0", r"model\.latent: 0"),
        ("ivae_mi", "critic.trained=f", r"leaves no g"),
        ("clvae_plus", "critic.trained=f", r"leaves no g"),
        ("vae", "objective.critic_term=mean_inside", r"mean_inside needs a critic: set objective\.regularizer=f or g"),
        ("vae", "data.clusters=4 checkpoint.best=loss", r"set model\.dropout=0"),
        ("sa_vae", "objective.aggressive_updates=2", r"aggressive_updates needs"),
        ("sa_vae", "engine.precision=bf16", r"set engine\.precision=fp32"),
        ("sa_vae", "objective.views=2", r"set objective\.views=1"),
        ("ae", "objective.aggressive_updates=3", r"aggressive_updates needs model\.posterior=gaussian"),
        ("ivae", "model.noise=31", r"model\.noise 31 is less than model\.latent 32"),
        ("vae", "data.path=null", r"data\.path is missing"),
        ("vae", "data.unknown=</s>", r"data\.unknown: .*is not an ordinary word"),
        ("vae", "model.init_range=1e300", r"model\.init_range: .*less than or equal to 1000"),
        ("ivae", "critic.clamp=1e300", r"critic\.clamp: .*less than or equal to"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(name, *override.split())


@pytest.mark.parametrize("unknown", ["", "a b", "x\ny"])
def test_the_unknown_word_is_one_word(unknown: str) -> None:
    """With a line break in it the vocabulary of a run could not be read again, and the run was lost."""
    with pytest.raises(ValueError, match="not an ordinary word"):
        DataSection(path=Path("x"), unknown=unknown)


def _clusters(name: str) -> LatentJob:
    job = load_job(CLUSTERS / f"clusters_{name}.yaml")
    assert isinstance(job, LatentJob)
    return job


@pytest.mark.parametrize("k", [4, 8, 16])
def test_clusters_have_the_batches_of_the_toy(k: int) -> None:
    job = _clusters(f"k{k}")
    assert job.data.clusters == k
    assert job.batch.global_ == job.batch.micro == 64 * k
    assert job.run.dir == Path(f"runs/clusters_k{k}")


@pytest.mark.parametrize("name", ["k4", "k8", "k4_code", "k16", "k4_ivae", "k4_vae"])
def test_these_clusters_are_as_released_and_those_are_not(name: str) -> None:
    job = _clusters(name)
    ours = name in ("k4", "k8")
    assert (job.contrast.mask_duplicates, job.schedule.type) == ((True, "linear") if ours else (False, "constant"))


def test_other_rows_on_clusters() -> None:
    code, ivae, vae = (_clusters(f"k4_{row}") for row in ("code", "ivae", "vae"))
    assert (code.critic.loss, code.objective.views, code.contrast.weight) == ("circle", 2, 1.0)
    assert (ivae.critic.loss, ivae.objective.views, ivae.contrast.weight) == ("dual", 1, 0.0)
    assert (vae.model.posterior, vae.batch.global_, vae.optimizer.lr) == ("gaussian", 500, 2e-5)
    assert not vae.has_critics


def test_beta_reaches_one_after_nine_epochs_of_ten() -> None:
    section = ObjectiveSection()
    assert beta_at(0, 100, section) == pytest.approx(0.1)
    assert beta_at(450, 100, section) == pytest.approx(0.55)
    assert beta_at(899, 100, section) < 1.0
    assert beta_at(900, 100, section) == pytest.approx(1.0)
    assert beta_at(10**6, 100, section) == 1.0
    half = ObjectiveSection(beta_end=0.5)
    assert beta_at(10**6, 100, half) == 0.5


def test_cycles_begin_again() -> None:
    section = ObjectiveSection(beta="cyclical")
    assert beta_at(999, 100, section) == 1.0
    assert beta_at(1000, 100, section) == pytest.approx(0.1)
    assert beta_at(5, 100, ObjectiveSection(beta="constant", beta_end=0.3)) == 0.3


def test_steps_follow_from_epochs() -> None:
    job = _load("vae").completed(1359, "equal")
    assert (job.schedule.max_steps, job.validate_.every) == (40 * 1359, 1359)
    assert job.batch.lengths == "equal"
    assert _load("vae", "schedule.max_steps=100").completed(1359, "equal").schedule.max_steps == 100


@pytest.mark.parametrize("name", ["k4", "k8"])
def test_a_configuration_that_asked_for_compilation_still_loads_and_says_so(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``model.compile`` is in the config.yaml of earlier runs of the clusters, which must resume."""
    assert not _clusters(name).model.compile
    job = load_job(CLUSTERS / f"clusters_{name}.yaml", ["model.compile=true"])
    assert isinstance(job, LatentJob)
    with caplog.at_level("WARNING"):
        task = LatentTask(job, tmp_path)
    assert "model.compile=true is no longer used" in caplog.text
    caplog.clear()
    LatentTask(_clusters(name), tmp_path)
    assert "model.compile" not in caplog.text
    assert set(task.build_modules()) == {"encoder", "decoder", "critics"}
