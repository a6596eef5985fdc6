"""Loads a checkpoint with mlx-lm: the model, its tokenizer, and the parts that embed or score."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_unflatten
from mlx_lm import utils
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.api import ModelError, Report, one_line
from engine.mlx_backend.kv.layout import Layout, discover
from engine.mlx_backend.loading.adapter_files import read_adapters
from engine.mlx_backend.loading.checkpoint import (
    WEIGHTS,
    Checkpoint,
    fingerprint,
    first_number,
    max_context_tokens,
    read_header,
)
from engine.mlx_backend.loading.division import Part, compare_whole, divide
from engine.mlx_backend.loading.images import Vision, open_vision, read_vision, with_images
from engine.mlx_backend.loading.purpose import GENERATES, Purpose
from engine.mlx_backend.loading.selfcheck import Agree, alone, find_execution
from engine.mlx_backend.loading.weights import (
    OriginalLayers,
    gpu_only,
    named_weights,
    own_arrays,
    to_float32,
)
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.batching import LADDER
from engine.mlx_backend.model.cached_model import Execution
from engine.mlx_backend.model.patches import RowAdapters
from engine.mlx_backend.model.plain_kernels import install_plain_kernels
from engine.mlx_backend.vision.modules import NoVision
from engine.text.tokenizer import with_any_config
from engine.values.model import TemplateKind
from engine.values.settings import AdapterConfig, KVFormat, StateFormat
from engine.values.stats import readable_bytes
from kvstore.sizes import StorageSizes

FLOAT32_SHARE = 0.8  # of memory, at most, for weights in float32
READ_BYTES = 128 << 20  # of weights that are read at once, and then compared with mlx-lm's
REPORTED_BYTES = 1 << 30  # of weights that are read before the progress is reported again
_HEADS_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the facts that the engine needs. Its weights may not be in memory yet."""

    model: Module
    tokenizer: TokenizerWrapper
    layout: Layout
    eos_token_ids: frozenset[int]
    query_heads: int  # in the layer that has most
    max_context_tokens: int | None  # None: its files state none
    fingerprint: str
    weight_bytes: int  # including those of the adapters
    row_adapters: RowAdapters
    adapters: Mapping[str, str]  # fingerprints by name
    original: OriginalLayers  # with which the layers are compared when their weights are read
    purpose: Purpose = GENERATES
    vision: Vision | None = None
    images_refused: str = ""  # why its vision tower cannot be loaded; "" where it is, or has none
    whole: "PreparedModel | None" = None  # before its division among ranks, to be compared


def open_images(loaded: LoadedModel, checkpoint: Path, step_tokens: int) -> LoadedModel:
    """The model with the vision tower of its checkpoint, if it generates. A tower that cannot be
    used, with steps of `step_tokens`, is left out, and the reason stated.
    """
    if not loaded.purpose.generates:
        return loaded
    try:
        has_states = bool(loaded.layout.states)
        vision = open_vision(checkpoint, step_tokens, has_states=has_states)
    except NoVision as reason:
        return replace(loaded, images_refused=str(reason))
    if vision is None:
        return loaded
    return replace(loaded, vision=vision, weight_bytes=loaded.weight_bytes + vision.weight_bytes)


