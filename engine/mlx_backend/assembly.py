"""Puts the backend's parts together for one configuration."""

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.utils import tree_flatten

from engine.api import ModelError, Report, one_line
from engine.core.step import Backend, DraftStorage, GiveBack
from engine.images.packages import describe_packages
from engine.mlx_backend import host
from engine.mlx_backend.attentions import UNSTATED_TOKENS, attention_choice, attentions
from engine.mlx_backend.blas import Blas
from engine.mlx_backend.decode.choice import DecodePath, compute_draws
from engine.mlx_backend.draft_model import OpenedDraft, load_draft, open_draft, split_sizes
from engine.mlx_backend.draft_runner import DraftRunner
from engine.mlx_backend.encoders.loading import open_encoder, planned_card
from engine.mlx_backend.kv.formats import dtype_name
from engine.mlx_backend.kv.shape import token_bytes
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.checkpoint import Checkpoint
from engine.mlx_backend.loading.compiler import Compiler
from engine.mlx_backend.loading.division import (
    Part,
    PlannedPart,
    describe_planned_ranks,
    describe_ranks,
    rank_memory,
    refuse,
)
from engine.mlx_backend.loading.format_check import check_formats, format_check_bytes
from engine.mlx_backend.loading.images import image_bytes, image_input
from engine.mlx_backend.loading.loader import (
    FLOAT32_SHARE,
    LoadedModel,
    batching_words,
    check_model,
    open_images,
    open_model,
    read_weights,
    slowdowns,
    template_kind,
)
from engine.mlx_backend.loading.locate import find_checkpoint
from engine.mlx_backend.loading.memory import MemoryPlan, footprint
from engine.mlx_backend.loading.pooling import pooled_by
from engine.mlx_backend.loading.purpose import Body, find_purpose, sampling_defaults
from engine.mlx_backend.loading.selfcheck import Agree, alone, check_bytes, measured_token_bytes
from engine.mlx_backend.loading.workspace import attention_workspace
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.cached_model import CachedModel, Execution
from engine.mlx_backend.model.patches import rope_digest
from engine.mlx_backend.runner import Launch, MlxRunner
from engine.mlx_backend.sampling.sampler import Sampler
from engine.mlx_backend.tuning.choice import AttentionChoice, compares
from engine.text.tokenizer import CheckpointTokenizer
from engine.values.images import ImageInput
from engine.values.model import ModelCard, SamplingDefaults, Task
from engine.values.settings import DEMO_NAME, EngineConfig
from engine.values.stats import DecodeStats, MachineReport, ModelMemory, readable_bytes
from kvstore.sizes import StorageSizes

if TYPE_CHECKING:  # most models have one rank
    from engine.mlx_backend.ranks.group import Ranks

SPARE_SHARE = 4
"""A quarter of the free memory may be taken while attentions are compared."""

