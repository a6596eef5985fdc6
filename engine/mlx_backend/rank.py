"""`python -m engine.mlx_backend.rank SOCKET`: a rank other than rank 0, which has started it."""

import logging
import os
import signal
import socket
import sys
from pathlib import Path

from engine.api import ModelError, one_line
from engine.mlx_backend.environment import mlx_imports
from engine.mlx_backend.ranks.follower import follow
from engine.mlx_backend.ranks.link import Link, RankLost, RankSilent, end_process
from engine.mlx_backend.ranks.plan import Frame
from engine.process.sockets import SWITCH_SECONDS
from engine.values.log_lines import LogFormatter

logger = logging.getLogger(__name__)


def main(descriptor: int) -> None:
    """Load this rank's part of a model, and compute what rank 0 sends. Never returns."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the server handles them
        signal.signal(ignored, signal.SIG_IGN)
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    sys.setswitchinterval(SWITCH_SECONDS)
    parent = os.getppid()

    def lost(why: RankLost) -> None:
        if isinstance(why, RankSilent) and os.getppid() == parent:
            logger.error("killing rank 0: %s", why)
            os.kill(parent, signal.SIGKILL)  # it was stopped; the server then loads the model again
        end_process(1)

    compute(Link(socket.socket(fileno=descriptor), "rank 0", lost))


def compute(link: Link, checkpoint: Path | None = None) -> None:
    """Compute a model with the rank at the other end of the link; see `join_ranks`. Never returns:
    the process ends when an error has been sent to that rank.
    """
    try:
        _load_and_follow(link, checkpoint)
    except BaseException as error:
        words = str(error) if isinstance(error, ModelError) else one_line(error)
        logger.debug("this rank ends", exc_info=True)
        link.send(Frame.FAILED, words.encode())
        end_process(1)


def _load_and_follow(link: Link, checkpoint: Path | None) -> None:
    with mlx_imports() as blas:
        from engine.mlx_backend.loading.compiler import start_compiler  # noqa: PLC0415 - BLAS first

        compiler = start_compiler()
        from engine.mlx_backend import assembly  # noqa: PLC0415
        from engine.mlx_backend.ranks.start import join_ranks  # noqa: PLC0415
    joined = join_ranks(link, checkpoint)
    opened = assembly.open_checkpoint(joined.config, joined.checkpoint, joined.ranks)
    backend = assembly.assemble_opened(joined.config, opened, blas, logger.debug, compiler)
    follow(link.receive, backend)


if __name__ == "__main__":
    main(int(sys.argv[1]))
