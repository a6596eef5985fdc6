"""DeepSeek-V4.1: compressed groups of tokens in the blocks of full attention, at any position."""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models import deepseek_v41
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from engine.api import ModelError
from engine.mlx_backend.assembly import open_checkpoint
from engine.mlx_backend.host import FusedAttention
from engine.mlx_backend.kv.layout import (
    FP4_GROUP,
    FP4_KEY_GROUP,
    FP8_GROUP,
    CompressedSpecs,
    OpenGroupSpec,
    discover,
)
from engine.mlx_backend.loading.loader import LoadedModel
from engine.mlx_backend.loading.selfcheck import (
    Chunk,
    Row,
    install_patches,
    logits_through_storage,
)
from engine.mlx_backend.loading.workspace import attention_workspace
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.batching import LADDER
from engine.mlx_backend.model.cached_model import Execution
from engine.mlx_backend.model.patches import OutputHead, RowAdapters
from engine.values.request import Request, SamplingParams
from engine.values.settings import EngineConfig, KVFormat
from engine.values.tokens import pack
from kvstore.sizes import build_groups
from kvstore.window import first_needed
from measuring.random_checkpoint import CONFIGS, random_model
from tests.checkpoints import UNROUNDED, Family, write_family
from tests.devices import tolerance
from tests.golden.driving import NEAR_TIE, Driver, random_tokens, reference, shortfall
from tests.offline import OfflineDaemon, Room, Served, load

PLAIN = CONFIGS["deepseek_v41"]
MIXED = CONFIGS["deepseek_v41, ratios of 0, 1 and 2"]


def of_ratio(ratio: int, **more: Any) -> dict[str, Any]:
    return {**PLAIN, **UNROUNDED, "compress_ratios": [0, *[ratio] * 3], **more}


ROUNDED_TOLERANCE = 0.02
"""The error of logits, relative to their size, where the model rounds to 4 and 8 bits: a number
that differs in its last bits may be rounded to the next code.
"""


CASES = {
    "4 in 8": (of_ratio(4), 8),
    "4 in 8, rounded": (PLAIN, 8),
    "4 in 4": (of_ratio(4), 4),
    "4 in 2": (of_ratio(4), 2),
    "16 in 8": (of_ratio(16), 8),
    "16 in 2": (of_ratio(16), 2),
    "8 in 16, as long as the window": (of_ratio(8), 16),
    "0, 1 and 2 in 8": ({**MIXED, **UNROUNDED}, 8),
    "2 in 1": ({**MIXED, **UNROUNDED}, 1),
    "four index heads, all groups": (of_ratio(4, index_n_heads=4, index_topk=64), 8),
}
"""Configurations, and the tokens of a block."""

FAST = {"4 in 8", "4 in 8, rounded", "16 in 2"}

NAMES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow, id=name) for name in CASES
]