FIRST_SHARE = 8
"""On a Mac the KV cache begins with an eighth of its memory, and grows."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose weights have not been read, and the machine as it was before."""

    checkpoint: Path
    loaded: LoadedModel
    choice: AttentionChoice
    machine: host.Machine
    used_bytes: int  # that MLX had given out
    draft: OpenedDraft | None = None
    ranks: "Ranks | None" = None  # with which this process computes the model; None: alone

    def plan(self, config: EngineConfig, token_bytes: int = 0) -> MemoryPlan:
        """How memory is divided with these settings, and how long a sequence may be. A token takes
        `token_bytes` of a step, if that has been measured. Raises ModelError for a longer sequence
        than the model can have.
        """
        loaded, layout = self.loaded, self.loaded.layout
        longest, wanted = loaded.max_context_tokens, config.max_model_len
        if longest is not None and wanted is not None and wanted > longest:
            raise ModelError(
                f"max_model_len of {wanted:,} tokens is more than the model's context, "
                f"{longest:,}: lower it, or leave it unset"
            )
        weight_bytes, stored = loaded.weight_bytes, footprint(layout, config.block_size)
        checked_bytes = max(check_bytes(layout), format_check_bytes(layout))
        if (draft := self.draft) is not None:
            weight_bytes += draft.loaded.weight_bytes
            stored = draft.footprint_with(stored, config.block_size)
            checked_bytes = max(checked_bytes, check_bytes(draft.loaded.layout))
        plan = MemoryPlan(
            config=config,
            machine=self.machine,
            weight_bytes=weight_bytes,
            footprint=stored,
            workspace=attention_workspace(
                config,
                layout,
                loaded.weight_bytes,
                loaded.query_heads,
                self.choice.attentions[0],
                self.machine.fused,
            ),
            vocab_size=layout.vocab_size,
            context_tokens=wanted or longest or UNSTATED_TOKENS,
            check_bytes=checked_bytes,
            token_bytes=token_bytes,
            image_bytes=self._image_bytes(wanted or longest or UNSTATED_TOKENS),
        )
        plan = plan if wanted else plan.fitting()
        return plan if self.ranks is None else self.ranks.planned(plan)

    def _image_bytes(self, context_tokens: int) -> int:
        if (vision := self.loaded.vision) is None:
            return 0
        return image_bytes(vision, image_input(vision, self.machine.left_bytes, context_tokens))

    def image_input(self, execution: Execution, plan: MemoryPlan) -> ImageInput | None:
        """What the model takes of images; None if it takes none."""
        if execution.images is None or self.loaded.vision is None:
            return None
        return image_input(self.loaded.vision, self.machine.left_bytes, plan.context_tokens)


def open_configured(config: EngineConfig) -> OpenedModel:
    """Open the configured model, which must have been fetched. Raises ModelError."""
    return open_checkpoint(config, find_checkpoint(config.model, download=False))


def open_checkpoint(
    config: EngineConfig, checkpoint: Path, ranks: "Ranks | None" = None
) -> OpenedModel:
    """Open a model that is to be served with this configuration. With more than one rank it is the
    part of this process among `ranks`, or a plan of such a part. Raises ModelError.
    """
    used_bytes, machine = mx.get_active_memory(), host.examine_for(config.memory_bytes)
    part: Part | None = None
    if config.ranks > 1:
        machine = host.shared(machine, config.local_ranks if ranks is None else ranks.n_sharing)
        part = _planned_part(config) if ranks is None else ranks.group
    purpose = find_purpose(checkpoint, config.pooling, config.reranker)
    loaded = open_model(
        checkpoint,
        machine.left_bytes,
        purpose,
        config.adapters,
        config.kv_format,
        config.state_format,
        part,
    )
    loaded = open_images(loaded, checkpoint, config.step_tokens)
    if part is not None and loaded.vision is not None:
        weight_bytes = loaded.weight_bytes - loaded.vision.weight_bytes
        refused = "ranks compute no images"
        loaded = replace(loaded, vision=None, images_refused=refused, weight_bytes=weight_bytes)
    loaded = replace(loaded, layout=loaded.layout.in_blocks_of(config.block_size))
    choice = attention_choice(config, loaded, None, lambda line: None)
    draft = open_draft(config, loaded, machine.left_bytes)
    return OpenedModel(checkpoint, loaded, choice, machine, used_bytes, draft, ranks)


def _planned_part(config: EngineConfig) -> Part:
    """The part of a rank, of which memory is planned. Raises ModelError."""
    refuse(config)
    return PlannedPart(0, config.ranks)


