"""`python -m engine.mlx_backend.rank SOCKET`: a rank other than rank 0, which has started it. With
`CONNECTION CHECKPOINT` rank 0 is on another machine, at the other end of the connection.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread

from engine.api import ModelError, one_line
from engine.mlx_backend.environment import mlx_imports
from engine.mlx_backend.ranks.follower import follow
from engine.mlx_backend.ranks.link import Link, RankLost, RankSilent, end_process
from engine.mlx_backend.ranks.plan import Frame
from engine.process.joining import LOADED
from engine.process.sockets import SWITCH_SECONDS
from engine.values.log_lines import LogFormatter

logger = logging.getLogger(__name__)


def main(own: int, joined: int | None = None, checkpoint: Path | None = None) -> None:
    """Load this rank's part of a model, and compute what rank 0 sends. Never returns.

    `own` is the descriptor of the socket to the process that has started this one. That is rank 0,
    unless `joined` is the descriptor of a connection to it, on another machine. `checkpoint` is
    where the model is on this one.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the process that has started it handles them
        signal.signal(ignored, signal.SIG_IGN)
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    sys.setswitchinterval(SWITCH_SECONDS)
    connection = socket.socket(fileno=own)
    if joined is None:
        compute(Link(connection, "rank 0", partial(_lose_parent, os.getppid())))
        return
    Thread(target=_end_with, args=[connection], name="starter", daemon=True).start()
    link = Link(socket.socket(fileno=joined), "rank 0", _lose)
    compute(link, checkpoint, partial(connection.sendall, LOADED))


def _lose_parent(parent: int, why: RankLost) -> None:
    """End when rank 0, which has started this process, is lost."""
    if isinstance(why, RankSilent) and os.getppid() == parent:
        logger.error("killing rank 0: %s", why)
        os.kill(parent, signal.SIGKILL)  # it was stopped; the server then loads the model again
    end_process(1)


def _lose(why: RankLost) -> None:
    """End when rank 0, on another machine, is lost."""
    logger.error("this rank ends: %s", why)
    end_process(1)


def _end_with(starter: socket.socket) -> None:
    """End when the process that has started this one has."""
    starter.recv(1)
    end_process(1)


def compute(
    link: Link, checkpoint: Path | None = None, loaded: Callable[[], object] = lambda: None
) -> None:
    """Compute a model with the rank at the other end of the link; see `join_ranks`. `loaded` is
    called when it is loaded. Never returns: the process ends when an error has been sent to that
    rank.
    """
    try:
        _load_and_follow(link, checkpoint, loaded)
    except BaseException as error:
        words = str(error) if isinstance(error, ModelError) else one_line(error)
        logger.error("this rank ends: %s", words)
        logger.debug("this rank ends", exc_info=True)
        link.send(Frame.FAILED, words.encode())
        end_process(1)


def _load_and_follow(link: Link, checkpoint: Path | None, loaded: Callable[[], object]) -> None:
    with mlx_imports() as blas:
        from engine.mlx_backend.loading.compiler import start_compiler  # noqa: PLC0415 - BLAS first

        compiler = start_compiler()
        from engine.mlx_backend import assembly  # noqa: PLC0415
        from engine.mlx_backend.ranks.start import join_ranks  # noqa: PLC0415
    joined = join_ranks(link, checkpoint)
    opened = assembly.open_checkpoint(joined.config, joined.checkpoint, joined.ranks)
    backend = assembly.assemble_opened(joined.config, opened, blas, logger.debug, compiler)
    loaded()
    follow(link.receive, backend)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [own]:
            main(int(own))
        case [own, joined, checkpoint]:
            main(int(own), int(joined), Path(checkpoint))
