"""Scheduler, store and runner together on real models: what is said never depends on the rest."""

from dataclasses import replace

from mlx.nn.layers.base import Module

from engine.mlx_backend.model.attention import Attention
from engine.values.request import Request, SamplingParams
from engine.values.tokens import pack
from tests.golden.driving import expect_greedy, random_tokens
from tests.offline import OfflineDaemon, Room, Served

BLOCK_SIZE = 8
OUTPUT_TOKENS = 24


def request(name: str, prompt: list[int], n: int = 1) -> Request:
    return Request(name, pack(prompt), OUTPUT_TOKENS, SamplingParams(temperature=0), n=n)


def test_cold_warm_and_continued(served: Served, peer: Module, attention: Attention) -> None:
    daemon = OfflineDaemon(served, attention, Room(64))
    prompt = random_tokens(45, seed=1)
    cold = daemon.serve(request("cold", prompt))["cold", 0]
    warm = daemon.serve(request("warm", prompt))["warm", 0]
    longer = [*prompt, *cold, *random_tokens(5, seed=2)]
    following = daemon.serve(request("following", longer))["following", 0]
    for said, after in ((cold, prompt), (warm, prompt), (following, longer)):
        assert len(said) == OUTPUT_TOKENS
        expect_greedy(peer, after, said)
    assert daemon.usage["warm"].cached_tokens == 44
    assert daemon.usage["following"].cached_tokens == 45 + OUTPUT_TOKENS - 1


def test_an_answer_that_stops_is_cached_to_its_end(
    served: Served, peer: Module, attention: Attention
) -> None:
    """Although a step that goes beyond it was in flight when that was found out."""
    prompt = random_tokens(21, seed=3)
    whole = OfflineDaemon(served, attention, Room(64)).serve(request("whole", prompt))["whole", 0]
    stop = frozenset({whole[10]})
    daemon = OfflineDaemon(served, attention, Room(64))
    stopped = replace(request("stopped", prompt), stop_token_ids=stop)
    said = daemon.serve(stopped)["stopped", 0]
    longer = [*prompt, *said, *random_tokens(5, seed=4)]
    following = daemon.serve(request("following", longer))["following", 0]
    assert daemon.usage["following"].cached_tokens == len(prompt) + len(said) - 1
    expect_greedy(peer, longer, following)


def test_a_conversation_hits_up_to_the_last_prompts_end(
    served: Served, peer: Module, attention: Attention
) -> None:
    """The next prompt says otherwise what was answered, as templates do: the prompt still hits."""
    daemon = OfflineDaemon(served, attention, Room(96))
    prompt, last_tokens = random_tokens(30, seed=40), 0
    for turn in range(4):
        said = daemon.serve(request(f"turn{turn}", prompt))[f"turn{turn}", 0]
        expect_greedy(peer, prompt, said)
        assert daemon.usage[f"turn{turn}"].cached_tokens >= last_tokens
        last_tokens = len(prompt)
        prompt = [*prompt, *random_tokens(20, seed=41 + turn)]


def test_aborted_and_taken_up_again(served: Served, peer: Module, attention: Attention) -> None:
    daemon = OfflineDaemon(served, attention, Room(64))
    prompt = random_tokens(70, seed=50)
    daemon.add(request("left", prompt))
    daemon.step(2)
    daemon.scheduler.abort("left")
    said = daemon.serve(request("back", prompt))["back", 0]
    expect_greedy(peer, prompt, said)
    assert daemon.usage["back"].cached_tokens == 2 * Room(64).step_tokens


def test_preempted_and_brought_back(served: Served, peer: Module, attention: Attention) -> None:
    daemon = OfflineDaemon(served, attention, Room(16))
    prompts = {f"r{i}": random_tokens(17 + 3 * i, seed=10 + i) for i in range(4)}
    said = daemon.serve(*(request(name, prompt) for name, prompt in prompts.items()))
    assert daemon.scheduler.metrics.preemptions > 0
    for name, prompt in prompts.items():
        expect_greedy(peer, prompt, said[name, 0])


def test_forked_outputs_of_one_prompt(served: Served, peer: Module, attention: Attention) -> None:
    daemon = OfflineDaemon(served, attention, Room(64))
    prompt = random_tokens(21, seed=20)
    said = daemon.serve(request("forked", prompt, n=3))
    assert daemon.store.counters.fork_copies > 0
    for index in range(3):
        expect_greedy(peer, prompt, said["forked", index])


def test_duplicates_that_diverge_inside_a_block(
    served: Served, peer: Module, attention: Attention
) -> None:
    daemon = OfflineDaemon(served, attention, Room(96))
    system = random_tokens(29, seed=30)
    prompts = {f"r{i}": system + random_tokens(3 + i, seed=31 + i) for i in range(6)}
    said = daemon.serve(*(request(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        expect_greedy(peer, prompt, said[name, 0])
    cached = sorted(daemon.usage[name].cached_tokens for name in prompts)
    assert min(cached[1:]) >= len(system) - len(system) % BLOCK_SIZE
