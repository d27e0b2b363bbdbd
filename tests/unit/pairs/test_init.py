"""A model of pairs that starts from a folder of sentence-transformers says what of the folder it does not do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from capt.pretrain.base.errors import CheckpointError
from capt.pretrain.pairs.data_config import PairData
from capt.pretrain.pairs.load import left_behind, pooling_of_init
from capt.pretrain.retrieval.encoders import load_text_encoder
from capt.pretrain.retrieval.options import EncoderOptions

_KINDS = ["Transformer", "Pooling", "Normalize"]
_PROMPTS = {"query": "query: ", "document": ""}


@pytest.mark.parametrize(
    ("kinds", "pooling", "settings", "data", "said"),
    [
        (_KINDS, {"pooling_mode": "mean", "include_prompt": True}, {"prompts": {"query": ""}}, {}, []),
        (["Transformer", "Pooling", "Dense"], {}, {}, {}, ["'Dense': the vectors begin as those of encoder and pool"]),
        (_KINDS, {"include_prompt": False}, {}, {}, ["include_prompt false"]),
        (_KINDS, {}, {"prompts": _PROMPTS}, {}, [r"its prompts \(query 'query: '\): data.prompts.query"]),
        (_KINDS, {}, {"prompts": _PROMPTS}, {"prompts": {"query": "q: "}}, []),
        (
            _KINDS,
            {},
            {"similarity_fn_name": "dot", "truncate_dim": 8},
            {},
            ["fn_name 'dot': .* cosine", "truncate_dim 8"],
        ),
        (_KINDS, {}, {"similarity_fn_name": "cosine", "truncate_dim": None}, {}, []),
    ],
)
def test_what_a_folder_does_and_the_job_does_not_is_said(
    kinds: list[str], pooling: Any, settings: Any, data: Any, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(kinds)]
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("config_sentence_transformers.json", settings),
    ):
        (tmp_path / name).write_text(json.dumps(content))
    remarks = left_behind(tmp_path, PairData(files=["a.jsonl"], **data))
    assert len(remarks) == len(said)
    assert all(re.search(pattern, remark) for pattern, remark in zip(said, remarks, strict=True)), remarks


def test_a_folder_that_lost_its_modules_is_not_averaged_in_silence(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for read in (pooling_of_init, lambda folder: load_text_encoder(folder, EncoderOptions())):
        with pytest.raises(CheckpointError, match=r"1_Pooling/config.json is there, but not modules.json.*--pooler"):
            read(tmp_path)
    listed = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
    (tmp_path / "modules.json").write_text(json.dumps([listed]))
    assert pooling_of_init(tmp_path) == "cls"
