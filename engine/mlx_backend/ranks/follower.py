"""A rank other than rank 0: makes the calls that rank 0 sends, on a runner of its own."""

from collections.abc import Callable

from engine.core.step import ModelRunner
from engine.mlx_backend.ranks.plan import Frame, decode_masks, decode_plan
from engine.process.sockets import ProtocolError


def follow(receive: Callable[[], bytes], runner: ModelRunner, rest: Callable[[], None]) -> None:
    """Make each call that `receive` returns, until it raises. Raises whatever the runner raises,
    and ProtocolError for a frame that is no call.
    """
    while True:
        frame = receive()
        match frame[0]:
            case Frame.SUBMIT:
                runner.submit(decode_plan(frame[1:]))
            case Frame.LAUNCH:
                runner.launch()
            case Frame.DRAW:
                runner.draw(decode_masks(frame[1:]))
            case Frame.COLLECT:
                runner.collect()
            case Frame.REST:
                rest()
            case kind:
                raise ProtocolError(f"a frame of kind {kind} in place of a call")
