"""A store that random operations change: of the kinds that the scheduler and operators cause."""

import random

from kvstore.lease import Lease
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.types import Namespace
from tests.unit.kv_helpers import make_store, tree_of

NAMESPACES = (
    Namespace(model="m"),
    Namespace(model="m", adapter="sql"),
    Namespace(model="m", cache_salt="tenant"),
    Namespace(model="m", adapter="sql", cache_salt="tenant"),
)
"""The namespaces of its prompts."""

ACTIONS = {
    "come": 30,
    "step": 40,
    "fork": 8,
    "donate": 14,
    "release": 6,
    "evict": 8,
    "clear": 1,
    "forget": 8,
}
"""What happens, and how often."""

MOST_LEASES = 6


class RandomStore:
    """Prompts that share prefixes, answers, forks, copies that diverge, leases that end in either
    way, evictions for lack of blocks and without need, clears of one namespace and of all, and
    their blocks that are freed bit by bit.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.store: KVStore = make_store(self._random.choice((24, 60)))
        self._live: list[Lease] = []
        self._prompts = [[1]]

    def operate(self) -> None:
        """Change the store once."""
        (action,) = self._random.choices([*ACTIONS], [*ACTIONS.values()])
        match action:
            case "come":
                self._come()
            case "evict":
                tree_of(self.store).evict()
            case "clear":
                self.store.clear(self._random.choice((None, *NAMESPACES)))
            case "forget":
                self.store.forget_cleared(2)
            case _ if self._live:
                self._continue(action, self._random.choice(self._live))
        self.store.begin_step()

    def _come(self) -> None:
        like = self._random.choice(self._prompts[-20:])
        more = self._random.choices(range(3), k=self._random.randint(1, 12))
        prompt = [*like[: self._random.randint(0, len(like))], *more][:30]
        self._prompts.append(prompt)
        (namespace,) = self._random.choices(NAMESPACES, (5, 2, 2, 1))
        lease = self.store.admit(namespace, Tokens(prompt))
        if isinstance(lease, Lease):
            self._live.append(lease)

    def _continue(self, action: str, lease: Lease) -> None:
        if action == "step":
            self._step(lease)
        elif action == "fork":
            n_tokens = self._random.randint(0, lease.written_tokens)
            tokens = Tokens([*lease.tokens.ids(0, n_tokens), 2])
            fork = self.store.fork(lease, tokens, n_tokens)
            if isinstance(fork, Lease):
                self._live.append(fork)
        if action in {"donate", "release"} or len(self._live) > MOST_LEASES:
            self._live.remove(lease)
            end = self.store.release if action == "release" else self.store.donate
            end(lease)

    def _step(self, lease: Lease) -> None:
        if lease.written_tokens == len(lease.tokens):
            lease.tokens.append(self._random.randrange(3))
        n_tokens = min(len(lease.tokens) - lease.written_tokens, self._random.randint(1, 9))
        if self.store.plan(lease, n_tokens) is None:
            self.store.take_ops()
            self.store.commit(lease, n_tokens)