def open_model(
    checkpoint: Path,
    memory_bytes: int,
    purpose: Purpose = GENERATES,
    adapter_configs: Sequence[AdapterConfig] = (),
    kv_format: KVFormat = KVFormat.AUTO,
    state_format: StateFormat = StateFormat.AUTO,
    part: Part | None = None,
) -> LoadedModel:
    """Build the model, its adapters and its tokenizer. `read_weights` reads the weights. The layout
    stores K and V in `kv_format`, and saves states in `state_format`, where that is possible.

    On a CPU everything is float32, and quantized weights are dequantized, if the result leaves a
    fifth of `memory_bytes` free: half precision and quantized products are 20 to 50 times slower
    there. Elsewhere the checkpoint's dtype and quantization are kept.

    `part`: of the ranks of a model, the one that this process is; None: it has the whole model.
    Raises ModelError.
    """
    whole: PreparedModel | None = None
    if part is None:
        model, config, original, max_tokens = _prepare(checkpoint, memory_bytes, purpose)
        layout, n_parts = discover(model), 1
    else:
        n_parts = part.size()
        whole, divided = (_prepare(checkpoint, memory_bytes * n_parts, purpose) for _ in range(2))
        model, config, _, max_tokens = divided
        layout = divide(model, config, part)
        original = OriginalLayers(model)
    if max_tokens is not None:
        layout = layout.within(max_tokens)
    layout = layout.stored_as(kv_format, state_format)
    tokenizer = _load_tokenizer(checkpoint, config, layout.vocab_size)
    adapters = read_adapters(adapter_configs, model, layout.vocab_size)
    row_adapters = RowAdapters(adapters)
    kv_heads = max((shape.kv_heads for shape in layout.kv_layers), default=0)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        layout=layout,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        query_heads=max((first_number(config, _HEADS_KEYS) or 0) // n_parts, kv_heads),
        max_context_tokens=max_tokens,
        fingerprint=fingerprint(checkpoint),
        weight_bytes=_weight_bytes(model) + row_adapters.weight_bytes,
        row_adapters=row_adapters,
        adapters={adapter.name: adapter.fingerprint for adapter in adapters},
        original=original,
        purpose=purpose,
        whole=whole,
    )


class PreparedModel(NamedTuple):
    """A model that mlx-lm has built, in the types that it is served in. Its arrays are lazy."""

    model: Module
    config: dict[str, Any]
    original: OriginalLayers
    max_tokens: int | None  # that a sequence may have; None: as many as fit


def _prepare(checkpoint: Path, memory_bytes: int, purpose: Purpose) -> PreparedModel:
    """Build a model; see `open_model`. Raises ModelError."""
    model, config = _build(checkpoint, purpose)
    original = OriginalLayers(model)
    if mx.default_device() == mx.cpu:
        to_float32(model)
        if _weight_bytes(model) > FLOAT32_SHARE * memory_bytes:
            model, _ = _build(checkpoint, purpose)  # quantized, and in its own dtype
            original = OriginalLayers(model)
        if problem := gpu_only(model):
            raise ModelError(f"it cannot be served on a CPU: {problem}")
    max_tokens = _fix_dynamic_rope(model, max_context_tokens(config))
    return PreparedModel(model, config, original, max_tokens)


def load_weights(loaded: LoadedModel, attentions: Sequence[Attention], report: Report) -> Execution:
    """Read the weights into memory, and check the model; see `check_model`."""
    read_weights(loaded, report)
    return check_model(loaded, attentions, report)


def check_model(
    loaded: LoadedModel,
    attentions: Sequence[Attention],
    report: Report,
    agree: Agree = alone,
) -> Execution:
    """Check how a model whose weights have been read runs over shared storage that holds all in
    full.

    `attentions` may serve, the preferred one first. Raises ModelError if the model runs with none
    of them.
    """
    if loaded.adapters:
        report(f"adapters: {', '.join(loaded.adapters)}")
    report("checking that the model computes the same over shared storage…")
    in_full = loaded.layout.stored_as(KVFormat.FULL)
    execution = find_execution(loaded.model, in_full, attentions, loaded.row_adapters, agree)
    mx.clear_cache()  # the check's buffers
    execution = _with_images(loaded, execution)
    if execution.batching is not LADDER[0]:
        report(f"batches: {execution.batching.name}, since not {execution.rejected[0]}")
    if execution.attention is not attentions[0]:
        report(f"attention: {execution.attention.name}, since not {execution.rejected[-1]}")
    return execution


def _with_images(loaded: LoadedModel, execution: Execution) -> Execution:
    """The execution with images, if the model takes some and the check finds nothing wrong."""
    if loaded.vision is None:
        return replace(execution, images_refused=loaded.images_refused)
    try:
        return with_images(
            loaded.model, loaded.model.layers, loaded.layout, execution, loaded.vision
        )
    except NoVision as reason:
        return replace(execution, images_refused=str(reason))


def batching_words(execution: Execution) -> str:
    """The card's `batching`."""
    name = f"{execution.batching.name}, {execution.attention.name} attention"
    return f"{name}, since not {execution.rejected[0]}" if execution.rejected else name


