"""Loading: what is served, what is refused, and the embedded default from nothing to a token."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from string import ascii_letters

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ConcatenateKVCache, KVCache
from mlx_lm.utils import load_model

from engine.api import ModelError, Report
from engine.core.step import BatchEntry, Prefill, Sampling, SequenceId, StepPlan
from engine.mlx_backend.attentions import attentions
from engine.mlx_backend.backend import describe_machine, load_backend
from engine.mlx_backend.kv.arena import LayerArena
from engine.mlx_backend.kv.layout import KVCacheSpec, Layout, discover
from engine.mlx_backend.kv.shape import LayerShape
from engine.mlx_backend.loading import selfcheck
from engine.mlx_backend.loading.checkpoint import DEFAULT_CHECKPOINT
from engine.mlx_backend.loading.compiler import Compiler
from engine.mlx_backend.loading.loader import load_weights, open_model
from engine.mlx_backend.loading.selfcheck import check_bytes, find_execution, longer_by
from engine.mlx_backend.model.attention import Attention, BlockAttention
from engine.mlx_backend.model.patches import RowAdapters
from engine.mlx_backend.model.rows import RowGroup
from engine.values.request import SamplingParams
from engine.values.settings import EngineConfig
from kvstore.ops import TablePatch
from measuring.random_checkpoint import CONFIGS, VOCAB_SIZE, tiny_tokenizer, train_tokenizer
from tests.checkpoints import FAMILIES, Family, write_family
from tests.devices import DEVICE, is_cpu, tolerance
from tests.golden.driving import Driver, compute_one, random_tokens, reference, rms, sampled_token
from tests.offline import Served, load


class Strange(Module):
    """A model whose second layer keeps a cache of its own kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def make_cache(self) -> list[object]:
        return [KVCache(), ConcatenateKVCache()]


