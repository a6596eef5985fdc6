"""What a journal records: a change of the tree, with all that a replica needs of it."""

from dataclasses import dataclass
from typing import TypeAlias

from kvstore.types import BlockId, Namespace


@dataclass(frozen=True, slots=True)
class Stored:
    """`blocks` follow what `behind` ends with: `node` itself, its parent, or None for a root.

    The node has `n_tokens` tokens now.
    """

    node: int
    behind: int | None
    namespace: Namespace
    n_tokens: int
    blocks: tuple[BlockId, ...]
    seconds: float  # of the clock, when it was last used


@dataclass(frozen=True, slots=True)
class Split:
    """`node` keeps its first `n_blocks` blocks, which are `n_tokens` tokens; the rest and what is
    below go to `lower`.
    """

    node: int
    lower: int
    n_blocks: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Used:
    """Of the path that ends with `node` the first `n_tokens` tokens were adopted then."""

    node: int
    n_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Removed:
    """The last `n_blocks` blocks of a leaf are gone: with all of them the node.

    `n_tokens` tokens are left of it where it is not gone.
    """

    node: int
    n_blocks: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class ClearedNamespace:
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class Afresh:
    """Forget all: the changes that follow tell the tree from its beginning."""


Change: TypeAlias = Stored | Split | Used | Removed | ClearedNamespace | Afresh
"""A change of a node that the replica does not know is ignored: the node is yet to be told."""
