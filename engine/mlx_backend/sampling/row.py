"""What the sampler knows of a sequence in the batch, kept from step to step."""

from hashlib import shake_128

import numpy as np
import numpy.typing as npt

from engine.mlx_backend.sampling.edits import Edits, TokenEdits
from engine.step.plan import Sampling
from engine.types.request import SamplingParams

_UNIFORM_BITS = 24
"""What float32 holds exactly."""


class SamplingRow:
    """The sampling state of one sequence. Mutable: it follows the tokens that are sampled."""

    def __init__(self, sampling: Sampling) -> None:
        self.seed = sampling.seed
        self._output_index = sampling.output_index
        self._edits = TokenEdits(sampling)
        self.params: SamplingParams = sampling.params

    def accept(self, token_id: int) -> None:
        """Take note of the token that was sampled last."""
        self._output_index += 1
        self._edits.count(token_id)

    def edits(self) -> Edits:
        """What to change about the logits of single tokens; bans as long as they hold."""
        if self._output_index < self.params.min_tokens:
            return self._edits.with_bans()
        return self._edits.edits

    def edits_beside_mask(self) -> Edits:
        """The same without bans, for a mask has taken note of them."""
        return self._edits.edits

    def uniforms(self, count: int) -> npt.NDArray[np.float32]:
        """Random numbers in (0, 1] for the next token, `[count]`; fewer are the first of more.

        They depend on the seed, modulo 2^64, and on how many tokens came before, alone.
        """
        seed = (self.seed % 2**64).to_bytes(8, "little")
        draw = seed + self._output_index.to_bytes(8, "little")
        words = np.frombuffer(shake_128(draw).digest(4 * count), dtype="<u4")
        drawn = (words >> (32 - _UNIFORM_BITS)) + np.uint32(1)
        return drawn.astype(np.float32) * np.float32(2.0**-_UNIFORM_BITS)
