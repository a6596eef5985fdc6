"""Finds the tokens that followed earlier occurrences of the end of a text.

A key made of the last three tokens finds their occurrences. A text that does not grow is sorted by
these keys once, on any thread. Tokens appended to it go into a dict, some at each query. So the
work of a query does not depend on the length of the text.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import cycle, islice
from struct import Struct
from typing import NamedTuple, TypeAlias

import numpy as np

from engine.values.request import Request
from kvstore.tokens import TEXT_BYTES, TOKEN_BYTES, Tokens

MIN_MATCH, MAX_MATCH = 3, 32
"""The fewest tokens that must match, and the most that are compared."""

MAX_OCCURRENCES = 8
"""The most recent occurrences of the last three tokens that are compared."""

EXTRA_TOKENS = 4
"""A match of n tokens makes the next n + EXTRA_TOKENS likely."""

INDEXED_TOKENS = 1 << 15
"""The most tokens of a prompt, its last, that are indexed. Sorting them takes some milliseconds."""

INDEXED_AT_ONCE = 512
"""The most appended tokens that a query indexes: about 0.1 ms. It misses those after them."""

_ID_BITS = 20
_ID_MASK = (1 << _ID_BITS) - 1
_KEY_MASK = (1 << MIN_MATCH * _ID_BITS) - 1
_TOKEN_BITS = 8 * TOKEN_BYTES
_MATCH_BYTES = MAX_MATCH * TOKEN_BYTES
_RUN, _TEXT_RUN = Struct(f"={MIN_MATCH}Q"), Struct(f"={MIN_MATCH}I")
_SAMPLE_RUNS = 16
"""The sorted runs of which one key is kept: of the others it is computed when they are compared."""

TokenIds: TypeAlias = tuple[int, ...]

Match: TypeAlias = tuple[TokenIds, int]
"""Tokens that may come next, and how many tokens before them match the end of the text."""

NO_MATCH: Match = (), 0


class SortedText:
    """A text that does not grow, and its runs of three tokens in sorted order. Sorting takes about
    100 ns a token, and lets other threads run. SuffixIndexes share it.

    The order takes 2 bytes a token, or 4 if the text has more than 65,535. Runs of its first
    `skipped` tokens are not found.
    """

    def __init__(self, tokens: Tokens, skipped: int = 0) -> None:
        """`tokens` has a text and no ids of its own. Parts of images are sorted as the tokens that
        stand for them, and compared by the ids of their content.
        """
        self.tokens = tokens
        ids = np.frombuffer(tokens.text, np.uint32)[skipped:].astype(np.int64)
        keys = (ids[:-2] << 2 * _ID_BITS) | (ids[1:-1] << _ID_BITS) | ids[2:]
        order = np.argsort(keys, kind="stable")
        ends = order + (skipped + MIN_MATCH)
        kind = "H" if len(self) < 1 << 16 else "I"
        self._ends = array(kind, ends.astype(kind).tobytes())
        self._samples = array("q", keys[order[::_SAMPLE_RUNS]].tobytes())

    def __len__(self) -> int:
        return len(self.tokens)

    def ends(self, key: int, below: int, most: int) -> list[int]:
        """The ends of up to `most` runs with this key before position `below`, the most recent
        first.
        """
        found, ends, key_of = list[int](), self._ends, self._key
        sampled = bisect_right(self._samples, key)
        if not sampled:
            return found
        high = min(sampled * _SAMPLE_RUNS, len(ends))
        at = bisect_right(ends, key, high - 1 & -_SAMPLE_RUNS, high, key=key_of) - 1
        while at >= 0 and len(found) < most and key_of(end := ends[at]) == key:
            if end < below:
                found.append(end)
            at -= 1
        return found

    def _key(self, end: int) -> int:
        return _key_of(*_TEXT_RUN.unpack_from(self.tokens.text, (end - MIN_MATCH) * TEXT_BYTES))


class RequestTexts(NamedTuple):
    """The texts of a request that its drafts continue. Its n sequences share them."""

    prompt: SortedText
    prediction: SortedText | None


def index_texts(request: Request, prompt: Tokens) -> RequestTexts | None:
    """Index the texts that the request's drafts continue; None if it allows no drafts. On any
    thread, because a text may be long. `prompt` has the ids under which the prompt is cached, so
    that a part of an image equals no token.
    """
    if not request.speculate or request.max_tokens <= 1:
        return None
    prediction = request.prediction.packed
    skipped = max(len(request.prompt) - INDEXED_TOKENS, 0)
    return RequestTexts(
        SortedText(prompt, skipped), SortedText(Tokens(text=prediction)) if prediction else None
    )


class SuffixIndex:
    """Finds earlier occurrences of the end of a text, in this text or in another one. The text
    begins with a `beginning`, which other indexes may share.

    An occurrence is identified by its end: the position of the token after it. Appending is O(1).
    An appended token takes about 120 bytes once it is indexed.
    """

    def __init__(self, beginning: SortedText | None = None) -> None:
        self._beginning = beginning or SortedText(Tokens())
        self._n_sorted = len(self._beginning)
        self._tokens = self._beginning.tokens.copy()
        last = self._tokens.packed(max(self._n_sorted - MIN_MATCH, 0), self._n_sorted)
        self._last_key = _key(last)  # of the last three indexed tokens
        self._last_ends: dict[int, int] = {}  # latest end of each key, among appended tokens
        self._ends_before = array("I")  # for each appended end the one before of its key; 0: none

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, packed: bytes) -> None:
        """Append packed tokens, without indexing them yet."""
        self._tokens.extend(packed)

    def propose(self, last: Sequence[int], most: int) -> Match:
        """Return up to `most` likely tokens that followed the longest occurrence of the end of
        `last`.

        Among equally long occurrences, the next token that most of them have wins, then the most
        recent occurrence.
        """
        self.catch_up()
        packed = array("Q", last[-MAX_MATCH:]).tobytes()
        end, matched = self._longest(packed, len(self._tokens))
        most = min(most, matched + EXTRA_TOKENS)
        return (tuple(self._tokens.ids(end, end + most)), matched) if matched else NO_MATCH

    def continue_itself(self, most: int) -> Match:
        """Return up to `most` likely tokens that followed the longest earlier occurrence of the
        text's own end. An occurrence that overlaps the end repeats without limit.

        If the last three tokens occur nowhere else, one of them may be an edit of repeated text.
        """
        self.catch_up()
        tokens, n_tokens = self._tokens, len(self._tokens)
        last = tokens.packed(max(n_tokens - MAX_MATCH - MIN_MATCH, 0), n_tokens)
        end, matched = self._longest(last[-_MATCH_BYTES:], n_tokens)
        if matched:
            most = min(most, matched + EXTRA_TOKENS)
            return tuple(islice(cycle(tokens.ids(end, end + most)), most)), matched
        for n_same in range(MIN_MATCH):  # tokens after the edit
            edited = n_tokens - n_same - 1
            before = last[: -(n_same + 1) * TOKEN_BYTES]
            at, matched = self._longest(before[-_MATCH_BYTES:], edited)
            if not matched:
                continue
            end = at + 1 + n_same
            ahead = tokens.ids(end, end + min(most, n_same + EXTRA_TOKENS))
            if ahead and tokens.packed(at + 1, end) == tokens.packed(edited + 1, n_tokens):
                return tuple(ahead), n_same
        return NO_MATCH

    def _longest(self, last: bytes, below: int) -> tuple[int, int]:
        """Return the end of the best occurrence of the packed tokens `last` before position
        `below`, and its length in tokens; a length of 0 means that there is none.
        """
        n_last = len(last) // TOKEN_BYTES
        if n_last < MIN_MATCH or below <= MIN_MATCH:
            return 0, 0
        ends = self._ends(_key(last), below)
        if not ends:
            return 0, 0
        number = int.from_bytes(last, "little")
        lengths = [self._common(end, number, n_last) for end in ends]
        longest = max(lengths)
        if longest < MIN_MATCH:
            return 0, 0
        ends = [end for end, length in zip(ends, lengths, strict=True) if length == longest]
        if len(ends) == 1:
            return ends[0], longest
        following = [self._tokens[end] for end in ends]
        return ends[following.index(max(following, key=following.count))], longest

    def _common(self, end: int, number: int, n_tokens: int) -> int:
        """Count the tokens before `end` that equal the last of `n_tokens` tokens.

        `number` has the bytes of these tokens, the last token in its highest bits.
        """
        n_before = min(end, n_tokens)
        before = int.from_bytes(self._tokens.packed(end - n_before, end), "little")
        different = before ^ (number >> (n_tokens - n_before) * _TOKEN_BITS)
        return n_before - -(-different.bit_length() // _TOKEN_BITS)

    def _ends(self, key: int, below: int) -> list[int]:
        """The ends of up to MAX_OCCURRENCES occurrences before position `below`, the most recent
        first.
        """
        found, end = list[int](), self._last_ends.get(key, 0)
        while end and len(found) < MAX_OCCURRENCES:
            if end < below:
                found.append(end)
            end = self._ends_before[end - self._n_sorted - 1]
        if self._n_sorted:
            found += self._beginning.ends(key, below, MAX_OCCURRENCES - len(found))
        return found

    def catch_up(self) -> bool:
        """Index the next INDEXED_AT_ONCE appended tokens. Return whether all are indexed."""
        n_indexed, n_tokens = self._n_sorted + len(self._ends_before), len(self._tokens)
        if n_indexed == n_tokens:
            return True
        stop = min(n_indexed + INDEXED_AT_ONCE, n_tokens)
        last_key, last_ends = self._last_key, self._last_ends
        for end, token_id in enumerate(self._tokens.ids(n_indexed, stop), n_indexed + 1):
            last_key = (last_key << _ID_BITS | token_id & _ID_MASK) & _KEY_MASK
            self._ends_before.append(last_ends.get(last_key, 0))
            last_ends[last_key] = end
        self._last_key = last_key
        return stop == n_tokens


def _key(packed: bytes) -> int:
    """Return the key of the last three of these packed tokens, which may be fewer."""
    return _key_of(*_RUN.unpack(packed[-_RUN.size :].rjust(_RUN.size, b"\0")))


def _key_of(first: int, second: int, third: int) -> int:
    """Return the key of three tokens: the lowest bits of their ids."""
    return (first & _ID_MASK) << 2 * _ID_BITS | (second & _ID_MASK) << _ID_BITS | (third & _ID_MASK)
