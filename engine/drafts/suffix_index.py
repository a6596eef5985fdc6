"""Finds the tokens that followed earlier occurrences of the end of a text.

A key made of the last three tokens finds their occurrences. The tokens that are there at the first
query are sorted by key at once, in milliseconds for tens of thousands of tokens. Tokens appended
later go into a dict, one at a time.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import TypeAlias

import numpy as np

MIN_MATCH, MAX_MATCH = 3, 32
"""Tokens: the fewest that must match, and the most that are compared."""
MAX_OCCURRENCES = 8
EXTRA_TOKENS = 4
"""A match of n tokens makes the next n + EXTRA_TOKENS likely."""
_ID_BITS = 20
_KEY_MASK = (1 << MIN_MATCH * _ID_BITS) - 1
_TOKEN_BITS = 8 * array("I").itemsize


TokenIds: TypeAlias = tuple[int, ...]

Match: TypeAlias = tuple[TokenIds, int]
"""Tokens that may come next, and how many tokens before them match the end of the text."""

NO_MATCH: Match = (), 0


def likely(match: Match) -> Match:
    """Return the match with the tokens that its length makes likely."""
    tokens, matched = match
    return tokens[: matched + EXTRA_TOKENS], matched


class SortedText:
    """A text that does not grow. The first query to any index that continues the text sorts it, in
    about 100 ns a token; the result is shared by all of these indexes.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.ids = array("I", tokens)
        self._sorted: tuple[array[int], array[int]] | None = None

    def keys_and_ends(self) -> "tuple[array[int], array[int]]":
        """Return the sorted keys of all runs of three tokens, and the ends of these runs."""
        if self._sorted is None:
            ids = np.array(self.ids, dtype=np.int64)
            keys = (ids[:-2] << 2 * _ID_BITS) | (ids[1:-1] << _ID_BITS) | ids[2:]
            order = np.argsort(keys, kind="stable")
            ends = (order + MIN_MATCH).astype(np.uint32)
            self._sorted = array("q", keys[order].tobytes()), array("I", ends.tobytes())
        return self._sorted


class SuffixIndex:
    """Finds earlier occurrences of the end of a text, in this text or in another one.

    Token ids are below 2**20; a run of three tokens with a larger id may be missed. An occurrence
    is identified by its end: the position of the token after it. Appending is O(1). A token takes
    16 bytes if it was there at the first query, and about 120 if it was appended later.
    """

    def __init__(self, tokens: "Iterable[int] | SortedText" = ()) -> None:
        self._text = tokens if isinstance(tokens, SortedText) else None
        self._ids = array("I", tokens.ids if isinstance(tokens, SortedText) else tokens)
        self._n_indexed = 0
        self._n_sorted = 0
        self._sorted_keys, self._sorted_ends = array("q"), array("I")
        self._last_key = 0  # of the last three indexed tokens
        self._last_ends: dict[int, int] = {}  # latest end of each key, among appended tokens
        self._ends_before = array("I")  # for each appended end the one before of its key; 0: none

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, token_id: int) -> None:
        self._ids.append(token_id)

    def extend(self, tokens: Iterable[int]) -> None:
        self._ids.extend(tokens)

    def propose(self, last: Sequence[int], most: int) -> Match:
        """Return up to `most` tokens that followed the longest occurrence of the end of `last`.

        The last MAX_OCCURRENCES of its last three tokens are compared. Among equally long ones the
        next token that most of them have wins, then the most recent occurrence.
        """
        end, matched = self._longest(array("I", last[-MAX_MATCH:]), len(self._ids))
        return (tuple(self._ids[end : end + most]), matched) if matched else NO_MATCH

    def continue_itself(self, most: int) -> Match:
        """Return up to `most` tokens that followed the longest earlier occurrence of the text's own
        end. An occurrence that overlaps the end repeats without limit.

        If the last three tokens occur nowhere else, one of them may be an edit of what is repeated.
        """
        end, matched = self._longest(self._ids[-MAX_MATCH:], len(self._ids))
        if matched:
            return tuple(islice(cycle(self._ids[end : end + most]), most)), matched
        edits = (self._after_edit(n_tokens, most) for n_tokens in range(1, MIN_MATCH + 1))
        return next((match for match in edits if match[0]), NO_MATCH)

    def _after_edit(self, n_tokens: int, most: int) -> Match:
        """Return what followed a text of which only the first of the last `n_tokens` differs."""
        edited = len(self._ids) - n_tokens
        end, matched = self._longest(self._ids[max(edited - MAX_MATCH, 0) : edited], edited)
        if not matched or self._ids[end + 1 : end + n_tokens] != self._ids[edited + 1 :]:
            return NO_MATCH
        return tuple(self._ids[end + n_tokens : end + n_tokens + most]), n_tokens - 1

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
        if len(ends) > 1:
            following = [self._ids[end] for end in ends]
            return ends[following.index(max(following, key=following.count))], longest
        return ends[0], longest

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
    """Return the key of the last three tokens."""
    key = 0
    for token_id in tokens[-MIN_MATCH:]:
        key = key << _ID_BITS | token_id
    return key
