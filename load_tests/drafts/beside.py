"""What drafts save beside other servers: `python -m load_tests.drafts.beside [--shape real]`.

All serve the successor checkpoint and are asked for the same greedy text completions:

    copy     words in order, and the first of them again: the answer is in the prompt
    resend   a prompt whose answer the server has given before
    new      words in order that the prompt does not have

mlx_lm.server drafts with a model of the successor's first layer, which says what the whole says: no
draft of it is ever wrong, so no draft model can do better. vllm-mlx drafts with heads that these
checkpoints lack, so it is asked as it is. Every answer must be the same, or the command fails.

All texts are runs of one lexicon, so each load has a salt: Rootstock would draft what is new from
the answers to another load. The others pass over it.
"""

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import httpx
import typer

from load_tests.client import Target, TargetError
from load_tests.drafts.draft_model import draft_checkpoint
from load_tests.drafts.successor import successor_checkpoint
from load_tests.lexicon import WORDS
from load_tests.peers.catalogue import Peer, mlx_lm, rootstock, serving, vllm_mlx
from load_tests.report import Table
from load_tests.shapes import Shape
from load_tests.terminal import fail, show_figures

LIMIT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked, and on how many streams at once."""

    prompt_words: int = 512
    output_tokens: int = 256
    streams: tuple[int, ...] = (1, 8)


USUAL = Size()


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    prompts: tuple[str, ...]
    before: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.name}, {len(self.prompts)} at once"


@dataclass(frozen=True, slots=True)
class Figures:
    """`tokens_per_second` of each round."""

    load: str
    server: str
    tokens_per_second: tuple[float, ...]


def loads(rng: random.Random, size: Size) -> list[Load]:
    """Of each kind one for each number of streams. No prompt comes twice but to be sent again."""
    found = list[Load]()
    for n_streams in size.streams:
        copied = tuple(_copied(rng, size) for _ in range(n_streams))
        found.append(Load("copy", copied))
        found.append(Load("new", tuple(_new(rng, size) for _ in range(n_streams))))
        again = tuple(_new(rng, size) for _ in range(n_streams))
        found.append(Load("resend", again, again))
    return found


def _copied(rng: random.Random, size: Size) -> str:
    start = rng.randrange(len(WORDS) - size.prompt_words)
    words = WORDS[start : start + size.prompt_words]
    return "".join(f"{word} " for word in (*words, words[0]))


def _new(rng: random.Random, size: Size) -> str:
    """The answer goes on from the last word, and none of the others is among its first."""
    start = rng.randrange(len(WORDS) - 2 * size.output_tokens)
    others = [*WORDS[:start], *WORDS[start + 2 * size.output_tokens :]]
    words = rng.choices(others, k=size.prompt_words)
    return "".join(f"{word} " for word in (*words, WORDS[start]))


class Round:
    """What one life of a server says of the loads."""

    def __init__(self, http: httpx.AsyncClient, target: Target, size: Size) -> None:
        self._http = http
        self._target = target
        self._size = size
        self.rates = dict[str, float]()
        self.said = dict[str, tuple[str, ...]]()

    async def warm_up(self) -> None:
        """Ask for something of the same size, and do not measure it. Raises TargetError."""
        await self._ask(_new(random.Random("before all"), self._size), "warm-up")

    async def play(self, load: Load) -> None:
        """Raises TargetError."""
        for prompt in load.before:
            await self._ask(prompt, load.title)
        start = time.perf_counter()
        answers = await asyncio.gather(*(self._ask(prompt, load.title) for prompt in load.prompts))
        seconds = time.perf_counter() - start
        self.rates[load.title] = sum(n_tokens for _, n_tokens in answers) / seconds
        self.said[load.title] = tuple(text.strip() for text, _ in answers)

    async def _ask(self, prompt: str, salt: str) -> tuple[str, int]:
        body = {
            "cache_salt": salt,
            "model": self._target.model,
            "prompt": prompt,
            "max_tokens": self._size.output_tokens,
            "temperature": 0,
        }
        response = await self._http.post(f"{self._target.base_url}/completions", json=body)
        if response.status_code != httpx.codes.OK:
            raise TargetError(f"HTTP {response.status_code}: {response.text[:500]}")
        answer = response.json()
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


async def _round(target: Target, asked: Sequence[Load], size: Size) -> Round:
    async with httpx.AsyncClient(timeout=LIMIT_SECONDS, trust_env=False) as http:
        one = Round(http, target, size)
        await one.warm_up()
        for load in asked:
            await one.play(load)
        return one


def measure(
    peers: Sequence[Peer], model: Path, size: Size, rounds: int, logs: Path
) -> list[Figures]:
    """Each round has a life of each server, in another order, and texts of its own. Raises
    TargetError.
    """
    rates: Mapping[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(rounds):
        asked = loads(random.Random(number), size)
        said = dict[str, Mapping[str, tuple[str, ...]]]()
        for peer in itertools.islice(itertools.cycle(peers), number, number + len(peers)):
            with serving(peer, model, logs / f"{len(rates)}-{number}.log") as target:
                one = asyncio.run(_round(target, asked, size))
            said[peer.name] = one.said
            for title, rate in one.rates.items():
                rates[title, peer.name].append(rate)
                typer.echo(f"{number} {title}, {peer.name}: {rate:.0f} tokens/s", err=True)
        expect_alike(said)
    return [Figures(load, server, tuple(each)) for (load, server), each in rates.items()]


def expect_alike(said: Mapping[str, Mapping[str, tuple[str, ...]]]) -> None:
    """Raises TargetError where two servers have answered otherwise."""
    (first, expected), *others = said.items()
    for name, answers in others:
        for title, texts in answers.items():
            if texts != expected[title]:
                raise TargetError(f"{title}: {name} says other than {first}")


def table(all_figures: Sequence[Figures]) -> Table:
    """Medians of tokens a second, and the ratio to the first server's, round by round."""
    titles = dict.fromkeys(figures.load for figures in all_figures)
    by_place = {(each.load, each.server): each.tokens_per_second for each in all_figures}
    servers = list(dict.fromkeys(figures.server for figures in all_figures))
    rows = [
        (title, *(_cell(by_place[title, name], by_place[title, servers[0]]) for name in servers))
        for title in titles
    ]
    return Table(("load", *servers), tuple(rows))


