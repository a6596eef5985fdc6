"""What a store should hold: an arena that says for which tokens each slot was computed, what was
ever indexed, and prompts in which images are named by their content.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

from kvstore.ops import CopyBlock
from kvstore.tokens import CONTENT_ID, Tokens, content_ids, unpacked
from kvstore.types import BlockId, Namespace

Ids = tuple[int, ...]
Slot = tuple[Namespace, Ids] | None
"""A namespace and all tokens up to and including the slot's own; None holds nothing of use."""

PLACEHOLDER = 2
"""The token that stands for each part of an image, and is one as any other."""


@dataclass(frozen=True)
class Picture:
    """An image: the ids that name its parts, and whether its tokens see each other."""

    ids: Ids
    is_whole: bool


def _picture(number: int, size: int, *, is_whole: bool) -> Picture:
    return Picture(tuple(content_ids(blake3(b"%d" % number).digest(), size)), is_whole)


PICTURES = (
    _picture(0, 1, is_whole=False),
    _picture(1, 5, is_whole=False),
    _picture(2, 5, is_whole=True),
    _picture(3, 3, is_whole=True),
)
_OF_FIRST_ID = {picture.ids[0]: picture for picture in PICTURES}


def flat(items: Iterable[int | Picture]) -> Ids:
    """The ids of tokens and images."""
    ids = list[int]()
    for item in items:
        ids += item.ids if isinstance(item, Picture) else (item,)
    return tuple(ids)


def pictures_of(ids: Ids) -> list[tuple[int, Picture]]:
    """The images in a prompt, with the positions of their first parts."""
    return [(at, _OF_FIRST_ID[each]) for at, each in enumerate(ids) if each in _OF_FIRST_ID]


def without_cut_picture(ids: Ids) -> Ids:
    """The ids up to the image that their end cuts."""
    for at, picture in pictures_of(ids):
        if at + len(picture.ids) > len(ids):
            return ids[:at]
    return ids


def tokens_of(ids: Ids) -> Tokens:
    """The prompt with these ids, as the engine makes it of a text and its images."""
    text = array("I", (PLACEHOLDER if each >= CONTENT_ID else each for each in ids))
    placed = pictures_of(ids)
    return Tokens(
        text=text.tobytes(),
        parts=[(at, array("Q", picture.ids).tobytes()) for at, picture in placed],
        wholes=[(at, at + len(picture.ids)) for at, picture in placed if picture.is_whole],
    )


def all_of(tokens: Tokens) -> Ids:
    return tuple(tokens.ids(0, len(tokens)))


def ids_of_path(path: bytes) -> Ids:
    return tuple(unpacked(path))


def common_prefix(left: Ids, right: Ids) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


class Arena:
    """Blocks of slots, each of which remembers for which tokens it was computed."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots: list[list[Slot]] = [[None] * block_size for _ in range(n_blocks)]

    def copy(self, op: CopyBlock) -> None:
        copied = self._slots[op.source][: op.n_tokens]
        self._slots[op.target] = copied + [None] * (self._block_size - op.n_tokens)

    def write(self, block: BlockId, position: int, slot: Slot) -> None:
        self._slots[block][position % self._block_size] = slot

    def read(self, block: BlockId, position: int) -> Slot:
        return self._slots[block][position % self._block_size]

    def wipe(self, block: BlockId) -> None:
        self._slots[block] = [None] * self._block_size


@dataclass
class Indexed:
    """What was indexed in one namespace. Exact while nothing has been evicted."""

    runs: set[Ids]
    is_exact: bool = True

    def hit_tokens(self, ids: Ids) -> int:
        return max((common_prefix(run, ids[:-1]) for run in self.runs), default=0)
