"""Checkpoints and models for the golden tests, made once per session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model

from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.gpu.paged import PagedAttention, as_it_is, smaller_units
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.runner import Launch
from engine.values.settings import KVFormat
from tests.checkpoints import FAMILIES, write_family
from tests.devices import DEVICE, is_cpu, launches, strategies
from tests.golden.imaging import Bench, Scene, load_with_images
from tests.offline import Served, load
from tests.stored_peer import store_in_format
from tests.vision_checkpoints import write_vision_checkpoint

as_served = smaller_units if is_cpu(DEVICE) else as_it_is

_ATTENTION: dict[str, Callable[[], Attention]] = {
    "gather": Attention,
    "cascade": lambda: CascadeAttention(min_saved_blocks=1),
    "paged": lambda: PagedAttention(Attention(), as_served, min_saved_blocks=1),
}
ATTENTION = {name: _ATTENTION[name] for name in strategies()}
"""The strategies that this device serves with."""

CASCADED = (
    *("llama", "qwen3", "qwen3_moe", "gemma3_text", "qwen3_next", "deepseek_v3"),
    *("qwen3_q8", "qwen3_k8v4", "qwen3_bf16", "gemma3_text_q8", "qwen3_next_q8"),
)
"""Attention strategies meet the layers of full attention alone; these have all kinds of those."""

FAST_FAMILIES = {"llama", "qwen3", "qwen3_next", "gemma3_text", "qwen3_q8"}

FAST_PAGED = {"qwen3", "gemma3_text"}
"""Full attention, and windows."""

CASES = [
    *((family, name) for family in sorted(FAMILIES) for name in ("gather", "paged")),
    *((family, "cascade") for family in CASCADED if "cascade" in strategies()),
]

EXACT_CASES = [case for case in CASES if FAMILIES[case[0]].kv_format is KVFormat.AUTO]
"""Those that say the same to the last token in forwards of unlike shapes. Where K and V are stored
otherwise, a number that differs in its last bits may be rounded to the next code.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The fast tests try five families: full attention, both norms of it, recurrent layers, sliding
    windows, quantized KV. The others are slow.
    """
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not is_fast(item):
            item.add_marker(pytest.mark.slow)


def is_fast(item: pytest.Item) -> bool:
    """Whether the item is of one of FAST_FAMILIES, or of no family. Where attention is `paged`, it
    is of one of FAST_PAGED, and compares logits or compiled decodes.
    """
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [value[0] if isinstance(value, tuple) and value else value for value in values]
    families = {name for name in names if isinstance(name, str) and name in FAMILIES}
    if "paged" in item.name:
        return families <= FAST_PAGED and item.path.stem in (
            *("test_logits", "test_exact", "test_compiled", "test_paged"),
        )
    return families <= FAST_FAMILIES


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint directory of a family."""
    parent = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda family: write_family(FAMILIES[family], parent))


@pytest.fixture(scope="session")
def served_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str], Served]:
    """A family's model as the daemon loads it."""
    return cache(lambda family: load(checkpoint_of(family), kv_format=FAMILIES[family].kv_format))


@pytest.fixture(scope="session")
def bench_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """The model of a family whose checkpoint has a vision tower, and its whole model."""
    parent = tmp_path_factory.mktemp("towers")

    def make(family: str) -> Bench:
        checkpoint = write_vision_checkpoint(family, parent)
        served = load_with_images(checkpoint)
        assert served.execution.images is not None, served.execution.images_refused
        return Bench(Scene(family, checkpoint), served)

    return cache(make)


@pytest.fixture(scope="session")
def peer_of(
    checkpoint_of: Callable[[str], Path], served_of: Callable[[str], Served]
) -> Callable[[str], Module]:
    """A family's model as mlx-lm loads it, quantized weights and all, with K and V as they are
    stored.
    """

    def peer(family: str) -> Module:
        model: Module = load_model(checkpoint_of(family))[0]
        if FAMILIES[family].kv_format is not KVFormat.AUTO:
            store_in_format(model, served_of(family).layout)
        return model

    return cache(peer)


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A family and an attention strategy."""
    family, attention = request.param
    return family, attention


@pytest.fixture(params=launches(), ids=lambda launch: launch.name)
def launch(request: pytest.FixtureRequest) -> Launch:
    """When a step's forwards are launched: see `launches`."""
    chosen: Launch = request.param
    return chosen


@pytest.fixture
def family(case: tuple[str, str]) -> str:
    return case[0]


@pytest.fixture
def served(family: str, served_of: Callable[[str], Served]) -> Served:
    return served_of(family)


@pytest.fixture
def peer(family: str, peer_of: Callable[[str], Module]) -> Module:
    return peer_of(family)


@pytest.fixture
def attention(case: tuple[str, str]) -> Attention:
    return ATTENTION[case[1]]()
