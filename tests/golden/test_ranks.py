"""Several ranks say what one process says, whatever happens around a sequence."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.values.settings import KVFormat
from tests.checkpoints import FAMILIES, Family, write_family
from tests.devices import tolerance
from tests.golden.ranking import SIX_HEADS, Said, say_alone, say_in_ranks

DIVIDED = (
    *("llama", "qwen3", "qwen3_moe", "gpt_oss", "qwen3_5", "deepseek_v3", "deepseek_v32"),
    *("deepseek_v41", "qwen3_4bit", "qwen3_8bit", "qwen3_mixed"),
)
"""All families that mlx-lm divides, but those whose K and V are stored in fewer bits."""

STORED = ("qwen3_q8", "qwen3_k8v4", "qwen3_bf16", "gpt_oss_k8v4")

COMPILED = ("llama", "qwen3_5", "deepseek_v3")

NEAR = {"qwen3_5": tolerance(1e-4)}
"""How far logits may differ, relative to the largest; of all others 1e-5."""


def compare(checkpoint: Path, family: Family, ranks: int, decode: str, output: Path) -> None:
    alone = say_alone(checkpoint, family.kv_format, decode)
    together = say_in_ranks(checkpoint, ranks, family.kv_format, decode, output)
    assert together.tokens == alone.tokens
    assert differences(together, alone) < NEAR.get(family.name, tolerance(1e-5))
    assert np.allclose(together.prompt_logprobs, alone.prompt_logprobs, atol=tolerance(1e-4))
    for said in (alone, together):
        happened = (said.cached, said.preempted, said.evicted, said.late, said.accepted)
        assert min(happened) > 0, happened
        assert (said.compiled > 0) == (decode == "compiled")
    assert together.cached == alone.cached


def differences(found: Said, expected: Said) -> float:
    """The largest difference of a logit, relative to the largest logit of its row."""
    assert found.logits.keys() == expected.logits.keys()
    pairs = ((found.logits[key], expected.logits[key]) for key in expected.logits)
    return max(float(np.abs(ours - its).max() / np.abs(its).max()) for ours, its in pairs)


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in DIVIDED[1:])]
)
def test_two_ranks(family: str, checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    compare(checkpoint_of(family), FAMILIES[family], 2, "eager", tmp_path / "said")


@pytest.mark.slow
@pytest.mark.parametrize("family", COMPILED)
def test_compiled(family: str, checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    compare(checkpoint_of(family), FAMILIES[family], 2, "compiled", tmp_path / "said")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_heads_for_three_ranks(ranks: int, tmp_path: Path) -> None:
    checkpoint = write_family(SIX_HEADS, tmp_path)
    compare(checkpoint, SIX_HEADS, ranks, "eager", tmp_path / "said")


@pytest.mark.slow
@pytest.mark.parametrize("family", STORED)
def test_stored_in_fewer_bits(
    family: str, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """A number that differs in its last bits may be rounded to the next code, and then a text may
    go on in another way: the first token of a prompt is not that far off.
    """
    kv_format: KVFormat = FAMILIES[family].kv_format
    checkpoint = checkpoint_of(family)
    alone = say_alone(checkpoint, kv_format, "eager")
    together = say_in_ranks(checkpoint, 2, kv_format, "eager", tmp_path / "said")
    firsts = {key for key in alone.logits if not key[1]} & together.logits.keys()
    assert len(firsts) > 10
    for key in firsts:
        ours, its = together.logits[key], alone.logits[key]
        assert np.abs(ours - its).max() < 1e-2 * np.abs(its).max()
