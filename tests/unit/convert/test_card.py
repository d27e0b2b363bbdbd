import json

import pytest
import yaml

from pretrain.convert.card import final_metrics, model_card

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
        form,
        name="capt-tiny",
        model={"layers": 2},
        job=JOB,
        progress={"step": 10, "samples": 320, "tokens": 40960},
        metrics={"loss": 1.25},
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


def test_what_was_not_trained_here_does_not_claim_it():
    text = model_card("hf", name="x", model={"layers": 2}, job=JOB, progress={"step": 0, "samples": 0, "tokens": 0})
    assert "## Training" not in text
    assert "no training step" in text
    mlm = model_card("hf", name="x", model={}, job={"contrast": {"weight": 0.0}}, progress={"step": 1})
    assert "masked language modelling." in mlm
    assert "CAPT (" in model_card("hf", name="x", model={}, job=JOB, progress={"step": 1})


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
