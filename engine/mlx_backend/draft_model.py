"""Loads a draft model next to the model that it drafts for, and puts its parts together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.api import ModelError, Report
from engine.core.step import DraftStorage
from engine.mlx_backend.decode.choice import DecodePath
from engine.mlx_backend.draft_runner import DraftRunner
from engine.mlx_backend.kv.shape import token_bytes
from engine.mlx_backend.kv.storage import Storage
from engine.mlx_backend.loading.loader import LoadedModel, check_model, open_model, read_weights
from engine.mlx_backend.loading.locate import about_draft_model, find_checkpoint
from engine.mlx_backend.loading.memory import Footprint, MemoryPlan, footprint
from engine.mlx_backend.loading.purpose import Body, find_purpose
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.model.cached_model import CachedModel
from engine.mlx_backend.sampling.sampler import Sampler
from engine.values.settings import DEMO_NAME, EngineConfig
from engine.values.stats import readable_bytes
from kvstore.sizes import StorageSizes

LEAST_COST_SHARE = 0.1
"""What a forward of a draft model takes at least of one of the model, before both were measured:
however few its weights are, the host has to build it.
"""


@dataclass(frozen=True, slots=True)
class OpenedDraft:
    """A draft model whose weights have not been read."""

    name: str  # by which the settings name it
    loaded: LoadedModel

    @property
    def words(self) -> str:
        """The model and its size, for a person."""
        weights = readable_bytes(self.loaded.weight_bytes)
        kv_bytes = token_bytes(self.loaded.layout.full_layers)
        return f"{self.name}, weights {weights}, {kv_bytes:,} bytes of KV a token"

    def footprint_with(self, target: Footprint, block_size: int) -> Footprint:
        """The footprint of both models: for each block of the target's KV the draft model has one,
        too, and the windows of its layers follow the target's.
        """
        own = footprint(self.loaded.layout, block_size)
        return replace(
            target,
            block_bytes=target.block_bytes + own.block_bytes,
            windows=(*target.windows, *own.windows),
        )


def open_draft(config: EngineConfig, target: LoadedModel, memory_bytes: int) -> OpenedDraft | None:
    """Open the draft model that the settings name; None if they name none. `memory_bytes`: what
    both models may take. Raises ModelError for a model that cannot draft for the target.
    """
    if (model := config.draft_model_in_use) is None:
        return None
    name = model or DEMO_NAME
    if not target.purpose.generates:
        raise ModelError(f"draft_model {name} drafts nothing, since the model generates nothing")
    with about_draft_model(model):
        checkpoint = find_checkpoint(model, download=False)
        purpose = find_purpose(checkpoint)
        if purpose.body is Body.ENCODER or not purpose.generates:
            raise ModelError("it generates nothing")
        loaded = _open(checkpoint, target, memory_bytes)
        loaded = replace(loaded, layout=loaded.layout.in_blocks_of(config.block_size))
    return OpenedDraft(name, loaded)


def _open(checkpoint: Path, target: LoadedModel, memory_bytes: int) -> LoadedModel:
    """Open the checkpoint of a draft model. Raises ModelError if it cannot draft."""
    loaded = open_model(checkpoint, max(memory_bytes - target.weight_bytes, 0))
    if loaded.layout.states:
        raise ModelError(
            "it has recurrent layers, which cannot return to before a draft that was rejected"
        )
    if problem := other_tokens(_tokens_by_id(target), _tokens_by_id(loaded)):
        raise ModelError(f"its tokenizer is another one: {problem}")
    return loaded


def _tokens_by_id(loaded: LoadedModel) -> Mapping[int, str]:
    vocabulary = loaded.tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}


def other_tokens(expected: Mapping[int, str], found: Mapping[int, str]) -> str:
    """The first difference between the tokens of the model, by id, and those of its draft model, in
    words; "" if there is none. Vocabularies of the same size may have other tokens.
    """
    differing = [
        token_id
        for token_id in expected.keys() | found.keys()
        if expected.get(token_id) != found.get(token_id)
    ]
    if not differing:
        return ""
    token_id = min(differing)
    of_both = (_in_words(tokens.get(token_id)) for tokens in (found, expected))
    one, other = of_both
    return (
        f"{len(differing):,} tokens differ, the first of which has the id {token_id:,}: {one} in "
        f"the draft model, {other} in the model"
    )


def _in_words(token: str | None) -> str:
    return "none" if token is None else repr(token)


def split_sizes(sizes: StorageSizes, n_windows: int) -> tuple[StorageSizes, StorageSizes]:
    """The storage of a model with `n_windows` windows, and that of its draft model; see
    `OpenedDraft.footprint_with`.
    """
    own, of_draft = sizes.windows[:n_windows], sizes.windows[n_windows:]
    return replace(sizes, windows=own), replace(sizes, windows=of_draft, states=None)


def load_draft(
    opened: OpenedDraft,
    target: LoadedModel,
    attentions: tuple[Attention, ...],
    plan: MemoryPlan,
    decode: DecodePath,
    report: Report,
) -> tuple[DraftRunner, DraftStorage]:
    """Read the weights of a draft model, check it, and allocate its storage. `attentions` may serve
    it, the preferred one first. `plan` is that of both models. `decode` draws for the target.
    Raises ModelError.
    """

    def report_draft(line: str) -> None:
        report(f"draft model: {line}")

    loaded, layout = opened.loaded, opened.loaded.layout
    read_weights(loaded, report_draft)
    execution = check_model(loaded, attentions, report_draft)
    _, sizes = split_sizes(plan.sizes, len(target.layout.windows))
    block_size, most_keys = plan.config.block_size, plan.most_keys
    storage = Storage(layout, sizes, block_size)
    context_tokens = loaded.max_context_tokens or math.inf
    model = CachedModel(loaded.model, layout, storage, execution, most_keys, context_tokens)
    path = DecodePath("as set")
    if plan.config.decode != "eager":
        path.choose(model, report_draft)
    report_draft(f"decode: {path.why}")
    vocab_size = target.layout.vocab_size
    sampler = Sampler(vocab_size)
    sampler.draw_with = decode.draw
    runner = DraftRunner(model, sampler, vocab_size, path)
    longest = int(min(context_tokens, sizes.n_blocks * block_size))
    share = max(loaded.weight_bytes / max(target.weight_bytes, 1), LEAST_COST_SHARE)
    return runner, DraftStorage(sizes, longest, share)
