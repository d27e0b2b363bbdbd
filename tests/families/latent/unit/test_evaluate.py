"""A run from text to evaluation and to sentences, through the loop and its checkpoints."""

from __future__ import annotations

import csv
import functools
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from typer.testing import CliRunner

from capt.launcher.cli import app as capt
from capt.launcher.commands.latent import app
from capt.pretrain.base.errors import CheckpointError, ConfigError, DataError
from capt.pretrain.base.quiet import quiet_libraries
from capt.pretrain.engine.run import run_job
from capt.pretrain.latent import evaluate as evaluation
from capt.pretrain.latent.evaluate import as_text, evaluate
from capt.pretrain.latent.evaluation import bridge as bridging
from capt.pretrain.latent.evaluation import forward_reverse
from capt.pretrain.latent.evaluation.forward_reverse import generated_perplexities
from capt.pretrain.latent.evaluation.text import interpolate, mean_codes, reconstruct, sample
from capt.pretrain.latent.models import load_model
from capt.pretrain.report.write import report
from tests.latent import small_job, write_text
from tests.studies.papers.__main__ import write_papers
from tests.support import run_ranks

WEIGHTED = ("ppl_iw_q", "ppl_iw_prior", "ppl_iw_mixture", "ppl_iw_refitted")
DRAWS = {"ppl_exact": 4, "ppl_iw_q": 6, "ppl_iw_prior": 6, "ppl_iw_mixture": 12, "ppl_iw_refitted": 12}


def _shown(estimate: dict[str, float]) -> str:
    return f"{estimate['value']:,.1f} ± {estimate['standard_error']:,.1f}"


