"""Prefixes that running leases are computing, and queued prompts that wait for them.

A lease's prefix is *in flight* from when the lease begins until its blocks are indexed or it ends.
A queued prompt that shares it waits, so that the same tokens are not computed twice.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore.lease import Lease
from kvstore.tokens import Tokens, common_tokens
from kvstore.types import Namespace

Probe = Callable[[Namespace, Tokens], int]
"""How many tokens of a prompt could be adopted now; see `KVStore.probe`."""

Checkpoint = Callable[[Lease, int], None]
"""Requests a checkpoint after n tokens of a lease; see `KVStore.checkpoint`."""


@dataclass(eq=False, slots=True)
class QueuedPrompt:
    """A prompt that is to be admitted. Only `InFlight` changes it.

    It waits until `awaited` has computed `until_tokens` tokens. `n_begun` is how many leases had
    begun when the prompt was last compared with those in flight.
    """

    namespace: Namespace
    tokens: Tokens
    awaited: Lease | None = None
    until_tokens: int = 0
    n_begun: int = -1


class InFlight:
    """The prefixes in flight, by their namespace and the packed tokens of their first block.

    A prompt is compared with the leases that begin with the same block, and only when leases have
    begun since it was last compared, or when its wait is over.
    """

    def __init__(self, block_size: int, probe: Probe, checkpoint: Checkpoint) -> None:
        self._block_size = block_size
        self._probe = probe
        self._checkpoint = checkpoint
        self._end_tokens: dict[Lease, int] = {}
        self._by_first_block: dict[tuple[Namespace, bytes], list[Lease]] = {}
        self._n_begun = 0

    def begin(self, lease: Lease) -> None:
        """The lease computes the whole blocks of its tokens, as far as it shares them.

        What it generates later is not in flight. The lease is dropped when these blocks have been
        computed and another prefix begins with the same block.
        """
        end_tokens = self._whole(min(len(lease.tokens), lease.shared_tokens))
        if end_tokens <= lease.cached_tokens:
            return
        key = self._key(lease)
        for other in tuple(self._by_first_block.get(key, ())):
            if not self.will_be_indexed(other, self._end_tokens[other]):
                self.end(other)
        self._by_first_block.setdefault(key, []).append(lease)
        self._end_tokens[lease] = end_tokens
        self._n_begun += 1

    def end(self, lease: Lease) -> None:
        """The lease has ended. Does nothing for a lease that has nothing in flight."""
        if self._end_tokens.pop(lease, None) is not None:
            key = self._key(lease)
            leases = self._by_first_block[key]
            leases.remove(lease)
            if not leases:
                del self._by_first_block[key]

    def will_be_indexed(self, lease: Lease, n_tokens: int) -> bool:
        """Whether the first `n_tokens` tokens in flight are still to be computed by the lease."""
        return lease in self._end_tokens and lease.written_tokens < n_tokens

    def must_wait(self, prompt: QueuedPrompt) -> bool:
        """Whether the prompt should wait for a lease that computes much of it.

        Requests a checkpoint where the prompt will resume. Each wait has an end: leases compute in
        every step, or end.
        """
        found = self.find(prompt)
        prompt.n_begun = self._n_begun
        if found is None:
            prompt.awaited = None
        elif found != (prompt.awaited, prompt.until_tokens):
            prompt.awaited, prompt.until_tokens = found
            self._checkpoint(*found)
        return found is not None

    def find(self, prompt: QueuedPrompt) -> tuple[Lease, int] | None:
        """The lease to wait for, and how many tokens it must have computed. Changes nothing.

        A lease counts only if it has fewer tokens left to compute before the point where the prompt
        could start now than both share after that point.
        """
        if prompt.awaited is not None:
            if self.will_be_indexed(prompt.awaited, prompt.until_tokens):
                return prompt.awaited, prompt.until_tokens
        elif prompt.n_begun == self._n_begun:
            return None
        leases = self._by_first_block.get(self._key(prompt), ())
        shares = [(n, lease) for lease in leases if (n := self._shared_tokens(lease, prompt))]
        if not shares:
            return None
        indexed_tokens = self._probe(prompt.namespace, prompt.tokens)
        for n_tokens, lease in sorted(shares, key=lambda share: -share[0]):
            if n_tokens - indexed_tokens > indexed_tokens - lease.written_tokens:
                return lease, n_tokens
        return None

    def problems(self, leases: frozenset[Lease]) -> Iterator[str]:
        """Contradictions, given the leases that have not been released."""
        if self._end_tokens.keys() - leases:
            yield "a prefix of a released lease is in flight"
        listed = [lease for leases in self._by_first_block.values() for lease in leases]
        if len(listed) != len(self._end_tokens) or set(listed) != self._end_tokens.keys():
            yield "the prefixes in flight by their first block are not those of the leases"
        for key, prefixes in self._by_first_block.items():
            if not prefixes or any(self._key(lease) != key for lease in prefixes):
                yield "a prefix in flight is listed under other tokens"

    def _shared_tokens(self, lease: Lease, prompt: QueuedPrompt) -> int:
        """The whole blocks, in tokens, with which both begin; 0 if the lease has computed them."""
        end = min(self._end_tokens[lease], len(prompt.tokens) - 1)  # the last is never adopted
        start = self._whole(lease.written_tokens)
        stop = start + self._block_size  # compare one block first: most prompts differ there
        if stop > end or lease.tokens.packed(start, stop) != prompt.tokens.packed(start, stop):
            return 0
        return self._whole(common_tokens(lease.tokens.packed(0, end), prompt.tokens.packed(0, end)))

    def _key(self, run: Lease | QueuedPrompt) -> tuple[Namespace, bytes]:
        return run.namespace, run.tokens.packed(0, self._block_size)

    def _whole(self, n_tokens: int) -> int:
        return n_tokens - n_tokens % self._block_size
