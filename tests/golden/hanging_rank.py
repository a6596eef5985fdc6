"""A rank that hangs in the midst of steps. It still says that it runs."""

import sys
import time
from itertools import count

from engine.mlx_backend.blas import load_blas

load_blas()  # before MLX

from engine.core.step import StepResult  # noqa: E402
from engine.mlx_backend.rank import main  # noqa: E402
from engine.mlx_backend.runner import MlxRunner  # noqa: E402

N_STEPS = 20


own_collect = MlxRunner.collect
steps = count()


def collect(runner: MlxRunner) -> StepResult:
    """Collect some steps, and then never return."""
    while next(steps) > N_STEPS:
        time.sleep(1)
    return own_collect(runner)


MlxRunner.collect = collect  # type: ignore[method-assign, assignment]

main(int(sys.argv[1]))
