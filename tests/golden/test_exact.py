"""Decodes through the arena are mlx-lm's own, in half precision as well: on a CPU to the last bit.

A GPU's kernels choose their tiles by the shapes, and the arena's tables are padded.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.loading.loader import load_weights, open_model
from engine.mlx_backend.model.attention import Attention
from tests.checkpoints import FAMILIES, write_family
from tests.devices import DEVICE, Device, rounding, strategies, tolerance
from tests.golden.conftest import ATTENTION
from tests.golden.driving import BLOCK_SIZE, Driver, Logits, Subject, random_tokens, rms
from tests.offline import Served

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}

EXACT = ("llama", "qwen3", "qwen3_5", "gemma3_text")
"""Full attention, with norms, with recurrent layers, and with windows."""

GATHER: Attention = Attention()
CASCADE: Attention = CascadeAttention(min_saved_blocks=1)
PAGED: Attention = ATTENTION["paged"]()
CASES = [
    *((family, dtype, GATHER) for family in EXACT for dtype in DTYPES),
    *((family, dtype, PAGED) for family in EXACT for dtype in DTYPES),
    *((family, "float32", CASCADE) for family in EXACT if "cascade" in strategies()),
]

FLOAT32_BOUND = 4e-6
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""RMS of the difference, where it is not 0. mlx-lm keeps the keys of a window in a ring, and so
sums over them in another order, which now and then rounds otherwise."""

PROMPT, DECODES = 3 * BLOCK_SIZE + 5, 24
NO_ROOM = 1
"""Bytes of memory with which a checkpoint keeps its precision on a CPU."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Served, Module]]:
    """A family in a dtype, as the daemon loads it where memory is short, and as mlx-lm does."""

    @cache
    def load(family: str, dtype: str) -> tuple[Served, Module]:
        parent: Path = tmp_path_factory.mktemp(f"{family}-{dtype}")
        checkpoint = write_family(FAMILIES[family], parent, dtype=DTYPES[dtype])
        loaded = open_model(checkpoint, NO_ROOM)
        execution = load_weights(loaded, (Attention(),), lambda line: None)
        return Served(loaded, execution), load_model(checkpoint)[0]

    return load


def own(model: Module, prompt: Sequence[int], decoded: Sequence[int]) -> Logits:
    """Through mlx-lm's caches: the prompt in one forward, then a token at a time."""
    caches = make_prompt_cache(model)
    steps = [model(mx.array([[*prompt]]), cache=caches)[0, -1]]
    steps += [model(mx.array([[token]]), cache=caches)[0, -1] for token in decoded]
    return np.stack([np.array(step.astype(mx.float32)) for step in steps])


def decode(driver: Driver, subject: Subject, tokens: Sequence[int]) -> Logits:
    found = []
    for token in tokens:
        subject.append([token])
        found += driver.run([(subject, 1)])
    return np.stack(found)


def in_full_precision(model: Module) -> Module:
    """The model with its weights as they are, which computes in float32."""
    again = deepcopy(model)
    again.set_dtype(mx.float32)
    return again


def bound(family: str, dtype: str, device: Device = DEVICE) -> float:
    if dtype == "float32":
        return tolerance(FLOAT32_BOUND, device)
    return ULP[dtype] if family == "gemma3_text" else rounding(ULP[dtype], device)


@pytest.mark.parametrize(
    ("family", "dtype", "attention"), CASES, ids=[f"{f}-{d}-{a.name}" for f, d, a in CASES]
)
def test_decodes_behind_a_bulk_prefill_with_a_fork_and_a_preemption_in_between(
    models: Callable[[str, str], tuple[Served, Module]],
    family: str,
    dtype: str,
    attention: Attention,
) -> None:
    served, peer = models(family, dtype)
    driver = Driver(served, attention)
    prompt, decoded = random_tokens(PROMPT, seed=3), random_tokens(DECODES, seed=4)
    subject = driver.subject(prompt)
    found = [np.stack(driver.run([(subject, PROMPT)])), decode(driver, subject, decoded[:8])]
    other = driver.fork(subject, [*subject.tokens, 7], len(subject.tokens))
    driver.run([(other, other.remaining_tokens)])
    found.append(decode(driver, subject, decoded[8:16]))
    driver.store.donate(subject.lease)  # as one that is preempted does
    again = driver.subject([*prompt, *decoded[:17]])
    assert again.lease.cached_tokens == len(prompt) + 16
    found.append(np.stack(driver.run([(again, 1)])))
    found.append(decode(driver, again, decoded[17:]))
    whole, theirs = np.concatenate(found), own(peer, prompt, decoded)
    if attention.name == "paged" and dtype != "float32":
        # It rounds a layer's attention once, and MLX scores and weights, too: so they differ, and
        # neither may be far from what the same weights give in full precision.
        precise = own(in_full_precision(peer), prompt, decoded)
        assert rms(whole, precise) <= 2 * rms(theirs, precise)
    else:
        assert rms(whole, theirs) <= bound(family, dtype)
