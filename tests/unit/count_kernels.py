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
    greedy, drawn = SamplingParams(temperature=0), SamplingParams(seed=1)
    requests = [Request(f"r{at}", (1, 2, 3, at), 40, drawn) for at in range(3)]
    lone = Request("lone", (3, 2, 1), 40, greedy)
    room, attention = Room(n_blocks=64), served.execution.attention
    if path == "eager":
        daemon, steps = OfflineDaemon(served, attention, room), {"": 0}
    else:
        run = Compiled(served, attention, room)
        daemon, steps = run.daemon, run.steps
    daemon.serve(*requests)
    daemon.serve(lone)
    print(before, len(list(kernels())), steps[""])


if __name__ == "__main__":
    main(*sys.argv[1:])
