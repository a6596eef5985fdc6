"""Sources of drafts: a request's prediction, the prefix cache, the sequence's own text, the latest
answers of the namespace, and a draft model.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from engine.drafts.suffix_index import (
    MIN_MATCH,
    NO_MATCH,
    Match,
    RequestTexts,
    SortedText,
    SuffixIndex,
    TokenIds,
)
from engine.values.stats import DraftSource
from kvstore.tokens import CONTENT_ID, TEXT_BYTES, TOKEN_BYTES
from kvstore.types import Namespace


class Draft(NamedTuple):
    """Tokens that may come next, at least one, and the source that proposed them.

    `matched` is how many tokens before them are the same in the source, as far as it compared.
    """

    tokens: TokenIds
    matched: int
    source: DraftSource


_MIN_BYTES = MIN_MATCH * TEXT_BYTES

MAX_SKIPPED_TOKENS = 512
"""The most tokens of a prediction that the output may leave out at once."""


class Prediction:
    """The predicted output of a request, and the position in it that the output has reached.

    An edit changes a few tokens and keeps most. So when the output has diverged, it is taken to
    continue at the first later place that has its last three tokens. Until there is such a place,
    the whole prediction is searched for the end of the output, as any other text is.
    """

    def __init__(self, text: SortedText) -> None:
        self._packed = text.tokens.text
        self._tokens = memoryview(self._packed).cast("I")
        self._text = SuffixIndex(text)
        self._n_read = 0  # tokens of the output that were compared
        self._at = 0  # position of the token expected next, or of the first that did not come
        self._n_followed: int | None = 0  # tokens that came without a gap; None: the last did not

    def propose(self, output: Sequence[int], most: int) -> Match:
        """Return up to `most` tokens that may follow the output, which only ever grows."""
        self._read(output)
        if self._n_followed is not None:
            return tuple(self._tokens[self._at : self._at + most]), self._n_followed
        return self._text.propose(output, most)

    def _read(self, output: Sequence[int]) -> None:
        """Compare the tokens of the output that were not compared yet."""
        first, n_tokens = max(self._n_read + 1 - MIN_MATCH, 0), len(self._tokens)
        packed = array("I", output[first:]).tobytes()
        for at in range(self._n_read, len(output)):
            n_followed = self._n_followed
            is_within = n_followed is not None and self._at < n_tokens
            if n_followed is not None and is_within and self._tokens[self._at] == output[at]:
                self._at += 1
                self._n_followed = n_followed + 1
                continue
            end = (at + 1 - first) * TEXT_BYTES
            last = packed[max(end - _MIN_BYTES, 0) : end]
            self._n_followed = MIN_MATCH if self._find(last) else None
        self._n_read = len(output)

    def _find(self, packed: bytes) -> bool:
        """Move to the first later place that has these packed tokens. Return False if there is
        none.
        """
        if len(packed) < _MIN_BYTES:
            return False
        start = self._at * TEXT_BYTES
        stop = start + MAX_SKIPPED_TOKENS * TEXT_BYTES
        found = self._packed.find(packed, start, stop)
        while found % TEXT_BYTES and found >= 0:  # between two tokens
            found = self._packed.find(packed, found + 1, stop)
        if found < 0:
            return False
        self._at = found // TEXT_BYTES + MIN_MATCH
        return True


MAX_ANSWER_TOKENS = 1 << 17
"""Tokens of answers that are remembered for all namespaces together: about 15 MB."""
_END = (1 << 32) - 1
"""Ends each answer. No token has this id, so no match crosses from one answer to the next."""
_END_BYTES = array("Q", [_END]).tobytes()


class LatestAnswers:
    """The latest answers of each namespace, at most `max_tokens` tokens for all together.

    There are two generations. When the new one has half of these tokens, it replaces the old one.
    An answer is found as far as `catch_up` has indexed it.
    """

    def __init__(self, max_tokens: int = MAX_ANSWER_TOKENS) -> None:
        self._generation_tokens = max_tokens // 2
        self._n_new_tokens = 0
        self._new: dict[Namespace, SuffixIndex] = {}
        self._old: dict[Namespace, SuffixIndex] = {}
        self._unindexed = deque[SuffixIndex]()  # texts with tokens that are not indexed yet

    def __len__(self) -> int:
        """The number of tokens, including one for the end of each answer."""
        return sum(len(text) for texts in (self._new, self._old) for text in texts.values())

    def add(self, namespace: Namespace, packed: bytes) -> None:
        """Remember an answer, or only its end if it is longer than a generation."""
        n_kept = min(len(packed) // TOKEN_BYTES, self._generation_tokens - 1)
        if n_kept <= 0:
            return
        if self._n_new_tokens + n_kept + 1 > self._generation_tokens:
            self._new, self._old, self._n_new_tokens = {}, self._new, 0
        text = self._new.setdefault(namespace, SuffixIndex())
        text.extend(packed[-n_kept * TOKEN_BYTES :] + _END_BYTES)
        self._unindexed.append(text)
        self._n_new_tokens += n_kept + 1

    def catch_up(self) -> None:
        """Index some of the tokens that were added, at most as many as one query may."""
        if self._unindexed and self._unindexed[0].catch_up():
            self._unindexed.popleft()

    def propose(self, namespace: Namespace, last: Sequence[int], most: int) -> Match:
        """Return up to `most` likely tokens that followed the end of `last` in an answer of the
        namespace.

        The longest match wins, then the new generation.
        """
        texts = (self._new.get(namespace), self._old.get(namespace))
        found = (_within_answer(text.propose(last, most)) for text in texts if text is not None)
        return max(found, key=itemgetter(1), default=NO_MATCH)

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget the answers of one namespace, or of all."""
        if namespace is None:
            self._new, self._old, self._n_new_tokens = {}, {}, 0
            return
        self._old.pop(namespace, None)
        if (text := self._new.pop(namespace, None)) is not None:
            self._n_new_tokens -= len(text)


