"""The attentions that may serve a kind of layer on this device."""

from dataclasses import fields
from functools import partial
from hashlib import blake2b

import mlx.core as mx

from engine.mlx_backend.cpu.cascade import CascadeAttention
from engine.mlx_backend.gpu.kind import Kind, Uncovered, kind_of, variants
from engine.mlx_backend.gpu.paged import PagedAttention, smaller_units
from engine.mlx_backend.gpu.source import source_text
from engine.mlx_backend.model.attention import Attention
from engine.mlx_backend.tuning.kinds import LayerKind
from engine.mlx_backend.tuning.race import Candidates
from engine.values.attention import GATHER

PAGED = PagedAttention.name


def kernel_digest() -> str:
    """A digest of the kernel's source."""
    return blake2b(source_text().encode(), digest_size=10).hexdigest()


def candidates_for(kind: LayerKind, gather: Attention) -> tuple[Candidates, dict[str, str]]:
    """The attentions to compare, by name, and why others are not compared."""
    found: dict[str, Attention] = {GATHER: gather}
    excluded = dict[str, str]()
    cascade = CascadeAttention()
    if kind.window is not None or kind.has_sinks:
        excluded[cascade.name] = "it has no windows and no sinks"
    elif mx.default_device() != mx.cpu and any(codec.bits for codec in kind.shape.codecs):
        excluded[cascade.name] = "it reads quantized blocks on CPUs only"
    else:
        found[cascade.name] = cascade
    try:
        own = kind_of(
            kind.shape,
            kind.block_size,
            kind.query_heads,
            kind.shape.key_dtype,
            kind.key_dim**-0.5,
            kind.window,
            kind.has_sinks,
            width=1,
        )
    except Uncovered as reason:
        excluded[PAGED] = str(reason)
    else:
        for index, variant in enumerate(variants(own)):
            adapt = partial(_variant, index)
            found[_name(variant, own)] = PagedAttention(gather, adapt)
    return found, excluded


def _name(variant: Kind, usual: Kind) -> str:
    """`paged`, or `paged tile=2` where the variant shares out the work in another way."""
    changed = (
        f"{field.name}={getattr(variant, field.name)}"
        for field in fields(Kind)
        if getattr(variant, field.name) != getattr(usual, field.name)
    )
    return " ".join([PAGED, *changed])


def _variant(index: int, kind: Kind) -> Kind:
    """A variant of a kind, which may be for another number of tokens than what was compared."""
    found = variants(kind)
    adapted = found[index] if index < len(found) else kind
    return smaller_units(adapted) if mx.default_device() == mx.cpu else adapted
