"""Clients that leave while their images arrive, are decoded or are asked about, and the process
that decodes them, which may end at any time: nothing of them stays, and others are served.
"""

import json
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.contract.wire import connected, request_head
from tests.hostile.image_bodies import CHAT, base64_of, chat, refusal
from tests.hostile.image_target import MIB, Target, attacked
from tests.hostile.pictures import huge_png, padded, saved
from tests.polling import until

pytest.importorskip("mlx_vlm", reason="the packages for images are not installed")
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with attacked(tmp_path_factory.mktemp("images")) as target:
        yield target


SOUND = base64_of(saved("PNG"))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
def test_clients_that_leave_while_their_body_arrives(target: Target, share: float) -> None:
    content = json.dumps(chat(base64_of(padded(4 * MIB, 7)))).encode()
    for _ in range(4):
        with connected(target.daemon.url) as connection:
            connection.sendall(request_head(content[: int(len(content) * share)], len(content)))
    target.check_that_nothing_is_left()


def test_clients_that_leave_while_their_images_are_prepared(target: Target) -> None:
    """And those that wait for the one process that decodes."""
    with target.another_client():
        for stream in (False, True):
            for seed in range(6):
                slow = saved("PNG", (1500, 1500), seed)
                body = {**chat(base64_of(slow)), "stream": stream}
                with connected(target.daemon.url) as connection:
                    connection.sendall(request_head(json.dumps(body).encode()))
    target.check_that_nothing_is_left()


def test_clients_that_leave_an_answer_about_an_image(target: Target) -> None:
    body = {**chat(base64_of(padded(MIB, 5))), "max_tokens": 200, "ignore_eos": True}
    for _ in range(3):
        with target.http.stream("POST", CHAT, json={**body, "stream": True}) as answer:
            next(answer.iter_raw())
    target.check_that_nothing_is_left()


def test_the_process_that_decodes_comes_back(target: Target) -> None:
    """Killed from outside between two images, and while it decodes one."""
    assert target.post(CHAT, chat(SOUND)).status_code == 200
    (first,) = decoders(target)
    first.kill()
    refusal(target.post(CHAT, chat(base64_of(huge_png()))), "messages[0].content[0]")
    (second,) = decoders(target)
    assert second.pid != first.pid
    answers = list[httpx.Response]()
    large = base64_of(saved("PNG", (2500, 2500), 99))
    thread = threading.Thread(target=lambda: answers.append(target.post(CHAT, chat(large))))
    thread.start()
    used = second.cpu_times().user
    until(
        lambda: not second.is_running() or second.cpu_times().user > used or not thread.is_alive()
    )
    second.kill()
    thread.join()
    assert answers[0].status_code == 200, answers[0].text
    target.check_that_nothing_is_left()


def decoders(target: Target) -> list[psutil.Process]:
    """The processes that decode images."""
    children = psutil.Process(target.daemon.process.pid).children(recursive=True)
    return [one for one in children if one.is_running() and is_decoder(one)]


def is_decoder(process: psutil.Process) -> bool:
    try:
        return "engine.images.worker" in process.cmdline()
    except psutil.Error:  # it has ended meanwhile
        return False