def _within_answer(match: Match) -> Match:
    """Cut the tokens of a match at the end of their answer."""
    tokens = tuple(takewhile(lambda token_id: token_id != _END, match[0]))
    return (tokens, match[1]) if tokens else NO_MATCH


TREE_TOKENS = 512
"""The most tokens that one look-up in the prefix cache returns."""
LOOKUP_TOKENS = 16
"""Tokens generated between two look-ups in the prefix cache, once a look-up is used up."""


class CachedText:
    """The text that the prefix cache has after the tokens of a sequence. It is proposed as long as
    the output follows it, and is then looked up again.
    """

    def __init__(self, look_up: Callable[[int], TokenIds]) -> None:
        self._look_up = look_up
        self._tokens: TokenIds = ()  # from the last look-up; none if the output does not follow it
        self._start = -LOOKUP_TOKENS  # length of the output at the last look-up
        self._n_read = 0  # tokens of the output that were compared

    def propose(self, output: Sequence[int], most: int) -> Match:
        """Return up to `most` tokens that may follow the output, which only ever grows."""
        at = len(output) - self._start
        if self._tokens[self._n_read - self._start : at] != tuple(output[self._n_read :]):
            self._tokens = ()
        self._n_read = len(output)
        ahead = self._tokens[at : at + most]
        if not ahead and at >= LOOKUP_TOKENS:
            self._tokens, self._start, at = self._look_up(TREE_TOKENS), len(output), 0
            ahead = self._tokens[:most]
        return ahead, at


class OwnText:
    """The prompt and output of a sequence. Nothing is indexed before the first proposal."""

    def __init__(self, prompt: SortedText) -> None:
        self._prompt = prompt
        self._text: SuffixIndex | None = None

    def propose(self, output: Sequence[int], most: int) -> Match:
        """Return up to `most` tokens that may follow the output, which only ever grows."""
        if self._text is None:
            self._text = SuffixIndex(self._prompt)
        new = output[len(self._text) - len(self._prompt) :]
        self._text.extend(array("Q", new).tobytes())
        return self._text.continue_itself(most)


class ModelText:
    """The latest tokens of the draft model. They are proposed while the output leads to them."""

    def __init__(self) -> None:
        self._tokens: TokenIds = ()
        self._start = 0  # length of the output before them

    def take(self, tokens: TokenIds, start: int) -> None:
        """Take the model's tokens after the first `start` tokens of the output."""
        self._tokens, self._start = tokens, start

    def propose(self, output: Sequence[int], most: int) -> Match:
        """Return up to `most` tokens that may follow the output, which only ever grows."""
        at = len(output) - self._start
        if not 0 <= at < len(self._tokens) or self._tokens[:at] != tuple(output[self._start :]):
            return NO_MATCH
        return self._tokens[at : at + most], at


Forced: TypeAlias = Callable[[], TokenIds]
"""Returns the next tokens, as far as a grammar allows only one."""


class Drafter:
    """Drafts the next tokens of one sequence.

    Sources are tried in order: the request's prediction, the prefix cache, the sequence's own text,
    other answers, the draft model. If a grammar forces tokens, a source must propose these and
    more; if none does, the forced tokens are the draft.
    """

    def __init__(
        self,
        texts: RequestTexts,
        cached: Callable[[int], TokenIds],
        answers: Callable[[Sequence[int], int], Match],
        forced: Forced | None = None,
        model: ModelText | None = None,
    ) -> None:
        """`cached(n)` returns up to n tokens that the prefix cache has after the sequence, and
        `answers(output, n)` up to n tokens that followed the end of the output in other answers.
        `model` is None if there is no draft model.
        """
        self._forced = forced
        self._sources = [
            (DraftSource.TREE, CachedText(cached).propose),
            (DraftSource.OWN, OwnText(texts.prompt).propose),
            (DraftSource.ANSWERS, answers),
        ]
        if texts.prediction is not None:
            prediction = Prediction(texts.prediction)
            self._sources.insert(0, (DraftSource.PREDICTION, prediction.propose))
        if model is not None:
            self._sources.append((DraftSource.MODEL, model.propose))

    def draft(self, output: Sequence[int], most: int) -> Draft | None:
        """Draft up to `most` tokens after the output. The same output gives the same draft."""
        forced = self._forced()[:most] if self._forced is not None else ()
        n_forced = len(forced)
        for source, propose in self._sources:
            tokens, matched = propose(output, most)
            if tokens and max(tokens) >= CONTENT_ID:  # an image, which no model generates
                tokens = tuple(takewhile(CONTENT_ID.__gt__, tokens))
            if len(tokens) > n_forced and tokens[:n_forced] == forced:
                return Draft(tokens, matched, source)
        return Draft(forced, 0, DraftSource.GRAMMAR) if forced else None
