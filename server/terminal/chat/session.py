"""The loop of a chat: reads a line, runs it as a command or sends it to the model."""

import time
from contextlib import closing

from server.terminal.chat.conversation import Conversation
from server.terminal.chat.screen import Screen
from server.terminal.client.answer import Answer
from server.terminal.client.chat import ChatClient
from server.terminal.client.events import Event, Reasoning, Text
from server.terminal.errors import TerminalError

COMMANDS = {
    "/clear": "forget the conversation",
    "/system": "set the system prompt to the text behind it; without one remove it",
    "/help": "show this",
    "/exit": "leave; so do Ctrl-D and Ctrl-C",
}
KEYS = {
    "Alt-Enter": "break the line; Enter sends",
    "Ctrl-R": "search what was typed before",
    "Ctrl-C": "while an answer comes: stop it, and keep what came",
}
HELP = "\n".join(
    [f"{name:11}{about}" for name, about in {**COMMANDS, **KEYS}.items()]
    + ["A line that begins with a space is never a command."]
)


class Session:
    """One user at one screen. `failures` counts the questions that were not answered."""

    def __init__(self, client: ChatClient, screen: Screen, conversation: Conversation) -> None:
        self.conversation = conversation
        self.failures = 0
        self._client = client
        self._screen = screen

    def run(self) -> None:
        """Until the input ends, /exit, or Ctrl-C where no answer is under way."""
        try:
            while (line := self._screen.read()) != "/exit":
                self._take(line)
        except (EOFError, KeyboardInterrupt):
            return

    def _take(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        match command:
            case "/clear":
                self.conversation = self.conversation.cleared()
                self._screen.note("forgotten")
            case "/system":
                self.conversation = self.conversation.with_system(argument.strip())
                self._screen.note("system prompt " + ("set" if argument.strip() else "removed"))
            case "/help":
                self._screen.note(HELP)
            case _ if command.startswith("/"):
                self._screen.error(f"there is no {command}; /help lists what there is")
            case _ if line.strip():
                self._ask(line.strip())

    def _ask(self, text: str) -> None:
        answer = Answer(time.perf_counter())
        try:
            self._listen(text, answer)
        except KeyboardInterrupt:
            answer.interrupted = True
            self._screen.interrupted()
        except TerminalError as error:
            self.failures += 1
            self._screen.error(str(error))
            return
        if answer.text or not answer.interrupted:
            self.conversation = self.conversation.answered(text, answer.text)
        if summary := answer.summary():
            self._screen.note(summary)

    def _listen(self, text: str, answer: Answer) -> None:
        with closing(self._client.answer(self.conversation.asking(text))) as events:
            for event in events:
                answer.add(event, time.perf_counter())
                self._show(event)

    def _show(self, event: Event) -> None:
        match event:
            case Text(text):
                self._screen.answer(text)
            case Reasoning(text):
                self._screen.reasoning(text)
