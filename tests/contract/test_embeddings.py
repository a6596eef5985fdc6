"""Embeddings and ranking over the fake engine: what it is asked for, in which order it is answered,
and what is refused.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from engine.api import EngineStopped, InvalidRequest, QueueFull
from engine.core.step import Limits
from engine.encoders.thread import EncoderParts, EncoderThread
from engine.values.model import Reranker
from engine.values.output import FinishReason, OutputEvent
from engine.values.request import Pooling, Request
from engine.values.settings import EngineConfig
from engine.values.tokens import PackedTokens, pack
from server.generation import pooling
from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import CARD, DIMENSIONS, MEMORY, FakeEngine, pooled
from tests.contract.scripted import CLIENT_SECONDS
from tests.encoders import POSITIONS, TEXTS, WORDS, write_encoder, write_encoder_classifier
from tests.hosting import loaded
from tests.polling import WAIT_SECONDS

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


# Encoders, which compute every text whole


@contextmanager
def encoder_daemon(checkpoint: Path) -> Iterator[httpx.Client]:
    engine = loaded(EngineConfig(model=str(checkpoint)))
    settings = Settings(port=0, model=str(checkpoint), served_model_name=("tiny",))
    with (
        running(engine, settings) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    checkpoint = write_encoder(tmp_path_factory.mktemp("encoders") / "bert", "bert")
    with encoder_daemon(checkpoint) as client:
        yield client


def test_an_encoder_embeds_by_every_route(encoder: httpx.Client) -> None:
    (listed,) = encoder.get("/v1/models").json()["data"]
    assert (listed["tasks"], listed["max_model_len"]) == (["embed"], POSITIONS)
    answer = encoder.post("/v1/embeddings", json={"input": TEXTS}).raise_for_status().json()
    vectors = [one["embedding"] for one in answer["data"]]
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(len(text.split()) + 2 for text in TEXTS)
    jina = {"input": [{"text": text} for text in TEXTS]}
    again = encoder.post("/v1/embeddings", json=jina).json()["data"]
    assert np.allclose([one["embedding"] for one in again], vectors, atol=1e-5)
    ollama = encoder.post("/api/embed", json={"model": "tiny", "input": TEXTS}).json()
    assert np.allclose(ollama["embeddings"], vectors, atol=1e-5)
    ranking = {"query": TEXTS[1], "documents": TEXTS}
    for path in ("/v1/rerank", "/v2/rerank"):
        results = encoder.post(path, json=ranking).raise_for_status().json()["results"]
        assert results[0]["index"] == 1
        assert results[0]["relevance_score"] == pytest.approx(1, abs=1e-5)


def test_a_text_beyond_an_encoder_s_length_names_field_and_limit(encoder: httpx.Client) -> None:
    long = " ".join(WORDS[:POSITIONS])
    refused = error(encoder.post("/v1/embeddings", json={"input": ["w1", long]}))
    assert (refused["param"], refused["code"]) == ("input[1]", "context_length_exceeded")
    assert str(POSITIONS) in refused["message"]
    ranking = {"query": "w1", "documents": ["w2", long]}
    assert error(encoder.post("/v1/rerank", json=ranking))["param"] == "documents[1]"
    cut = {"input": long, "truncate_prompt_tokens": -1}
    usage = encoder.post("/v1/embeddings", json=cut).raise_for_status().json()["usage"]
    assert usage["prompt_tokens"] == POSITIONS


def test_what_is_seen_of_an_encoder(encoder: httpx.Client) -> None:
    """There is no cache, and nothing that is asked of it fails."""
    encoder.post("/v1/embeddings", json={"input": TEXTS}).raise_for_status()
    for path in (
        "/admin/cache/tree",
        "/admin/requests",
        "/admin/models",
        "/metrics",
        "/admin/daemon",
    ):
        assert encoder.get(path).status_code == 200, path
    assert encoder.post("/admin/cache/clear").status_code == 200
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert error(encoder.post("/v1/chat/completions", json=chat))["code"] == "task_not_supported"


def test_a_classifier_of_an_encoder_reranks(tmp_path: Path) -> None:
    with encoder_daemon(write_encoder_classifier(tmp_path / "bert", "bert")) as client:
        (listed,) = client.get("/v1/models").json()["data"]
        assert listed["tasks"] == ["rerank"]
        ranking = {"query": TEXTS[1], "documents": TEXTS[:3]}
        results = client.post("/v2/rerank", json=ranking).raise_for_status().json()["results"]
        pairs = {"text_1": TEXTS[1], "text_2": TEXTS[:3]}
        scored = client.post("/v1/score", json=pairs).raise_for_status().json()["data"]
        refused = error(client.post("/v1/embeddings", json={"input": "w1"}))
    by_index = {one["index"]: one["relevance_score"] for one in results}
    assert list(by_index.values()) == sorted(by_index.values(), reverse=True)
    assert [one["score"] for one in scored] == pytest.approx(
        [by_index[index] for index in range(3)], abs=1e-5
    )
    assert refused["code"] == "task_not_supported"


def test_minilm_finds_what_its_makers_publish(minilm: Path) -> None:
    texts = [
        "That is a happy person",
        "That is a happy dog",
        "That is a very happy person",
        "Today is a sunny day",
    ]
    with encoder_daemon(minilm) as client:
        (listed,) = client.get("/v1/models").json()["data"]
        answer = client.post("/v1/embeddings", json={"input": texts}).raise_for_status().json()
    assert (listed["tasks"], listed["max_model_len"]) == (["embed"], 256)
    first, *others = (np.array(one["embedding"]) for one in answer["data"])
    cosines = [float(first @ other) for other in others]
    assert cosines == pytest.approx([0.69458, 0.94291, 0.25688], abs=1e-4)


def test_the_search_of_the_readme_finds_its_section(
    minilm: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    blocks = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text("utf-8"), re.DOTALL)
    (program,) = [block for block in blocks if "embeddings.create" in block]
    engine = loaded(EngineConfig(model=str(minilm)))
    settings = Settings(port=0, model="minilm", served_model_name=("minilm",))
    with running(engine, settings) as url:
        scope: dict[str, Any] = {}
        exec(program.replace("http://127.0.0.1:8000", url), scope)
        scope["client"].close()
    assert "Accept the model's terms" in capsys.readouterr().out


class GatedEncoder:
    """An encoder whose forwards wait for a test, and the events that it delivers."""

    def __init__(self, most_waiting: int = 4) -> None:
        self.forwards = list[list[int]]()  # the lengths of the texts of each
        self.events = list[OutputEvent]()
        self.began, self.passed = threading.Semaphore(0), threading.Semaphore(0)
        self.failure: Exception | None = None
        limits = Limits(257, 100, 100, 1, most_waiting, step_tokens=20, pools=True)
        self.thread = EncoderThread(
            lambda: EncoderParts(
                self._encode, CARD, limits, lambda: MEMORY, lambda: None, lambda: None
            ),
            self.events.extend,
            lambda: None,
        )

    def _encode(self, texts: Sequence[PackedTokens]) -> list[bytes]:
        self.forwards.append([len(text) for text in texts])
        self.began.release()
        assert self.passed.acquire(timeout=WAIT_SECONDS)
        if self.failure is not None:
            raise self.failure
        return [bytes([len(text)]) for text in texts]

    def submit(self, name: str, n_tokens: int, client: str = "") -> None:
        request = Request(name, pack(range(n_tokens)), 0, client=client, pooling=Pooling.MEAN)
        asyncio.run(self.thread.submit(request))

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.thread._changed:
            assert self.thread._changed.wait_for(condition, WAIT_SECONDS)

    def ends(self) -> dict[str, FinishReason]:
        found = [event for event in self.events if event.finish_reason is not None]
        assert len({event.request_id for event in found}) == len(found)
        return {event.request_id: event.finish_reason for event in found if event.finish_reason}

    def drain(self, seconds: float) -> None:
        asyncio.run(self.thread.drain(seconds))


def test_aborts_hold_between_forwards_and_the_queue_is_bounded() -> None:
    encoder = GatedEncoder()
    encoder.submit("running", 9)
    assert encoder.began.acquire(timeout=WAIT_SECONDS)
    for name in ("a", "b"):
        encoder.submit(name, 9)
    with pytest.raises(QueueFull, match="max_waiting"):
        encoder.submit("c", 9)
    encoder.submit("d", 9, client="other")
    with pytest.raises(InvalidRequest, match="is being served"):
        encoder.submit("a", 9)
    for name in ("running", "a", "unknown"):
        asyncio.run(encoder.thread.abort(name))
    for _ in range(2):
        encoder.passed.release()
    encoder.wait(lambda: len(encoder.ends()) == 4)
    assert encoder.forwards == [[9], [9, 9]]
    assert encoder.ends() == {
        "running": FinishReason.ABORT,
        "a": FinishReason.ABORT,
        "b": FinishReason.LENGTH,
        "d": FinishReason.LENGTH,
    }
    encoder.drain(WAIT_SECONDS)
    with pytest.raises(EngineStopped):
        encoder.submit("e", 9)


def test_a_forward_that_fails_ends_its_texts_alone() -> None:
    encoder = GatedEncoder()
    encoder.failure = ValueError("no memory")
    encoder.submit("a", 9)
    encoder.passed.release()
    encoder.wait(lambda: "a" in encoder.ends())
    encoder.failure = None
    encoder.submit("b", 9)
    encoder.passed.release()
    encoder.drain(WAIT_SECONDS)
    assert encoder.ends() == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}
    assert "no memory" in str(encoder.events)


def test_a_drain_aborts_what_is_left() -> None:
    encoder = GatedEncoder()
    for name in ("a", "b", "c"):
        encoder.submit(name, 20, client=name)
    assert encoder.began.acquire(timeout=WAIT_SECONDS)
    timer = threading.Timer(0.05, encoder.passed.release)
    timer.start()
    encoder.drain(0.0)
    timer.join()
    assert set(encoder.ends().values()) == {FinishReason.ABORT}
    assert not encoder.thread.is_alive()
