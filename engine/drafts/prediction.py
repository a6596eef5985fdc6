"""A request's prediction: followed while the output is the same, and again from where it is."""

from array import array
from collections.abc import Sequence

from engine.drafts.suffix_index import SHORTEST, Proposal, SuffixIndex

AHEAD_TOKENS = 512
"""How far ahead of a divergence the output may go on with the prediction: what was left out."""
_TOKEN_BYTES = array("I").itemsize


class Prediction:
    """Where an output is in what was predicted of it.

    After a divergence it goes on at the first place ahead that has the output's last three tokens:
    an edit changes few tokens between many that are kept. Until then, what followed the end of the
    output anywhere in the prediction is proposed.
    """

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens
        self._packed = array("I", tokens).tobytes()
        self._text: SuffixIndex | None = None
        self._at = 0  # of the token that comes next, or of the first that did not come
        self._is_followed = True
        self._n_followed = 0  # tokens that came as predicted, without a gap

    def accept(self, output: Sequence[int]) -> None:
        """The output has got its last token."""
        if self._is_followed and self._tokens[self._at : self._at + 1] == (output[-1],):
            self._at += 1
            self._n_followed += 1
        else:
            self._is_followed = self._find(output[-SHORTEST:])
            self._n_followed = SHORTEST

    def propose(self, output: Sequence[int], most: int) -> Proposal:
        """Up to `most` tokens that may come next."""
        if self._is_followed:
            return Proposal(self._tokens[self._at : self._at + most], self._n_followed)
        if self._text is None:
            self._text = SuffixIndex(self._tokens)
        return self._text.propose(output, most).likely

    def _find(self, last: Sequence[int]) -> bool:
        """Go to the first place ahead that has these tokens. Returns whether there is one."""
        if len(last) < SHORTEST or self._at == len(self._tokens):
            return False
        packed, start = array("I", last).tobytes(), self._at * _TOKEN_BYTES
        stop = start + AHEAD_TOKENS * _TOKEN_BYTES
        found = self._packed.find(packed, start, stop)
        while found % _TOKEN_BYTES and found >= 0:  # between two tokens
            found = self._packed.find(packed, found + 1, stop)
        if found < 0:
            return False
        self._at = found // _TOKEN_BYTES + SHORTEST
        return True
