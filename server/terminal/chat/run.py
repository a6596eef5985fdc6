"""Runs a chat: finds or starts a server, opens the screen, and ends both in order."""

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from server.settings import Settings
from server.terminal.chat.conversation import Conversation
from server.terminal.chat.daemon import STOP_SECONDS, daemon, serve_command
from server.terminal.chat.history import history_file, history_in
from server.terminal.chat.lines import line_reader
from server.terminal.chat.screen import (
    Screen,
    is_terminal,
    pipe_screen,
    replace_bad_text,
    terminal_screen,
)
from server.terminal.chat.session import COMMANDS, Session
from server.terminal.client.chat import ChatClient, Parameters, connected
from server.terminal.client.http import Endpoint
from server.terminal.errors import TerminalError
from server.terminal.running import running_daemon
from server.terminal.signals import TERMINAL_ENDS, exiting_on, terminal_restored

PIPE_ENDS = TERMINAL_ENDS | {signal.SIGINT}  # Ctrl-C ends a script, not only one of its answers


def chat(
    endpoint: Endpoint | None,
    api_key: str,
    settings: Settings,
    model: str | None,
    system: str,
    parameters: Parameters,
) -> bool:
    """Chat until the user leaves: with the endpoint, else the daemon that runs at the settings'
    port, else one of its own. `api_key` is for a daemon whose key the settings do not have.

    Returns whether every question was answered.
    """
    replace_bad_text()
    with ExitStack() as stack:
        if is_terminal():
            screen = terminal_screen(line_reader(COMMANDS, history_in(history_file())))
            stack.enter_context(terminal_restored(sys.stdin.fileno()))
            stack.enter_context(exiting_on(TERMINAL_ENDS))
        else:
            screen = pipe_screen()
            stack.enter_context(exiting_on(PIPE_ENDS))
        try:
            with _client(endpoint, api_key, settings, model, parameters, screen) as client:
                return _talk(client, screen, Conversation(system))
        except TerminalError as error:
            screen.error(str(error))
            return False


def _talk(client: ChatClient, screen: Screen, conversation: Conversation) -> bool:
    screen.note(f"{client.model} at {client.base_url}; /help lists the commands")
    session = Session(client, screen, conversation)
    session.run()
    return session.failures == 0


@contextmanager
def _client(
    endpoint: Endpoint | None,
    api_key: str,
    settings: Settings,
    model: str | None,
    parameters: Parameters,
    screen: Screen,
) -> Iterator[ChatClient]:
    endpoint = endpoint or running_daemon(settings, model, api_key)
    with ExitStack() as stack:
        if endpoint is None:
            stop_seconds = STOP_SECONDS + settings.disk_cache_shutdown_seconds
            with screen.busy("starting a daemon") as progress:
                own = daemon(serve_command(model), progress, stop_seconds)
                endpoint = stack.enter_context(own)
            model = None  # the daemon may serve it by another name
        yield stack.enter_context(connected(endpoint, model, parameters))
