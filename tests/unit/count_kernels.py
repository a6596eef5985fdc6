"""How many kernels MLX has built for a CPU: `python -m tests.unit.count_kernels CHECKPOINT PATH`.

Serves a few requests, as PATH says: `unbuilt`, before the process that builds kernels has been
started, or `compiled`. Prints the number of kernels in this machine's temporary folder before and
after, and how many steps were compiled.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE

from engine.mlx_backend.backend import mlx_imports


def kernels() -> Iterator[Path]:
    return (Path(tempfile.gettempdir()) / "mlx").glob("*/cpu/*.so")


def main(checkpoint: str, path: str) -> None:
    before = len(list(kernels()))
    with mlx_imports():
        from engine.mlx_backend.decode.choice import DecodePath  # noqa: PLC0415
        from engine.mlx_backend.model.cached_model import CachedModel  # noqa: PLC0415
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
        SamplingParams(temperature=0, top_logprobs=3),
    )
    room, attention = Room(n_blocks=64), served.execution.attention
    if path == "unbuilt":

        def wait(model: CachedModel) -> DecodePath:
            waiting = DecodePath("its kernels are built later")
            waiting.choose_after(lambda: subprocess.Popen("cat", stdin=PIPE, stdout=DEVNULL), model)
            return waiting

        daemon, steps = OfflineDaemon(served, attention, room, decode=wait), {"": 0}
        daemon.serve(Request("first", (3, 4), 2, sampled[0]))  # what the check at load computes
        before = len(list(kernels()))
    else:
        run = Compiled(served, attention, room)
        daemon, steps = run.daemon, run.steps
    for kind, params in enumerate(sampled):
        for n_rows in (1, 3):
            names = [f"{kind}-{n_rows}-{at}" for at in range(n_rows)]
            prompts = [(1, kind, at) for at in range(n_rows)]
            daemon.serve(*(Request(*row, 40, params) for row in zip(names, prompts, strict=True)))
    kinds = enumerate(sampled)  # all of them in the same steps
    daemon.serve(*(Request(f"all-{kind}", (2, kind), 40, params) for kind, params in kinds))
    print(before, len(list(kernels())), steps[""])


if __name__ == "__main__":
    main(*sys.argv[1:])
