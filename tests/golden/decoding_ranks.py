"""`python -m tests.golden.decoding_ranks CHECKPOINT RANKS [MODULE]`: rank 0 of a model that decodes
one sequence without end. It prints a line after each step, and what it reports. With a `MODULE`
that is what the other ranks run, and a step may take a second.
"""

import sys
from itertools import count
from pathlib import Path
from unittest.mock import patch

from engine.core.step import BatchEntry, Decode, Prefill, Sampling, SequenceId, StepPlan
from engine.mlx_backend.backend import load_backend
from engine.mlx_backend.ranks import leader, start
from engine.values.request import SamplingParams
from kvstore.ops import TablePatch
from tests.golden.driving import compute
from tests.golden.ranking import BLOCK_SIZE, config_of

STEP = "a step"
N_TOKENS = 100

if __name__ == "__main__":
    checkpoint, ranks, *modules = sys.argv[1:]
    for module in modules:
        patch.object(start, "RANK_MODULE", module).start()
        patch.object(leader, "STEP_SECONDS", 1.0).start()
    backend = load_backend(config_of(Path(checkpoint), int(ranks)), print)
    greedy = Sampling(SamplingParams(temperature=0), 0)
    for number in count(step=1):
        sequence = SequenceId(number)
        blocks = TablePatch(None, 0, tuple(range(2 + N_TOKENS // BLOCK_SIZE)))
        plan = StepPlan(
            number,
            [SequenceId(number - 1)] if number else [],
            [BatchEntry(sequence, greedy)],
            [(sequence, blocks)],
            [Prefill(sequence, 0, (5, 6, 7), samples=True)],
        )
        compute(backend.runner, plan)
        for _ in range(N_TOKENS):
            compute(backend.runner, StepPlan(rows=[Decode(sequence)]))
            print(STEP, flush=True)
