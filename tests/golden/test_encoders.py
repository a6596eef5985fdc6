"""Encoders compute what transformers does, in batches as alone, and each text whole."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from engine.api import ModelError
from engine.encoders.queue import TextQueue, WaitingText
from engine.encoders.thread import EncoderParts
from engine.mlx_backend.backend import describe_machine, load_encoder
from engine.mlx_backend.encoders import models
from engine.values.request import Pooling, Request
from engine.values.settings import EngineConfig
from engine.values.tokens import PackedTokens, pack
from tests.devices import tolerance
from tests.encoders import (
    KINDS,
    PAIRS,
    POSITIONS,
    TEXTS,
    VECTORS,
    write_encoder,
    write_encoder_classifier,
)

TOLERANCE = tolerance(1e-5)

EXPECTED: dict[str, Any] = json.loads(VECTORS.read_text("utf-8"))

Vector = npt.NDArray[np.float32]


class Loaded:
    """An encoder on a thread of its own, which its arrays belong to."""

    def __init__(self, thread: ThreadPoolExecutor, checkpoint: Path, **settings: Any) -> None:
        self._thread = thread
        config = EngineConfig(model=str(checkpoint), **settings)
        self.parts: EncoderParts = thread.submit(load_encoder, config, print).result()
        self.tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def computed(self, texts: Sequence[PackedTokens]) -> list[Vector]:
        pooled = self._thread.submit(self.parts.encode, texts).result()
        return [np.frombuffer(one, "<f4") for one in pooled]

    def tokens(self, text: str, pair: str | None = None) -> PackedTokens:
        return pack(self.tokenizer.encode(text, pair).ids)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield executor
        executor.submit(mx.clear_streams).result()


def error(found: Vector, expected: Any) -> float:
    wanted = np.array(expected, np.float32)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_an_encoder_with_a_type_of_layer_that_transformers_does_not_know(
    thread: ThreadPoolExecutor, tmp_path: Path
) -> None:
    checkpoint = write_encoder(tmp_path / "bert", "bert")
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_types": ["invented"]}))
    encoder = Loaded(thread, checkpoint)
    (found,) = encoder.computed([encoder.tokens(TEXTS[0])])
    assert np.isfinite(found).all()


@pytest.mark.parametrize("way", Pooling)
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(
    thread: ThreadPoolExecutor, tmp_path: Path, kind: str, way: Pooling
) -> None:
    """Of texts of 1 to 57 words in one forward."""
    encoder = Loaded(thread, write_encoder(tmp_path / kind, kind), pooling=str(way))
    found = encoder.computed([encoder.tokens(text) for text in TEXTS])
    for vector, expected in zip(found, EXPECTED[kind]["texts"], strict=True):
        assert error(vector, expected[way]) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(
    thread: ThreadPoolExecutor, tmp_path: Path, kind: str
) -> None:
    """Of pairs; of two labels it is the difference."""
    encoder = Loaded(thread, write_encoder_classifier(tmp_path / kind, kind))
    found = encoder.computed([encoder.tokens(*pair) for pair in PAIRS])
    assert error(np.concatenate(found), EXPECTED[kind]["scores"]) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_batched_against_alone(
    thread: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also where attention is computed in parts of a few queries."""
    encoder = Loaded(thread, write_encoder(tmp_path / kind, kind))
    texts = [encoder.tokens(text) for text in TEXTS]
    alone = [encoder.computed([text])[0] for text in texts]
    for most_scores in (models.MOST_SCORES, 5000):
        monkeypatch.setattr(models, "MOST_SCORES", most_scores)
        for together, single in zip(encoder.computed(texts), alone, strict=True):
            assert error(together, single) < TOLERANCE


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_an_encoder_below_another_head_is_found(
    thread: ThreadPoolExecutor, tmp_path: Path, kind: str
) -> None:
    """As it is saved with the head that it was trained with."""
    checkpoint = write_encoder_classifier(tmp_path / kind, kind)
    file = checkpoint / "config.json"
    config = json.loads(file.read_text("utf-8")) | {"architectures": ["SomethingForMaskedLM"]}
    file.write_text(json.dumps(config), "utf-8")
    encoder = Loaded(thread, checkpoint, pooling="mean")
    (found,) = encoder.computed([encoder.tokens(TEXTS[2])])
    assert error(found, EXPECTED[kind]["texts"][2]["mean"]) < TOLERANCE


