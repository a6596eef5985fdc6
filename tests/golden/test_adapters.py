"""Rows of several adapters in one forward say what mlx-lm's model says with each alone."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model

from engine.mlx_backend.loading.adapter_files import WEIGHTS
from engine.mlx_backend.loading.loader import load_weights, open_model
from engine.mlx_backend.loading.selfcheck import GPU_TOLERANCE
from engine.mlx_backend.model.attention import Attention
from engine.values.request import Request, SamplingParams
from engine.values.settings import AdapterConfig, KVFormat
from engine.values.tokens import pack
from tests.adapters import adapted_peer, write_adapter
from tests.checkpoints import FAMILIES, write_family
from tests.devices import rounding, tolerance
from tests.golden.conftest import ATTENTION
from tests.golden.driving import (
    BLOCK_SIZE,
    Driver,
    allowed,
    expect_greedy,
    random_tokens,
    reference,
    rms,
)
from tests.offline import OfflineDaemon, Room, Served, load
from tests.stored_peer import store_in_format

FAMILY_NAMES = ("llama", "qwen3", "qwen3_4bit", "qwen3_q8", "gemma3_text", "qwen3_5", "falcon_h1")
"""Full attention, norms, quantized weights, quantized KV, windows, two recurrent layers."""

TOLERANCE = tolerance(2e-4)
APART = 0.05
"""RMS of the difference of what two adapters say, at least: above every tolerance."""
HALF_TOLERANCE = 0.02
OUTPUT_TOKENS = 24
WIDE, NARROW = "wide", "narrow"


class Adapted(NamedTuple):
    """A model with two adapters of unlike rank and layers, and mlx-lm's model by adapter."""

    served: Served
    peers: Mapping[str, Module]


def adapter_configs(checkpoint: Path, parent: Path) -> tuple[AdapterConfig, ...]:
    """One that changes all layers, and one that changes some projections of the last."""
    return (
        AdapterConfig(WIDE, write_adapter(checkpoint, parent / WIDE, seed=1, rank=8)),
        AdapterConfig(NARROW, write_adapter(checkpoint, parent / NARROW, 2, rank=3, n_layers=1)),
    )


def peers(checkpoint: Path, configs: tuple[AdapterConfig, ...]) -> dict[str, Module]:
    adapted = {config.name: adapted_peer(checkpoint, config.directory) for config in configs}
    return {"": load_model(checkpoint)[0], **adapted}


@pytest.fixture(scope="module")
def adapted_of(
    checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Adapted]:
    @cache
    def make(family: str) -> Adapted:
        checkpoint = checkpoint_of(family)
        configs = adapter_configs(checkpoint, tmp_path_factory.mktemp(family))
        kv_format = FAMILIES[family].kv_format
        served = load(checkpoint, adapters=configs, kv_format=kv_format)
        adapted = peers(checkpoint, configs)
        if kv_format is not KVFormat.AUTO:
            for peer in adapted.values():
                store_in_format(peer, served.layout)
        return Adapted(served, adapted)

    return make


@pytest.fixture(params=FAMILY_NAMES)
def adapted(request: pytest.FixtureRequest, adapted_of: Callable[[str], Adapted]) -> Adapted:
    return adapted_of(request.param)


def greedy(name: str, prompt: list[int], adapter: str, salt: str = "") -> Request:
    sampling = SamplingParams(temperature=0)
    return Request(name, pack(prompt), OUTPUT_TOKENS, sampling, cache_salt=salt, adapter=adapter)


@pytest.mark.parametrize("adapter", ["", WIDE, NARROW])
def test_alone(adapted: Adapted, adapter: str) -> None:
    driver = Driver(adapted.served, Attention())
    tokens = random_tokens(45, seed=1)
    (found,) = driver.logits([driver.subject(tokens, adapter)], lasts=20)
    assert rms(found, reference(adapted.peers[adapter], tokens)[-21:]) < allowed(
        TOLERANCE, adapted.peers[adapter]
    )


def test_without_an_adapter_it_is_the_model_to_the_last_bit(
    adapted_of: Callable[[str], Adapted], served_of: Callable[[str], Served]
) -> None:
    tokens = random_tokens(45, seed=1)
    found = []
    for served in (adapted_of("qwen3").served, served_of("qwen3")):
        driver = Driver(served, Attention())
        found += driver.logits([driver.subject(tokens)], lasts=20)
    assert np.abs(found[0] - found[1]).max() <= rounding(GPU_TOLERANCE)


def test_adapters_say_something_else(adapted: Adapted) -> None:
    """Else none of these tests would say anything."""
    tokens = random_tokens(45, seed=1)
    logits = [reference(peer, tokens) for peer in adapted.peers.values()]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert rms(logits[one], logits[other]) > APART


@pytest.mark.parametrize("attention", [*ATTENTION.values()], ids=[*ATTENTION])
def test_prompts_and_decodes_of_all_in_one_step(
    adapted: Adapted, attention: Callable[[], Attention]
) -> None:
    driver = Driver(adapted.served, attention())
    chosen = ["", WIDE, NARROW, WIDE, "", NARROW]
    rows = [random_tokens(n + 10, seed=n) for n in (5, BLOCK_SIZE, 33, 1, 70, 33)]
    subjects = list(map(driver.subject, rows, chosen))
    found = driver.logits(subjects, lasts=10)
    for logits, tokens, adapter in zip(found, rows, chosen, strict=True):
        assert rms(logits, reference(adapted.peers[adapter], tokens)[-11:]) < allowed(
            TOLERANCE, adapted.peers[adapter]
        )


