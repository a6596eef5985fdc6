"""What ranks do not divide or support is refused, with the setting that has to change."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from engine.api import ModelError
from engine.mlx_backend.assembly import needed_memory, open_checkpoint
from engine.mlx_backend.backend import load_encoder
from engine.mlx_backend.loading.division import refuse
from engine.values.settings import AdapterConfig, DiskCacheConfig, EngineConfig
from measuring.random_checkpoint import CONFIGS
from tests.checkpoints import FAMILIES, Family, write_family
from tests.encoders import write_encoder
from tests.golden.test_ranks import DIVIDED, STORED

TWO = EngineConfig(model="model", ranks=2, memory_bytes=1 << 30)


def write(parent: Path, name: str, **changes: Any) -> Path:
    return write_family(Family(name, {**CONFIGS[name], **changes}), parent)


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("adapters", {"adapters": (AdapterConfig("own", Path("own")),)}),
        ("draft_model", {"draft_model": "smaller"}),
        ("disk_cache", {"disk": DiskCacheConfig(Path("kv"), 1 << 30)}),
    ],
)
def test_a_setting(setting: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"^ranks of 2 does not go with {setting}"):
        refuse(replace(TWO, **changes))


def test_a_draft_model_that_is_not_used() -> None:
    refuse(replace(TWO, draft_model="smaller", speculate="off"))


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ({"num_key_value_heads": 1}, "its 1 KV heads cannot be divided among 2 ranks"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "its 3 query heads cannot be divided among 2 ranks: set ranks to a number that "
            "divides 3",
        ),
    ],
)
def test_heads(heads: dict[str, int], words: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, "llama", head_dim=16, **heads)
    with pytest.raises(ModelError, match=words):
        open_checkpoint(TWO, checkpoint)


def test_a_model_that_mlx_lm_does_not_divide(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, "gemma3_text")
    words = "a model of the type gemma3_text among ranks: set ranks to 1"
    with pytest.raises(ModelError, match=words):
        open_checkpoint(TWO, checkpoint)


def test_an_encoder(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder", "bert")
    with pytest.raises(ModelError, match="an encoder, which ranks do not divide: set ranks to 1"):
        load_encoder(replace(TWO, model=str(encoder)), lambda line: None)


def test_all_families_that_are_divided_are_tested() -> None:
    """Those that mlx-lm divides are served by ranks in the golden tests."""

    def is_divided(family: Family) -> bool:
        module = import_module(f"mlx_lm.models.{family.config['model_type']}")
        return hasattr(module.Model, "shard")

    divided = {name for name, family in FAMILIES.items() if is_divided(family)}
    assert divided == {*DIVIDED, *STORED}


def test_memory_is_planned_for_each_part(tmp_path: Path) -> None:
    """Each of two ranks has half of the layers' weights, and its own share of the machine."""
    checkpoint = write(tmp_path, "llama")
    one, two = (replace(TWO, model=str(checkpoint), ranks=n, max_model_len=256) for n in (1, 2))
    whole, part = open_checkpoint(one, checkpoint), open_checkpoint(two, checkpoint)
    assert part.machine.left_bytes == whole.machine.left_bytes // 2
    assert part.loaded.weight_bytes < 0.8 * whole.loaded.weight_bytes
    assert 2 * part.plan(two).footprint.block_bytes == whole.plan(one).footprint.block_bytes
    alone, together = (needed_memory(config, 1 << 30) for config in (one, two))
    assert together.weights_bytes == 2 * part.loaded.weight_bytes > alone.weights_bytes
