"""Runs of tokens in order, so that those that begin alike are neighbours."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from kvstore.tokens import common_tokens
from kvstore.types import Namespace


class Run(Protocol):
    """Tokens in a namespace. Two runs may be equal; each is itself."""

    @property
    def namespace(self) -> Namespace: ...

    @property
    def packed(self) -> bytes: ...


R = TypeVar("R", bound=Run)
_packed = attrgetter("packed")


@dataclass(slots=True)
class _Line(Generic[R]):
    """The runs of one namespace. `common[i]` tokens begin both `runs[i - 1]` and `runs[i]`."""

    runs: list[R] = field(default_factory=list)
    common: list[int] = field(default_factory=list)


class PrefixOrder(Generic[R]):
    """Finds the runs that begin as a given one does, at the cost of comparing it with a few.

    What two runs have in common is the least that any two neighbours between them have, so only
    the runs on either side of a place are ever compared by their tokens.
    """

    def __init__(self) -> None:
        self._lines: dict[Namespace, _Line[R]] = {}

    def __len__(self) -> int:
        return sum(len(line.runs) for line in self._lines.values())

    def __iter__(self) -> Iterator[R]:
        for line in self._lines.values():
            yield from line.runs

    def add(self, run: R) -> None:
        line = self._lines.setdefault(run.namespace, _Line())
        at = bisect_right(line.runs, run.packed, key=_packed)
        line.runs.insert(at, run)
        line.common.insert(at, self._common_before(line, at))
        if at + 1 < len(line.runs):
            line.common[at + 1] = self._common_before(line, at + 1)

    def remove(self, run: R) -> None:
        """Raises ValueError, or KeyError for the namespace, when the run is not here."""
        line = self._lines[run.namespace]
        at = line.runs.index(run, bisect_left(line.runs, run.packed, key=_packed))
        del line.runs[at]
        behind = line.common.pop(at)
        if at < len(line.runs):
            line.common[at] = min(behind, line.common[at])
        elif not line.runs:
            del self._lines[run.namespace]

    def beginning_like(
        self, namespace: Namespace, packed: bytes, least_tokens: int
    ) -> Iterator[tuple[R, int]]:
        """The runs that share the first `least_tokens` (at least one) tokens of `packed`, each
        with how many it shares."""
        line = self._lines.get(namespace)
        if line is None:
            return
        behind = bisect_left(line.runs, packed, key=_packed)
        for start, step in ((behind - 1, -1), (behind, 1)):
            at = start
            while 0 <= at < len(line.runs):
                if at == start:
                    common = common_tokens(packed, line.runs[at].packed)
                else:
                    common = min(common, line.common[max(at, at - step)])
                if common < least_tokens:
                    break
                yield line.runs[at], common
                at += step

    def problems(self) -> Iterator[str]:
        """What does not add up."""
        for line in self._lines.values():
            if not line.runs:
                yield "a namespace without runs"
            if sorted(line.runs, key=_packed) != line.runs:
                yield "runs out of order"
            if line.common != [self._common_before(line, at) for at in range(len(line.runs))]:
                yield "runs with other tokens in common than are noted"

    def _common_before(self, line: _Line[R], at: int) -> int:
        return common_tokens(line.runs[at - 1].packed, line.runs[at].packed) if at else 0