def assemble_opened(
    config: EngineConfig,
    opened: OpenedModel,
    blas: Blas,
    report: Report,
    compiler: Compiler | None,
) -> Backend:
    """Read the weights, check the model, and allocate its storage. `compiler` is what
    `start_compiler` has returned. Raises ModelError.
    """
    loaded, layout = opened.loaded, opened.loaded.layout
    spare_bytes = opened.machine.left_bytes // SPARE_SHARE
    opened = replace(opened, choice=attention_choice(config, loaded, spare_bytes, report))
    plan = opened.plan(config)
    _limit_allocator(opened, plan)
    read_weights(loaded, report)
    problem = "" if compiler is None else compiler.problem()
    if problem:
        mx.disable_compile()  # or MLX would raise wherever it fuses operations
        report(f"{problem}: MLX fuses no operations, and all steps take longer")
    elif compiler is not None and compiler.is_first_start:
        report("kernels: g++ builds them, once on this machine, so that this start takes longer")
    ranks = opened.ranks
    agree = alone if ranks is None else ranks.worst
    execution = check_model(loaded, opened.choice.attentions, report, agree)
    divergences = check_formats(loaded, execution, config, report)
    pooled = pooled_by(loaded, execution.head, opened.checkpoint)
    if token_bytes := measured_token_bytes(loaded.model, layout, execution):
        plan = opened.plan(config, token_bytes)
        _limit_allocator(opened, plan)
    # On a Mac other programs share the memory, and have it until it is needed.
    is_shared = mx.metal.is_available() and mx.default_device() != mx.cpu
    first_blocks = plan.sizes.n_blocks // FIRST_SHARE if is_shared else None
    report(f"filling the KV cache with zeros, {readable_bytes(plan.stored.arenas)}…")
    sizes, _ = split_sizes(plan.sizes, len(layout.windows))
    storage = Storage(layout, sizes, config.block_size, first_blocks)
    for line in (*_inventory(plan, sizes, storage), *_context(config, loaded, plan)):
        report(line)
    model = CachedModel(
        loaded.model, layout, storage, execution, plan.most_keys, plan.context_tokens
    )
    launch = Launch.on(mx.default_device())
    decode = _decode_path(config, opened, model, problem, report, agree)
    report(f"decode: {decode.why}")
    kept = partial(storage.kept, _n_weights(loaded))
    meter = host.MemoryMeter(plan.memory, plan.step_bytes, opened.used_bytes, kept=kept)
    sampler = Sampler(layout.vocab_size) if ranks is None else ranks.sampler(layout.vocab_size)
    draft_runner, draft_storage = _load_draft(config, opened, plan, decode, report)
    runner = MlxRunner(
        model,
        sampler,
        launch,
        pooled.pooler,
        decode,
        meter,
        draft_runner,
        None if loaded.vision is None else loaded.vision.encoder,
    )

    card = replace(
        _planned_card(config, opened, plan, blas),
        kv_divergence=divergences.kv,
        state_divergence=divergences.state,
        sampling=_sampling(config, opened, report),
        template=template_kind(loaded.tokenizer, pooled.template),
        embedder=pooled.embedder,
        reranker=pooled.reranker,
        batching=batching_words(execution),
        attention=execution.attention.name,
        attention_choice=opened.choice.words(execution.attention),
        slowdowns=tuple(slowdowns(execution, opened.choice.attentions[0], sizes, problem)),
        images=opened.image_input(execution, plan),
        images_refused=execution.images_refused,
        ranks="" if ranks is None or not ranks.memories else describe_ranks(ranks.memories),
    )
    for line in _on_card(config, card):
        report(line)
    hf_tokenizer = loaded.tokenizer._tokenizer
    serving = runner if ranks is None else ranks.serve(runner)
    return Backend(
        runner=serving,
        card=card,
        tokenizer=CheckpointTokenizer(hf_tokenizer, card.template, card.max_sequence_tokens),
        hf_tokenizer=hf_tokenizer,
        sizes=sizes,
        bytes=footprint(layout, config.block_size).storage_bytes(sizes),
        kv_format=storage.kv_format,
        software=f"mlx={metadata.version('mlx')} mlx-lm={metadata.version('mlx-lm')} "
        f"rope={rope_digest()}",
        part_bytes=storage.part_bytes,
        memory=meter.stats,
        decode=partial(_decode_stats, decode, execution.attention),
        rest=serving.resize_ahead,
        give_back=GiveBack(serving.shrink, serving.give_back),
        release_unused=host.release_unused,
        release_thread=partial(_release, ranks),
        draft=draft_storage,
        ranks=None if ranks is None else ranks.stats,
    )