Case = tuple[Served, Module, Room]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @cache
    def case(name: str) -> Case:
        config, block_size = CASES[name]
        checkpoint = write_family(Family(name, dict(config)), tmp_path_factory.mktemp("compressed"))
        room = Room(1024 // block_size, block_size, max_running=12, step_tokens=160, spare=48)
        return load(checkpoint), load_model(checkpoint)[0], room

    return case


@pytest.mark.parametrize("name", NAMES)
def test_logits_after_chunks_of_any_length(case_of: Callable[[str], Case], name: str) -> None:
    """Rows of unlike lengths, whose chunks begin and end within groups, and decodes among them."""
    served, peer, room = case_of(name)
    driver = Driver(served, Attention(), room=room)
    rows = [random_tokens(n, seed=n) for n in (70, 41, 9, 2)]
    subjects = [driver.subject(tokens) for tokens in rows]
    random = np.random.default_rng(7)
    expected = [reference(peer, tokens) for tokens in rows]
    while waiting := [one for one in subjects if one.remaining_tokens]:
        chunks = [
            (one, int(random.integers(1, min(one.remaining_tokens, 13) + 1))) for one in waiting
        ]
        for (one, n_tokens), found in zip(chunks, driver.run(chunks), strict=True):
            assert n_tokens > 0
            own = expected[subjects.index(one)][one.lease.written_tokens - 1]
            most = ROUNDED_TOLERANCE if "rounded" in name else tolerance(1e-4)
            assert np.linalg.norm(found - own) < most * np.linalg.norm(own)


def serve(daemon: OfflineDaemon, name: str, prompt: list[int], n_tokens: int = 3) -> list[int]:
    sampling = SamplingParams(temperature=0)
    said = daemon.serve(Request(name, pack(prompt), n_tokens, sampling))
    return list(said[name, 0])


@pytest.mark.parametrize("name", NAMES)
def test_a_hit_resumes_at_any_token(case_of: Callable[[str], Case], name: str) -> None:
    """Also where the group of the next token has been compressed by others, with other tokens."""
    served, peer, room = case_of(name)
    daemon = OfflineDaemon(served, Attention(), room)
    told = random_tokens(39, seed=1)
    serve(daemon, "first", told, n_tokens=1)
    for n_cached in range(38, 15, -1):
        prompt = [*told[:n_cached], *random_tokens(5, seed=n_cached)]
        said = serve(daemon, f"from {n_cached}", prompt)
        assert daemon.usage[f"from {n_cached}"].cached_tokens == n_cached
        most = ROUNDED_TOLERANCE if "rounded" in name else NEAR_TIE
        assert shortfall(peer, prompt, said) < most
    again = serve(daemon, "again", told)
    assert daemon.usage["again"].cached_tokens == len(told) - 1
    assert shortfall(peer, told, again) < most


@pytest.mark.parametrize("kv_format", [KVFormat.Q8, KVFormat.K8V4, KVFormat.BF16])
def test_a_kv_format_changes_nothing(tmp_path: Path, kv_format: KVFormat) -> None:
    checkpoint = write_family(Family("rounded", dict(PLAIN)), tmp_path)
    peer: Module = load_model(checkpoint)[0]
    served = load(checkpoint, kv_format=kv_format)
    assert served.layout.format_in_use == "full"
    daemon = OfflineDaemon(served, Attention(), Room(64))
    prompt = random_tokens(37, seed=3)
    for name in ("cold", "warm"):
        assert shortfall(peer, prompt, serve(daemon, name, prompt, 12)) < ROUNDED_TOLERANCE
    assert daemon.usage["warm"].cached_tokens == 36


@pytest.mark.parametrize("config", [PLAIN, MIXED], ids=["4", "0, 1 and 2"])
def test_16_bits_hold_what_the_model_has_rounded(config: dict[str, Any]) -> None:
    model = random_model(config, 0, mx.float32)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([random_tokens(90, seed=4)]), cache=caches))
    n_checked = 0
    for cached, specs in zip(caches, discover(model).caches, strict=True):
        assert isinstance(specs, CompressedSpecs)
        found = (cached.window, cached.compress_kv, cached.index_k)
        kept = [array for array in found if array is not None]
        dtypes = [own for spec in specs[:2] for size, own in spec.shape.vectors if size]
        assert dtypes == [mx.bfloat16] * len(kept)
        assert all(map(is_held_by_16_bits, kept))
        n_checked += len(kept)
    assert n_checked > len(caches)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_16_bits_hold_numbers_of_any_size(dtype: mx.Dtype, size: float) -> None:
    vectors = (mx.random.normal((512, 64), key=mx.random.key(5)) * size).astype(dtype)
    for rounded in (
        deepseek_v41._fake_quant_fp8(vectors, FP8_GROUP),
        deepseek_v41._fake_quant_fp4(vectors, block_size=FP4_GROUP, e4m3_scale=True),
        deepseek_v41._fake_quant_fp4(vectors, block_size=FP4_KEY_GROUP),
    ):
        assert rounded.dtype == dtype
        assert is_held_by_16_bits(rounded)


