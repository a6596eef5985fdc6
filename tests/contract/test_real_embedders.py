"""Daemons of tiny embedders and rerankers say what mlx-lm's own bodies of the models do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model
from openai import OpenAI
from tokenizers import Tokenizer

from engine.api import ModelError
from engine.values.request import Pooling
from engine.values.settings import EngineConfig
from server.settings import Settings
from tests.checkpoints import FAMILIES, write_family
from tests.contract.daemon import running
from tests.contract.scripted import CLIENT_SECONDS
from tests.embedders import (
    END,
    PROMPTS,
    write_classifier,
    write_embedder,
    write_json,
    write_llama_classifier,
    write_yes_no,
)
from tests.hosting import loaded

TEXTS = ["the cat sat on the mat", "the dog sat", "and the log", "a cat and a dog on a mat"]
TOLERANCE = 1e-4

Vectors = npt.NDArray[np.float32]


@contextmanager
def daemon(model: Path, **settings: Any) -> Iterator[httpx.Client]:
    config = EngineConfig(model=str(model), kv_cache_bytes=4 << 20, block_size=8, **settings)
    engine = loaded(config)
    served = Settings(port=0, model=str(model), served_model_name=("tiny",))
    with (
        running(engine, served) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def embedder_and_generator(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_embedder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def embedder(embedder_and_generator: tuple[Path, Path]) -> Iterator[httpx.Client]:
    with daemon(embedder_and_generator[0]) as client:
        yield client


@pytest.fixture(scope="module")
def body(embedder_and_generator: tuple[Path, Path]) -> Module:
    generator: Module = load_model(embedder_and_generator[1])[0]
    return generator


@pytest.fixture(scope="module")
def tokenizer(embedder_and_generator: tuple[Path, Path]) -> Tokenizer:
    return Tokenizer.from_file(str(embedder_and_generator[0] / "tokenizer.json"))


def hidden(generator: Module, tokens: list[int]) -> Vectors:
    return np.array(generator.model(mx.array([tokens]))[0].astype(mx.float32))


def unit(vector: Vectors) -> Vectors:
    return vector / np.float32(np.linalg.norm(vector))


def embeddings(client: httpx.Client, **body: Any) -> Vectors:
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    assert [one["index"] for one in answer.json()["data"]] == list(
        range(len(answer.json()["data"]))
    )
    return np.array([one["embedding"] for one in answer.json()["data"]], np.float32)


def error(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


def test_texts_and_tokens_without_a_head(
    embedder: httpx.Client, body: Module, tokenizer: Tokenizer
) -> None:
    tokens = [tokenizer.encode(text).ids for text in TEXTS]
    assert all(one[-1] == tokenizer.token_to_id(END) for one in tokens)
    expected = np.stack([unit(hidden(body, one)[-1]) for one in tokens])
    assert np.allclose(embeddings(embedder, input=TEXTS), expected, atol=TOLERANCE)
    assert np.allclose(embeddings(embedder, input=tokens), expected, atol=TOLERANCE)
    assert np.allclose(embeddings(embedder, input=TEXTS[0]), expected[:1], atol=TOLERANCE)


def test_openai_s_client_which_asks_for_base64(embedder: httpx.Client) -> None:
    with OpenAI(base_url=f"{embedder.base_url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS)
    found = np.array([one.embedding for one in answer.data], np.float32)
    assert np.allclose(found, embeddings(embedder, input=TEXTS), atol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)


def test_dimensions_are_cut_and_as_long_as_one_again(embedder: httpx.Client) -> None:
    whole, cut = (embeddings(embedder, input=TEXTS, dimensions=n) for n in (64, 16))
    assert np.allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    assert np.allclose(cut, [unit(one[:16]) for one in whole], atol=1e-6)
    for dimensions in (0, 65):
        asked = {"input": "a", "dimensions": dimensions}
        assert error(embedder.post("/v1/embeddings", json=asked))["param"] == "dimensions"


def test_a_prompt_by_name_stands_before_the_text_and_is_shared(
    embedder: httpx.Client, body: Module, tokenizer: Tokenizer
) -> None:
    asked = {"input": TEXTS, "prompt_name": "query"}
    answer = embedder.post("/v1/embeddings", json=asked).json()
    tokens = [tokenizer.encode(PROMPTS["query"] + text).ids for text in TEXTS]
    expected = [unit(hidden(body, one)[-1]) for one in tokens]
    found = [one["embedding"] for one in answer["data"]]
    assert np.allclose(found, expected, atol=TOLERANCE)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(map(len, tokens))
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 3 * 8
    unknown = embedder.post("/v1/embeddings", json={"input": "a", "prompt_name": "passage"})
    assert "'query'" in error(unknown)["message"]


def test_a_text_is_cut_before_its_special_tokens(
    embedder: httpx.Client, tokenizer: Tokenizer
) -> None:
    long = TEXTS[3] * 400
    first = [*tokenizer.encode(long, add_special_tokens=False).ids[:9], tokenizer.token_to_id(END)]
    cut = embeddings(embedder, input=long, truncate_prompt_tokens=10)
    assert np.allclose(cut, embeddings(embedder, input=[first]), atol=1e-5)
    too_long = error(embedder.post("/v1/embeddings", json={"input": ["a", long]}))
    assert too_long["param"] == "input[1]"
    assert too_long["code"] == "context_length_exceeded"
    asked = {"input": long, "truncate_prompt_tokens": -1}
    usage = embedder.post("/v1/embeddings", json=asked).json()["usage"]
    (model,) = embedder.get("/v1/models").json()["data"]
    assert usage["prompt_tokens"] == model["max_model_len"]


def test_an_embedder_ranks_by_similarity(embedder: httpx.Client) -> None:
    asked = {"query": TEXTS[0], "documents": TEXTS, "top_n": 2}
    answer = embedder.post("/v1/rerank", json=asked).json()
    query = embeddings(embedder, input=TEXTS[0], prompt_name="query")[0]
    similar = embeddings(embedder, input=TEXTS) @ query
    order = np.argsort(-similar)[:2].tolist()
    assert [one["index"] for one in answer["results"]] == order
    scores = [one["relevance_score"] for one in answer["results"]]
    assert np.allclose(scores, similar[order], atol=TOLERANCE)


def test_ollamas_clients_are_told_that_it_embeds(embedder: httpx.Client) -> None:
    shown = embedder.post("/api/show", json={"model": "tiny"}).json()
    assert shown["capabilities"] == ["embedding"]


def test_an_embedder_writes_no_answers(embedder: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, asked in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", chat | {"max_tokens": 5}),
        ("/v1/responses", {"input": "hi"}),
    ):
        message = error(embedder.post(path, json=asked))["message"]
        assert "writes no answers" in message
        assert "/v1/embeddings" in message
    assert embedder.get("/v1/models/tiny").json()["tasks"] == ["embed"]


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.FIRST])
def test_other_ways_and_lengths(tmp_path: Path, pooling: Pooling) -> None:
    checkpoint, generator = write_embedder(tmp_path, pooling, normalized=False)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    body = load_model(generator)[0]
    with daemon(checkpoint) as client:
        found = embeddings(client, input=TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        own = hidden(body, tokenizer.encode(text).ids)
        expected = own.mean(axis=0) if pooling is Pooling.MEAN else own[0]
        assert np.allclose(vector, expected, atol=TOLERANCE)


def test_a_generator_embeds_where_the_settings_say_how(tmp_path: Path) -> None:
    generator = write_family(FAMILIES["llama"], tmp_path)
    with daemon(generator) as client:
        refused = error(client.post("/v1/embeddings", json={"input": "hi"}))
        assert "--pooling" in refused["message"]
        assert refused["param"] == "model"
    with daemon(generator, pooling="mean") as client:
        assert client.get("/v1/models/tiny").json()["tasks"] == ["generate", "embed"]
        assert np.isclose(np.linalg.norm(embeddings(client, input="hi")), 1)
        asked = {"prompt": "hi", "max_tokens": 3}
        assert client.post("/v1/completions", json=asked).status_code == 200


def score_of(generator: Module, tokens: list[int], weight: Vectors) -> float:
    return float(1 / (1 + np.exp(-(hidden(generator, tokens)[-1] @ weight))))


def rerank(client: httpx.Client, **body: Any) -> dict[int, float]:
    answer = client.post("/v1/rerank", json=body)
    assert answer.status_code == 200, answer.text
    scores = {one["index"]: one["relevance_score"] for one in answer.json()["results"]}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    return scores


def published(query: str, document: str, instruction: str) -> str:
    """Qwen3-Reranker's prompt, as its model card has it."""
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".'
    )
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_4bit"])
def test_a_reranker_compares_yes_and_no(tmp_path: Path, family: str) -> None:
    checkpoint = write_yes_no(tmp_path, FAMILIES[family])
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    generator = load_model(checkpoint)[0]
    no, yes = (tokenizer.token_to_id(word) for word in ("no", "yes"))
    with daemon(checkpoint, reranker="yes-no") as client:
        assert client.get("/v1/models/tiny").json()["tasks"] == ["rerank"]
        plain = rerank(client, query="cats", documents=TEXTS)
        told = rerank(client, query="cats", documents=TEXTS, instruction="find dogs")
    for instruction, scores in ((SEARCH, plain), ("find dogs", told)):
        for index, text in enumerate(TEXTS):
            tokens = tokenizer.encode(published("cats", text, instruction)).ids
            logits = np.array(generator(mx.array([tokens]))[0, -1].astype(mx.float32))
            softmax = np.exp(logits[yes]) / (np.exp(logits[yes]) + np.exp(logits[no]))
            assert scores[index] == pytest.approx(float(softmax), abs=1e-3)