class Forgetful(Module):
    """A model that runs over views but makes no use of what they hold."""

    def __init__(self, inner: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self.layers = inner.layers

    def __call__(self, tokens: mx.array, cache: list[object]) -> mx.array:
        own = isinstance(cache[0], KVCache)
        logits: mx.array = self.inner(tokens, cache=cache if own else None)
        return logits


class Blindness(BlockAttention):
    """Attention that pays no attention."""

    def attend(
        self,
        queries: mx.array,
        layer: LayerArena,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        return mx.zeros_like(queries)


class Blind(Attention):
    """Computes attention wrongly."""

    name = "blind"

    def prepare(self, group: RowGroup, window: int | None) -> BlockAttention:
        return Blindness()


_LETTERS = " ".join(f"{a}{b}{a}" for a in ascii_letters for b in ascii_letters)


def _configure(checkpoint: Path, **settings: object) -> None:
    """Change a checkpoint's config.json."""
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def _load_aside(config: EngineConfig, report: Report) -> None:
    """Load on a thread of its own: a failure gives back what MLX keeps for the thread."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(load_backend, config, report).result()


def test_shapes_and_vocabulary_are_discovered(checkpoint_of: Callable[[str], Path]) -> None:
    model, _ = load_model(checkpoint_of("llama"))
    shape = LayerShape(2, 32, 32, mx.float32, mx.float32)
    assert discover(model) == Layout((KVCacheSpec(shape),) * 3, mx.float32, VOCAB_SIZE)


def test_windows_states_and_lists_are_discovered(served_of: Callable[[str], Served]) -> None:
    gemma, falcon = served_of("gemma3_text").layout, served_of("falcon_h1").layout
    assert gemma.windows == (8,)
    assert len(gemma.layers_of(8)) == len(gemma.full_layers) == 2
    assert falcon.states[0].dtype == mx.float32
    assert [len(cache) for cache in falcon.caches if isinstance(cache, tuple)] == [2] * 3


def test_a_window_that_covers_the_context_is_full_attention() -> None:
    shape = LayerShape(1, 4, 4, mx.float16, mx.float16)
    layout = Layout((KVCacheSpec(shape, 64), (KVCacheSpec(shape, 63),)), mx.float32, 10)
    within = layout.within(64)
    assert within.windows == (63,)
    assert within.full_layers == (shape,)


@pytest.mark.parametrize(
    ("family", "rung"),
    [
        ("llama", "joined rows"),
        ("gemma3n", "joined rows"),
        ("gpt_oss", "joined rows"),
        ("gemma4_text", "padded rows"),  # layers that attend to another's keys, without its cache
        ("deepseek_v3", "padded rows"),  # keys are made of what is cached
        ("qwen3_next", "padded rows"),
        ("nemotron_h", "rows of equal length"),
        ("jamba", "rows of equal length"),
        ("rwkv7", "rows of equal length"),
        ("recurrent_gemma", "rows of equal length, fresh ones apart"),
        ("llama4", "one row at a time"),
    ],
)
def test_how_rows_share_forwards_is_found_out(
    served_of: Callable[[str], Served], family: str, rung: str
) -> None:
    assert served_of(family).execution.batching.name == rung


@pytest.mark.parametrize("family", ["gemma3n", "qwen3_next", "jamba", "llama4"])
def test_a_gpus_longer_check_finds_the_same(
    family: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find() -> tuple[str, int]:
        served = load(checkpoint_of(family))
        return served.execution.batching.name, check_bytes(served.layout)

    rung, n_bytes = find()
    monkeypatch.setattr(
        selfcheck, "longer_by", lambda layout, _: longer_by(layout, mx.Device(mx.gpu))
    )
    found, more_bytes = find()
    assert found == rung
    assert more_bytes > n_bytes or mx.default_device() == mx.gpu


def test_a_gpus_check_has_a_chunk_of_512_tokens_and_passes_windows_of_512() -> None:
    shape = LayerShape(1, 4, 4, mx.float16, mx.float16)
    full, windows = KVCacheSpec(shape), [KVCacheSpec(shape, n) for n in (128, 512, 4096)]
    for caches, on_cpu, on_gpu in (((full,), 0, 512), ((full, *windows), 128, 512)):
        layout = Layout(caches, mx.float32, 10)
        assert (longer_by(layout, mx.Device(mx.cpu)), longer_by(layout, mx.Device(mx.gpu))) == (
            on_cpu,
            on_gpu,
        )


def test_sparse_attention_that_begins_late_is_checked(tmp_path: Path) -> None:
    """MiniMax M3's counts blocks of keys from the last: only a row alone has them as they are."""
    config = CONFIGS["minimax_m3_vl"]
    early = config["text_config"]["sparse_attention_config"]
    late = {**early, "sparse_block_size": 16, "sparse_topk_blocks": 4}
    text_config = {**config["text_config"], "sparse_attention_config": late}
    checkpoint = write_family(Family("late", {**config, "text_config": text_config}), tmp_path)
    served, peer = load(checkpoint), load_model(checkpoint)[0]
    assert served.execution.batching.name == "one row at a time"
    driver = Driver(served, Attention())
    rows = [random_tokens(n, seed=n) for n in (75, 100)]
    found = driver.logits([driver.subject(tokens) for tokens in rows], lasts=6)
    for logits, tokens in zip(found, rows, strict=True):
        assert rms(logits, reference(peer, tokens)[-len(logits) :]) < tolerance(1e-4)


def test_a_text_config_that_is_null_counts_as_absent(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(DEFAULT_CHECKPOINT, tmp_path / "checkpoint")
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"text_config": None}))
    served, plain = load(checkpoint), load(DEFAULT_CHECKPOINT)
    assert served.layout == plain.layout


def test_other_caches_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="layer 1 keeps a ConcatenateKVCache"):
        discover(Strange())


def test_a_model_that_ignores_what_is_cached_is_refused(
    checkpoint_of: Callable[[str], Path],
) -> None:
    model, _ = load_model(checkpoint_of("llama"))
    layout = discover(model)
    with pytest.raises(ModelError, match="one row at a time with gather: logits are wrong by"):
        find_execution(Forgetful(model), layout, [Attention()], RowAdapters())


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="elsewhere the dtype stands")
def test_what_serves_is_what_passed_the_check(tmp_path: Path) -> None:
    """On a CPU MLX multiplies gathered blocks in float32 alone: cascade cannot decode in half."""
    checkpoint = write_family(FAMILIES["llama"], tmp_path, dtype=mx.float16)
    lines: list[str] = []
    chosen = {}
    for memory_bytes in (1 << 30, 1 << 16):
        loaded = open_model(checkpoint, memory_bytes)
        execution = load_weights(loaded, attentions("cascade", loaded), lines.append)
        chosen[loaded.layout.dtypes] = execution.attention.name
        assert execution.batching.name == "joined rows"
    assert chosen == {(mx.float32,): "cascade", (mx.float16,): "gather"}
    (said,) = (line for line in lines if line.startswith("attention: "))
    assert said.startswith("attention: gather, since not joined rows with cascade: [GatherMM")