def _run(preset: str, folder: Path, run_dir: Path, *more: str) -> int:
    quiet_libraries(debug=False)
    return run_job(small_job(preset, folder, run_dir, *more))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clVAE+_MI run that has learned which words there are, the best checkpoint kept."""
    folder = write_text(tmp_path_factory.mktemp("text"))
    more = ("optimizer.lr=0.02", "schedule.max_steps=40", "validate.every=20", "checkpoint.best=loss")
    assert run_ranks(_run, 1, "clvae_plus_mi", folder, folder / "run", *more) == [0]
    return folder / "run"


def test_evaluation_reports_both_conventions(finished: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = evaluate(
        load_model(finished),
        samples=4,
        weighted=6,
        refit_steps=4,
        out=tmp_path / "e.json",
        sentences_out=tmp_path / "s.csv",
        progress=lambda done, of: seen.append((done, of)),
    )
    assert {"nelbo_dual", "ppl_dual", "nelbo_exact", "ppl_exact", *WEIGHTED, "ppl_best", "kl_dual", "kl_dual_clamped",
            "kl_exact", "mi_dual", "mi_batch", "mi_aggregate", "au", "au_sampled"} <= result.keys()  # fmt: skip
    assert result["sentences"] == 18
    assert json.loads((tmp_path / "e.json").read_text()) == result
    assert seen == [(done, len(seen) - 1) for done in range(len(seen))]
    assert result["nelbo_exact"] > result["ppl_iw_q"]["nats"]
    assert result["nelbo_dual"] < result["nelbo_exact"]
    for name in (*WEIGHTED, "ppl_exact", "ppl_best"):
        assert result[name]["value"] > 1
        assert result[name]["standard_error"] > 0
        assert result[name]["standard_error_by"] == "delta method over sentences"
        assert (result[name]["sentences"], result[name]["draws"]) == (18, DRAWS.get(name, ANY))
    best = result[f"ppl_iw_{result['ppl_best']['proposal']}"]
    assert (
        result["ppl_best"]["value"] == best["value"] == min(result[name]["value"] for name in (*WEIGHTED, "ppl_exact"))
    )
    rows = list(csv.DictReader((tmp_path / "s.csv").read_text().splitlines()))
    assert list(rows[0]) == ["words", "exact", "q", "prior", "mixture", "refitted"]
    for column, name in (("exact", "ppl_exact"), ("prior", "ppl_iw_prior"), ("refitted", "ppl_iw_refitted")):
        nats, words = (sum(float(row[key]) for row in rows) for key in (column, "words"))
        assert math.exp(nats / words) == pytest.approx(result[name]["value"], rel=1e-4)
    text = as_text(result)
    assert "bound on no side" in text
    line = next(line for line in text.splitlines() if line.strip().startswith("ppl_best"))
    assert f"{best['value']:.4f} ± {best['standard_error']:.4f} (18 sentences, {best['draws']} draws, by " in line
    checkpoint = Path(result["checkpoint"])
    (finished / "evaluation-test.json").unlink()
    again = evaluate(load_model(checkpoint), samples=4, weighted=6, refit_steps=4)
    assert json.loads((finished / "evaluation-test.json").read_text()) == again, "kept for a run's checkpoint as well"
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in result.items() if k != "seconds"}


def test_the_report_shows_the_papers_column_and_the_bounds(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridging, "TEMPERATURES", 4)
    result = evaluate(load_model(finished), samples=4, weighted=6, weighted_limit=9, refit_steps=4, bridged=2)
    there = result["ppl_exact_there"]
    assert result["ppl_best"]["sentences"] == there["sentences"] < result["ppl_exact"]["sentences"] == 18
    assert json.loads((finished / "evaluation-test.json").read_text()) == result
    report([finished], tmp_path / "own")
    assert f"| ppl_best.value | {result['ppl_best']['value']:.4g} |" in (tmp_path / "own/report.md").read_text()
    page = write_papers([finished], tmp_path)
    text = (tmp_path / "report.md").read_text()
    first, second, *_ = (line for line in text.splitlines() if line.startswith(r"| clVAE+\_MI"))
    assert "test, 4 draws, step " in first
    assert f"{result['ppl_dual']:,.1f}" in first
    by = {"q": "q", "prior": "prior", "mixture": "q and prior", "refitted": "refitted"}[result["ppl_best"]["proposal"]]
    assert f"| {_shown(result['ppl_best'])} | {by}, {there['sentences']} |" in first
    for name in ("ppl_exact", "ppl_exact_there", *WEIGHTED):
        assert f"| {_shown(result[name])} |" in second
    assert f"| 6; 12 | {there['sentences']} | 2, {_shown(result['bridge'])} |" in second
    assert (tmp_path / "latent-bounds.png").stat().st_size > 5000
    assert "bounds -log p(x) on no side" in page.read_text()
    assert json.loads((tmp_path / "report.json").read_text())["Latent-variable models (Tables 1 to 3 and 7)"]


def test_training_made_the_text_more_probable(finished: Path) -> None:
    result = evaluate(load_model(finished), split="validation", samples=1, weighted=0)
    best = json.loads((finished / "best.json").read_text())
    assert result["rec"] < 0.9 * math.log(18) * result["scored_a_sentence"], "better than 18 words at random"
    assert best["metric"] == "loss"
    assert Path(result["checkpoint"]) == (finished / "checkpoints" / "best").resolve()


def test_unknown_words_are_stated_and_warned_of(
    finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The training text has no unknown word: the checkpoint knows that, and ``<unk>`` was never trained."""
    (tmp_path / "other.test.txt").write_text("the cat sees a zebra\nan okapi finds a dog\n" * 8)
    model = load_model(finished)
    assert model.unknown_in_training == 0
    with caplog.at_level("INFO"):
        result = evaluate(model, data=tmp_path, samples=2, weighted=4, refit_steps=4)
    assert "test text: 25.00% of 96 scored tokens are unknown words" in caplog.text
    assert "the training text has none" in caplog.text
    assert result["unknown_share"] == 0.25
    assert result["ppl_known"]["value"] < 0.8 * result["ppl_best"]["value"]
    assert result["ppl_known"]["proposal"] == result["ppl_best"]["proposal"]
    text = as_text(result)
    assert "share of unknown words" in text
    assert "PPL of the known words alone" in text
    caplog.clear()
    known = evaluate(model, samples=2, weighted=4, refit_steps=4)
    assert known["unknown_share"] == 0
    assert known["ppl_known"] == known["ppl_best"]
    assert "the training text has none" not in caplog.text


def test_other_data_and_fewer_sentences(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "other.test.txt").write_text("the cat sees a dog\n" * 30)
    result = evaluate(load_model(finished), data=tmp_path, samples=1, weighted=0, limit=8)
    assert result["sentences"] == 8
    with pytest.raises(DataError, match="no file whose name says validation"):
        evaluate(load_model(finished), data=tmp_path, split="validation")
    (tmp_path / "other.test.txt").write_text("qqq zzz\n")
    with pytest.raises(DataError, match="holds no known word"):
        evaluate(load_model(finished), data=tmp_path)