def _on_card(config: EngineConfig, card: ModelCard) -> Iterator[str]:
    """Lines for the log about what the card says."""
    if card.images_refused:
        yield f"images: none, since {card.images_refused}"
    if card.ranks:
        yield f"ranks: {card.ranks}"
    if compares(config):
        yield f"attention: {card.attention_choice}"
    if card.tasks != (Task.GENERATE,):
        yield f"tasks: {', '.join(card.tasks)}"


def _load_draft(
    config: EngineConfig,
    opened: OpenedModel,
    plan: MemoryPlan,
    decode: DecodePath,
    report: Report,
) -> tuple[DraftRunner | None, DraftStorage | None]:
    """Load the draft model, if there is one. Raises ModelError."""
    if (draft := opened.draft) is None:
        return None, None
    report(f"draft model: {draft.words}")
    found = attentions(config.attention, draft.loaded)
    return load_draft(draft, opened.loaded, found, plan, decode, report)


def _sampling(config: EngineConfig, opened: OpenedModel, report: Report) -> SamplingDefaults:
    """The values of sampling fields that a request omits."""
    if config.generation_config == "none":
        return SamplingDefaults()
    return sampling_defaults(opened.checkpoint, report)


def _planned_card(
    config: EngineConfig, opened: OpenedModel, plan: MemoryPlan, blas: Blas
) -> ModelCard:
    """The model's card as far as it is known before the weights are read."""
    loaded, layout = opened.loaded, opened.loaded.layout
    return ModelCard(
        name=config.model or DEMO_NAME,
        fingerprint=loaded.fingerprint,
        vocab_size=layout.vocab_size,
        model_context_tokens=loaded.max_context_tokens,
        max_context_tokens=plan.context_tokens,
        eos_token_ids=loaded.eos_token_ids,
        kv_bytes_per_token=token_bytes(layout.full_layers),
        arena_tokens=plan.arena_tokens,
        block_size=config.block_size,
        device=opened.machine.device,
        dtype=", ".join(map(dtype_name, layout.dtypes)),
        blas=str(blas),
        checkpoint=str(opened.checkpoint),
        adapters=loaded.adapters,
        generates=loaded.purpose.generates,
        template=template_kind(loaded.tokenizer),
        kv_format=layout.format_in_use,
        state_format=str(layout.state_format) if layout.states else "",
        attention=opened.choice.attentions[0].name,
        attention_choice=opened.choice.words(opened.choice.attentions[0]),
        license=Checkpoint(opened.checkpoint).license,
        draft_model="" if opened.draft is None else opened.draft.words,
    )


def _decode_stats(decode: DecodePath, attention: Attention) -> DecodeStats:
    """How steps are computed now. Any thread may call it."""
    return replace(
        decode.stats(),
        attention_problem=attention.problem,
        attention_fallbacks=attention.fallbacks,
    )


def _decode_path(
    config: EngineConfig,
    opened: OpenedModel,
    model: CachedModel,
    problem: str,
    report: Report,
    agree: Agree,
) -> DecodePath:
    """Rehearse compiled decodes, and prepare draws. `problem` is why MLX cannot compile; "" if it
    can.
    """
    if not opened.loaded.purpose.generates:
        return DecodePath("it generates nothing")
    if problem:
        return DecodePath(problem)
    path = DecodePath("as set")
    if config.decode != "eager":
        path.choose(model, report, agree)
    if mx.default_device() == mx.cpu:
        compute_draws(path, model.layout, report)
    return path


def _release(ranks: "Ranks | None") -> None:
    """End the other ranks, and release the thread."""
    if ranks is not None:
        ranks.close()
    release_thread()


def release_thread() -> None:
    """Release what MLX keeps for this thread. The thread may not use MLX afterwards.

    If this is left to the end of the thread, it may race with the end of the interpreter, which
    aborts the process.
    """
    mx.clear_streams()


