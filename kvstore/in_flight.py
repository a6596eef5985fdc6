"""Prefixes that running leases are computing, and queued prompts that wait for them.

A lease's prefix is *in flight* from when the lease begins until its blocks are indexed or it ends.
A queued prompt that shares it waits, so that the same tokens are not computed twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from math import lcm

from kvstore.lease import Lease
from kvstore.slots import Group
from kvstore.tokens import Tokens, common_tokens
from kvstore.types import Namespace


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

    def __init__(
        self,
        block_size: int,
        groups: Sequence[Group],
        probe: Callable[[Namespace, Tokens], int],
    ) -> None:
        """`groups`: in all of which a prompt must be able to resume. `probe`: the number of a
        prompt's tokens that could be adopted; see `KVStore.probe`.
        """
        self._block_size = block_size
        self._resume_multiple = lcm(block_size, *(group.resume_multiple for group in groups))
        self._probe = probe
        # Of each lease, the number of its tokens that are in flight, those written included.
        self._by_first_block: dict[tuple[Namespace, bytes], dict[Lease, int]] = {}
        self._n_begun = 0

    def begin(self, lease: Lease) -> None:
        """The lease computes the whole blocks of the tokens that it shares. It is dropped when they
        have been computed and another prefix begins with the same block.
        """
        end_tokens = self._whole(min(len(lease.tokens), lease.shared_tokens))
        if end_tokens <= lease.cached_tokens:
            return
        leases = self._by_first_block.setdefault(self._key(lease), {})
        for other in [each for each, end in leases.items() if each.written_tokens >= end]:
            del leases[other]
        leases[lease] = end_tokens
        self._n_begun += 1

    def end(self, lease: Lease) -> None:
        """The lease has ended. Does nothing for a lease that has nothing in flight."""
        key = self._key(lease)
        leases = self._by_first_block.get(key, {})
        if leases.pop(lease, None) is not None and not leases:
            del self._by_first_block[key]

    def will_be_indexed(self, lease: Lease, n_tokens: int) -> bool:
        """Whether the first `n_tokens` tokens in flight are still to be computed by the lease."""
        is_written = lease.written_tokens >= n_tokens
        return not is_written and lease in self._by_first_block.get(self._key(lease), ())

    def must_wait(self, prompt: QueuedPrompt) -> bool:
        """Whether the prompt should wait for a lease that computes much of it: one that has fewer
        tokens left before the point where the prompt could start now than both share after it.

        The lease saves its state where the prompt will resume. Each wait has an end: leases compute
        in every step, or end.
        """
        if self.awaited(prompt) is not None:
            return True
        if prompt.awaited is None and prompt.n_begun == self._n_begun:
            return False
        prompt.awaited, prompt.n_begun = None, self._n_begun
        leases = self._by_first_block.get(self._key(prompt), {}).items()
        found = ((self._shared_tokens(each, end, prompt), each) for each, end in leases)
        if not (shares := [share for share in found if share[0]]):
            return False
        indexed_tokens = self._probe(prompt.namespace, prompt.tokens)
        for n_tokens, lease in sorted(shares, key=lambda share: -share[0]):
            if n_tokens - indexed_tokens > indexed_tokens - lease.written_tokens:
                prompt.awaited, prompt.until_tokens = lease, n_tokens
                lease.checkpoint(n_tokens)
                return True
        return False

    def compare(self, lease: Lease, prompts: Iterable[QueuedPrompt]) -> None:
        """Make queued `prompts` wait for a lease that has just begun and computes a prefix of
        theirs. The lease saves its state where they will resume.
        """
        key = self._key(lease)
        if (end := self._by_first_block.get(key, {}).get(lease)) is None:
            return
        for prompt in prompts:
            if self._key(prompt) == key and self._shared_tokens(lease, end, prompt):
                self.must_wait(prompt)

    def awaited(self, prompt: QueuedPrompt) -> Lease | None:
        """The lease for which the prompt waits, as of when it was last compared."""
        lease, n_tokens = prompt.awaited, prompt.until_tokens
        return lease if lease is not None and self.will_be_indexed(lease, n_tokens) else None

    def problems(self, leases: Set[Lease]) -> Iterator[str]:
        """Contradictions, given the leases that have not been released."""
        for key, in_flight in self._by_first_block.items():
            if in_flight.keys() - leases:
                yield "a prefix of a released lease is in flight"
            if not in_flight or any(self._key(lease) != key for lease in in_flight):
                yield "a prefix in flight is listed under other tokens"

    def _shared_tokens(self, lease: Lease, end_tokens: int, prompt: QueuedPrompt) -> int:
        """The tokens of their common prefix after which the prompt could resume; 0 if the lease has
        already written these.
        """
        end = min(end_tokens, len(prompt.tokens) - 1)  # the last is never adopted
        start = self._whole(lease.written_tokens)
        stop = start + self._block_size  # compare one block first: most prompts differ there
        if stop > end or lease.tokens.packed(start, stop) != prompt.tokens.packed(start, stop):
            return 0
        common = common_tokens(lease.tokens.packed(0, end), prompt.tokens.packed(0, end))
        shared, tried = common, None
        while shared != tried:
            tried = shared
            shared = prompt.tokens.whole_until(shared - shared % self._resume_multiple)
        return shared if shared > lease.written_tokens else 0  # they may differ before that block

    def _key(self, run: Lease | QueuedPrompt) -> tuple[Namespace, bytes]:
        return run.namespace, run.tokens.packed(0, self._block_size)

    def _whole(self, n_tokens: int) -> int:
        return n_tokens - n_tokens % self._block_size
