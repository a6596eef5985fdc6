"""Finds the end of a sequence's tokens that repeats itself without end."""

from array import array

from engine.values.request import LoopLimit

_EVERY_TOKENS = 16
"""Tokens between two looks, which take microseconds each."""
_SEED_TOKENS = 24
_TOKEN_BYTES = 4


class LoopFinder:
    """Whether the tokens of one sequence end in a cycle: the same run of tokens, exactly, as often
    as its length demands.
    """

    def __init__(self, limit: LoopLimit) -> None:
        self._limit = limit
        self._tokens = array("I")
        self._most = limit.max_pattern_size + max(
            map(limit.cycle_tokens, range(limit.min_pattern_size, limit.max_pattern_size + 1))
        )

    def add(self, token_id: int) -> bool:
        """Take the next token. Whether the tokens end in a cycle, as every 16th token shows."""
        self._tokens.append(token_id)
        n_tokens = len(self._tokens)
        if n_tokens % _EVERY_TOKENS:
            return False
        if n_tokens >= 2 * self._most + _EVERY_TOKENS:
            del self._tokens[: n_tokens - self._most - n_tokens % _EVERY_TOKENS]
        return self._ends_in_cycle()

    def _ends_in_cycle(self) -> bool:
        limit, n_tokens = self._limit, len(self._tokens)
        seed = min(_SEED_TOKENS, limit.least_tokens // 2)
        window = self._tokens[-limit.max_pattern_size - seed :].tobytes()
        last = window[-seed * _TOKEN_BYTES :]
        end, shorter = len(window) - 1, list[int]()
        while (at := window.rfind(last, 0, end)) >= 0:
            end = at + len(last) - 1
            if at % _TOKEN_BYTES:
                continue
            period = (len(window) - len(last) - at) // _TOKEN_BYTES
            if period < limit.min_pattern_size:
                continue
            n_cycle = limit.cycle_tokens(period)
            if n_cycle <= n_tokens and _repeats(self._tokens[n_tokens - n_cycle :], period):
                run = self._tokens[n_tokens - period :]
                if not any(period % one == 0 and _repeats(run, one) for one in shorter):
                    return True
            shorter.append(period)
        return False


def _repeats(tokens: "array[int]", period: int) -> bool:
    """Whether each token is the one that is a period before it."""
    return tokens[period:] == tokens[:-period]
