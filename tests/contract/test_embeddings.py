"""Embeddings and ranking over the fake engine: what it is asked for, in which order it is answered,
and what is refused.
"""

from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from engine.values.model import Reranker
from engine.values.request import Pooling, Request
from server.generation import pooling
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, DIMENSIONS, FakeEngine, pooled

pytestmark = pytest.mark.usefixtures("engine")  # each test starts from the default script


def submitted(engine: FakeEngine) -> list[Request]:
    return [engine.submitted.get_nowait() for _ in range(engine.submitted.qsize())]


def error(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def test_one_engine_request_for_each_text(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"input": ["abcd", "abce", [65, 66]], "cache_salt": "mine", "user": "someone"}
    answer = http.post("/v1/embeddings", json=body).json()
    requests = sorted(submitted(engine), key=lambda request: request.id)
    assert [tuple(request.prompt) for request in requests] == [
        (97, 98, 99, 100),
        (97, 98, 99, 101),
        (65, 66),
    ]
    assert [request.shared_tokens for request in requests] == [3, 3, 0]
    for request in requests:
        assert (request.pooling, request.max_tokens, request.n) == (Pooling.LAST, 0, 1)
        assert (request.cache_salt, request.client) == ("mine", "127.0.0.1")
    usage = {"prompt_tokens": 10, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["usage"] == usage
    assert (answer["object"], answer["model"]) == ("list", "test/bytes")


def test_a_clear_forgets_the_texts_that_later_ones_are_compared_with(
    http: httpx.Client, engine: FakeEngine
) -> None:
    shared = []
    for text in ("prefix 1", "prefix 2"):
        http.post("/v1/embeddings", json={"input": text}).raise_for_status()
        shared += [request.shared_tokens for request in submitted(engine)]
    http.post("/admin/cache/clear", params={"tiers": "disk"}).raise_for_status()
    http.post("/v1/embeddings", json={"input": "prefix 3"}).raise_for_status()
    http.post("/admin/cache/clear").raise_for_status()
    http.post("/v1/embeddings", json={"input": "prefix 4"}).raise_for_status()
    shared += [request.shared_tokens for request in submitted(engine)]
    assert shared == [0, 7, 7, 0]


def test_many_texts_come_back_in_their_order(base_url: str) -> None:
    """To openai's client, which asks for base64; a strict one would not take what it asked for."""
    texts = [f"text {i}" for i in range(700)]
    with OpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
        data = client.embeddings.create(model="test/bytes", input=texts).data
    assert [one.index for one in data] == list(range(700))
    for text, one in zip(texts, data, strict=True):
        counts = np.frombuffer(pooled(tuple(text.encode())), "<f4")
        assert np.allclose(one.embedding, counts / np.linalg.norm(counts), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", []]}, "input[1]"),
        ({"input": [[1, 999]]}, "input"),
        ({"input": ["a", "b" * 513]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": DIMENSIONS + 1}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "output_dimension": DIMENSIONS + 1}, "dimensions"),
        ({"input": "a", "output_dtype": "int8"}, "output_dtype"),
        ({"input": ["a", {"image": "b"}]}, "input"),
        ({"input": [{"text": 1}]}, "input"),
        ({"input": "a", "prompt_name": "nobody"}, "prompt_name"),
        ({"input": [1], "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "priority": 1}, "priority"),
    ],
)
def test_what_is_refused_names_the_field(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    assert error(http.post("/v1/embeddings", json=fields))["param"] == param


def test_fields_by_the_names_of_voyage_and_jina(http: httpx.Client) -> None:
    def vectors(**fields: Any) -> list[list[float]]:
        answer = http.post("/v1/embeddings", json=fields).raise_for_status().json()
        return [each["embedding"] for each in answer["data"]]

    short = vectors(input="abc", dimensions=3)
    assert vectors(input="abc", output_dimension=3) == short
    assert vectors(input=[{"text": "abc"}], dimensions=3, output_dtype="float") == short
    refused = error(http.post("/v1/embeddings", json={"input": ["a", {"image": "b"}]}))
    assert "item 1 is an object with 'image'" in refused["message"]
    ranking = {"query": "abc", "documents": ["cab", "xyz", "abc"], "top_k": 2}
    assert len(http.post("/v1/rerank", json=ranking).json()["results"]) == 2


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["a", "b" * 600]}, "documents[1]"),
        ("/v2/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "instruction": "b"}, "instruction"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2[1]"),
    ],
)
def test_so_does_ranking(http: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    assert error(http.post(path, json=fields))["param"] == param


def test_each_text_is_embedded_once_to_compare(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"query": "abc", "documents": ["cab", {"text": "xyz"}, "cab"], "return_documents": False}
    answer = http.post("/v1/rerank", json=body).json()
    assert sorted(bytes(request.prompt) for request in submitted(engine)) == [
        b"Q: abc",
        b"cab",
        b"xyz",
    ]
    assert sorted(result["index"] for result in answer["results"]) == [0, 1, 2]
    assert all(set(result) == {"index", "relevance_score"} for result in answer["results"])


def test_documents_come_with_their_texts_the_best_first() -> None:
    card = replace(CARD, generates=False, embedder=None, reranker=Reranker(has_sigmoid=False))
    with running(NumberEngine(card=card), Settings(port=0)) as url:
        body = {"query": "q", "documents": ["bb", "dddd", "a", "ccc"], "top_n": 3}
        results = httpx.post(f"{url}/v2/rerank", json=body).json()["results"]
        assert [result["document"]["text"] for result in results] == ["dddd", "ccc", "bb"]
        assert [result["index"] for result in results] == [1, 3, 0]
        refused = error(httpx.post(f"{url}/v1/embeddings", json={"input": "a"}))
    assert "/v1/rerank" in refused["message"]
    assert refused["code"] == "task_not_supported"


def test_a_query_is_not_repeated_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "MAX_TOKENS", 1000)
    card = replace(CARD, generates=False, embedder=None, reranker=Reranker(is_templated=False))
    with running(NumberEngine(card=card), Settings(port=0)) as url:
        body = {"query": "q" * 98, "documents": ["d"] * 10}
        assert httpx.post(f"{url}/v1/rerank", json=body).status_code == 200
        refused = error(httpx.post(f"{url}/v1/rerank", json=body | {"documents": ["d"] * 11}))
    assert refused["param"] == "documents[10]"
    assert "at most 1000" in refused["message"]


class NumberEngine(FakeEngine):
    """Its score of a pair is how many tokens that has."""

    async def events(self, request: Request) -> Any:
        async for event in super().events(request):
            score = np.array([len(request.prompt)], "<f4").tobytes()
            yield replace(event, pooled=score) if event.finish_reason else event


def test_requests_are_listed_and_counted(http: httpx.Client) -> None:
    http.post("/v1/embeddings", json={"input": ["abcd", "ab"]})
    latest = http.get("/admin/requests/log").json()["requests"][0]
    assert (latest["route"], latest["sequences"]) == ("/v1/embeddings", 2)
    assert (latest["prompt_tokens"], latest["output_tokens"]) == (6, 0)
