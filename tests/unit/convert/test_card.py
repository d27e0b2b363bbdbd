import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from capt.pretrain.base.errors import ConfigError
from capt.pretrain.convert.card import About, CardFacts, final_metrics, plain_text
from capt.pretrain.engine.evaluations import Section
from capt.pretrain.language.export import model_card

JOB = {
    "data": {"source": "files", "files": ["/home/someone/secret/books.txt"], "sequence_length": 128},
    "model": {"init": "/home/someone/roberta-base"},
    "batch": {"global": 32, "micro": 8},
    "optimizer": {"lr": 5e-4, "betas": [0.9, 0.98]},
    "contrast": {"weight": 1.0, "queue": 256, "temperature": {"type": "inverted_triangle"}},
}


@pytest.mark.parametrize("form", ["hf", "sentence-transformers", "onnx"])
def test_card_has_a_head_a_loading_example_and_the_facts(form):
    text = model_card(
        form, CardFacts("capt-tiny", JOB, {"step": 10, "samples": 320, "tokens": 40960}, {"loss": 1.25}), {"layers": 2}
    )
    _, head, body = text.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["library_name"] in ("transformers", "sentence-transformers", "onnx")
    assert "capt" in fields["tags"]
    assert not {"license", "language"} & fields.keys()
    for row in ("| layers | 2 |", "| loss | 1.25 |", "| tokens seen (once a sequence) | 40960 |"):
        assert row in body
    assert "# capt-tiny" in body
    assert "| data files | books.txt |" in body
    assert "| started from | roberta-base |" in body
    assert "/home/someone" not in text
    assert "inverted_triangle" in body
    for line in body.split("```python\n")[1].split("```")[0].splitlines():
        compile(line, "card", "exec")


def test_a_number_is_no_markup_and_an_item_of_a_list_is():
    """A reader of the file itself sees figures and releases as they are."""
    for text in ("1.0000 (before training 0.5)", "0.2.0", "-0.94", "+1"):
        assert plain_text(text) == text
    for text in ("1. item", "12) item", "3.", "- item", "-", "# h", "---"):
        assert plain_text(text).startswith("&#")


def test_nothing_of_a_home_folder_and_no_token_stands_in_a_card():
    job = JOB | {
        "data": {
            "name": "/home/someone/saved/books",
            "files": [
                "/home/someone/hf_ABCDEFGHIJKLMNOP.txt",
                "https://host/books.txt?token=SECRET",
                "s3://b/AKIA12345678",
            ],
        },
        "model": {"init": "/home/someone/models/roberta-base"},
    }
    text = model_card("hf", CardFacts("x", job, {"step": 1}), {})
    for leak in ("/home", "someone", "hf_ABCDEFGHIJ", "SECRET", "AKIA1234"):
        assert leak not in text
    assert "| data files | (not shown), books.txt, (not shown) |" in text
    assert "| data set | books |" in text


SECTIONS = (
    Section(name="wiki.txt, 15% masked", protocol="512 windows", metrics={"loss/mlm": 2.5, "accuracy/mlm": None}),
    Section(name="STS-B test", protocol="SimCSE", systems={"mean": {"spearman": 0.45}, "head": {"spearman": 0.32}}),
)


def test_the_head_says_what_is_known_and_what_was_measured():
    about = About("apache-2.0", ("en", "de"), "FacebookAI/roberta-base", "me/mine")
    text = model_card("hf", CardFacts("x: #1", JOB, {"step": 1}, about=about), {}, evaluations=SECTIONS)
    fields = yaml.safe_load(text.split("---\n")[1])
    assert (fields["license"], fields["language"], fields["base_model"]) == (
        "apache-2.0", ["en", "de"], "FacebookAI/roberta-base",
    )  # fmt: skip
    (entry,) = fields["model-index"]
    assert entry["name"] == "x: #1"
    fill, sts = entry["results"]
    assert fill["task"]["type"] == "fill-mask"
    assert fill["metrics"] == [{"type": "loss", "name": "loss/mlm", "value": 2.5}]
    assert sts["dataset"] == {"name": "STS-B test", "type": "sts-b-test"}
    assert sts["metrics"] == [{"type": "spearman", "name": "spearman", "value": 0.45}]
    assert "SimCSE" in text
    assert 'from_pretrained("me/mine")' in text
    assert ModelCard(text).data.eval_results[0].metric_value == 2.5  # as the hub reads it


@pytest.mark.parametrize(
    "fields",
    [{"license": "MIT License"}, {"languages": ("English",)}, {"base_model": "roberta"}, {"license": "a\nb: c"}],
)
def test_what_the_hub_would_not_take_is_refused(fields):
    with pytest.raises(ConfigError, match="--"):
        About(**fields)


def test_the_base_model_is_what_training_started_from(tmp_path):
    assert About().started_from(Path("FacebookAI/roberta-base@main"), tmp_path).base_model == "FacebookAI/roberta-base"
    assert About().started_from(tmp_path / "folder", tmp_path).base_model is None
    (tmp_path / "imported.json").write_text('{"source": "x/y@abc"}')
    assert About().started_from(None, tmp_path).base_model == "x/y"
    assert About(base_model="mine/own").started_from(None, tmp_path).base_model == "mine/own"
    (tmp_path / "imported.json").write_text('{"source": 7}')
    with pytest.raises(ConfigError, match=r"imported\.json"):
        About().started_from(None, tmp_path)


def test_what_was_not_trained_here_does_not_claim_it():
    text = model_card("hf", CardFacts("x", JOB, {"step": 0, "samples": 0, "tokens": 0}), {"layers": 2})
    assert "## Training" not in text
    assert "no training step" in text
    mlm = model_card("hf", CardFacts("x", {"contrast": {"weight": 0.0}}, {"step": 1}), {})
    assert "masked language modelling." in mlm
    assert "CAPT (" in model_card("hf", CardFacts("x", JOB, {"step": 1}), {})


def test_metrics_are_those_of_the_checkpoint_not_of_the_end(tmp_path):
    rows = [
        {"step": 1, "loss": 3.0, "note": "text"},
        {"step": 2, "loss": 2.0, "loss/mlm": 1.0, "tokens_per_second": 7.0, "lr": 0.1},
        {"step": 2, "split": "validation", "mlm_loss": 2.5},
        {"step": 3, "loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2, "lo')
    assert final_metrics(tmp_path, 2) == {"loss": 2.0, "loss/mlm": 1.0, "validation/mlm_loss": 2.5}
    assert final_metrics(tmp_path / "none", 2) == {}
