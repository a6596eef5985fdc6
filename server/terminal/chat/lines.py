"""The line editor of a chat: keys, history, completion of commands.

A paste of several lines arrives as one piece (bracketed paste) and is sent by Enter, not by its own
line breaks.
"""

from collections.abc import Callable, Mapping

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

editing = has_focus(DEFAULT_BUFFER)  # and not searching in the history


@Condition
def something_typed() -> bool:
    return bool(get_app().current_buffer.text)


@Condition
def command_begun() -> bool:
    return get_app().current_buffer.text.startswith("/")


def line_reader(commands: Mapping[str, str], history: History) -> Callable[[], str]:
    """Asks for the user's next text, which may have several lines. It raises EOFError for Ctrl-D
    and KeyboardInterrupt for Ctrl-C where nothing is typed.

    `commands` are completed, and shown with what they do.
    """
    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        key_bindings=_keys(),
        history=history,
        completer=WordCompleter(list(commands), sentence=True, meta_dict=dict(commands)),
        complete_while_typing=command_begun,
        reserve_space_for_menu=len(commands),
    )
    return session.prompt


def _keys() -> KeyBindings:
    """Enter sends, Alt-Enter breaks the line, Ctrl-C takes back what is typed. All else is as in
    Emacs and readline: Ctrl-R searches.
    """
    keys = KeyBindings()

    @keys.add("enter", filter=editing)
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=editing)
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=editing & something_typed)
    def take_back(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return keys
