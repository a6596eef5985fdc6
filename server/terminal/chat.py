"""`rootstock chat`: a conversation with any server that speaks OpenAI's chat completions.

The server is the one at --url, else the running daemon, else one that is started for the chat.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from server.settings import Settings
from server.settings.folders import state_folder
from server.terminal.chat_screen import (
    PATH_COMMAND,
    Screen,
    history_file,
    history_in,
    is_terminal,
    line_reader,
    pipe_screen,
    terminal_screen,
)
from server.terminal.cli import command
from server.terminal.client import Answer, ChatClient, Endpoint, Parameters, chat_client
from server.terminal.console import (
    TERMINAL_ENDS,
    TerminalError,
    bytes_text,
    counted,
    exiting_on,
    replace_bad_text,
    terminal_restored,
    typeable,
)
from server.terminal.endpoint import ApiKey, endpoint_at, running_daemon
from server.terminal.flags import settings_or_exit
from server.terminal.image_file import ImageFile, read_again, read_image, typed_path
from server.terminal.local_daemon import STOP_SECONDS, local_daemon, serve_command

PIPE_ENDS = TERMINAL_ENDS | {signal.SIGINT}  # Ctrl-C ends a script, not only one of its answers

COMMANDS = {
    "/clear": "forget the conversation and attached images",
    PATH_COMMAND: "attach the image in the file after it to the next question; without one drop "
    "the attached ones",
    "/system": "set the system prompt to the text after it; without one remove it",
    "/help": "show this",
    "/exit": "leave; so do Ctrl-D and Ctrl-C",
}
KEYS = {
    "Alt-Enter": "break the line; Enter sends",
    "Ctrl-R": "search earlier input",
    "Ctrl-C": "during an answer: stop it, and keep its text",
    "Ctrl-Z": "suspend the chat; fg continues it",
}
HELP = "\n".join(
    [f"{name:11}{about}" for name, about in {**COMMANDS, **KEYS}.items()]
    + [
        "The beginning of a command is enough. A line that begins with a space is never a command.",
        "`rootstock chat --resume` goes on with the last conversation.",
    ]
)


@command
def chat(
    url: Annotated[
        str | None,
        typer.Option(help="Any OpenAI-compatible server, such as http://127.0.0.1:8000/v1."),
    ] = None,
    api_key: ApiKey = "",
    model: Annotated[
        str | None,
        typer.Option(
            help="Its name on the running daemon, or the server at --url. Default: the first one. "
            "If no running daemon has it, one is started for the chat."
        ),
    ] = None,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Nucleus sampling: the share of probability to sample from."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed; the same seed gives the same answer.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the last conversation at a terminal.")
    ] = False,
) -> None:
    """Talk to a model: at a URL, on the running daemon, or on one started for the chat."""
    parameters = {
        "temperature": temperature,
        "max_tokens": max_tokens,
        "top_p": top_p,
        "seed": seed,
    }
    given = {name: value for name, value in parameters.items() if value is not None}
    settings = settings_or_exit({})
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
            conversation = saved_conversation() if resume else Conversation()
            if system:
                conversation = replace(conversation, system=system)
            endpoint = (
                running_daemon(settings, model, api_key)
                if url is None
                else endpoint_at(url, api_key, settings)
            )
            with _connected(endpoint, settings, model, given, screen) as client:
                screen.note(f"{client.model} at {client.base_url}; /help lists the commands")
                if resume:
                    turns = counted(len(conversation.turns), "turn")
                    screen.note(f"going on after {turns}, saved in {conversation_file()}")
                is_saved = resume or is_terminal()
                session = Session(client, screen, conversation, save if is_saved else None)
                session.run()
                if is_saved and session.conversation.turns:
                    saved = f"`rootstock chat --resume` goes on; saved in {conversation_file()}"
                    screen.note(typeable(saved))
        except TerminalError as error:
            screen.error(typeable(str(error)))
            raise typer.Exit(1) from None
        if session.failures:
            raise typer.Exit(1)


@contextmanager
def _connected(
    endpoint: Endpoint | None,
    settings: Settings,
    model: str | None,
    parameters: Parameters,
    screen: Screen,
) -> Iterator[ChatClient]:
    """A client of the server at the endpoint, or of a daemon that ends with the block."""
    with ExitStack() as stack:
        if endpoint is None:
            with_model = f" that serves {model}" if model else ""
            screen.note(f"no daemon runs{with_model}; starting one for this chat")
            stop_seconds = STOP_SECONDS + settings.disk_cache_shutdown_seconds
            with screen.busy("starting a daemon") as progress:
                own = local_daemon(serve_command(model), progress, stop_seconds)
                endpoint = stack.enter_context(own)
            model = None  # the daemon may serve it by another name
        yield stack.enter_context(chat_client(endpoint, model, parameters))


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, its answer, and the question's images."""

    user: str
    assistant: str
    images: tuple[ImageFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Complete turns, and the system prompt above them ("" is none). Immutable: a turn that fails
    never becomes part of it.
    """

    system: str = ""
    turns: tuple[Turn, ...] = ()

    def asking(self, text: str, images: Sequence[ImageFile] = ()) -> list[dict[str, object]]:
        """The messages of a request for an answer to `text` about these images."""
        messages = [_message("system", self.system)] if self.system else []
        for turn in self.turns:
            messages.append(_message("user", turn.user, turn.images))
            messages.append(_message("assistant", turn.assistant))
        return [*messages, _message("user", text, images)]

    def answered(self, text: str, answer: str, images: Sequence[ImageFile] = ()) -> "Conversation":
        """The conversation with one more turn."""
        return replace(self, turns=(*self.turns, Turn(text, answer, tuple(images))))


def _message(role: str, text: str, images: Sequence[ImageFile] = ()) -> dict[str, object]:
    if not images:
        return {"role": role, "content": text}
    parts = [*(image.part for image in images), {"type": "text", "text": text}]
    return {"role": role, "content": parts}


_CONVERSATION = TypeAdapter(Conversation)


def conversation_file() -> Path:
    """The file with the last conversation at a terminal."""
    return state_folder() / "conversation.json"


def save(conversation: Conversation) -> None:
    """Replace the saved conversation. Its file is for its user's eyes alone."""
    file = conversation_file()
    with suppress(OSError):  # a full disk does not end the chat
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (new := file.with_suffix(".new")).unlink(missing_ok=True)
        new.touch(mode=0o600)
        new.write_bytes(_CONVERSATION.dump_json(conversation))
        new.replace(file)


def saved_conversation() -> Conversation:
    """The saved conversation. Raises TerminalError where there is none, and where an image of it is
    no longer in its file.
    """
    file = conversation_file()
    try:
        saved = _CONVERSATION.validate_json(file.read_bytes())
    except OSError as error:
        raise TerminalError(f"no conversation is saved in {file} ({error.strerror})") from None
    except ValidationError:
        raise TerminalError(f"{file} is no saved conversation") from None
    turns = [replace(turn, images=tuple(map(read_again, turn.images))) for turn in saved.turns]
    return replace(saved, turns=tuple(turns))


class Session:
    """The loop of a chat: reads a line, runs it as a command or sends it to the model. `failures`
    counts the questions that were not answered and the images that could not be attached. `save`
    gets the conversation after each turn.
    """

    def __init__(
        self,
        client: ChatClient,
        screen: Screen,
        conversation: Conversation,
        save: Callable[[Conversation], None] | None = None,
    ) -> None:
        self.conversation = conversation
        self.failures = 0
        self._client = client
        self._screen = screen
        self._save = save
        self._images = list[ImageFile]()  # of the next question

    def run(self) -> None:
        """Read lines until the input ends, /exit, or Ctrl-C outside an answer."""
        try:
            while True:
                self._take(self._screen.read())
        except (EOFError, KeyboardInterrupt):
            return

    def _take(self, line: str) -> None:
        """Run a command, or ask. Raises EOFError for /exit."""
        name, _, argument = line.partition(" ")
        match _whole_command(name):
            case "/exit":
                raise EOFError
            case "/clear":
                self.conversation = replace(self.conversation, turns=())
                self._images.clear()
                self._screen.note("forgotten")
            case "/system":
                self.conversation = replace(self.conversation, system=argument.strip())
                self._screen.note("system prompt " + ("set" if argument.strip() else "removed"))
            case "/image":
                self._attach(argument.strip())
            case "/help":
                self._screen.note(typeable(HELP))
            case _ if name.startswith("/"):
                self._screen.error(f"there is no {name}; /help lists the commands")
            case _ if line.strip():
                self._ask(line.strip())

    def _attach(self, typed: str) -> None:
        if not typed:
            self._images.clear()
            self._screen.note("no image is attached")
            return
        try:
            if self._client.no_images:
                raise TerminalError(self._client.no_images)
            image, n_bytes = read_image(typed_path(typed))
        except TerminalError as error:
            self.failures += 1
            self._screen.error(str(error))
            return
        self._images.append(image)
        name = Path(image.path).name
        self._screen.note(f"{name}, {bytes_text(n_bytes)}, goes with the next question")

    def _ask(self, text: str) -> None:
        answer = Answer(time.perf_counter())
        try:
            with (
                closing(
                    self._client.stream(self.conversation.asking(text, self._images))
                ) as chunks,
                self._screen.reading() as reading,
            ):
                for chunk in chunks:
                    answer.add(chunk, time.perf_counter())
                    reading(chunk.prompt_progress)
                    self._screen.reasoning(chunk.reasoning)
                    self._screen.answer(chunk.text)
        except KeyboardInterrupt:
            answer.interrupted = True
            self._screen.interrupted()
        except TerminalError as error:
            self.failures += 1
            self._screen.error(str(error))
            if self._images:
                n_images = counted(len(self._images), "image")
                self._screen.note(f"{n_images} still attached; /image without a path drops them")
            return
        if answer.text or not answer.interrupted:
            self.conversation = self.conversation.answered(text, answer.text, self._images)
            self._images.clear()
            if self._save is not None:
                self._save(self.conversation)
        if summary := answer.summary():
            self._screen.note(summary)


def _whole_command(begun: str) -> str:
    """The only command that begins so, or else the text itself."""
    found = [name for name in COMMANDS if begun[1:] and name.startswith(begun)]
    return found[0] if len(found) == 1 else begun