def _cell(rates: Sequence[float], ours: Sequence[float]) -> str:
    ratio = statistics.median(own / rate for own, rate in zip(ours, rates, strict=True))
    return f"{statistics.median(rates):,.0f} ({ratio:.2f})"


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    shape: Annotated[Shape, typer.Option(help="Of all servers' checkpoint.")] = "qwen3",
    prompt_words: Annotated[int, typer.Option(min=1)] = USUAL.prompt_words,
    output_tokens: Annotated[int, typer.Option(min=1)] = USUAL.output_tokens,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="At once. May be repeated. By default 1 and 8.")
    ] = None,
    n_draft_tokens: Annotated[int, typer.Option(help="Of mlx_lm.server's draft model.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Ask all servers for the same texts. The ratios say how many times as fast the first is."""
    model, draft = successor_checkpoint(shape), draft_checkpoint(shape)
    size = Size(prompt_words, output_tokens, tuple(streams or USUAL.streams))
    drafting = ("--draft-model", str(draft), "--num-draft-tokens", str(n_draft_tokens))
    peers = [
        rootstock(),
        rootstock("--speculate", "off"),
        mlx_lm(listen_queue=128),
        replace(mlx_lm(*drafting, listen_queue=128), name="mlx_lm.server, draft model"),
        vllm_mlx(),
    ]
    try:
        with tempfile.TemporaryDirectory() as logs:
            figures = measure(peers, model, size, rounds, Path(logs))
    except TargetError as error:
        raise typer.Exit(fail(str(error))) from error
    show_figures(table(figures), figures, json_path)


if __name__ == "__main__":
    typer.run(main)
