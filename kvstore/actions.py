"""Orders that the store gives to the arena: what must happen to tensors before a step's forward."""

from dataclasses import dataclass

from kvstore.types import BlockId


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy the first `n_tokens` slots of one block, in every layer, from `source` to `target`.

    Orders are carried out one after another in the order in which they were given: a block that
    an earlier order read from may be the target of a later one.
    """

    source: BlockId
    target: BlockId
    n_tokens: int
