"""`/api/embed` and `/api/embeddings`, with Ollama's client and without."""

from dataclasses import dataclass, field, replace
from queue import Queue
from typing import Any

import numpy as np
import pytest
from ollama import ResponseError

from engine.values.model import ModelCard
from engine.values.request import Pooling
from tests.contract.fake_engine import (
    CARD,
    DIMENSIONS,
    END_OF_TEXT,
    ByteTokenizer,
    FakeEngine,
    pooled,
)
from tests.contract.ollama.scripted import OllamaDaemon


def vector_of(text: str) -> Any:
    """What the engine pools of it, of a length of 1."""
    found = np.frombuffer(pooled(tuple(text.encode())), "<f4")
    return pytest.approx((found / np.linalg.norm(found)).tolist(), abs=1e-6)


def test_vectors_come_in_the_order_of_the_texts(hermes: OllamaDaemon) -> None:
    answer = hermes.ollama.embed("bytes:latest", ["abcd", "b"])
    assert answer.model == "bytes"
    assert answer.prompt_eval_count == 5
    assert answer.total_duration >= answer.load_duration >= 0
    assert list(answer.embeddings) == [vector_of("abcd"), vector_of("b")]
    assert list(hermes.ollama.embed("bytes", "abcd").embeddings) == [vector_of("abcd")]


def test_they_are_the_vectors_of_openais_route(hermes: OllamaDaemon) -> None:
    body = {"input": "abcd", "encoding_format": "float"}
    openai = hermes.http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert hermes.ollama.embed("bytes", "abcd").embeddings == [pytest.approx(openai)]
    assert hermes.ollama.embeddings("bytes", "abcd").embedding == pytest.approx(openai)
    assert hermes.asked.pooling is Pooling.LAST


def test_dimensions_cut_a_vector(hermes: OllamaDaemon) -> None:
    (cut,) = hermes.ollama.embed("bytes", "abcd", dimensions=2).embeddings
    assert len(cut) == 2
    with pytest.raises(ResponseError, match="dimensions: must be between 1 and") as caught:
        hermes.ollama.embed("bytes", "abcd", dimensions=DIMENSIONS + 1)
    assert caught.value.status_code == 400


def test_without_a_text_the_model_is_loaded_and_no_more(hermes: OllamaDaemon) -> None:
    nothing: tuple[Any, ...] = ("", [])
    for empty in nothing:
        assert hermes.ollama.embed("bytes", empty).embeddings == []
    assert hermes.ollama.embeddings("bytes", "").embedding == []
    assert hermes.engine.submitted.empty()


def test_an_empty_text_among_several_is_embedded(hermes: OllamaDaemon) -> None:
    """As the model's end-of-text token where its tokenizer adds no tokens."""
    answer = hermes.ollama.embed("bytes", ["abcd", "", "b"])
    assert len(answer.embeddings) == 3
    assert list(answer.embeddings)[::2] == [vector_of("abcd"), vector_of("b")]
    assert answer.prompt_eval_count == 6
    hermes.engine.submitted = Queue()
    hermes.ollama.embed("bytes", [""])
    assert tuple(hermes.asked.prompt) == (END_OF_TEXT,)


@dataclass(frozen=True)
class BosTokenizer(ByteTokenizer):
    """Begins every text with a token, as Llama's does."""

    def encode_beginning(
        self, text: str, most_tokens: int, *, add_special_tokens: bool
    ) -> list[int]:
        return [1, *super().encode_beginning(text, most_tokens - 1, add_special_tokens=False)]


def test_an_empty_text_has_the_tokens_that_the_tokenizer_adds() -> None:
    with OllamaDaemon.serving(BosTokenizer()) as made:
        made.ollama.embed("bytes", ["", ""])
        assert tuple(made.asked.prompt) == (1,)


def test_a_text_that_is_too_long_is_cut_unless_it_is_to_be_refused(hermes: OllamaDaemon) -> None:
    long = "a" * 600
    assert hermes.ollama.embed("bytes", long).prompt_eval_count == 512
    assert len(hermes.ollama.embeddings("bytes", long).embedding) == DIMENSIONS
    with pytest.raises(ResponseError) as caught:
        hermes.ollama.embed("bytes", long, truncate=False)
    assert caught.value.status_code == 400


def test_what_is_wrong_is_refused_in_ollamas_form(hermes: OllamaDaemon) -> None:
    answer = hermes.http.post("/api/embed", json={"input": [1]})
    assert (answer.status_code, list(answer.json())) == (400, ["error"])
    assert hermes.http.post("/api/embed", json={"model": "no", "input": "a"}).status_code == 404


@dataclass
class Plain(FakeEngine):
    """A model that embeds nothing."""

    card: ModelCard = field(default_factory=lambda: replace(CARD, embedder=None))


def test_a_model_without_embeddings_says_so() -> None:
    with OllamaDaemon.serving(engine=Plain) as made, pytest.raises(ResponseError) as caught:
        made.ollama.embed("bytes", "abcd")
    assert caught.value.status_code == 400
    assert "has no embeddings" in caught.value.error
