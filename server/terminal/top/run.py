"""Draws a daemon's picture until the user leaves, or once where there is no terminal."""

import sys
from contextlib import closing

from rich.console import Console, RenderableType
from rich.live import Live

from server.terminal.chat.screen import replace_bad_text
from server.terminal.client.admin import Admin
from server.terminal.errors import NotLoaded, TerminalError
from server.terminal.loaded import loaded_model
from server.terminal.signals import TERMINAL_ENDS, exiting_on
from server.terminal.top.drawing import Size, drawn
from server.terminal.top.watch import Seen, Watch

REDRAWS_PER_SECOND = 4
LINES_WITHOUT_TERMINAL = 60


def top(daemon: Admin, url: str, model: str) -> None:
    """Show the cache of the model. Raises TerminalError, also when it is unloaded or the daemon
    ends.
    """
    replace_bad_text()
    if sys.stdout.isatty():
        with exiting_on(TERMINAL_ENDS):
            _follow(daemon, url, model)
    else:
        console = Console()
        seen = Seen(daemon.picture(model), 0.0, None)
        console.print(drawn(seen, url, Size(console.width, LINES_WITHOUT_TERMINAL)))


def _follow(daemon: Admin, url: str, model: str) -> None:
    """Draw until Ctrl-C."""
    console = Console()
    try:
        with closing(daemon.pictures(model)) as pictures:
            watch = Watch(next(pictures))

            def now_drawn() -> RenderableType:
                return drawn(watch.seen(), url, Size(*console.size))

            with Live(
                console=console,
                screen=True,
                get_renderable=now_drawn,
                refresh_per_second=REDRAWS_PER_SECOND,
                vertical_overflow="crop",
            ):
                for picture in pictures:
                    watch.take(picture)
    except KeyboardInterrupt:
        return
    except StopIteration:
        pass
    try:
        loaded_model(daemon, model)
    except NotLoaded:
        raise
    except TerminalError:
        pass  # a daemon that has stopped does not answer
    raise TerminalError("the daemon has stopped")