def test_on_a_gpu_cascade_is_refused_and_auto_gathers(
    served_of: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = served_of("llama").loaded
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    for name in ("auto", "gather"):
        assert [each.name for each in attentions(name, loaded)] == ["gather"]
    with pytest.raises(ModelError, match=r"^the setting attention is cascade, which is for CPUs"):
        attentions("cascade", loaded)


def test_paged_serves_where_it_is_set_and_on_a_cpu_never_else(
    checkpoint_of: Callable[[str], Path],
) -> None:
    """It passes the check at load, in windows, too."""
    loaded = open_model(checkpoint_of("gemma3_text"), 1 << 30)
    if is_cpu(DEVICE):
        assert [each.name for each in attentions("auto", loaded)] == ["cascade", "gather"]
    execution = load_weights(loaded, attentions("paged", loaded), lambda line: None)
    assert execution.attention.name == "paged"
    assert execution.batching.name == "joined rows"


def test_a_wrong_attention_is_not_served(checkpoint_of: Callable[[str], Path]) -> None:
    model, _ = load_model(checkpoint_of("llama"))
    layout = discover(model)
    execution = find_execution(model, layout, [Blind(), Attention()], RowAdapters())
    assert execution.attention.name == "gather"
    assert execution.rejected[0].startswith("joined rows with blind: logits are wrong by")
    with pytest.raises(ModelError, match="padded rows with blind: logits are wrong"):
        find_execution(model, layout, [Blind()], RowAdapters())


def test_dynamic_rope_becomes_what_it_is_within_the_context(tmp_path: Path) -> None:
    config = {
        **FAMILIES["llama"].config,
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 64,
    }
    served = load(write_family(Family("dynamic", config), tmp_path))
    assert served.execution.batching.name == "joined rows"
    assert served.loaded.max_context_tokens == 64


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="elsewhere the dtype stands")
def test_on_the_cpu_weights_become_float32_where_they_fit(tmp_path: Path) -> None:
    checkpoint = write_family(FAMILIES["qwen3_4bit"], tmp_path, dtype=mx.float16)
    roomy, tight = (open_model(checkpoint, memory_bytes=n) for n in (1 << 30, 1 << 16))
    assert (roomy.layout.dtypes, tight.layout.dtypes) == ((mx.float32,), (mx.float16,))
    assert tight.weight_bytes < roomy.weight_bytes / 4


def test_unreadable_checkpoints_are_explained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_architecture"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="cannot load"):
        open_model(tmp_path, memory_bytes=1 << 30)


@pytest.mark.parametrize(
    ("setting", "value", "fault"),
    [
        ("num_hidden_layers", 30, "243 of the parameters are missing, such as model.layers."),
        ("num_hidden_layers", 1, "18 of the parameters are not the model's, such as model.layers."),
        ("vocab_size", 640, r"Expected shape \(640, 64\)"),
    ],
)
def test_weights_of_another_configuration_are_one_line(
    tmp_path: Path, setting: str, value: int, fault: str
) -> None:
    checkpoint = write_family(FAMILIES["llama"], tmp_path)
    _configure(checkpoint, **{setting: value})
    with pytest.raises(ModelError, match=f"^the weights do not fit config.json: {fault}.*$"):
        open_model(checkpoint, memory_bytes=1 << 30)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = write_family(FAMILIES["llama"], tmp_path)
    train_tokenizer([_LETTERS], VOCAB_SIZE + 9).save(str(checkpoint / "tokenizer.json"))
    with pytest.raises(ModelError, match=f"go up to {VOCAB_SIZE + 8}, and the model has 320"):
        open_model(checkpoint, memory_bytes=1 << 30)


