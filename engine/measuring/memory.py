"""What steps take beside weights and storage, against what was promised when the model was loaded.

MLX's own count. The promise is for the longest sequence that fits into the cache, which is made as
large as what is computed here.
"""

from collections.abc import Sequence

from engine.measuring.messages import MeasureConfig
from engine.measuring.rounds import Figures
from engine.measuring.turned_engine import open_engine

STEPS = 8
"""Of decodes, once all prompts are computed."""
SAID_TOKENS = 64
"""By each row at most: what begins first says more."""


class MemoryMeasurement:
    """The longest prompt that there is room for, then as many rows as may run at once."""

    def __init__(self, config: MeasureConfig) -> None:
        """Raises ModelError."""
        rows = config.engine.max_running
        each = max(config.sizes.prompt_tokens // rows, 1)
        self._engine = open_engine(config.engine, rows, each + SAID_TOKENS).engine
        longest = self._engine.longest - SAID_TOKENS
        self._cases = {
            f"{n} x {tokens:,}": (n, tokens) for n, tokens in ((1, longest), (rows, each))
        }

    def cases(self) -> Sequence[str]:
        return list(self._cases)

    def measure(self, case: str) -> Figures:
        """The peak since the model was loaded. Raises RuntimeError where a step fails."""
        self._engine.begin(*self._cases[case], SAID_TOKENS)
        self._engine.turn(STEPS)
        found = self._engine.memory()
        taken = found.peak - found.promise.kept
        return {
            "promised_mib": found.promise.workspace / 2**20,
            "taken_mib": taken / 2**20,
            "taken_times": taken / found.promise.workspace,
            "weights_mib": found.promise.weights / 2**20,
            "storage_mib": found.promise.storage / 2**20,
        }
