"""How many kernels MLX has built for a CPU: `python -m tests.unit.count_kernels CHECKPOINT PATH`.

Serves a few requests, eagerly or compiled as PATH says. Prints the number of kernels in this
machine's temporary folder before and after, and how many steps were compiled.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine.mlx_backend.backend import mlx_imports


def kernels() -> Iterator[Path]:
    return (Path(tempfile.gettempdir()) / "mlx").glob("*/cpu/*.so")


def main(checkpoint: str, path: str) -> None:
    before = len(list(kernels()))
    with mlx_imports():
        from engine.values.request import Request, SamplingParams  # noqa: PLC0415 - BLAS first
        from tests.golden.compiling import Compiled  # noqa: PLC0415
        from tests.offline import OfflineDaemon, Room, load  # noqa: PLC0415

    served = load(Path(checkpoint))
    sampled = (
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=20, top_p=0.95),
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(temperature=0, repetition_penalty=1.1),
    )
    room, attention = Room(n_blocks=64), served.execution.attention
    if path == "eager":
        daemon, steps = OfflineDaemon(served, attention, room), {"": 0}
    else:
        run = Compiled(served, attention, room)
        daemon, steps = run.daemon, run.steps
    for kind, params in enumerate(sampled):
        for n_rows in (1, 3):
            names = [f"{kind}-{n_rows}-{at}" for at in range(n_rows)]
            prompts = [(1, kind, at) for at in range(n_rows)]
            daemon.serve(*(Request(*row, 40, params) for row in zip(names, prompts, strict=True)))
    print(before, len(list(kernels())), steps[""])


if __name__ == "__main__":
    main(*sys.argv[1:])
