"""What the load tests send and measure of images."""

import base64
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from load_tests.checkpoint import checkpoint
from load_tests.client import Answer, Asker, TargetError, connected
from load_tests.conditions import observe
from load_tests.pictures import MOST_TOKENS, picture
from load_tests.scenarios.arrival import play_arrival
from load_tests.scenarios.kinds import Arrival, Load, load_scenario
from load_tests.scenarios.load import ENCODED_IMAGES, Run, Summary, play, summarize
from load_tests.scenarios.workloads import build
from load_tests.shapes import CONFIGS
from load_tests.side_by_side.record import Record
from load_tests.side_by_side.rounds import Rounds
from load_tests.side_by_side.tables import tables
from tests.unit.test_load_scenarios import Body, Talking, honest, served

LOAD = Load(
    kind="load",
    description="of two sets of two images",
    concurrency=1,
    conversations=3,
    turns=2,
    image_sets=2,
    images=2,
    image_tokens=6,
    user_words=4,
    output_tokens=2,
)


def urls(body: Body) -> list[str]:
    """The images of the body's first message, which must precede its text."""
    content = body["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    return [part["image_url"]["url"] for part in content[:-1]]


def without_metrics(body: Body) -> str:
    return honest(body) if body else "HTTP/1.1 404 Not Found\r\n\r\n"


async def test_the_first_message_has_the_conversations_images() -> None:
    """Sets are dealt in turn, and a later turn sends them again, unchanged."""
    async with served(without_metrics) as (fake, target):
        run = await play(build(LOAD, 0), target)
    bodies = [body for body in fake.bodies if body]
    first, again, second, *_ = sent = [urls(body) for body in bodies]
    assert (len(sent), first == again, len({*first, *second})) == (6, True, 4)
    assert sent[4] == sent[5] == first
    assert isinstance(bodies[1]["messages"][2]["content"], str)
    assert run.encoded_images is None, "a server without metrics"


def told(*totals: int) -> Any:
    """A server whose metrics report these totals of encoded images, the next at each reading."""
    left = list(totals)

    def respond(body: Body) -> str:
        if body:
            return honest(body)
        total = left.pop(0)
        lines = f'{ENCODED_IMAGES}{{model="a"}} {total}.0\n{ENCODED_IMAGES}{{model="b"}} 1.0\n'
        return f"HTTP/1.1 200 OK\r\n\r\n# HELP {ENCODED_IMAGES} of 99\n{lines}"

    return respond


async def test_images_are_counted_over_a_run_for_all_models() -> None:
    async with served(told(3, 7)) as (_, target):
        run = await play(build(LOAD, 0), target)
    assert run.encoded_images == summarize(run).encoded_images == 4


async def test_a_metric_that_cannot_be_asked_for_is_an_error() -> None:
    async with served(lambda _: "") as (_, target), connected(target) as asker:
        with pytest.raises(TargetError, match="metrics"):
            await Asker.counted(asker, ENCODED_IMAGES)


async def test_images_arrive_beside_streams() -> None:
    """The warm-up, the prompt alone, and the prompt beside the streams have four each, all new."""
    scenario = load_scenario("image-prompt")
    assert isinstance(scenario, Arrival)
    talking = Talking(words_said=100_000)
    small = scenario.model_copy(update={"image_tokens": 4, "streams": 1})
    async with talking.served() as target:
        found = await play_arrival(small, 0, target)
    assert found.first_token_beside > 0
    assert len(set(talking.images)) == len(talking.images) == 3 * 4


@pytest.mark.parametrize("n_tokens", [1, 6, 97, 1000])
def test_a_picture_has_the_tokens_asked_for(n_tokens: int) -> None:
    """In the grid of the processor of the checkpoint `vision`."""
    image = pytest.importorskip("PIL.Image")
    url = picture(random.Random(n_tokens), n_tokens)
    assert url == picture(random.Random(n_tokens), n_tokens) != picture(random.Random(0), n_tokens)
    head, _, data = url.partition(",")
    assert head == "data:image/jpeg;base64"
    decoded = base64.b64decode(data)
    assert decoded.startswith(b"\xff\xd8")
    width, height = image.open(BytesIO(decoded)).size
    vision = CONFIGS["vision"]["vision_config"]
    side = vision["patch_size"] * vision["spatial_merge_size"]
    assert (width % side, height % side, width * height // side**2) == (0, 0, n_tokens)


@pytest.mark.parametrize("n_tokens", [0, MOST_TOKENS + 1])
def test_a_picture_has_a_size_that_the_processor_leaves(n_tokens: int) -> None:
    with pytest.raises(ValueError, match="1 to 16384 tokens"):
        picture(random.Random(0), n_tokens)


def answer(turn: int, prompt_tokens: int, cached_tokens: int, conversation: int = 0) -> Answer:
    return Answer(
        wave=0,
        conversation=conversation,
        turn=turn,
        started_seconds=0.0,
        first_token_seconds=1.0 + turn,
        latency_seconds=2.0,
        gap_seconds=(0.1,),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=5,
        drafted_tokens=0,
        accepted_tokens=0,
        text="",
    )


ANSWERS = (
    answer(1, 120, 90),
    answer(0, 100, 40),  # of another conversation's prompt: not what the turn before had
    answer(0, 100, 100, 1),
)


def test_what_a_later_turn_could_have_had_is_what_the_turn_before_had() -> None:
    found = summarize(Run(1.0, ANSWERS, encoded_images=2))
    assert (found.cached_tokens, found.earlier_tokens, found.resumed_tokens) == (230, 104, 90)


def test_runs_with_images_have_a_table_of_their_own() -> None:
    scenario = load_scenario("image-turns")
    ours, other = (summarize(Run(1.0, ANSWERS, n)) for n in (2, None))
    rounds: tuple[dict[str, Summary], ...] = ({"rootstock": ours, "mlx-vlm": other},)
    conditions = observe(0, (), "a BLAS")
    found = Record(
        "image-turns", scenario, conditions, ("rootstock", "mlx-vlm"), Rounds(rounds, ())
    )
    _, images = tables([found])
    assert images.rows == (
        ("image-turns", "rootstock", "320", "230", "86.5%", "2", "2.00"),
        ("image-turns", "mlx-vlm", "320", "230", "86.5%", "", "2.00"),
    )


def test_the_checkpoint_with_a_tower_takes_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its kind with small layers."""
    pytest.importorskip("mlx_vlm", reason="the packages for images are not installed")
    from engine.mlx_backend.loading.images import open_vision, read_vision  # noqa: PLC0415

    config = CONFIGS["vision"]
    small = {"hidden_size": 32, "intermediate_size": 32}
    text = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"depth": 10, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
    monkeypatch.setitem(
        CONFIGS,
        "vision",
        {
            **config,
            "text_config": {**config["text_config"], **small, **text},
            "vision_config": {**config["vision_config"], **small, **vision},
        },
    )
    opened = open_vision(checkpoint("vision", 0, tmp_path), 2048, has_states=False)
    assert opened is not None
    read_vision(opened)
    prepared = opened.layout.prepared(bytes(32), (1, 20, 50), "")
    assert prepared.image.n_tokens == 250