def test_added_tokens_may_lie_beyond_the_vocabulary(tmp_path: Path) -> None:
    checkpoint = write_family(FAMILIES["llama"], tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([f"<|image {i}|>" for i in range(VOCAB_SIZE)])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    assert open_model(checkpoint, memory_bytes=1 << 30).layout.vocab_size == VOCAB_SIZE


def test_a_checkpoint_that_is_broken_is_one_line_and_the_same_to_the_doctor(tmp_path: Path) -> None:
    checkpoint = write_family(FAMILIES["llama"], tmp_path)
    (checkpoint / "tokenizer.json").write_text('{"added_tokens": "")')
    config = EngineConfig(model=str(checkpoint))
    with pytest.raises(ModelError, match=r"^cannot load its tokenizer: .*$") as refused:
        _load_aside(config, lambda line: None)
    assert describe_machine(config).problem == str(refused.value)


@pytest.mark.parametrize(
    ("setting", "config"),
    [
        ("kv_cache_bytes", EngineConfig(model="", kv_cache_bytes=900 << 30)),
        ("state_cache_bytes", EngineConfig(model="", state_cache_bytes=900 << 30)),
    ],
)
def test_an_arena_larger_than_memory_is_refused_and_what_fits_is_said(
    checkpoint_of: Callable[[str], Path], setting: str, config: EngineConfig
) -> None:
    config = replace(config, model=str(checkpoint_of("falcon_h1")))
    lines: list[str] = []
    with pytest.raises(
        ModelError, match=rf"^{setting} of 900.0 GiB does not fit: of .*$"
    ) as refused:
        _load_aside(config, lines.append)
    assert not any("weights" in line for line in lines)  # they were not waited for
    assert "would fit" in str(refused.value)
    assert describe_machine(config).problem.startswith(f"{setting} of 900.0 GiB does not fit")


def test_the_machine_is_asked_for_the_weights_as_they_will_be() -> None:
    report = describe_machine(EngineConfig(model="", kv_cache_bytes=8 << 20))
    backend = load_backend(EngineConfig(model="", kv_cache_bytes=8 << 20), lambda line: None)
    assert report.memory is not None
    assert report.memory.kv_bytes == backend.bytes.arenas
    assert report.memory.states_bytes == backend.bytes.states
    assert report.memory.weights_bytes > 4 << 20
    assert report.card is not None
    assert report.card.arena_tokens == backend.card.arena_tokens
    assert report.card.max_context_tokens == report.card.model_context_tokens


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    checkpoint = write_family(FAMILIES["llama"], tmp_path)
    (checkpoint / "evil.py").write_text("raise SystemExit('ran')")
    _configure(checkpoint, model_file="evil.py")
    with pytest.raises(ModelError, match="trust"):
        open_model(checkpoint, memory_bytes=1 << 30)


def test_the_embedded_default_from_nothing_to_a_token() -> None:
    lines: list[str] = []
    config = EngineConfig(model="", kv_cache_bytes=8 << 20, block_size=16)
    backend = load_backend(config, lines.append)
    assert backend.bytes.arenas <= 8 << 20
    assert backend.card.max_context_tokens >= 4096
    assert any("weights" in line for line in lines)
    prompt = backend.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    name = SequenceId(0)
    plan = StepPlan(
        enter=[BatchEntry(name, Sampling(SamplingParams(temperature=0), seed=0))],
        patches=[(name, TablePatch(None, 0, (0, 1, 2, 3)))],
        rows=[Prefill(name, 0, tuple(prompt), samples=True)],
    )
    sampled = sampled_token(compute_one(backend.runner, plan))
    assert 0 <= sampled.token_id < backend.card.vocab_size
    again = load_backend(config, lines.append)
    assert again.card == backend.card
    assert sampled_token(compute_one(again.runner, plan)) == sampled


def test_what_is_slower_than_it_could_be_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=str(write_family(FAMILIES["qwen3_next"], tmp_path)),
        kv_cache_bytes=1 << 20,
        block_size=8,
    )
    card = load_backend(config, lambda line: None).card
    assert card.batching.startswith("padded rows, ")
    assert "since not joined rows" in card.batching
    assert card.slowdowns == ()
    monkeypatch.setattr(Compiler, "problem", lambda compiler: "there is no g++")
    monkeypatch.setattr(mx, "disable_compile", lambda: None)  # it holds for all tests
    small = replace(config, kv_cache_bytes=1 << 15, max_running=1)
    fuses_nothing, saves_nothing = load_backend(small, lambda line: None).card.slowdowns
    assert "there is no g++" in fuses_nothing
    assert "kv_cache_bytes" in saves_nothing


def test_the_machine_is_described(tmp_path: Path) -> None:
    report = describe_machine(EngineConfig(model="", kv_cache_bytes=8 << 20))
    assert report.problem == ""
    assert report.memory is not None
    assert report.memory.kv_bytes <= 8 << 20
    assert report.card is not None
    assert report.card.arena_tokens > 0
    missing = describe_machine(EngineConfig(model=str(tmp_path / "nothing")))
    assert "nothing" in missing.problem
