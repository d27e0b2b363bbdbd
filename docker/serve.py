"""An example of a service over an index: ``/search``, ``/embed`` and ``/predict``, with FastAPI. Change it as you like.

``CAPT_INDEX=index uvicorn --app-dir docker serve:app``; ``CAPT_PREDICT=FOLDER`` adds a classifier or a reranker. It
asks nobody who they are: put it behind something that does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from capt.pretrain.base.errors import UserError
from capt.pretrain.retrieval.index import SearchIndex

Text = Annotated[str, Field(max_length=20_000)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=256)]

app = FastAPI(title="A search over documents")
_one_at_a_time = threading.Lock()  # tokenizers and the model are shared by all requests


class Search(BaseModel):
    """A question to the index."""

    query: Annotated[Text, Field(min_length=1)]
    top: Annotated[int, Field(ge=1, le=100)] = 10
    mode: Literal["hybrid", "dense", "bm25"] = "hybrid"
    where: dict[str, str] = {}


class Embed(BaseModel):
    """Texts to make vectors of."""

    texts: Texts
    role: Literal["query", "document"] = "document"


class Predict(BaseModel):
    """Texts, or pairs of texts, to make predictions for."""

    texts: Annotated[list[Text | tuple[Text, Text]], Field(min_length=1, max_length=256)]


@cache
def index() -> SearchIndex:
    """The index, which is opened once."""
    return SearchIndex.open(os.environ["CAPT_INDEX"])


@cache
def classifier() -> Any:
    """The model of ``/predict``, which is loaded once."""
    import capt

    return capt.load(os.environ["CAPT_PREDICT"])


@contextmanager
def answering() -> Iterator[None]:
    """Let one request at a time use the models, and answer a wrong one with what is wrong."""
    with _one_at_a_time:
        try:
            yield
        except UserError as error:
            raise HTTPException(422, str(error)) from None


@app.get("/health")
def health() -> dict[str, int]:
    """How many documents there are."""
    with answering():
        return {"documents": len(index())}


@app.post("/search")
def search(asked: Search) -> list[dict[str, Any]]:
    """The best documents for a question."""
    with answering():
        (hits,) = index().search([asked.query], asked.top, asked.mode, where=asked.where)
    return [hit.as_json() for hit in hits]


@app.post("/embed")
def embed(asked: Embed) -> list[list[float]]:
    """The vector of each text, by the encoder of the index."""
    with answering():
        vectors: list[list[float]] = index().encoder.encode(asked.texts, asked.role).tolist()
    return vectors


@app.post("/predict")
def predict(asked: Predict) -> list[dict[str, Any]]:
    """A label, labels or a score for each text or pair."""
    if "CAPT_PREDICT" not in os.environ:
        raise HTTPException(404, "this service has no model that predicts: set CAPT_PREDICT")
    with answering():
        return [each._asdict() for each in classifier().predict(asked.texts)]