def test_a_prompt_beside_decodes_of_others(adapted: Adapted) -> None:
    driver = Driver(adapted.served, Attention())
    old, new = random_tokens(50, seed=3), random_tokens(33, seed=4)
    running, arriving = driver.subject(old, WIDE), driver.subject(new, NARROW)
    driver.run([(running, 49)])
    driver.prefill(arriving, 10)
    found = driver.run([(running, 1), (arriving, 23)])
    assert rms(found[0], reference(adapted.peers[WIDE], old)[-1]) < allowed(
        TOLERANCE, adapted.peers[WIDE]
    )
    assert rms(found[1], reference(adapted.peers[NARROW], new)[-1]) < allowed(
        TOLERANCE, adapted.peers[NARROW]
    )


def test_answers_beside_each_other(adapted: Adapted) -> None:
    daemon = OfflineDaemon(adapted.served, Attention(), Room(96))
    prompt = random_tokens(30, seed=5)
    asked = [greedy(f"{adapter}-{i}", prompt, adapter) for adapter in adapted.peers for i in (0, 1)]
    said = daemon.serve(*asked)
    for request in asked:
        expect_greedy(adapted.peers[request.adapter], prompt, said[request.id, 0])


def test_prefixes_are_found_by_their_own_adapter_alone(adapted: Adapted) -> None:
    daemon = OfflineDaemon(adapted.served, Attention(), Room(96))
    prompt = random_tokens(41, seed=6)
    for adapter in adapted.peers:
        daemon.serve(greedy(f"cold {adapter}", prompt, adapter))
        assert daemon.usage[f"cold {adapter}"].cached_tokens == 0
    for adapter, peer in adapted.peers.items():
        said = daemon.serve(greedy(f"warm {adapter}", prompt, adapter))[f"warm {adapter}", 0]
        assert daemon.usage[f"warm {adapter}"].cached_tokens == 40
        expect_greedy(peer, prompt, said)
    daemon.serve(greedy("salted", prompt, WIDE, salt="mine"))
    assert daemon.usage["salted"].cached_tokens == 0


def test_prompts_that_come_at_once_wait_for_none_of_another_adapter(
    adapted_of: Callable[[str], Adapted],
) -> None:
    adapted = adapted_of("qwen3")
    daemon = OfflineDaemon(adapted.served, Attention(), Room(96))
    prompt = random_tokens(41, seed=7)
    asked = [greedy(f"{adapter}-{i}", prompt, adapter) for adapter in adapted.peers for i in (0, 1)]
    daemon.serve(*asked)
    for adapter in adapted.peers:
        assert daemon.usage[f"{adapter}-0"].cached_tokens == 0
        assert daemon.usage[f"{adapter}-1"].cached_tokens == 40


def test_scores_are_those_of_the_adapter(adapted_of: Callable[[str], Adapted]) -> None:
    adapted = adapted_of("llama")
    daemon = OfflineDaemon(adapted.served, Attention(), Room(96))
    prompt = random_tokens(20, seed=8)
    logits = mx.array(reference(adapted.peers[WIDE], prompt)[:-1])
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    expected = logprobs[np.arange(19), prompt[1:]]
    request = Request("scored", pack(prompt), 0, prompt_logprobs=0, adapter=WIDE)
    daemon.add(request)
    events = [event for _ in range(5) for event in daemon.turn()]
    scored = [entry for event in events for entry in event.prompt_logprobs]
    found = [entry.logprob for entry in scored if entry is not None]
    assert np.allclose(found, expected, atol=TOLERANCE)


def test_half_precision(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Where there is no memory for float32 a checkpoint stays what it is, and so it is on GPUs."""
    checkpoint = write_family(FAMILIES["qwen3"], tmp_path, dtype=mx.bfloat16)
    configs = adapter_configs(checkpoint, tmp_path)
    loaded = open_model(checkpoint, 1, adapter_configs=configs)
    served = Served(loaded, load_weights(loaded, (Attention(),), lambda line: None))
    assert set(loaded.layout.dtypes) == {mx.bfloat16}
    driver = Driver(served, Attention())
    rows = {adapter: random_tokens(20, seed=9) for adapter in ("", WIDE, NARROW)}
    found = driver.run([(driver.subject(rows[adapter], adapter), 20) for adapter in rows])
    for logits, (adapter, peer) in zip(found, peers(checkpoint, configs).items(), strict=True):
        expected = reference(peer, rows[adapter])[-1]
        assert rms(logits, expected) < HALF_TOLERANCE * float(np.abs(expected).max())


def test_weights_are_counted(
    adapted_of: Callable[[str], Adapted],
    served_of: Callable[[str], Served],
    checkpoint_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Of each projection the matrices of both, and zeros for none, in the higher of the ranks."""
    folder = write_adapter(checkpoint_of("qwen3"), tmp_path / WIDE, seed=1, rank=8)
    matrices = mx.load(str(folder / WEIGHTS))
    assert isinstance(matrices, dict)
    own_bytes = sum(matrix.nbytes for matrix in matrices.values())
    adapted, bare = adapted_of("qwen3").served.loaded, served_of("qwen3").loaded
    assert adapted.weight_bytes - bare.weight_bytes == 3 * own_bytes
