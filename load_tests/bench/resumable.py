"""How much of what is cached cannot be resumed, in models with windows or recurrent layers.

    python -m load_tests.bench.resumable

A router that follows KV events counts the cached blocks of a prompt. These models resume only where
the slots of a window or a state are cached as well. The share that is counted in vain is printed
for conversations of 8 clients, agents with one system prompt, resends, and prompts that leave a
conversation early. Few slots are those of four sequences.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import typer

from kvstore.sizes import StateCounts, StorageSizes, WindowSize, build_groups
from kvstore.tokens import Tokens
from kvstore.window import lease_slots
from tests.unit.engine_harness import Harness

BLOCK_SIZE = 32
N_BLOCKS = 1024
STEP_TOKENS = 512


@dataclass(slots=True)
class Counted:
    """Tokens in cached blocks, and those of them from which the prompt is not resumed."""

    cached: int = 0
    in_vain: int = 0


class Measured(Harness):
    """Serves prompts one after another, and counts for each before it is served."""

    def __init__(self, sizes: StorageSizes, max_running: int) -> None:
        groups = build_groups(sizes, BLOCK_SIZE, STEP_TOKENS)
        super().__init__(
            N_BLOCKS, BLOCK_SIZE, STEP_TOKENS, max_running, max_context_tokens=8000, groups=groups
        )
        self.counted = defaultdict[str, Counted](Counted)

    def ask(self, kind: str, prompt: list[int], max_tokens: int) -> list[int]:
        """Returns the answer."""
        namespace, tree = self.scheduler.namespaces.unsalted, self.store.tree
        assert tree is not None
        tokens = Tokens(prompt)
        found = tree.match(namespace, tokens.packed(0, len(tokens))).n_tokens
        cached = found - found % BLOCK_SIZE
        counted = self.counted[kind]
        counted.cached += cached
        counted.in_vain += max(cached - 1 - self.store.probe(namespace, tokens), 0)
        request_id = self.add(prompt, max_tokens)
        while self.scheduler.has_work:
            step = self.scheduler.plan()
            assert step is not None
            self.compute(step)
            self.take(self.scheduler.take_events())
        return self.output(request_id)


def measure(sizes: StorageSizes, max_running: int, seed: int) -> dict[str, Counted]:
    """Counts by the kind of work."""
    engine, drawn = Measured(sizes, max_running), random.Random(seed)
    text: Callable[[int], list[int]] = lambda n: drawn.choices(range(40), k=n)  # noqa: E731
    held = [text(300) for _ in range(8)]
    for _ in range(6):
        for number, conversation in enumerate(held):
            answer = engine.ask("conversations", conversation, 24)
            held[number] = conversation + answer + text(150)
    system = text(1500)
    for _ in range(24):
        engine.ask("agents", system + text(60), 8)
    for conversation in held[:4] * 3:
        engine.ask("resends", conversation, 24)
    for conversation in held:
        for cut in (1100, 900, 700, 500):
            engine.ask("branches", conversation[:cut] + text(40), 8)
    return engine.counted


def main(seed: int = 1) -> None:
    """Measure, and print a table."""
    kinds = ("conversations", "agents", "resends", "branches")
    print(f"| | {' | '.join(kinds)} | all |\n| --- | --- | --- | --- | --- | --- |")
    for window in (1024, 128):
        for n_leases, max_running in ((32, 16), (4, 4)):
            n_slots = n_leases * lease_slots(window, BLOCK_SIZE, STEP_TOKENS)
            sizes = StorageSizes(N_BLOCKS, (WindowSize(window, min(n_slots, N_BLOCKS)),))
            name = f"window of {window}, {'few' if n_leases == 4 else 'many'} slots"
            print(_row(name, measure(sizes, max_running, seed), kinds))
    for n_saved, max_running in ((256, 16), (16, 4)):
        sizes = StorageSizes(N_BLOCKS, (), StateCounts(32, n_saved))
        print(_row(f"{n_saved} saved states", measure(sizes, max_running, seed), kinds))


def _row(name: str, counted: dict[str, Counted], kinds: tuple[str, ...]) -> str:
    every = Counted(
        sum(each.cached for each in counted.values()),
        sum(each.in_vain for each in counted.values()),
    )
    shares = [each.in_vain / each.cached for each in (*(counted[kind] for kind in kinds), every)]
    return f"| {name} | {' | '.join(f'{share:.1%}' for share in shares)} |"


if __name__ == "__main__":
    typer.run(main)
