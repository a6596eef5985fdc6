"""What an agent's first prompt in another folder shares with the one before, and where they differ:
`python -m tests.clients.prompts TOKENIZER NAMES`, with the tokenizer.json of a checkpoint.
"""

import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer

from engine.values.request import Request
from server.settings import Settings
from tests.clients.checks import Daemon
from tests.clients.programs.agent import Program
from tests.clients.scenario import GREETING, SCRIPTED
from tests.clients.scripted import TOOLS, AgentEngine
from tests.contract.daemon import running

SHOWN_CHARACTERS = 150

BEFORE_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
AFTER_TOOLS = """\
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""What Qwen's chat template writes before the tools and after them."""


@dataclass(frozen=True)
class Prompt:
    """What the agent sent: the system message, the tools as lines of JSON, and the conversation."""

    system: str
    tools: str
    conversation: str

    def system_first(self) -> str:
        """As Qwen's chat template has it."""
        return self._joined(self.system, self._tools())

    def tools_first(self) -> str:
        return self._joined(self._tools(), self.system)

    def _tools(self) -> str:
        return f"{BEFORE_TOOLS}{self.tools}{AFTER_TOOLS}"

    def _joined(self, *parts: str) -> str:
        system = "\n\n".join(parts)
        return f"<|im_start|>system\n{system}<|im_end|>\n{self.conversation}"


class RecordingEngine(AgentEngine):
    """Keeps the longest prompt that has the question: agents have smaller requests around it."""

    prompt = ""

    def _answer(self, request: Request, index: int) -> bytes:
        text = bytes(request.prompt).decode(errors="replace")
        if GREETING in text and len(text) > len(self.prompt):
            self.prompt = text
        return super()._answer(request, index)


def main(
    tokenizer: Annotated[Path, typer.Argument(help="A tokenizer.json.")],
    clients: Annotated[list[str], typer.Argument(help="Agents, as `tests.clients` names them.")],
) -> None:
    """Start each agent with one question in a git folder with one file, then in another folder of
    the same home.
    """
    encode = Tokenizer.from_file(str(tokenizer)).encode
    for client in clients:
        first, second = _prompts(client)
        for render in (Prompt.system_first, Prompt.tools_first):
            before, after = render(first), render(second)
            n_same = _n_same(encode(before).ids, encode(after).ids)
            n_tokens = len(encode(after).ids)
            typer.echo(
                f"{client}, {render.__name__.replace('_', ' ')}: {n_same:,} of {n_tokens:,} tokens "
                f"({n_same / n_tokens:.0%})"
            )
            end = _n_same(before, after)
            typer.echo(f"    both: {before[max(0, end - SHOWN_CHARACTERS) : end]!r}")
            typer.echo(f"    then: {after[end : end + SHOWN_CHARACTERS]!r}")


def _prompts(client: str) -> Iterator[Prompt]:
    """Of a session in one folder, then of one in another."""
    module = import_module(f"tests.clients.programs.{client}")
    program: Program = module.PROGRAM
    engine = RecordingEngine()
    settings = Settings(port=0, served_model_name=(SCRIPTED,))
    with tempfile.TemporaryDirectory() as home, running(engine, settings) as root:
        for agent in program.agent_in(home, Daemon(root, SCRIPTED)).in_two_folders():
            folder = Path(home, agent.folder)
            subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
            (folder / f"{agent.folder}.py").touch()
            engine.prompt = ""
            agent.say(*program.ask, GREETING)
            system, tools, conversation = TOOLS.split(engine.prompt, maxsplit=1)
            yield Prompt(system.removeprefix("<system>").strip(), tools, conversation)


def _n_same(before: Iterable[object], after: Iterable[object]) -> int:
    """How many items the two begin with alike."""
    pairs = zip(before, after, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


if __name__ == "__main__":
    typer.run(main)
