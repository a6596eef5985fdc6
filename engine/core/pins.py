"""Pinned prefixes, which requests keep from eviction."""

from kvstore.lease import Lease
from kvstore.store import KVStore
from kvstore.tokens import Tokens
from kvstore.types import Namespace

PINNED_SHARE = 0.25
"""The share of all blocks that may be pinned. Requests need the others."""


class Pins:
    """The pinned prefixes, each with a lease that holds its whole blocks and computes nothing.

    A clear removes them. Where a request finds too few blocks although no other request runs, the
    oldest goes first. `n_blocks` counts pinned blocks, each once; any thread may read it.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._leases: dict[tuple[Namespace, bytes], Lease] = {}  # the oldest first
        self.n_blocks = 0

    @property
    def most_blocks(self) -> int:
        """The most blocks that may be pinned."""
        return int(self._store.pool.n_blocks * PINNED_SHARE)

    def problem(self, namespace: Namespace, tokens: Tokens) -> str | None:
        """Why a prompt cannot be pinned now; None if it can. Blocks that it shares with other
        pinned prefixes count again until it is pinned, unless it is pinned already.
        """
        if self._store.tree is None:
            return "nothing is cached (prefix_cache is off)"
        if self._store.groups:
            return (
                "this model keeps sliding windows or recurrent states, which cannot be pinned: "
                "the prompt can be warmed without"
            )
        n_blocks = len(tokens) // self._store.block_size
        if not n_blocks:
            return f"the prompt has {len(tokens)} tokens, less than a block of the KV cache"
        is_pinned = self._key(namespace, tokens) in self._leases
        if not is_pinned and self.n_blocks + n_blocks > self.most_blocks:
            return (
                f"the prompt takes {n_blocks:,} blocks of the KV cache, and {self.n_blocks:,} are "
                f"pinned of at most {self.most_blocks:,}: clear the cache, or raise kv_cache_bytes"
            )
        return None

    def pin(self, namespace: Namespace, tokens: Tokens) -> str | None:
        """Pin the whole blocks of a prompt, all of which are indexed. Returns the reason for a
        failure; None if they are pinned.
        """
        if (problem := self.problem(namespace, tokens)) is None:
            key = self._key(namespace, tokens)
            lease = self._store.pin(namespace, Tokens(tokens.ids(0, self._whole(tokens))))
            if lease is None:
                return "the prompt is not in the KV cache"
            self._release(self._leases.pop(key, None))
            self._leases[key] = lease
            self._recount()
        return problem

    def drop_oldest(self) -> bool:
        """Unpin the prefix that was pinned first. False if there is none."""
        key = next(iter(self._leases), None)
        if key is None:
            return False
        self._release(self._leases.pop(key))
        self._recount()
        return True

    def clear(self, namespace: Namespace | None) -> None:
        """Unpin all prefixes of one namespace, or all. They stay cached."""
        for key in [key for key in self._leases if namespace in {None, key[0]}]:
            self._release(self._leases.pop(key))
        self._recount()

    def _key(self, namespace: Namespace, tokens: Tokens) -> tuple[Namespace, bytes]:
        return namespace, tokens.packed(0, self._whole(tokens))

    def _whole(self, tokens: Tokens) -> int:
        return len(tokens) - len(tokens) % self._store.block_size

    def _release(self, lease: Lease | None) -> None:
        if lease is not None:
            self._store.release(lease)

    def _recount(self) -> None:
        self.n_blocks = len({block for lease in self._leases.values() for block in lease.table})