def slowdowns(
    execution: Execution, preferred: Attention, sizes: StorageSizes, problem: str
) -> Iterator[str]:
    """The card's `slowdowns`. `problem` is why MLX cannot compile; "" if it can."""
    if problem:
        yield (
            f"MLX fuses no operations, so all steps take longer: {problem}. "
            "Mend that, and start the daemon again."
        )
    if execution.attention is not preferred:
        yield (
            f"Steps take longer, because attention is {execution.attention.name} and not "
            f"{preferred.name}. The check at load rejected {execution.rejected[0]}. "
            "Try newer versions of mlx and mlx-lm, or report the model."
        )
    if sizes.states is not None and not sizes.states.saved:
        yield (
            "No recurrent state can be saved, so no prompt is resumed from the cache. "
            "Raise kv_cache_bytes or lower max_running."
        )


def read_weights(loaded: LoadedModel, report: Report) -> None:
    """Read the weights, a part at a time, so that the progress can be reported and the layers that
    were changed can be compared with mlx-lm's. Raises ModelError if they compute something else.
    """
    total = readable_bytes(loaded.weight_bytes)
    if loaded.whole is not None:
        compare_whole(loaded.whole.model, loaded.whole.original)
    arrays, part = own_arrays(loaded.model), dict[str, Module]()
    part_bytes, done_bytes, reported_bytes = 0, 0, 0
    report(f"loading weights, {total}…")

    def read() -> None:
        mx.eval([arrays[path] for path in part])
        for path, module in part.items():
            loaded.original.check(path, module, arrays[path])
        part.clear()

    for path, module in loaded.model.named_modules():
        part[path] = module
        part_bytes += sum(array.nbytes for array in arrays[path].values())
        if part_bytes >= READ_BYTES:
            read()
            done_bytes, part_bytes = done_bytes + part_bytes, 0
            if done_bytes - reported_bytes >= REPORTED_BYTES:
                reported_bytes = done_bytes
                report(f"loading weights, {readable_bytes(done_bytes)} of {total}…")
    read()
    if loaded.vision is not None:
        read_vision(loaded.vision)
    loaded.original.close()
    report(f"weights: {total}")


def _weight_bytes(model: Module) -> int:
    return sum(array.nbytes for array in named_weights(model).values())


def _fix_dynamic_rope(model: Module, max_context_tokens: int | None) -> int | None:
    """Replace each dynamic NTK RoPE by the plain RoPE that it is up to its first context length.

    Beyond that length its base changes, which invalidates all cached keys. Returns the most tokens
    that a sequence may have; None: as many as fit.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, DynamicNTKScalingRoPE)
    }
    plain = [(name, RoPE(rope.dims, rope.traditional, rope.base)) for name, rope in found.items()]
    model.update_modules(tree_unflatten(plain))
    lengths = [int(rope.max_position_embeddings) for rope in found.values()]
    if max_context_tokens is not None:
        lengths.append(max_context_tokens)
    return min(lengths, default=None)


_FAULTS = {"olmo": "its model fails for two tokens or more, with its own cache, too"}
"""Faults of mlx-lm's models that are found before a model runs, by architecture."""

_ALIASES = {"lfm2_vl": "lfm2-vl"}
"""What mlx-lm names architectures that published checkpoints name otherwise."""

CLASSIFIER, _HEAD, _BODY = "score.weight", "lm_head.", "model."


def _build(checkpoint: Path, purpose: Purpose) -> tuple[Module, dict[str, Any]]:
    """The model and its configuration. Raises ModelError.

    A model that does not generate may lack an LM head. Its embedding then makes logits that are not
    used, and weights of its body alone can be loaded.
    """

    def classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
        if fault := _FAULTS.get(config["model_type"]):
            raise ModelError(f"mlx-lm cannot run it: {fault}")
        if config.get("text_config") is None:
            config.pop("text_config", None)  # mlx-lm only checks whether the key exists
        named = _ALIASES.get(config["model_type"], config["model_type"])
        model, arguments = utils._get_classes({**config, "model_type": named})
        return (model if purpose.generates else _without_head(model)), arguments

    changes = {}
    if not purpose.generates:
        names = (name for file in checkpoint.glob(WEIGHTS) for name in read_header(file).tensors)
        if not any(name.startswith(_HEAD) for name in names):
            changes = {"tie_word_embeddings": True}
    try:
        model, config = utils.load_model(
            checkpoint, lazy=True, model_config=changes, get_model_classes=classes
        )
    except ModelError:
        raise
    except SystemExit as error:  # a module may exit when it cannot import its package
        reason = error.__context__ or f"its module exits with {error}"
        raise ModelError(f"mlx-lm cannot load it: {reason}") from error
    except Exception as error:  # mlx-lm's modules raise exceptions of any type
        if misfit := _misfit(str(error)):
            raise ModelError(f"the weights do not fit config.json: {misfit}") from error
        raise ModelError(f"mlx-lm cannot load it: {one_line(error)}") from error
    install_plain_kernels(model)
    return model, config


