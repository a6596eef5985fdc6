"""A sequence finds in the cache only what sequences of its own salt and adapter have brought."""

from collections import defaultdict

from engine.core.sequence import LiveSequence


class NamespaceCheck:
    """Remembers all sequences of one machine's life: engines that end leave their cache on disk."""

    def __init__(self) -> None:
        self._submitted = defaultdict[tuple[str, str], list[LiveSequence]](list)

    def submitted(self, sequence: LiveSequence) -> None:
        self._of(sequence).append(sequence)

    def check(self, sequence: LiveSequence) -> None:
        """What the sequence was first admitted with."""
        n_tokens = sequence.cached_tokens
        found = sequence.tokens.packed(0, n_tokens)
        others = (other for other in self._of(sequence) if other is not sequence)
        assert not n_tokens or any(other.tokens.packed(0, n_tokens) == found for other in others), (
            f"{n_tokens} cached tokens were brought by no sequence of the same namespace"
        )

    def _of(self, sequence: LiveSequence) -> list[LiveSequence]:
        return self._submitted[sequence.request.cache_salt, sequence.request.adapter]