def needed_memory(config: EngineConfig, default_bytes: int) -> ModelMemory:
    """What the configured model takes: weights as they will be in memory, the work of a step, and
    the storage that the settings specify, or else `default_bytes`. Reads no weights.

    Raises ModelError.
    """
    checkpoint = find_checkpoint(config.model, download=False)
    if find_purpose(checkpoint, config.pooling, config.reranker).body is Body.ENCODER:
        return open_encoder(config, checkpoint).memory
    plan = open_checkpoint(config, checkpoint).plan(config)
    least_bytes = math.ceil(plan.weight_bytes / FLOAT32_SHARE)  # or their type changes
    needed = plan.needed(default_bytes // config.local_ranks)
    needed = replace(needed, total_bytes=max(needed.total_bytes, least_bytes))
    return ModelMemory(*(config.local_ranks * part_bytes for part_bytes in astuple(needed)))


def describe(config: EngineConfig, blas: Blas) -> MachineReport:
    """Describe the device and how the configured model would fit, for `describe_machine`."""
    machine = host.examine_for(config.memory_bytes)
    report = MachineReport(
        memory_bytes=machine.memory_bytes,
        left_bytes=machine.left_bytes,
        advice=blas.advice,
        mlx_version=metadata.version("mlx"),
        mlx_lm_version=metadata.version("mlx-lm"),
        images=describe_packages(),
    )
    try:
        checkpoint = find_checkpoint(config.model, download=False)
        if find_purpose(checkpoint, config.pooling, config.reranker).body is Body.ENCODER:
            encoder = open_encoder(config, checkpoint)
            card = planned_card(config, encoder, blas)
            return replace(report, card=card, memory=encoder.memory)
        opened = open_checkpoint(config, checkpoint)
        plan = opened.plan(config)
        card = _planned_card(config, opened, plan, blas)
        return replace(
            report,
            card=replace(card, ranks=describe_planned_ranks(config, rank_memory(plan))),
            memory=plan.memory,
            attention=opened.choice.trials,
            arrays=plan.array_counts(_n_weights(opened.loaded), opened.loaded.layout),
        )
    except Exception as error:  # the words that `load_backend` would have
        problem = str(error) if isinstance(error, ModelError) else one_line(error)
        return replace(report, problem=problem)


def _n_weights(loaded: LoadedModel) -> int:
    """The number of arrays of a model's weights, read or not."""
    return len(tree_flatten(loaded.model.parameters()))


def _limit_allocator(opened: OpenedModel, plan: MemoryPlan) -> None:
    host.limit_allocator(opened.used_bytes + opened.machine.most_bytes, plan.cache_limit_bytes)


def _context(config: EngineConfig, loaded: LoadedModel, plan: MemoryPlan) -> Iterator[str]:
    """A line for the log where the context is neither the model's nor set."""
    context_tokens, longest = plan.context_tokens, loaded.max_context_tokens
    if config.max_model_len is None and longest is None:
        yield (
            f"context: {context_tokens:,} tokens, since the model's files state no length; "
            "max_model_len sets another"
        )
    elif config.max_model_len is None and longest is not None and context_tokens < longest:
        yield (
            f"context: {context_tokens:,} of {longest:,} tokens fit into memory; "
            "max_model_len sets another"
        )


def _inventory(plan: MemoryPlan, sizes: StorageSizes, storage: Storage) -> Iterator[str]:
    """Lines for the log that describe the allocated storage of the model, of these sizes."""
    size = plan.config.block_size
    if storage.full.layers:
        bytes_used = f"{storage.full.bytes / 1e9:.2f} GB"
        yield f"KV cache: {sizes.n_blocks:,} blocks of {size} tokens, {bytes_used}"
        if (n_allocated := storage.full.n_allocated) < sizes.n_blocks:
            yield f"memory is taken for {n_allocated:,} of them, and for more when they are needed"
    for window, arena in zip(sizes.windows, storage.windows, strict=True):
        yield (
            f"window of {window.window:,} tokens: {window.n_slots:,} blocks of {size} tokens, "
            f"{arena.bytes / 1e9:.2f} GB"
        )
    if sizes.states is not None:
        running, saved = sizes.states.running, sizes.states.saved
        yield (
            f"recurrent states: {running} running and {saved} saved, at most "
            f"{plan.stored.states / 1e9:.2f} GB"
        )