def _without_head(model: type[Any]) -> type[Any]:
    """A class of model that also loads the weights of the body alone."""
    has_own = hasattr(model, "sanitize")

    class Headless(model):  # type: ignore[misc]
        def sanitize(self, weights: Mapping[str, mx.array]) -> Mapping[str, mx.array]:
            named = weights_of_body(weights)
            same = (
                array is weights.get(name) or array is weights.get(name.removeprefix(_BODY))
                for name, array in named.items()
            )
            if len(named) != len(weights.keys() - {CLASSIFIER}) or not all(same):
                raise ModelError("weights of its body were changed with their names: report it")
            return super().sanitize(named) if has_own else named

    return Headless


def weights_of_body(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The weights of a checkpoint without a classifier, as mlx-lm names them. transformers writes
    names without a prefix if it saves the body by itself.
    """
    prefix = "" if any(name.startswith(_BODY) for name in weights) else _BODY
    return {
        name if name.startswith(_HEAD) else prefix + name: array
        for name, array in weights.items()
        if name != CLASSIFIER
    }


def _misfit(message: str) -> str:
    """A short form of `Module.load_weights`'s message about wrong parameters, which lists them all;
    "" for any other message.
    """
    if message.startswith("Expected shape"):
        return message
    listed = re.match(r"(Missing|Received) (\d+) parameters[^\n]*\n([^\s,]+)", message)
    if listed is None:
        return ""
    verb, count, first = listed.groups()
    fault = "missing" if verb == "Missing" else "not the model's"
    return f"{count} of the parameters are {fault}, such as {first.rstrip('.')}"


def _load_tokenizer(
    checkpoint: Path, config: Mapping[str, Any], vocab_size: int
) -> TokenizerWrapper:
    """The checkpoint's tokenizer. Raises ModelError if it cannot be loaded, or has tokens that the
    model does not have.

    Added tokens may lie beyond `vocab_size`, such as Gemma's for images in a model of text alone.
    """
    # mlx-lm takes them from generation_config.json, or else from config.json. None if they name
    # none of the model's tokens: mlx-lm knows the end tokens of some tokenizers.
    named = config.get("eos_token_id")
    listed = named if isinstance(named, list) else [named]
    end_tokens = [id for id in listed if isinstance(id, int) and 0 <= id < vocab_size] or None
    files, extra = Checkpoint(checkpoint), dict[str, Any]()
    if files.processor_template == files.chat_template != "":  # there is no other
        extra["chat_template"] = files.processor_template
    try:
        tokenizer = with_any_config(
            lambda more: utils.load_tokenizer(
                checkpoint, {**extra, **more}, eos_token_ids=end_tokens
            )
        )
    except Exception as error:
        raise ModelError(f"cannot load its tokenizer: {one_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError("the checkpoint has no tokenizer.json, and none can be made of its files")
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    ordinary = backend.get_vocab(with_added_tokens=False).values() - added.keys()
    if not ordinary:
        raise ModelError("the tokenizer has no tokens")
    if max(ordinary) >= vocab_size:
        raise ModelError(
            f"the tokenizer is not the model's: its tokens go up to {max(ordinary):,}, and the "
            f"model has {vocab_size:,}"
        )
    return tokenizer


def template_kind(tokenizer: TokenizerWrapper, source: str = "") -> TemplateKind:
    """How chat prompts are rendered: by the template `source`, or else by the tokenizer's own."""
    if source:
        return TemplateKind(source=source)
    function = tokenizer._chat_template
    return TemplateKind(
        module="" if function is None else function.__module__.rpartition(".")[2],
        thinking_argument=tokenizer._thinking_kwarg,
        thinks=tokenizer.has_thinking,
    )
