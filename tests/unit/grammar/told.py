"""The engine thread's side of two grammar processes, which a test speaks for."""

from engine.core.step import SequenceId
from engine.grammar.matcher import Matcher
from engine.grammar.remote.answers import RemoteAnswers
from engine.grammar.remote.wire import Message
from engine.values.request import Grammar, GrammarKind
from tests.unit.grammar.scripted import LIMIT, MEMORY, SameThread, ScriptedProcess, Starts

BITS = bytes([5, 0, 0, 0])


class Told:
    """The answers under test, a clock that stands still, and what the processes are asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.starts = Starts()
        self.seconds: list[float] = []
        self.answers = RemoteAnswers(
            self.starts, self.starts, SameThread(), 1, self.seconds.append, lambda: self.now
        )

    def ask(self, sequence: int, client: str, matcher: Matcher) -> None:
        self.answers.ask(SequenceId(sequence), client, matcher)

    def wait(self) -> None:
        self.answers.wait(lambda: False, 0.0)

    def asked(self, process: int) -> list[Message]:
        self.wait()
        return self.starts.started[process].asked()

    def process(self, number: int) -> ScriptedProcess:
        return self.starts.started[number]

    def lose(
        self, process: int, job: Message, exit_code: int = LIMIT, bytes_left: int = MEMORY
    ) -> None:
        """It dies over the job that it has begun, and that is found out."""
        self.process(process).begin(job, bytes_left)
        self.process(process).die(exit_code)
        for _ in ("what it has said", "its end"):
            self.wait()


def matcher(trial_seconds: float = 0.0, tokens: tuple[int, ...] = ()) -> Matcher:
    return Matcher(Grammar(GrammarKind.REGEX, "a"), "regex", trial_seconds, list(tokens))