@pytest.fixture(scope="module")
def yes_no(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_yes_no(tmp_path_factory.mktemp("rerankers"), FAMILIES["qwen3"])


@pytest.fixture(scope="module")
def reranker(yes_no: Path) -> Iterator[httpx.Client]:
    with daemon(yes_no, reranker="yes-no") as client:
        yield client


def prompt_tokens(client: httpx.Client, **body: Any) -> int:
    answer = client.post("/v1/rerank", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens"])


def test_all_documents_share_the_query(reranker: httpx.Client) -> None:
    asked = {"query": "a cat on a mat", "documents": [f"document {i}" for i in range(20)]}
    usage = reranker.post("/v1/rerank", json=asked).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]


def test_a_pair_is_cut_in_its_document(reranker: httpx.Client, yes_no: Path) -> None:
    long = " ".join(TEXTS * 200)
    least = prompt_tokens(reranker, query="cats", documents=["a"])
    asked = {"query": "cats", "documents": ["a", long]}
    assert error(reranker.post("/v1/rerank", json=asked))["param"] == "documents[1]"
    cut = {"query": "cats", "documents": [long], "truncate_prompt_tokens": least + 20}
    assert least + 10 < prompt_tokens(reranker, **cut) <= least + 20
    few = cut | {"truncate_prompt_tokens": 30}
    assert error(reranker.post("/v1/rerank", json=few))["param"] == "truncate_prompt_tokens"
    tokenizer = Tokenizer.from_file(str(yes_no / "tokenizer.json"))
    first = tokenizer.decode(tokenizer.encode(long).ids[:12])
    by_document = rerank(reranker, query="cats", documents=[long], max_tokens_per_doc=12)
    whole = rerank(reranker, query="cats", documents=[first])
    assert by_document[0] == pytest.approx(whole[0], abs=1e-5)


@pytest.mark.parametrize("labels", [1, 2])
def test_a_head_of_its_own(tmp_path: Path, labels: int) -> None:
    checkpoint, peer = write_classifier(tmp_path, labels)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    weight = np.array(mx.random.normal((labels, 64), key=mx.random.key(7)))
    weight = weight[-1] - weight[0] if labels == 2 else weight[0]
    with daemon(checkpoint) as client:
        scores = rerank(client, query="cats", documents=TEXTS)
    generator = load_model(peer)[0]
    for index, text in enumerate(TEXTS):
        tokens = tokenizer.encode(published("cats", text, SEARCH)).ids
        assert scores[index] == pytest.approx(score_of(generator, tokens, weight), abs=1e-4)


def test_scores_without_a_sigmoid_and_pair_by_pair(tmp_path: Path) -> None:
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    checkpoint, peer = write_classifier(tmp_path, 1, sentence_transformers=identity)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    weight = np.array(mx.random.normal((1, 64), key=mx.random.key(7)))[0]
    with daemon(checkpoint) as client:
        asked = {"text_1": TEXTS[:2], "text_2": TEXTS[2:]}
        answer = client.post("/v1/score", json=asked).json()
        again = client.post("/score", json={"queries": TEXTS[:2], "documents": TEXTS[2:]}).json()
        uneven = {"text_1": TEXTS[:2], "text_2": TEXTS[:3]}
        assert error(client.post("/v1/score", json=uneven))["param"] == "text_2"
    generator = load_model(peer)[0]
    assert [one["index"] for one in answer["data"]] == [0, 1]
    for one, query, document in zip(answer["data"], TEXTS[:2], TEXTS[2:], strict=True):
        tokens = tokenizer.encode(published(query, document, SEARCH)).ids
        raw = float(hidden(generator, tokens)[-1] @ weight)
        assert one["score"] == pytest.approx(raw, abs=1e-3)
    scores, once_more = ([one["score"] for one in found["data"]] for found in (answer, again))
    assert once_more == pytest.approx(scores, abs=1e-3)


def test_a_pair_without_a_format_is_the_tokenizer_s(tmp_path: Path) -> None:
    checkpoint, peer = write_llama_classifier(tmp_path)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    weight = np.array(mx.random.normal((1, 64), key=mx.random.key(7)))[0]
    with daemon(checkpoint) as client:
        scores = rerank(client, query="cats", documents=TEXTS)
        asked = {"query": "cats", "documents": TEXTS, "instruction": "find dogs"}
        assert error(client.post("/v1/rerank", json=asked))["param"] == "instruction"
    generator = load_model(peer)[0]
    for index, text in enumerate(TEXTS):
        tokens = tokenizer.encode("cats", text).ids
        assert scores[index] == pytest.approx(score_of(generator, tokens, weight), abs=1e-4)


OWN_FORMAT = (
    "{% for message in messages %}{% if message['role'] == 'query' %}Q: {{ message['content'] }}"
    "{% elif message['role'] == 'document' %} D: {{ message['content'] }}{% endif %}{% endfor %} A:"
)


def test_a_template_of_the_checkpoint_s_own_comes_first(tmp_path: Path) -> None:
    checkpoint, peer = write_classifier(tmp_path)
    (checkpoint / "chat_template.jinja").write_text(OWN_FORMAT)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    weight = np.array(mx.random.normal((1, 64), key=mx.random.key(7)))[0]
    with daemon(checkpoint) as client:
        scores = rerank(client, query="cats", documents=TEXTS[:1])
    tokens = tokenizer.encode(f"Q: cats D: {TEXTS[0]} A:").ids
    expected = score_of(load_model(peer)[0], tokens, weight)
    assert scores[0] == pytest.approx(expected, abs=1e-4)


def test_what_would_be_wrong_is_refused(tmp_path: Path) -> None:
    def refusal(checkpoint: Path, **settings: Any) -> str:
        config = EngineConfig(model=str(checkpoint), kv_cache_bytes=4 << 20, **settings)
        with pytest.raises(ModelError) as refused:
            loaded(config)
        return str(refused.value)

    generator = write_family(FAMILIES["llama"], tmp_path)
    assert "no token 'no'" in refusal(generator, reranker="yes-no")
    classifier, _ = write_classifier(tmp_path, 3)
    assert "3 labels" in refusal(classifier)
    embedder, _ = write_embedder(tmp_path)
    dense = [{"type": "sentence_transformers.models.Dense"}]
    write_json(embedder / "modules.json", dense)
    assert "Dense" in refusal(embedder)
