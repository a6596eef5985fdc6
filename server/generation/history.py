"""Memory of earlier requests: the tokens of answers with tool calls, which clients send back, and
the prefixes of pooled texts.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import TypeAlias

from engine.values.model import Replay
from server.generation.late_tools import ToolPlaces

_Key: TypeAlias = tuple[str | bytes, ...]

MAX_ANSWERS = 1024
MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. `arguments` is the value of the JSON."""

    id: str
    name: str
    arguments: object


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """An assistant's message in parsed form. `content` is None where there is none, and
    `conversation` is a digest of the messages before it.
    """

    calls: Sequence[Call]
    content: str | None = None
    reasoning: str | None = None
    conversation: bytes = b""


class Replays:
    """An LRU cache of answers with calls, limited in answers and in tokens. Safe from any thread.

    The key is the `cache_salt` with the conversation and the ids of the calls: models that write
    ids write the same ones in every conversation. `tool_places` are those of the same
    conversations.
    """

    def __init__(self, max_answers: int = MAX_ANSWERS, max_tokens: int = MAX_TOKENS) -> None:
        self.tool_places = ToolPlaces()
        self._max_answers = max_answers
        self._max_tokens = max_tokens
        self._answers: OrderedDict[_Key, tuple[AssistantTurn, Replay]] = OrderedDict()
        self._tokens = 0
        self._lock = Lock()

    def remember(self, cache_salt: str, turn: AssistantTurn, replay: Replay) -> None:
        """Store the tokens of an answer, given as it was sent. It must have calls."""
        key = _key(cache_salt, turn)
        with self._lock:
            self._forget(key)
            self._answers[key] = turn, replay
            self._tokens += len(replay.tokens)
            while self._tokens > self._max_tokens or len(self._answers) > self._max_answers:
                self._forget(next(iter(self._answers)))

    def __len__(self) -> int:
        return len(self._answers)

    def clear(self) -> int:
        """Forget all answers, and the places of tools. Returns how many answers there were."""
        self.tool_places.clear()
        with self._lock:
            n_answers = len(self._answers)
            self._answers.clear()
            self._tokens = 0
        return n_answers

    def knows(self, cache_salt: str, conversation: bytes, call_ids: Sequence[str]) -> bool:
        """Whether an answer with these calls is remembered."""
        return (cache_salt, conversation, *call_ids) in self._answers

    def find(self, cache_salt: str, turn: AssistantTurn) -> Replay | None:
        """The tokens that were generated for a message; None for one that differs in anything.

        Reasoning may be missing: many clients leave it out. Arguments are compared only as far as
        the stored ones go, however long a client's are.
        """
        key = _key(cache_salt, turn)
        answer = self._answers.get(key)
        if answer is None or not _is_same(answer[0], turn):
            return None
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
        return answer[1]

    def _forget(self, key: _Key) -> None:
        if key in self._answers:
            _, replay = self._answers.pop(key)
            self._tokens -= len(replay.tokens)


def _key(cache_salt: str, turn: AssistantTurn) -> _Key:
    return (cache_salt, turn.conversation, *(call.id for call in turn.calls))


def _is_same(known: AssistantTurn, turn: AssistantTurn) -> bool:
    return (
        (known.content or "").strip() == (turn.content or "").strip()
        and (not turn.reasoning or turn.reasoning.strip() == (known.reasoning or "").strip())
        and all(
            own.name == call.name and same_json(own.arguments, call.arguments)
            for own, call in zip(known.calls, turn.calls, strict=True)
        )
    )


def same_json(known: object, other: object) -> bool:
    """Whether two JSON values are equal. Key order and the form of numbers do not count: clients
    that parse arguments lose both. So `1` equals `1.0`, but not `true`.
    """
    pairs = [(known, other)]
    while pairs:  # not by recursion: they may be deep
        match pairs.pop():
            case Mapping() as one, Mapping() as two:
                if one.keys() != two.keys():
                    return False
                pairs += [(value, two[key]) for key, value in one.items()]
            case list() as one, list() as two:
                if len(one) != len(two):
                    return False
                pairs += zip(one, two, strict=True)
            case one, two:
                if isinstance(one, bool) is not isinstance(two, bool) or one != two:
                    return False
    return True


Tokens = tuple[int, ...]

REMEMBERED = 32
"""First texts that a CommonPrefixTracker keeps."""

MOST_TOKENS = 4096
"""Tokens that it keeps of each."""


class CommonPrefixTracker:
    """Remembers the prefixes of the last requests' first texts, by their salt: clients write the
    same instruction before every text, one request at a time. Safe in several threads.
    """

    def __init__(self) -> None:
        self._latest = deque[tuple[str, Tokens]](maxlen=REMEMBERED)

    def shared_tokens(self, salt: str, texts: Sequence[Tokens]) -> list[int]:
        """The number of tokens of each text that are a prefix of another text, of these or of the
        latest.
        """
        known = [tokens for other, tokens in tuple(self._latest) if other == salt]
        found = _shared([*texts, *known])[: len(texts)]
        self._latest.append((salt, texts[0][:MOST_TOKENS]))
        return found

    def clear(self) -> None:
        """Forget all texts. Later texts share a prefix only with others of their request."""
        self._latest.clear()


def _shared(texts: Sequence[Tokens]) -> list[int]:
    """The longest common prefix of each text: after sorting, it is with a neighbour."""
    found = [0] * len(texts)
    order = sorted(range(len(texts)), key=texts.__getitem__)
    for before, after in pairwise(order):
        common = common_beginning(texts[before], texts[after])
        found[before] = max(found[before], common)
        found[after] = max(found[after], common)
    return found


def common_beginning(left: Tokens, right: Tokens) -> int:
    """The number of tokens that both begin with, found by bisection: a slice is compared at
    once.
    """
    longest = min(len(left), len(right))
    lengths = range(1, longest + 1)
    return bisect_left(lengths, True, key=lambda n: left[:n] != right[:n])
