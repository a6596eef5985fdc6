"""What forwards are given of a sequence: the tables of its blocks and slots, its adapter, and the
images of its prompt.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.values.images import Image
from kvstore.ops import TablePatch

Ids: TypeAlias = npt.NDArray[np.uint32]
Positions: TypeAlias = npt.NDArray[np.int32]

_LEAST_IDS = 16


class Table:
    """Block or slot ids, one for each block of a sequence. It grows by doubling."""

    __slots__ = ("_end", "_ids")

    def __init__(self) -> None:
        self._ids: Ids = np.zeros(_LEAST_IDS, dtype=np.uint32)
        self._end = 0

    @property
    def ids(self) -> Ids:
        """All ids, up to the last one that was set. A view: read it before the next patch."""
        return self._ids[: self._end]

    def patch(self, first: int, ids: Sequence[int]) -> None:
        self._end = max(self._end, first + len(ids))
        if self._end > len(self._ids):
            grown = np.zeros(max(self._end, 2 * len(self._ids)), dtype=np.uint32)
            grown[: len(self._ids)] = self._ids
            self._ids = grown
        self._ids[first : first + len(ids)] = ids


class ImageParts(NamedTuple):
    """Parts of an image that some tokens stand for: `n` from `first` on, counted over the image,
    and the index of the token that stands for the first of them.
    """

    image: Image
    first: int
    at: int
    n: int


class SequenceImages:
    """The images of a sequence, and the rotary positions of its tokens.

    In a model whose rotary embeddings have three axes, the parts of an image have one position in
    time, and their row and column after it. Text goes on after the larger of its sides. So text
    after an image has a rotary position that differs from its own by a number, its delta.
    """

    def __init__(self, images: Sequence[Image], merge: int | None) -> None:
        """`merge`: the patches along each side of a part, in a model with three axes; None: rotary
        positions are the tokens' own.
        """
        self.images = images
        self.wholes = [(image.start, image.stop) for image in images if image.is_whole]
        stop = images[-1].stop if merge is not None else 0
        self._axes: Positions = np.zeros((3, stop), np.int32)
        self._after: int = 0  # the rotary position of the token after the last image
        if merge is None:
            return
        at = 0
        for image in images:
            times, rows, columns = image.grid
            n_text, sides = image.start - at, (times, rows // merge, columns // merge)
            self._axes[:, at : image.start] = self._after + np.arange(n_text, dtype=np.int32)
            self._after += n_text
            parts = np.indices(sides, np.int32).reshape(3, -1)
            self._axes[:, image.start : image.stop] = self._after + parts
            self._after += max(sides)
            at = image.stop

    def delta(self, position: int) -> int:
        """The rotary position of a token of text, less its position."""
        stop = self._axes.shape[1]
        if position < stop:
            return int(self._axes[0, position]) - position
        return int(self._after - stop)

    def axes(self, start: int, n_tokens: int) -> Positions:
        """The positions of tokens on each axis, `[3, tokens]`."""
        known = self._axes[:, start : start + n_tokens]
        first = start + known.shape[1]
        after = np.arange(first, start + n_tokens, dtype=np.int32) + self.delta(first)
        return np.concatenate([known, np.broadcast_to(after, (3, len(after)))], axis=1)

    def parts(self, start: int, n_tokens: int) -> Iterator[ImageParts]:
        """The parts of images that these tokens stand for."""
        stop = start + n_tokens
        for image in self.images:
            if image.stop <= start or image.start >= stop:
                continue
            part = 0
            for first, n in image.runs:
                begin, end = max(first, start), min(first + n, stop)
                if begin < end:
                    yield ImageParts(image, part + begin - first, begin - start, end - begin)
                part += n

    def wholes_in(self, start: int, stop: int) -> list[tuple[int, int]]:
        """First and last positions, exclusive, of images whose tokens see each other, among these
        positions. Raises ValueError where such an image is cut.
        """
        found = [(first, last) for first, last in self.wholes if first < stop and start < last]
        if any(first < start or stop < last for first, last in found):
            raise ValueError("a chunk ends within an image whose tokens see each other")
        return found


class SequenceTables:
    """The table of a sequence's blocks, those of its slots in each group, its adapter and its
    images.
    """

    __slots__ = ("_blocks", "_groups", "adapter", "images", "version")

    def __init__(
        self, n_groups: int, adapter: str = "", images: SequenceImages | None = None
    ) -> None:
        self.adapter = adapter
        self.images = images
        self.version = 0  # changes with every patch
        self._blocks = Table()
        self._groups = tuple(Table() for _ in range(n_groups))

    def ids(self, group: int | None) -> Ids:
        """The ids of the sequence's blocks, or of its slots in a group: a view."""
        return (self._blocks if group is None else self._groups[group]).ids

    def patch(self, patch: TablePatch) -> None:
        table = self._blocks if patch.group is None else self._groups[patch.group]
        table.patch(patch.first, patch.ids)
        self.version += 1

    def rotary_delta(self, position: int) -> int:
        """The rotary position of a token of text, less its position."""
        return 0 if self.images is None else self.images.delta(position)