def is_held_by_16_bits(array: mx.array) -> bool:
    wide = array.astype(mx.float32)
    return bool(mx.array_equal(wide.astype(mx.bfloat16).astype(mx.float32), wide))


RATIOS_AND_BLOCKS = [
    (ratio, size) for ratio, size in product((2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64))
]


@pytest.mark.parametrize(("ratio", "block_size"), RATIOS_AND_BLOCKS)
def test_an_open_group_is_held_and_where_none_is_open_no_slot_is_asked_for(
    ratio: int, block_size: int
) -> None:
    """Except by groups of several blocks, which hold one block less than they have."""
    layout = discover(random_model(of_ratio(ratio), 0, mx.float32)).in_blocks_of(block_size)
    (window,) = {spec.window for spec in layout.specs if isinstance(spec, OpenGroupSpec)}
    assert window is not None
    sizes = Room(8, block_size).sizes(layout)
    group = next(
        group for group in build_groups(sizes, block_size, 32) if group.name == f"window-{window}"
    )
    for n_tokens in range(4 * max(ratio, block_size)):
        held = group.required_blocks(n_tokens)
        n_open = n_tokens % ratio
        if n_open:
            assert held.start * block_size <= n_tokens - n_open
            assert held.stop * block_size >= n_tokens
        elif n_tokens % block_size == 0:
            assert len(held) <= max(ratio // block_size - 1, 0)
        assert first_needed(n_tokens, window, block_size) * block_size <= n_tokens - n_open


def test_a_block_size_that_groups_do_not_fit_is_refused_with_one_that_does(tmp_path: Path) -> None:
    checkpoint = write_family(Family("of 16", of_ratio(16)), tmp_path)
    with pytest.raises(
        ModelError, match=r"groups of 16 tokens.*set block_size to a multiple of 16"
    ):
        open_checkpoint(EngineConfig(model=str(checkpoint), block_size=24), checkpoint)
    opened: LoadedModel = open_checkpoint(
        EngineConfig(model=str(checkpoint), block_size=32), checkpoint
    ).loaded
    assert opened.layout.windows == (1, 8)


def test_groups_that_are_no_power_of_two_are_refused(tmp_path: Path) -> None:
    checkpoint = write_family(Family("of 6", of_ratio(6)), tmp_path)
    with pytest.raises(ModelError, match="groups of 6 tokens are compressed; served are powers"):
        load(checkpoint)


def test_a_token_takes_its_share_of_a_groups_bytes() -> None:
    """Compressed KV and index key, of 16 bits."""
    layout = discover(random_model(PLAIN, 0, mx.float32))
    assert [shape.token_bytes for shape in layout.full_layers] == [2 * (32 + 32) // 4, 2 * 32 // 4]


def test_what_attention_copies_for_each_token_is_reserved() -> None:
    """In a model whose selected vectors take more than all else, by MLX's own count."""
    wide = of_ratio(2, head_dim=512, sliding_window=128, index_topk=256, num_hidden_layers=2)
    config = {**wide, "compress_ratios": [2, 2], "kv_source_layer_ids": [0]}
    model = random_model({**config, "index_source_layer_ids": [0]}, 0, mx.float32)
    mx.eval(model.parameters())
    layout, n_tokens = discover(model), 512
    settings = EngineConfig(model="", max_running=1, step_tokens=n_tokens)
    workspace = attention_workspace(settings, layout, 0, 4, Attention(), FusedAttention.NONE)
    install_patches(model, layout, RowAdapters())
    rows, steps = [Row(random_tokens(n_tokens, 0), "")], [[Chunk(0, 0, n_tokens, 1)]]
    execution = Execution(LADDER[1], Attention(), OutputHead())
    mx.clear_cache()
    before_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(logits_through_storage(model, layout, execution, rows, steps))
    taken_bytes = mx.get_peak_memory() - before_bytes
    assert layout.selected_bytes == (128 + 256) * 512 * 12
    assert 0.3 * workspace.bytes(n_tokens) < taken_bytes < 1.1 * workspace.bytes(n_tokens)
