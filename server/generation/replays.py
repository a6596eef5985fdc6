"""What the model wrote in answers with tool calls, for when clients send them back."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from engine.types.model import Replay

MAX_ANSWERS = 1024
MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. `arguments` is the value of the JSON."""

    id: str
    name: str
    arguments: object


@dataclass(frozen=True, slots=True)
class Said:
    """An assistant's message: with None for content there is none."""

    calls: Sequence[Call]
    content: str | None = None
    reasoning: str | None = None


class Replays:
    """The answers with calls that were given last. Safe from any thread.

    An answer is found by the ids of its calls, which therefore must be the server's own, and under
    its `cache_salt`. The one that was not asked for longest is forgotten where there are too many
    or they have too many tokens.
    """

    def __init__(self, max_answers: int = MAX_ANSWERS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_answers = max_answers
        self._max_tokens = max_tokens
        self._answers: OrderedDict[tuple[str, ...], tuple[Said, Replay]] = OrderedDict()
        self._tokens = 0
        self._lock = Lock()

    def remember(self, cache_salt: str, said: Said, replay: Replay) -> None:
        """Keep what was generated for an answer, as the client was sent it. It must have calls."""
        key = _key(cache_salt, said)
        with self._lock:
            self._forget(key)
            self._answers[key] = said, replay
            self._tokens += len(replay.tokens)
            while self._tokens > self._max_tokens or len(self._answers) > self._max_answers:
                self._forget(next(iter(self._answers)))

    def knows(self, cache_salt: str, call_ids: Sequence[str]) -> bool:
        """Whether an answer with these calls is remembered."""
        return (cache_salt, *call_ids) in self._answers

    def find(self, cache_salt: str, said: Said) -> Replay | None:
        """What was generated for a message; None for one that says anything else.

        Reasoning may be missing: many clients leave it out. Arguments are compared no further than
        what was remembered goes, whatever a client sends.
        """
        key = _key(cache_salt, said)
        answer = self._answers.get(key)
        if answer is None or not _says_the_same(answer[0], said):
            return None
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
        return answer[1]

    def _forget(self, key: tuple[str, ...]) -> None:
        if key in self._answers:
            _, replay = self._answers.pop(key)
            self._tokens -= len(replay.tokens)


def _key(cache_salt: str, said: Said) -> tuple[str, ...]:
    return (cache_salt, *(call.id for call in said.calls))


def _says_the_same(known: Said, said: Said) -> bool:
    return (
        (known.content or "").strip() == (said.content or "").strip()
        and (not said.reasoning or said.reasoning.strip() == (known.reasoning or "").strip())
        and all(
            own.name == call.name and same_json(own.arguments, call.arguments)
            for own, call in zip(known.calls, said.calls, strict=True)
        )
    )


def same_json(known: object, other: object) -> bool:
    """Whether two values are one in JSON. Neither the order of keys matters nor how a number is
    written, which clients that parse arguments lose: `1` and `1.0` are the same, `true` is not.
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
