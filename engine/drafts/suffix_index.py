"""What followed the end of a text where it stood before.

The occurrences of a text's last three tokens are found by a key made of these. What is there at the
first question is sorted by key at once, in milliseconds for tens of thousands of tokens; what is
appended later goes into a dict, token by token.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

SHORTEST, LONGEST = 3, 32
"""Tokens: the least that must match, and the most that are compared."""
MOST_OCCURRENCES = 8
FARTHER_TOKENS = 4
"""How many more tokens than those that matched may be likely."""
_ID_BITS = 20
_KEY_MASK = (1 << SHORTEST * _ID_BITS) - 1
_TOKEN_BITS = 8 * array("I").itemsize


class Proposal(NamedTuple):
    """Tokens that may come next, and how many in front of them matched."""

    tokens: tuple[int, ...] = ()
    matched: int = 0

    @property
    def likely(self) -> "Proposal":
        """As many of the tokens as the match makes likely."""
        return self._replace(tokens=self.tokens[: self.matched + FARTHER_TOKENS])


NOTHING = Proposal()


class SortedText:
    """A text that does not grow. It is sorted at the first question to any index that goes on from
    it, in some 100 ns a token, and once for all of them.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.ids = array("I", tokens)
        self._sorted: tuple[array[int], array[int]] | None = None

    def keys_and_ends(self) -> "tuple[array[int], array[int]]":
        """The keys of all its triples in order, and the ends of these triples."""
        if self._sorted is None:
            ids = np.array(self.ids, dtype=np.int64)
            keys = (ids[:-2] << 2 * _ID_BITS) | (ids[1:-1] << _ID_BITS) | ids[2:]
            order = np.argsort(keys, kind="stable")
            ends = (order + SHORTEST).astype(np.uint32)
            self._sorted = array("q", keys[order].tobytes()), array("I", ends.tobytes())
        return self._sorted


class SuffixIndex:
    """Finds earlier occurrences of the end of a text, in this text or in another one.

    Token ids are below 2**20; any triple with a larger one may be missed. An occurrence is known by
    its end, the position of what follows it. Appending is O(1). A token takes 16 bytes if it was
    there at the first question, some 120 if it was appended later.
    """

    def __init__(self, tokens: "Iterable[int] | SortedText" = ()) -> None:
        self._text = tokens if isinstance(tokens, SortedText) else None
        self._ids = array("I", tokens.ids if isinstance(tokens, SortedText) else tokens)
        self._n_indexed = 0
        self._n_sorted = 0
        self._sorted_keys, self._sorted_ends = array("q"), array("I")
        self._last_key = 0  # of the last three tokens that are indexed
        self._last_ends: dict[int, int] = {}  # by key, of what was appended
        self._ends_before = array("I")  # of the same key, for each end that was appended; 0: none

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, token_id: int) -> None:
        self._ids.append(token_id)

    def extend(self, tokens: Iterable[int]) -> None:
        self._ids.extend(tokens)

    def propose(self, last: Sequence[int], most: int) -> Proposal:
        """What followed the longest occurrence of the end of `last`, of `most` tokens at most.

        Looked at are the last MOST_OCCURRENCES of its last three tokens that something follows. Of
        equally long ones those count that most agree with on the next token, then the most recent.
        """
        end, matched = self._longest(array("I", last[-LONGEST:]), len(self._ids))
        return Proposal(tuple(self._ids[end : end + most]), matched) if matched else NOTHING

    def continue_itself(self, most: int) -> Proposal:
        """The same for the text's own end. Where that overlaps what it repeats, it goes on so.

        If its last three tokens are nowhere else, one of them may be an edit of what it repeats.
        """
        end, matched = self._longest(self._ids[-LONGEST:], len(self._ids))
        if matched:
            return Proposal(tuple(islice(cycle(self._ids[end : end + most]), most)), matched)
        edits = (self._behind_edit(n_tokens, most) for n_tokens in range(1, SHORTEST + 1))
        return next((found for found in edits if found.tokens), NOTHING)

    def _behind_edit(self, n_tokens: int, most: int) -> Proposal:
        """What goes on where the last `n_tokens` are the same but for the first of them."""
        edited = len(self._ids) - n_tokens
        end, matched = self._longest(self._ids[max(edited - LONGEST, 0) : edited], edited)
        if not matched or self._ids[end + 1 : end + n_tokens] != self._ids[edited + 1 :]:
            return NOTHING
        return Proposal(tuple(self._ids[end + n_tokens : end + n_tokens + most]), n_tokens - 1)

    def _longest(self, last: "array[int]", below: int) -> tuple[int, int]:
        """The end of the occurrence that is taken, before position `below`, and how many tokens it
        has; 0 for none.
        """
        if len(last) < SHORTEST or below <= SHORTEST:
            return 0, 0
        self._catch_up()
        ends = list(islice(self._ends(_key(last), below), MOST_OCCURRENCES))
        if not ends:
            return 0, 0
        number = int.from_bytes(last.tobytes(), "little")
        lengths = [self._common(end, number, len(last)) for end in ends]
        longest = max(lengths)
        if longest < SHORTEST:
            return 0, 0
        ends = [end for end, length in zip(ends, lengths, strict=True) if length == longest]
        if len(ends) > 1:
            following = [self._ids[end] for end in ends]
            return ends[following.index(max(following, key=following.count))], longest
        return ends[0], longest

    def _common(self, end: int, number: int, n_tokens: int) -> int:
        """How many tokens before `end` equal the last of `n_tokens`, whose bytes are `number`.

        Its last token has the highest bits.
        """
        n_before = min(end, n_tokens)
        before = int.from_bytes(self._ids[end - n_before : end].tobytes(), "little")
        different = before ^ (number >> (n_tokens - n_before) * _TOKEN_BITS)
        return n_before - -(-different.bit_length() // _TOKEN_BITS)

    def _ends(self, key: int, below: int) -> Iterator[int]:
        """The ends of all occurrences that end before position `below`, the most recent first."""
        n_sorted = self._n_sorted
        end = self._last_ends.get(key, 0)
        while end:
            if end < below:
                yield end
            end = self._ends_before[end - n_sorted - 1]
        keys = self._sorted_keys
        at = bisect_right(keys, key) - 1
        while at >= 0 and keys[at] == key:
            if (end := self._sorted_ends[at]) < below:
                yield end
            at -= 1

    def _catch_up(self) -> None:
        if self._n_indexed == 0:
            self._sort()
        last_key, last_ends = self._last_key, self._last_ends
        for end, token_id in enumerate(self._ids[self._n_indexed :], self._n_indexed + 1):
            last_key = (last_key << _ID_BITS | token_id) & _KEY_MASK
            self._ends_before.append(last_ends.get(last_key, 0))
            last_ends[last_key] = end
        self._last_key, self._n_indexed = last_key, len(self._ids)

    def _sort(self) -> None:
        text = self._text or SortedText(self._ids)
        self._sorted_keys, self._sorted_ends = text.keys_and_ends()
        self._last_key = _key(text.ids)
        self._n_sorted = self._n_indexed = len(text.ids)


def _key(tokens: "array[int]") -> int:
    """What the last three tokens are found by."""
    key = 0
    for token_id in tokens[-SHORTEST:]:
        key = key << _ID_BITS | token_id
    return key