def test_sentences_from_a_model(finished: Path) -> None:
    model = load_model(finished)
    assert len(sample(model, 3)) == 3
    assert sample(model, 3) == sample(model, 3)
    assert all(len(text.split()) <= 4 for text in sample(model, 3, max_words=4))
    way = interpolate(model, "the cat sees", "a big dog", steps=3)
    assert [t for t, _ in way] == [0.0, 0.5, 1.0]
    assert [way[0][1], way[2][1]] == reconstruct(model, ["the cat sees", "a big dog"])
    with pytest.raises(DataError, match="no word of it is among"):
        reconstruct(model, ["qqq"])
    with pytest.raises(DataError, match=r"data\.max_words is 200"):
        reconstruct(model, ["the " * 201])


def test_drawn_words_and_a_model_that_writes_no_unknown_word(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(finished)
    text_model, vocabulary = model.text
    drawn = sample(model, 20, top_p=0.9)
    assert drawn == sample(model, 20, top_p=0.9) != sample(model, 20)
    with pytest.raises(ConfigError, match=r"above 0, at most 1, got 1\.5"):
        sample(model, 1, top_p=1.5)
    bias = text_model.decoder.output.bias.detach()
    monkeypatch.setitem(text_model.decoder.output._parameters, "bias", bias.clone())
    text_model.decoder.output.bias.data[vocabulary.unknown_id] += 100
    assert all(set(text.split()) == {vocabulary.unknown} for text in sample(model, 3))
    written = [sample(model, 3, unknown=False), sample(model, 3, top_p=1.0, unknown=False)]
    written += [reconstruct(model, ["the cat sees"], unknown=False)]
    written += [[text for _, text in interpolate(model, "the cat", "a dog", 3, unknown=False)]]
    assert not any(vocabulary.unknown in text.split() for texts in written for text in texts)


def test_the_command_writes_vectors_and_takes_the_switches(finished: Path) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, [words[0], str(finished), *words[1:]])
        assert result.exit_code == 0, result.output
        return result.stdout

    sentences = ["the cat sees", "a big dog"]
    expected = mean_codes(load_model(finished), sentences)
    rows = json.loads(run("encode", *sentences, "--json"))
    assert [row["sentence"] for row in rows] == sentences
    torch.testing.assert_close(torch.tensor([row["vector"] for row in rows]), expected)
    lines = [line.split("\t") for line in run("encode", *sentences).splitlines()]
    assert [line[0] for line in lines] == sentences
    assert [[float(value) for value in line[1:]] for line in lines] == [
        pytest.approx(row, rel=1e-5) for row in expected.tolist()
    ]
    assert len(run("encode", "-n", "3").splitlines()) == 3
    assert run("sample", "-n", "2", "--top-p", "0.5", "--no-unk").splitlines() == sample(
        load_model(finished), 2, top_p=0.5, unknown=False
    )


