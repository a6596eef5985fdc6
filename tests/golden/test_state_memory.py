"""What steps take for recurrent states is within the plan, in every architecture."""

import gc
from collections.abc import Iterator
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from engine.api import ModelError
from engine.mlx_backend.host import Machine
from engine.mlx_backend.kv.layout import Layout, discover
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.memory import MemoryPlan, footprint
from engine.mlx_backend.loading.selfcheck import install_patches, measured_token_bytes
from engine.mlx_backend.loading.workspace import AttentionWorkspace
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.batching import LADDER
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.model.patches import RowAdapters
from engine.mlx_backend.model.rows import TokenSpan
from engine.mlx_backend.model.sequences import SequenceTables
from engine.values.settings import EngineConfig
from kvstore.ops import TablePatch
from kvstore.sizes import StateCounts, StorageSizes, WindowSize
from measuring.random_checkpoint import CONFIGS, random_model

LARGER = {
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 512),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
}
"""Fields of configs that make states large next to everything else."""

ROWS, BLOCK_SIZE, BLOCKS = 8, 16, 16
FEW_BYTES = 1 << 30
NO_ATTENTION = AttentionWorkspace(
    rows=0, tokens=0, key_bytes=0, gathered_bytes=1, copies=0, pair_bytes=0
)


def larger(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: larger(value) if isinstance(value, dict) else LARGER.get(name, value)
        for name, value in config.items()
    }


def is_recurrent(config: dict[str, Any]) -> bool:
    """Whether the model has states, and can be made here at all."""
    try:
        return bool(discover(random_model(config, 0, mx.float32)).states)
    except (ModelError, SystemExit, ImportError):
        return False


class Steps:
    """Runs steps of a model with random weights, and notes the memory that each takes at most."""

    def __init__(self, model: Module, layout: Layout, execution: Execution) -> None:
        windows = tuple(WindowSize(window, ROWS * BLOCKS) for window in layout.windows)
        sizes = StorageSizes(ROWS * BLOCKS, windows, StateCounts(ROWS, 0))
        self._storage = Storage(layout, sizes, BLOCK_SIZE)
        self._model = CachedModel(model, layout, self._storage, execution)
        self._tables = [SequenceTables(self._model.n_groups) for _ in range(ROWS)]
        for row, table in enumerate(self._tables):
            blocks = tuple(range(row * BLOCKS, (row + 1) * BLOCKS))
            for group in (None, *range(len(windows))):
                table.patch(TablePatch(group, 0, blocks))
            table.patch(TablePatch(len(windows), 0, (row,)))
        mx.eval(self._storage.arrays())
        gc.collect()
        mx.clear_cache()
        self._before_bytes = mx.get_active_memory()

    def peak_bytes(self, start: int, n_tokens: int, n_rows: int) -> int:
        """Of a step that computes tokens of some rows, in addition to weights and arenas."""
        spans = [
            TokenSpan.of(self._tables[row], start, n_tokens, row, row * n_tokens, 1)
            for row in range(n_rows)
        ]
        self._storage.states.begin_step()
        mx.reset_peak_memory()
        self._run(spans, mx.zeros(n_rows * n_tokens, mx.int32))
        mx.eval(self._storage.arrays())
        return mx.get_peak_memory() - self._before_bytes

    def _run(self, spans: list[TokenSpan], token_ids: mx.array) -> None:
        for batch in self._model.arrange(spans).sampling:
            computed = self._model.forward(batch, token_ids)
            mx.async_eval(computed.logits, computed.fences)


def planned_bytes(layout: Layout, step_tokens: int, token_bytes: int) -> int:
    """What the plan has for the states of ROWS sequences and for a step."""
    config = EngineConfig(
        model="",
        max_running=ROWS,
        step_tokens=step_tokens,
        block_size=BLOCK_SIZE,
        decode="eager",
        prefix_cache=False,
    )
    machine = Machine("cpu (fake)", FEW_BYTES, FEW_BYTES, FEW_BYTES, kv_share=0.5)
    plan = MemoryPlan(
        config=config,
        machine=machine,
        weight_bytes=0,
        footprint=footprint(layout, BLOCK_SIZE),
        workspace=NO_ATTENTION,
        vocab_size=layout.vocab_size,
        context_tokens=BLOCKS * BLOCK_SIZE,
        token_bytes=token_bytes,
    )
    return plan.stored.states + plan.cache_limit_bytes


def executions(model: Module, layout: Layout) -> Iterator[Execution]:
    head = install_patches(model, layout, RowAdapters())
    for batching in LADDER:
        yield Execution(batching, Attention(), head, RowAdapters())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_peak_of_a_step_is_within_the_plan(name: str) -> None:
    """Rows that decode, for which the states before are kept, and a prompt."""
    if is_recurrent(config := larger(CONFIGS[name])):
        check_steps(config)


def test_the_peak_grows_with_the_layers_by_their_states_alone() -> None:
    """What one layer makes its states of is gone before the next one begins."""
    check_steps({**larger(CONFIGS["mamba2"]), "num_hidden_layers": 16})


def check_steps(config: dict[str, Any]) -> None:
    model = random_model(config, 0, mx.float32)
    mx.eval(model.parameters())
    layout = discover(model)
    for execution in executions(model, layout):
        try:
            token_bytes = measured_token_bytes(model, layout, execution)
        except ValueError:  # this batching is not for this model
            continue
        steps = Steps(model, layout, execution)
        allowed_bytes = planned_bytes(layout, ROWS, 0)
        for start in range(4):
            assert steps.peak_bytes(start, 1, ROWS) <= allowed_bytes
        n_tokens = Random(str(config)).randint(40, 100)
        allowed_bytes = planned_bytes(layout, n_tokens, token_bytes)
        assert steps.peak_bytes(4, n_tokens, 1) <= allowed_bytes
        return
