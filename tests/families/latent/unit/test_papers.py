"""Every preset is the row of the paper that it is named after; clusters have scatter plots; sweeps show their best."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from capt.launcher.sweep.config import StudySection, load_sweep
from capt.pretrain.base.errors import DataError
from capt.pretrain.config import flatten
from capt.pretrain.config.load import load_job
from capt.pretrain.report.runs import read_run
from tests.latent import PTB
from tests.studies.papers.__main__ import write_papers
from tests.studies.papers.latent_plots import plotted, shown_steps
from tests.studies.papers.latent_table import (
    GENERATED,
    PUBLISHED,
    cluster_label,
    dataset_of,
    likelihood_table,
    row_name,
    text_rows,
    variant_of,
)

ROWS = {
    "vae": "VAE", "beta_vae": "beta_0.5 VAE", "cyc_vae": "CycVAE", "sa_vae": "SaVAE", "lag_vae": "LagVAE", "ae": "AE",
    "lstm_lm": "LSTM language model", "ivae": "iVAE", "ivae_mi": "iVAE_MI", "clvae": "clVAE", "clvae_mi": "clVAE_MI",
    "clvae_plus": "clVAE+", "clvae_plus_mi": "clVAE+_MI",
}  # fmt: skip


def _flat(preset: Path, *more: str) -> dict[str, object]:
    return flatten(load_job(preset, list(more)).model_dump(mode="json", by_alias=True))


@pytest.mark.parametrize("preset", ROWS)
def test_presets_are_rows(preset: str) -> None:
    config = _flat(PTB / f"{preset}.yaml")
    assert row_name(config) == ROWS[preset]
    assert dataset_of(config) == "ptb"


def test_rows_of_tables_2_3_and_7() -> None:
    assert row_name(_flat(PTB / "clvae.yaml", "contrast.over=h")) == "clVAE over h"
    assert row_name(_flat(PTB / "clvae_plus_mi.yaml", "objective.swap=0.1")) == "clVAE+_MI swap"
    for name, end in (("yahoo", "beta_0.4 VAE"), ("yelp", "beta_0.4 VAE")):
        config = _flat(PTB.parent / name / "beta_vae.yaml")
        assert (dataset_of(config), row_name(config)) == (name, end)


@pytest.mark.parametrize(
    ("sweep", "text", "beside"),
    [
        ("latent_table1", "ptb", {"LagVAE", "AE", "LSTM language model"}),
        ("latent_table2_yahoo", "yahoo", {"LSTM language model"}),
        ("latent_table2_yelp", "yelp", {"LSTM language model"}),
    ],
)
def test_the_shipped_sweeps_have_every_row_of_their_table(sweep: str, text: str, beside: set[str]) -> None:
    configs = [flatten(load_job(study.base).model_dump(mode="json", by_alias=True)) for study in studies_of(sweep)]
    assert {dataset_of(config) for config in configs} == {text}
    printed = {name for name in PUBLISHED[text] if not name.endswith(("over h", "swap"))}  # Tables 3 and 7
    assert sorted(map(row_name, configs)) == sorted(printed | beside)


def studies_of(sweep: str) -> list[StudySection]:
    return list(load_sweep(sweep).studies.values())


def test_a_run_without_an_evaluation_shows_the_validation_that_chose_its_checkpoint(tmp_path: Path) -> None:
    job = load_job(PTB / "ivae.yaml")
    (tmp_path / "config.yaml").write_text(json.dumps(job.model_dump(mode="json", by_alias=True)))
    rows = [
        {"step": step, "split": "validation", "loss": bound, "nelbo_iw": bound, "ppl_dual": dual, "ppl_exact": exact}
        for step, bound, dual, exact in ((10, 120.0, 90.0, 150.0), (20, 110.0, 100.0, 400.0))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = text_rows([read_run(tmp_path)])
    assert row.measured == "validation, 1 draw, step 20, seed 1"
    assert row.printed("ppl") is None, "not a text of PTB's size"
    assert (row.get("ppl_dual"), row.get("ppl_exact")) == (100.0, 400.0)
    header = likelihood_table([row]).header
    assert "PPL dual" in header
    assert "PPL published" not in header, "a column without a figure"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "evaluation-test.json",
            {"ppl_best": {"value": 99.0}},
            r"evaluation-test\.json: ppl_best: .*draws: Field required",
        ),
        (
            "evaluation-test.json",
            {"ppl_best": {"value": 9.0, "draws": 1, "sentences": 1, "proposal": "x"}},
            "proposal: ",
        ),
        ("generated.json", {"number": "many"}, r"generated\.json: .*number: Input should be a valid integer"),
    ],
)
def test_a_damaged_result_is_named_with_the_remedy(
    tmp_path: Path, name: str, content: dict[str, object], message: str
) -> None:
    job = load_job(PTB / "ivae.yaml")
    (tmp_path / "config.yaml").write_text(json.dumps(job.model_dump(mode="json", by_alias=True)))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "split": "validation", "nelbo_iw": 9.0}) + "\n")
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"{message}.*; capt evaluate {tmp_path} measures it again"):
        text_rows([read_run(tmp_path)])


def test_a_figure_that_is_not_finite_is_null_in_the_reports_json(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    job = load_job(PTB / "ivae.yaml")
    (run / "config.yaml").write_text(json.dumps(job.model_dump(mode="json", by_alias=True)))
    row = {"step": 10, "split": "validation", "nelbo_iw": 120.0, "ppl_dual": None, "ppl_exact": 150.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    write_papers([run], tmp_path / "report")

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "report" / "report.json").read_text()
    (found,) = json.loads(text, parse_constant=refuse)["Latent-variable models (Tables 1 to 3 and 7)"].values()
    assert (found["ppl_dual"], found["ppl_exact"]) == (None, 150.0)


def test_the_papers_variants_have_titles_of_their_own() -> None:
    code, paper = (_flat(PTB / f"{name}.yaml") for name in ("clvae_plus", "clvae_plus_paper"))
    assert row_name(code) == row_name(paper) == "clVAE+"
    assert variant_of(code) == ""
    assert variant_of(paper) == "mlp, sum_inside, encoder mean_inside, negatives of the own view"
    masked = _flat(PTB / "clvae.yaml", "contrast.mask_duplicates=true", "schedule.type=cosine")
    assert variant_of(masked) == "duplicates masked, cosine decay"


@pytest.mark.parametrize(
    ("preset", "label"),
    [
        ("clusters_k4", "clVAE+ (duplicates masked, linear decay)"),
        ("clusters_k4_code", "clVAE+"),
        ("clusters_k4_ivae", "iVAE"),
        ("clusters_k4_vae", "VAE"),
    ],
)
def test_clusters_say_in_what_they_differ_from_the_release(preset: str, label: str) -> None:
    assert cluster_label(_flat(PTB.parent / f"{preset}.yaml")) == label


def test_published_perplexities_follow_from_the_likelihoods() -> None:
    """PPL = exp(-ELBO / tokens a sentence): 21.917 on PTB, 79.867 on Yahoo; the tables round to 0.1 nats."""
    for dataset, tokens in (("ptb", 82_430 / 3_761), ("yahoo", 79.867)):
        for name, (nelbo, ppl, *_) in PUBLISHED[dataset].items():
            assert abs(np.log(ppl) * tokens - nelbo) < 0.11, name
    assert set(GENERATED) - set(PUBLISHED["ptb"]) == {"AE", "beta_0 VAE"}


def test_clusters_have_a_table_and_plots(tmp_path: Path) -> None:
    run = tmp_path / "k4"
    (run / "codes").mkdir(parents=True)
    job = load_job(PTB.parent / "clusters_k4.yaml")
    (run / "config.yaml").write_text(json.dumps(job.model_dump(mode="json", by_alias=True)))
    rows = [
        {
            "step": step,
            "split": "validation",
            "purity": 0.9,
            "purity_cosine": 1.0,
            "silhouette": 0.5,
            "probe": 1.0,
            "accuracy": 0.8,
            "loss": 1.0,
        }
        for step in (5000, 10_000, 20_000)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        np.save(run / "codes" / f"step-{row['step']:08d}.npy", np.random.default_rng(0).normal(size=(4, 500, 2)))
    write_papers([run], tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    label = "clVAE+ (duplicates masked, linear decay)"
    assert f"| {label} | 4 | 20,000 | 0.900 | 1.000 | 0.500 | 1.000 | 0.800 | 1.000 |" in text
    assert f"| {label} | 4 | 10,000" in text
    assert (tmp_path / "report" / "codes-k4.png").stat().st_size > 5000
    assert shown_steps([]) == []
    assert shown_steps(range(5000, 85_000, 5000)) == [5000, 15_000, 30_000, 80_000]


def test_the_plot_shows_the_exact_bound_of_the_sentences_that_were_weighted(tmp_path: Path) -> None:
    job = load_job(PTB / "vae.yaml")
    (tmp_path / "config.yaml").write_text(json.dumps(job.model_dump(mode="json", by_alias=True)))
    row = {"step": 10, "split": "validation", "loss": 120.0, "nelbo_iw": 120.0, "ppl_exact": 157.9}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = text_rows([read_run(tmp_path)])
    assert plotted(found, "ppl_exact") == 157.9
    assert plotted(replace(found, estimates={"ppl_exact_there": {"value": 177.4}}), "ppl_exact") == 177.4