def test_unknown_words_of_a_sentence_are_named(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(finished)
    caplog.clear()
    reconstruct(model, ["the cat sees"])
    assert not caplog.messages
    reconstruct(model, ["the CAT sees!", "the CAT"])
    (message,) = caplog.messages
    assert "'CAT sees!'" in message


def test_generated_text_is_scored_by_n_grams(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    figures = generated_perplexities(load_model(finished), number=40)
    assert caplog.text.count("40 generated sentences: the paper's are of 1280") == 1
    assert set(figures) == {
        f"{name}_ppl{ends}" for name in ("forward", "reverse_train", "reverse_test") for ends in ("", "_with_ends")
    }
    assert all(1 < value < math.inf for value in figures.values())


def test_commands_write_what_the_functions_return(finished: Path) -> None:
    def rows(command: str, *arguments: str) -> list[dict[str, str]]:
        result = CliRunner().invoke(app, [command, str(finished), *arguments, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        found: list[dict[str, str]] = json.loads(result.output)
        return found

    model = load_model(finished)
    assert [row["sentence"] for row in rows("sample", "-n", "2", "--max-words", "5")] == sample(model, 2, max_words=5)
    way = [(float(row["t"]), row["sentence"]) for row in rows("interpolate", "the cat sees", "a dog", "--steps", "2")]
    assert way == interpolate(model, "the cat sees", "a dog", 2)
    assert rows("reconstruct", "the cat")[0]["reconstruction"] == reconstruct(model, ["the cat"])[0]
    assert len(rows("reconstruct", "-n", "3")) == 3


def test_the_command_measures_generated_text_as_well_unless_told_otherwise(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = functools.partial(generated_perplexities, number=40)
    monkeypatch.setattr(evaluation, "generated_perplexities", fewer)
    monkeypatch.setattr(bridging, "TEMPERATURES", 4)

    def figures(*arguments: str) -> dict[str, Any]:
        command = ["evaluate", str(finished), "--draws", "2", "--weighted", "0", "--json", *arguments]
        result = CliRunner().invoke(capt, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    assert figures()["forward_ppl"] == fewer(load_model(finished))["forward_ppl"]
    assert "forward_ppl" not in figures("--generated", "none")
    assert "forward_ppl" not in figures("--split", "validation")
    bridged = figures("--generated", "none", "--weighted", "4", "--bridge", "1", "-o", "refit_steps=2")["bridge"]
    assert (bridged["sentences"], bridged["draws"]) == (1, 16)
    refused = CliRunner().invoke(capt, ["evaluate", str(finished), "--generated", "srilm"])
    assert "choose builtin, kenlm or none" in str(refused.exception)


def test_generated_text_that_cannot_be_scored_costs_no_other_figure(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that ends each sentence immediately, or a training text that has moved, lost the whole measurement."""
    monkeypatch.setattr(forward_reverse, "sample", lambda model, number, seed: [""] * number)
    result = evaluate(load_model(finished), samples=1, weighted=0, generated="builtin", out=tmp_path / "out.json")
    assert result["forward_ppl"] == {"value": None, "reason": ANY}
    assert "no word to score" in result["forward_ppl"]["reason"]
    assert result["ppl_exact"]["value"] > 1
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert "no word to score" in as_text(result)


def test_missing_kenlm_is_said_before_anything_is_measured(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(finished / "python"))
    monkeypatch.setenv("PATH", "")
    nowhere = finished / "no such text"
    with pytest.raises(ConfigError, match="make kenlm"):  # and not that the text is missing
        evaluate(load_model(finished), generated="kenlm", data=nowhere)
    with pytest.raises(ConfigError, match="make kenlm"):
        generated_perplexities(load_model(finished), by="kenlm", data=nowhere)


def test_what_is_no_latent_model_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        load_model(tmp_path)
    for wrong in ({"samples": 0}, {"refit_steps": -1}, {"weighted": -1}, {"samples": 10**9}, {"weighted": 10**9}):
        with pytest.raises(ConfigError, match="--draws must be 1 to 65536"):
            evaluate(load_model(finished), **wrong)
    for name in ("out", "sentences_out"):
        with pytest.raises(ConfigError, match="is a folder: name a file to write"):  # before all is measured
            evaluate(load_model(finished), **{name: tmp_path})
    with pytest.raises(ConfigError, match="--weighted must be 1 or more"):
        evaluate(load_model(finished), bridged=1, weighted=0)


def test_what_is_not_finite_has_a_reason_and_stays_json(finished: Path, tmp_path: Path) -> None:
    """An encoder that is far away: exp(nats a word) is more than a float holds, and the prior's bound is unharmed."""
    model = load_model(finished)
    with torch.no_grad():
        model.text[0].encoder.head.linear.bias.fill_(1e3)  # type: ignore[union-attr]
    result = evaluate(model, samples=2, weighted=4, refit_steps=4, out=tmp_path / "e.json")
    assert result == json.loads((tmp_path / "e.json").read_text(), parse_constant=pytest.fail)
    assert result["ppl_exact"]["value"] is None
    assert "more than a float holds" in result["ppl_exact"]["reason"]
    assert result["ppl_iw_prior"]["value"] < 100
    assert result["ppl_best"]["value"] <= result["ppl_iw_prior"]["value"]
    assert "none (more than a float holds)" in as_text(result)


def test_without_weights_every_key_is_there(finished: Path) -> None:
    result = evaluate(load_model(finished), samples=2, weighted=0)
    for name in WEIGHTED:
        assert result[name] == {"value": None, "reason": "no draws were asked for: --weighted 0"}
    assert result["ppl_best"] == result["ppl_exact"] | {"proposal": "exact"}


def test_another_vocabulary_is_refused_on_resuming(finished: Path, tmp_path: Path) -> None:
    (outcome,) = run_ranks(_resume_on_other_text, 1, finished, write_text(tmp_path, seed=5))
    assert outcome.startswith("CheckpointError: ")
    assert "set data.vocabulary_file=" in outcome or "another architecture" in outcome


def _resume_on_other_text(run_dir: Path, folder: Path) -> str:
    quiet_libraries(debug=False)
    train = folder / "toy.train.txt"
    train.write_text(train.read_text().replace("cat", "zebra"))
    job = small_job("clvae_plus_mi", folder, run_dir, "schedule.max_steps=50")
    try:
        return str(run_job(job, resume=True))
    except CheckpointError as error:
        return f"CheckpointError: {error}"
