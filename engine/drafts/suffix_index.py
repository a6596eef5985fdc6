"""Finds the tokens that followed earlier occurrences of the end of a text.

A key made of the last three tokens finds their occurrences. The tokens that are there at the first
query are sorted by key at once, in milliseconds for tens of thousands of tokens. Tokens appended
later go into a dict, one at a time.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import cycle, islice
from typing import TypeAlias

import numpy as np

MIN_MATCH, MAX_MATCH = 3, 32
"""The fewest tokens that must match, and the most that are compared."""

MAX_OCCURRENCES = 8
"""The most recent occurrences of the last three tokens that are compared."""

EXTRA_TOKENS = 4
"""A match of n tokens makes the next n + EXTRA_TOKENS likely."""
_ID_BITS = 20
_KEY_MASK = (1 << MIN_MATCH * _ID_BITS) - 1
_TOKEN_BITS = 8 * array("I").itemsize

TokenIds: TypeAlias = tuple[int, ...]

Match: TypeAlias = tuple[TokenIds, int]
"""Tokens that may come next, and how many tokens before them match the end of the text."""

NO_MATCH: Match = (), 0


class SortedText:
    """A text that does not grow, and its sorted index, which all SuffixIndexes that continue the
    text share. The first query to any of them sorts the text, in about 100 ns a token.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.ids = array("I", tokens)

    @cached_property
    def keys_and_ends(self) -> "tuple[array[int], array[int]]":
        """The sorted keys of all runs of three tokens, and the ends of these runs."""
        ids = np.array(self.ids, dtype=np.int64)
        keys = (ids[:-2] << 2 * _ID_BITS) | (ids[1:-1] << _ID_BITS) | ids[2:]
        order = np.argsort(keys, kind="stable")
        ends = (order + MIN_MATCH).astype(np.uint32)
        return array("q", keys[order].tobytes()), array("I", ends.tobytes())


class SuffixIndex:
    """Finds earlier occurrences of the end of a text, in this text or in another one.

    Token ids are below 2**20; a run of three tokens with a larger id may be missed. An occurrence
    is identified by its end: the position of the token after it. Appending is O(1). A token takes
    16 bytes if it was there at the first query, and about 120 if it was appended later.
    """

    def __init__(self, tokens: "Iterable[int] | SortedText" = ()) -> None:
        self._text = tokens if isinstance(tokens, SortedText) else None
        self._ids = array("I", tokens.ids if isinstance(tokens, SortedText) else tokens)
        self._n_sorted = 0
        self._sorted_keys, self._sorted_ends = array("q"), array("I")
        self._last_key = 0  # of the last three indexed tokens
        self._last_ends: dict[int, int] = {}  # latest end of each key, among appended tokens
        self._ends_before = array("I")  # for each appended end the one before of its key; 0: none

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, tokens: Iterable[int]) -> None:
        self._ids.extend(tokens)

    def propose(self, last: Sequence[int], most: int) -> Match:
        """Return up to `most` likely tokens that followed the longest occurrence of the end of
        `last`.

        Among equally long occurrences, the next token that most of them have wins, then the most
        recent occurrence.
        """
        end, matched = self._longest(array("I", last[-MAX_MATCH:]), len(self._ids))
        most = min(most, matched + EXTRA_TOKENS)
        return (tuple(self._ids[end : end + most]), matched) if matched else NO_MATCH

    def continue_itself(self, most: int) -> Match:
        """Return up to `most` likely tokens that followed the longest earlier occurrence of the
        text's own end. An occurrence that overlaps the end repeats without limit.

        If the last three tokens occur nowhere else, one of them may be an edit of repeated text.
        """
        end, matched = self._longest(self._ids[-MAX_MATCH:], len(self._ids))
        if matched:
            most = min(most, matched + EXTRA_TOKENS)
            return tuple(islice(cycle(self._ids[end : end + most]), most)), matched
        for n_same in range(MIN_MATCH):  # tokens after the edit
            edited = len(self._ids) - n_same - 1
            at, matched = self._longest(self._ids[max(edited - MAX_MATCH, 0) : edited], edited)
            end = at + 1 + n_same
            ahead = self._ids[end : end + min(most, n_same + EXTRA_TOKENS)]
            if matched and ahead and self._ids[at + 1 : end] == self._ids[edited + 1 :]:
                return tuple(ahead), n_same
        return NO_MATCH

    def _longest(self, last: "array[int]", below: int) -> tuple[int, int]:
        """Return the end of the best occurrence of `last` before position `below`, and its length
        in tokens; a length of 0 means that there is none.
        """
        if len(last) < MIN_MATCH or below <= MIN_MATCH:
            return 0, 0
        self._catch_up()
        ends = list(islice(self._ends(_key(last), below), MAX_OCCURRENCES))
        if not ends:
            return 0, 0
        number = int.from_bytes(last.tobytes(), "little")
        lengths = [self._common(end, number, len(last)) for end in ends]
        longest = max(lengths)
        if longest < MIN_MATCH:
            return 0, 0
        ends = [end for end, length in zip(ends, lengths, strict=True) if length == longest]
        if len(ends) == 1:
            return ends[0], longest
        following = [self._ids[end] for end in ends]
        return ends[following.index(max(following, key=following.count))], longest

    def _common(self, end: int, number: int, n_tokens: int) -> int:
        """Count the tokens before `end` that equal the last of `n_tokens` tokens.

        `number` has the bytes of these tokens, the last token in its highest bits.
        """
        n_before = min(end, n_tokens)
        before = int.from_bytes(self._ids[end - n_before : end].tobytes(), "little")
        different = before ^ (number >> (n_tokens - n_before) * _TOKEN_BITS)
        return n_before - -(-different.bit_length() // _TOKEN_BITS)

    def _ends(self, key: int, below: int) -> Iterator[int]:
        """Yield the ends of all occurrences before position `below`, the most recent first."""
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
        """Index the tokens that were appended since the last query. The first query sorts them."""
        n_indexed = self._n_sorted + len(self._ends_before)
        if n_indexed == 0:
            text = self._text or SortedText(self._ids)
            self._sorted_keys, self._sorted_ends = text.keys_and_ends
            self._last_key = _key(text.ids)
            self._n_sorted = n_indexed = len(text.ids)
        last_key, last_ends = self._last_key, self._last_ends
        for end, token_id in enumerate(self._ids[n_indexed:], n_indexed + 1):
            last_key = (last_key << _ID_BITS | token_id) & _KEY_MASK
            self._ends_before.append(last_ends.get(last_key, 0))
            last_ends[last_key] = end
        self._last_key = last_key


def _key(tokens: "array[int]") -> int:
    """Return the key of the last three tokens."""
    key = 0
    for token_id in tokens[-MIN_MATCH:]:
        key = key << _ID_BITS | token_id
    return key
