"""What a checkpoint says of its purpose and of sampling, and what is made of texts and vectors."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import ModelError
from engine.mlx_backend.loading.purpose import (
    GENERATES,
    Body,
    Purpose,
    Ranking,
    find_purpose,
    longest_text_stated,
    sampling_defaults,
)
from engine.values.model import Embedder, Reranker, SamplingDefaults
from engine.values.request import Pooling
from server.generation.history import REMEMBERED, CommonPrefixTracker
from server.generation.pooling import cosine, score, vector

MODULES = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling")]
NORMALIZE = {"type": "sentence_transformers.models.Normalize"}


def checkpoint(
    directory: Path,
    config: dict[str, Any] | None = None,
    modules: object = None,
    pooling: object = None,
    prompts: object = None,
) -> Path:
    (directory / "1_Pooling").mkdir()
    files = {
        "config.json": {"model_type": "qwen3", **(config or {})},
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "config_sentence_transformers.json": prompts,
    }
    for name, content in files.items():
        if content is not None:
            (directory / name).write_text(json.dumps(content), "utf-8")
    return directory


def test_without_files_of_its_own_a_checkpoint_generates(tmp_path: Path) -> None:
    assert find_purpose(checkpoint(tmp_path)) == GENERATES


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, Pooling.FIRST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
    ],
)
def test_how_an_embedder_pools(tmp_path: Path, said: object, pooling: Pooling) -> None:
    prompts = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}
    found = find_purpose(checkpoint(tmp_path, None, [*MODULES, NORMALIZE], said, prompts))
    embedder = Embedder(pooling, 0, True, {"query": "Q: "}, "query")
    assert found == Purpose(generates=False, embedder=embedder)


def test_vectors_are_as_long_as_they_are_without_that_module(tmp_path: Path) -> None:
    found = find_purpose(checkpoint(tmp_path, None, MODULES, {"pooling_mode_lasttoken": True}))
    assert found.embedder == Embedder(Pooling.LAST, 0, normalized=False)


def test_a_setting_comes_before_the_files_and_keeps_the_rest_of_them(tmp_path: Path) -> None:
    said = {"pooling_mode_lasttoken": True}
    found = find_purpose(checkpoint(tmp_path, None, MODULES, said), pooling="mean")
    assert found == Purpose(generates=False, embedder=Embedder(Pooling.MEAN, 0, normalized=False))


def test_a_setting_has_a_generator_embed_beside_its_answers(tmp_path: Path) -> None:
    found = find_purpose(checkpoint(tmp_path), pooling="last")
    assert found == Purpose(generates=True, embedder=Embedder(Pooling.LAST, 0))


CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"]}
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("config", "ranking"),
    [
        (CLASSIFIER, Ranking()),
        (CLASSIFIER | {"classifier_from_token": ["no", "yes"]}, Ranking(("no", "yes"))),
        (CLASSIFIER | {"sentence_transformers": {"activation_fn": IDENTITY}}, Ranking((), False)),
        (CLASSIFIER | {"sbert_ce_default_activation_function": IDENTITY}, Ranking((), False)),
    ],
)
def test_how_a_reranker_scores(tmp_path: Path, config: dict[str, Any], ranking: Ranking) -> None:
    assert find_purpose(checkpoint(tmp_path, config)) == Purpose(generates=False, ranking=ranking)


def test_an_encoder_embeds_or_reranks(tmp_path: Path) -> None:
    bert = {"model_type": "bert", "architectures": ["BertModel"]}
    found = find_purpose(checkpoint(tmp_path, bert, MODULES, {"pooling_mode_mean_tokens": True}))
    embedder = Embedder(Pooling.MEAN, 0, normalized=False)
    assert found == Purpose(False, embedder=embedder, body=Body.ENCODER)
    with pytest.raises(ModelError, match="leave the setting reranker out"):
        find_purpose(tmp_path, reranker="yes-no")
    classifier = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(classifier), "utf-8")
    assert find_purpose(tmp_path) == Purpose(False, ranking=Ranking(), body=Body.ENCODER)
    with pytest.raises(ModelError, match="leave the setting pooling out"):
        find_purpose(tmp_path, pooling="mean")


def test_the_longest_text_is_that_of_the_files(tmp_path: Path) -> None:
    assert longest_text_stated(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}', "utf-8")
    assert longest_text_stated(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}', "utf-8")
    assert longest_text_stated(tmp_path) == 512
    texts = tmp_path / "sentence_bert_config.json"
    texts.write_text('{"max_seq_length": 256, "do_lower_case": false}', "utf-8")
    assert longest_text_stated(tmp_path) == 256
    texts.write_text('{"max_seq_length": 256, "do_lower_case": true}', "utf-8")
    with pytest.raises(ModelError, match="lower case"):
        longest_text_stated(tmp_path)


def test_a_classifier_does_not_embed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="leave the setting pooling out"):
        find_purpose(checkpoint(tmp_path, CLASSIFIER), pooling="last")


def test_a_setting_makes_a_reranker_of_a_generator(tmp_path: Path) -> None:
    found = find_purpose(checkpoint(tmp_path), reranker="yes-no")
    assert found == Purpose(generates=False, ranking=Ranking(("no", "yes")))


@pytest.mark.parametrize(
    ("config", "modules", "pooling", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, None, None, "BertModel is an enc"),
        ({"model_type": "xlm-roberta"}, None, None, "set pooling to mean or first"),
        ({"model_type": "albert"}, None, None, "albert is an encoder"),
        (
            {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
            | {"classifier_from_token": ["no", "yes"]},
            None,
            None,
            "scores by no tokens",
        ),
        (
            {"is_causal": False},
            MODULES,
            {"pooling_mode_lasttoken": True},
            "attends to later",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            MODULES,
            {"pooling_mode_mean_tokens": True},
            "mlx-embeddings",
        ),
        (None, [{"type": "sentence_transformers.models.Dense"}], None, "Dense"),
        (None, MODULES, {"pooling_mode_weightedmean_tokens": True}, "weightedmean_tokens"),
        (
            None,
            MODULES,
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "mean_tokens and cls_token",
        ),
        (None, MODULES, {"pooling_mode_mean_tokens": False}, "nothing"),
        (CLASSIFIER | {"classifier_from_token": ["a", "b", "c"]}, None, None, "one token or two"),
    ],
)
def test_what_is_refused_and_why(
    tmp_path: Path, config: dict[str, Any] | None, modules: object, pooling: object, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        find_purpose(checkpoint(tmp_path, config, modules, pooling))


def test_files_that_are_broken_are_named(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, None, MODULES, {"pooling_mode_lasttoken": True})
    (directory / "modules.json").write_text("[")
    with pytest.raises(ModelError, match=r"modules\.json cannot be read"):
        find_purpose(directory)
    (directory / "modules.json").write_text("{}")
    with pytest.raises(ModelError, match="delete it"):
        find_purpose(directory)


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1)


@given(TEXTS)
def test_how_far_texts_begin_alike(texts: list[tuple[int, ...]]) -> None:
    def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
        pairs = zip(left, right, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))

    expected = [
        max((common(one, other) for j, other in enumerate(texts) if i != j), default=0)
        for i, one in enumerate(texts)
    ]
    assert CommonPrefixTracker().shared_tokens("", texts) == expected


def test_the_latest_requests_are_remembered_by_their_salt() -> None:
    prefixes = CommonPrefixTracker()
    assert prefixes.shared_tokens("", [(1, 2, 3, 4)]) == [0]
    assert prefixes.shared_tokens("", [(1, 2, 3, 5)]) == [3]
    assert prefixes.shared_tokens("other", [(1, 2, 3, 5)]) == [0]
    for i in range(REMEMBERED):
        prefixes.shared_tokens("", [(9, i)])
    assert prefixes.shared_tokens("", [(1, 2, 3, 6)]) == [0]


def test_vectors_are_cut_before_they_are_as_long_as_one() -> None:
    pooled = np.array([3, 4, 12], "<f4").tobytes()
    embedder = Embedder(Pooling.LAST, 3)
    assert vector(pooled, embedder) == pytest.approx(np.array([3, 4, 12]) / 13)
    assert vector(pooled, embedder, 2) == pytest.approx([0.6, 0.8])
    plain = Embedder(Pooling.LAST, 3, normalized=False)
    assert vector(pooled, plain, 2).tolist() == [3, 4]
    assert vector(np.zeros(3, "<f4").tobytes(), embedder).tolist() == [0, 0, 0]
    assert cosine(np.array([2, 0], np.float32), np.array([3, 3], np.float32)) == pytest.approx(
        2**-0.5
    )


@pytest.mark.parametrize(
    ("number", "bounded"), [(0, 0.5), (1000, 1), (-1000, 0), (2, 1 / (1 + np.exp(-2)))]
)
def test_scores(number: float, bounded: float) -> None:
    pooled = np.array([number], "<f4").tobytes()
    assert score(pooled, Reranker()) == pytest.approx(bounded)
    assert score(pooled, Reranker(has_sigmoid=False)) == number


QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def read(checkpoint: Path, content: bytes | Mapping[str, object]) -> tuple[SamplingDefaults, str]:
    """The defaults, and what the log says of them."""
    written = content if isinstance(content, bytes) else json.dumps(content).encode()
    (checkpoint / "generation_config.json").write_bytes(written)
    lines: list[str] = []
    return sampling_defaults(checkpoint, lines.append), "\n".join(lines)


def test_the_file_of_a_qwen3(tmp_path: Path) -> None:
    defaults, said = read(tmp_path, QWEN3)
    assert defaults == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert said == (
        "sampling defaults: temperature 0.6, top_p 0.95, top_k 20, min_p 0, repetition_penalty 1"
    )


def test_without_a_file_or_a_word_about_sampling(tmp_path: Path) -> None:
    lines: list[str] = []
    assert sampling_defaults(tmp_path, lines.append) == SamplingDefaults()
    assert lines == []
    nulls = {"temperature": None, "top_k": None, "eos_token_id": 2}
    assert read(tmp_path, nulls) == (SamplingDefaults(), "")


def test_do_sample_counts_for_nothing(tmp_path: Path) -> None:
    defaults, _ = read(tmp_path, QWEN3 | {"do_sample": False, "temperature": 0.7})
    assert defaults.temperature == 0.7


def test_whole_numbers_and_limits_are_taken(tmp_path: Path) -> None:
    said = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 1, "repetition_penalty": 100}
    assert read(tmp_path, said)[0] == SamplingDefaults(0, 1, -1, 1, 100)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", "0.6"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 20.5),
        ("top_k", 10**4000),
        ("min_p", [0.1]),
        ("min_p", {"a": "\n" * 10_000}),
        ("repetition_penalty", 0),
    ],
)
def test_what_no_request_could_say_is_ignored_in_one_line(
    tmp_path: Path, name: str, value: object
) -> None:
    other = "min_p" if name == "top_p" else "top_p"
    defaults, said = read(tmp_path, {other: 0.5, name: value})
    assert asdict(defaults) == asdict(SamplingDefaults()) | {other: 0.5}
    ignored, applies = said.split("\n")
    assert ignored.startswith(f"generation_config.json: {name} is ignored: Input should be ")
    assert len(ignored) < 200
    assert applies.startswith("sampling defaults: ")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"temperature": 0.6',
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        b"\xff\xfe{\x00}\x00",
        b"[" * 100_000,
        b'{"top_k": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_broken_file_is_ignored_in_one_line(tmp_path: Path, content: bytes) -> None:
    defaults, said = read(tmp_path, content)
    assert defaults == SamplingDefaults()
    assert said.startswith("generation_config.json is ignored: ")
    assert "\n" not in said