def test_the_card_states_what_a_text_may_have(thread: ThreadPoolExecutor, tmp_path: Path) -> None:
    """sentence-transformers' number, or else the tokenizer's, within the model's positions."""
    checkpoint = write_encoder(tmp_path / "roberta", "roberta")

    def longest(**settings: Any) -> int:
        return Loaded(thread, checkpoint, **settings).parts.card.max_sequence_tokens

    assert longest() == POSITIONS
    tokenizer = checkpoint / "tokenizer_config.json"
    stated = json.loads(tokenizer.read_text("utf-8"))
    tokenizer.write_text(json.dumps(stated | {"model_max_length": 40}), "utf-8")
    assert longest() == 40
    (checkpoint / "sentence_bert_config.json").write_text('{"max_seq_length": 30}', "utf-8")
    assert longest() == 30
    assert longest(max_model_len=50) == 50
    with pytest.raises(ModelError, match=f"the model's positions, {POSITIONS}"):
        longest(max_model_len=POSITIONS + 1)


def test_what_is_planned_is_what_doctor_shows(thread: ThreadPoolExecutor, tmp_path: Path) -> None:
    checkpoint = write_encoder(tmp_path / "bert", "bert")
    report = describe_machine(EngineConfig(model=str(checkpoint)))
    parts = Loaded(thread, checkpoint).parts
    assert report.problem == ""
    assert report.memory is not None
    assert report.memory.kept_bytes == parts.memory().model.kept_bytes
    assert report.card is not None
    assert report.card.max_sequence_tokens == parts.card.max_sequence_tokens
    assert parts.memory().active >= report.memory.weights_bytes


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden_act": "mish"}, "'mish'"),
        ({"num_hidden_layers": 5}, "encoder.layer.4.attention.self.query.weight is missing"),
        ({"vocab_size": 50}, "tokens go up to 99"),
        ({"is_decoder": True}, "decoder"),
        ({"quantization": {"bits": 4}}, "quantized"),
    ],
)
def test_what_would_be_wrong_is_refused(
    thread: ThreadPoolExecutor, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    checkpoint = write_encoder(tmp_path / "bert", "bert")
    file = checkpoint / "config.json"
    config = json.loads(file.read_text("utf-8")) | changed
    file.write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelError, match=words):
        Loaded(thread, checkpoint)


def waiting(lengths: Sequence[int], client: str = "", first: int = 0) -> list[WaitingText]:
    return [
        WaitingText(Request(f"{client}{order}", pack(range(length)), 0, client=client), 0.0, order)
        for order, length in enumerate(lengths, start=first)
    ]


def forwards(queue: TextQueue) -> list[list[WaitingText]]:
    found = []
    while texts := queue.take():
        found.append(texts)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_forwards_are_full_and_hardly_padded(seed: int) -> None:
    """Of 64 texts each is computed once, in forwards of at most the tokens of a step."""
    random = np.random.default_rng(seed)
    lengths = [int(n) for n in random.integers(1, random.integers(2, 700), 64)]
    queue = TextQueue(512)
    for text in waiting(lengths):
        queue.add(text)
    area = 0
    found = forwards(queue)
    for texts in found:
        longest = max(text.n_tokens for text in texts)
        assert len(texts) * longest <= 512 or len(texts) == 1
        area += len(texts) * longest
    assert sorted(text.order for texts in found for text in texts) == list(range(64))
    assert area - sum(lengths) < 0.3 * sum(lengths)
    assert len(found) < 64 or min(lengths) > 256


def test_clients_take_turns_and_priority_comes_first() -> None:
    queue = TextQueue(100)
    many = waiting([100] * 5, "a")
    urgent = WaitingText(Request("urgent", pack(range(90)), 0, client="a", priority=-1), 0.0, 9)
    for text in [*many, *waiting([50], "b", 10), urgent]:
        queue.add(text)
    order = [texts[0].request.id for texts in forwards(queue)]
    assert order == ["urgent", "b10", "a0", "a1", "a2", "a3", "a4"]


def test_a_text_that_fits_joins_the_forward_of_another_client() -> None:
    queue = TextQueue(100)
    for text in [*waiting([30, 99], "a"), *waiting([28, 4], "b", 5)]:
        queue.add(text)
    assert [sorted(text.request.id for text in texts) for texts in forwards(queue)] == [
        ["a0", "b5"],
        ["b6"],
        ["a1"],
    ]
