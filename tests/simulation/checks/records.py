"""Every entry that is offered to the tier, against the model."""

from kvstore.disk.types import Buffer, Entry
from kvstore.tokens import Digest, Tokens, child_digest, later_digest, root_digest
from tests.simulation.model import (
    ADAPTERS,
    NAMESPACES,
    ROOT,
    SALTS,
    fingerprint,
    token_between,
    unpacked,
)


class RecordCheck:
    """What an entry holds is the KV that the model computes of the tokens that its name says.

    KV tells its token, so an entry's tokens are worked out from its bytes, and its name from these.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ends: dict[Digest, int] = {}  # the last KV of what has been checked
        self._adapters = {
            root_digest(NAMESPACES.of(salt, adapter)): fingerprint(adapter)
            for salt in SALTS
            for adapter in ("", *ADAPTERS)
        }

    def __call__(self, root: Digest, parent: Digest, entry: Entry) -> None:
        assert parent == root or parent in self._ends, "an entry whose parent was never offered"
        kv = ROOT if parent == root else self._ends[parent]
        block, *windows, state = entry.parts
        assert block is not None, "an entry without its block"
        own, tokens = list[int](), list[int]()
        for previous, value in self._slots(block, entry.n_tokens):
            assert previous == kv, "an entry that does not follow its parent"
            tokens.append(token_between(kv, value, self._vocab_size, self._adapters[root]))
            own.append(kv := value)
        name = child_digest(parent, Tokens(tokens).packed(0, len(tokens)))
        while name != entry.block_hash:
            assert name in self._ends, "an entry under another's name"
            name = later_digest(name)
        for window in windows:
            if window is not None:
                values = unpacked(bytes(window))
                assert values[: len(own)] == own, "another's window"
                assert not any(values[len(own) :]), "a window with something behind its tokens"
        assert state is None or unpacked(bytes(state))[0] == kv, "another's state"
        self._ends[entry.block_hash] = kv

    def _slots(self, block: Buffer, n_tokens: int) -> list[tuple[int, int]]:
        values = unpacked(bytes(block))
        assert not any(values[2 * n_tokens :]), "a block with something behind its tokens"
        return list(zip(values[::2], values[1::2], strict=True))[:n_tokens]
