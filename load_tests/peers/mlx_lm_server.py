"""`mlx_lm.server` on the BLAS that Rootstock loads: arguments are LISTEN_QUEUE, then the server's.

LISTEN_QUEUE is how many connections may wait to be accepted; Python's HTTP server, so the stock
mlx_lm.server, has 5. Sixteen clients at once overflow that: Linux resets some and lets others try
again a second later. A longer queue ends the resets, but is no favour: clients that were held up
find the first ones' prefix cached, and a burst that comes in whole finds nothing.
"""

import sys
from http.server import ThreadingHTTPServer

from engine.mlx_backend.blas import load_blas


def main() -> None:
    """Load the BLAS, set the queue, then become the server."""
    load_blas()
    ThreadingHTTPServer.request_queue_size = int(sys.argv.pop(1))
    from mlx_lm.server import main as serve  # noqa: PLC0415 - the BLAS must come first

    serve()


if __name__ == "__main__":
    main()
