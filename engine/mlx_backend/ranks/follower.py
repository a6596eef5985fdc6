"""A rank other than rank 0: makes the calls that rank 0 sends, on a runner of its own."""

from collections.abc import Callable

from engine.core.step import Backend
from engine.mlx_backend.ranks.plan import Frame, decode_ids, decode_masks, decode_plan
from engine.process.sockets import ProtocolError
from kvstore.types import BlockId, SlotId


def follow(receive: Callable[[], bytes], backend: Backend) -> None:
    """Make each call that `receive` returns, until it raises. Raises whatever the runner raises,
    and ProtocolError for a frame that is no call.
    """
    runner = backend.runner
    while True:
        frame = receive()
        body = frame[1:]
        match frame[0]:
            case Frame.SUBMIT:
                runner.submit(decode_plan(body))
            case Frame.LAUNCH:
                runner.launch()
            case Frame.DRAW:
                runner.draw(decode_masks(body))
            case Frame.COLLECT:
                runner.collect()
            case Frame.RESIZE:
                backend.rest()
            case Frame.SHRINK:
                [free] = decode_ids(body)
                backend.give_back.shrink(list(map(BlockId, free)))
            case Frame.GIVE_BACK:
                blocks, *slots = decode_ids(body)
                backend.give_back.release(
                    list(map(BlockId, blocks)), [list(map(SlotId, each)) for each in slots]
                )
                backend.release_unused()
            case kind:
                raise ProtocolError(f"a frame of kind {kind} in place of a call")
