"""Files and batches, with the newest SDKs over a real socket."""

import errno
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest

from engine.api import EngineStopped, QueueFull
from server.app import create_app
from server.batches import runner as runner_module
from server.batches.lines import MAX_ERRORS, prefix_key
from server.batches.store import Part
from server.dialects.openai_batches import MOST_SECONDS
from server.settings import Settings
from tests.contract.access.helpers import client_of, key_file, secret_of
from tests.contract.daemon import registry_of
from tests.contract.fake_engine import FakeEngine, Gate, Script
from tests.contract.metrics import value
from tests.contract.scripted import Daemon, anthropic_client, strict_client
from tests.polling import WAIT_SECONDS, until

CHAT = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture(scope="module")
def shared(
    no_settings_from_outside: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    with Daemon.serving(batches=tmp_path_factory.mktemp("batches")) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: Daemon) -> Daemon:
    shared.engine.reset()
    shared.say("Fine.")
    return shared


def chat_line(id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": f"question {id}"}], "max_tokens": 20}
    return {"custom_id": id, "method": "POST", "url": url, "body": said | body}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def upload(client: Any, content: bytes) -> str:
    return str(client.files.create(file=("in.jsonl", content), purpose="batch").id)


def create(client: Any, content: bytes, endpoint: str = CHAT, **fields: Any) -> Any:
    given = {"endpoint": endpoint, "completion_window": "24h"} | fields
    return client.batches.create(input_file_id=upload(client, content), **given)


def ended(client: Any, id: str) -> Any:
    return until(partial(client.batches.retrieve, id), lambda batch: batch.status in ENDED)


def results(client: Any, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a file of results by their ids, each of which is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_every_line_has_the_answer_that_its_request_has(daemon: Daemon) -> None:
    client = daemon.openai
    batch = create(client, jsonl(*(chat_line(f"q{n}") for n in range(40))), metadata={"a": "b"})
    assert (batch.status, batch.metadata, batch.completion_window) == (
        "validating",
        {"a": "b"},
        "24h",
    )
    batch = ended(client, batch.id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 40, 40, 0)
    assert batch.error_file_id is None
    found = results(client, batch.output_file_id)
    assert found.keys() == {f"q{n}" for n in range(40)}
    for line in found.values():
        body = line["response"].pop("body")
        assert line["response"].pop("status_code") == 200
        assert body["id"] == f"chatcmpl-{line['response'].pop('request_id')}"
        assert body["choices"][0]["message"]["content"] == "Fine."
        assert (line["response"], line["error"]) == ({}, None)
    used = list(daemon.engine.submitted.queue)
    assert all(request.is_background for request in used)
    assert batch.usage.output_tokens == 40 * 5
    assert batch.usage.total_tokens == batch.usage.input_tokens + 200
    output = client.files.retrieve(batch.output_file_id)
    content = client.files.content(batch.output_file_id).content
    assert (output.purpose, output.bytes) == ("batch_output", len(content))


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}, "chat.completion"),
        ("/v1/completions", {"prompt": "Hi"}, "text_completion"),
        ("/v1/responses", {"input": "Hi"}, "response"),
    ],
)
def test_each_endpoint(daemon: Daemon, endpoint: str, body: dict[str, Any], kind: str) -> None:
    line = {"custom_id": "one", "method": "POST", "url": endpoint, "body": body}
    batch = ended(daemon.openai, create(daemon.openai, jsonl(line), endpoint).id)
    (result,) = results(daemon.openai, batch.output_file_id).values()
    assert result["response"]["body"]["object"] == kind
    assert batch.usage.output_tokens == 5


def test_an_encoder_s_endpoint_of_another_model_is_an_error_line(daemon: Daemon) -> None:
    line = {"custom_id": "one", "url": "/v1/embeddings", "body": {"input": "Hi", "model": "other"}}
    batch = ended(daemon.openai, create(daemon.openai, jsonl(line), "/v1/embeddings").id)
    (result,) = results(daemon.openai, batch.error_file_id).values()
    assert result["response"]["body"]["error"]["code"] == "model_not_found"


WRONG_BODIES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 7},
    "model": {"model": "none"},
    "stream": {"stream": True},
    "messages": {"messages": "Hi"},
}


def test_a_wrong_request_is_answered_as_it_would_be_alone(daemon: Daemon) -> None:
    lines = [chat_line(name, **body) for name, body in WRONG_BODIES.items()]
    batch = ended(daemon.openai, create(daemon.openai, jsonl(*lines, chat_line("right"))).id)
    assert (batch.status, batch.request_counts.failed) == ("completed", len(lines))
    assert results(daemon.openai, batch.output_file_id).keys() == {"right"}
    failed = results(daemon.openai, batch.error_file_id)
    assert failed.keys() == WRONG_BODIES.keys()
    for name, line in failed.items():
        assert line["error"] is None
        if name == "stream":
            assert line["response"]["status_code"] == 400
            assert line["response"]["body"]["error"]["param"] == "stream"
            continue
        alone = daemon.http.post(CHAT, json=chat_line(name, **WRONG_BODIES[name])["body"])
        assert line["response"]["status_code"] == alone.status_code
        assert line["response"]["body"] == alone.json()


def test_lists_have_pages(daemon: Daemon) -> None:
    client = daemon.openai
    made = [create(client, jsonl(chat_line("only"))) for _ in range(5)]
    for batch in made:
        ended(client, batch.id)
    ids = [batch.id for batch in client.batches.list(limit=2)]  # the SDK asks for each page
    assert {batch.id for batch in made} <= set(ids)
    assert len(ids) == len(set(ids))
    page = daemon.http.get("/v1/batches?limit=2").json()
    assert (page["object"], page["has_more"], len(page["data"])) == ("list", True, 2)
    assert [page["first_id"], page["last_id"]] == [batch["id"] for batch in page["data"]]
    files = [file.id for file in client.files.list(limit=3, purpose="batch")]
    assert {batch.input_file_id for batch in made} <= set(files)
    backwards = [file.id for file in client.files.list(limit=3, purpose="batch", order="asc")]
    assert backwards == files[::-1]
    for query in ("after=none", "limit=0", "limit=101", "limit=x"):
        refused = daemon.http.get(f"/v1/batches?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == query.partition("=")[0]


WRONG_FILES: dict[str, tuple[bytes, int | None]] = {
    "empty_file": (b"\n \n", None),
    "invalid_json_line": (jsonl(chat_line("a")) + b'{"custom_id": "b\xff"}\n', 2),
    "duplicate_custom_id": (jsonl(chat_line("a"), chat_line("b"), chat_line("a")), 3),
    "mismatched_url": (jsonl(chat_line("a", url="/v1/embeddings")), 1),
    "invalid_custom_id": (jsonl(chat_line("a") | {"custom_id": 5}), 1),
    "invalid_body": (jsonl(chat_line("a") | {"body": []}), 1),
    "invalid_method": (jsonl(chat_line("a") | {"method": "GET"}), 1),
    "line_too_long": (jsonl(chat_line("a", padding="x" * (9 << 20))), 1),
}


@pytest.mark.parametrize("code", WRONG_FILES)
def test_a_wrong_file_fails_its_batch_in_words(daemon: Daemon, code: str) -> None:
    content, line = WRONG_FILES[code]
    batch = ended(daemon.openai, create(daemon.openai, content).id)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, line)]
    assert not daemon.engine.submitted.qsize()


def test_a_file_of_rubbish_has_so_many_errors_and_no_more(daemon: Daemon) -> None:
    batch = ended(daemon.openai, create(daemon.openai, b"[\n" * 10_000).id)
    assert len(batch.errors.data) == MAX_ERRORS


def test_what_is_wrong_with_a_batch_is_said_at_once(daemon: Daemon) -> None:
    client = daemon.openai
    file = upload(client, jsonl(chat_line("a")))
    given = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    for field, wrong in (
        ("endpoint", "/v1/models"),
        ("completion_window", "tomorrow"),
        ("completion_window", "31d"),
        ("metadata", {"k": "v" * 513}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
    ):
        with pytest.raises(openai.BadRequestError, match=field):
            client.batches.create(**given | {field: wrong})
    with pytest.raises(openai.NotFoundError, match="file"):
        client.batches.create(**given | {"input_file_id": "file-none"})


def test_cancelling_in_the_middle_keeps_what_is_there(daemon: Daemon) -> None:
    gate = Gate()
    client = daemon.openai
    first = ended(client, create(client, jsonl(chat_line("before"))).id)  # the engine is warm
    assert first.status == "completed"
    answered, waiting = chat_line("answered", model="none"), [chat_line(f"q{n}") for n in range(30)]
    daemon.engine.script = Script(gate=gate)
    try:
        batch = create(client, jsonl(answered, *waiting))
        until(lambda: client.batches.retrieve(batch.id).request_counts.failed)
        daemon.engine.at_gate.get(timeout=WAIT_SECONDS)
        assert client.batches.cancel(batch.id).status in {"cancelling", "cancelled"}
        batch = ended(client, batch.id)
    finally:
        gate.open()
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 0)
    lines = results(client, batch.error_file_id)
    assert lines.pop("answered")["response"]["status_code"] == 404
    assert lines.keys() == {f"q{n}" for n in range(30)}
    assert {line["error"]["code"] for line in lines.values()} == {"batch_cancelled"}
    until(lambda: daemon.http.get("/load").json()["server_load"] == 0)
    with pytest.raises(openai.ConflictError, match="cancelled"):
        client.batches.cancel(batch.id)


def test_a_batch_that_waits_for_another_is_cancelled_at_once(daemon: Daemon) -> None:
    gate = Gate()
    daemon.engine.script = Script(gate=gate)
    client = daemon.openai
    try:
        running, waiting = [create(client, jsonl(chat_line("a"))) for _ in range(2)]
        daemon.engine.at_gate.get(timeout=WAIT_SECONDS)
        client.batches.cancel(waiting.id)
        assert ended(client, waiting.id).status == "cancelled"
        assert client.batches.retrieve(running.id).status == "in_progress"
    finally:
        gate.open()
    assert ended(client, running.id).status == "completed"


def test_what_is_not_answered_in_time_expires(daemon: Daemon) -> None:
    gate = Gate()
    daemon.engine.script = Script(gate=gate)
    client = daemon.openai
    try:
        batch = create(client, jsonl(chat_line("a"), chat_line("b")), completion_window="1s")
        batch = ended(client, batch.id)
    finally:
        gate.open()
    assert (batch.status, batch.expired_at is not None) == ("expired", True)
    lines = results(client, batch.error_file_id)
    assert [line["error"]["code"] for line in lines.values()] == ["batch_expired"] * 2


@pytest.mark.parametrize("refusal", [QueueFull("full", 1), EngineStopped("it restarts")])
def test_a_line_that_finds_no_room_is_tried_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    monkeypatch.setattr("server.batches.answer.MAX_RETRY_SECONDS", 0.05)
    daemon.engine.script = Script(refusal=refusal)
    batch = create(daemon.openai, jsonl(chat_line("a")))
    for _ in range(3):
        daemon.engine.submitted.get(timeout=WAIT_SECONDS)
    daemon.say("Fine.")
    batch = ended(daemon.openai, batch.id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 0)


def test_a_file_that_a_batch_needs_is_not_deleted(daemon: Daemon) -> None:
    gate = Gate()
    daemon.engine.script = Script(gate=gate)
    client = daemon.openai
    try:
        batch = create(client, jsonl(chat_line("a")))
        with pytest.raises(openai.ConflictError, match=batch.id):
            client.files.delete(batch.input_file_id)
    finally:
        gate.open()
    batch = ended(client, batch.id)
    for id in (batch.input_file_id, batch.output_file_id):
        assert client.files.delete(id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(id)


def messages(*ids: str, **params: Any) -> list[dict[str, Any]]:
    said = {"max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]} | params
    return [{"custom_id": id, "params": said} for id in ids]


def batch_over(client: Any, id: str) -> Any:
    return until(
        partial(client.messages.batches.retrieve, id),
        lambda batch: batch.processing_status == "ended",
    )


def test_batches_of_messages(daemon: Daemon) -> None:
    client = daemon.anthropic
    requests = [*messages(*(f"m{n}" for n in range(9))), *messages("wrong", max_tokens=-1)]
    made = client.messages.batches.create(requests=requests)
    assert made.processing_status == "in_progress"
    assert made.request_counts.processing == 10
    assert (made.expires_at - made.created_at).total_seconds() == 24 * 3600
    batch = batch_over(client, made.id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (9, 1)
    found = {line.custom_id: line.result for line in client.messages.batches.results(made.id)}
    alone = daemon.http.post("/v1/messages", json=requests[-1]["params"]).json()
    wrong = found.pop("wrong")
    assert wrong.error.error.message == alone["error"]["message"]
    assert wrong.error.error.type == "invalid_request_error"
    assert {result.message.content[0].text for result in found.values()} == {"Fine."}
    others = [client.messages.batches.create(requests=messages("x")).id for _ in range(3)]
    for id in others:
        batch_over(client, id)
    listed = [each.id for each in client.messages.batches.list(limit=2)]
    assert listed.index(made.id) > max(map(listed.index, others))
    page = client.messages.batches.list(limit=1, before_id=made.id)
    assert [each.id for each in page.data] == [listed[listed.index(made.id) - 1]]
    assert client.messages.batches.delete(made.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.results(made.id)
    assert not [file for file in daemon.openai.files.list() if "msgbatch" in file.filename]


def test_cancelling_a_batch_of_messages(daemon: Daemon) -> None:
    gate = Gate()
    daemon.engine.script = Script(gate=gate)
    client = daemon.anthropic
    try:
        batch = client.messages.batches.create(requests=messages("a", "b"))
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            client.messages.batches.delete(batch.id)
        with pytest.raises(anthropic.AnthropicError, match="results_url"):
            client.messages.batches.results(batch.id)
        daemon.engine.at_gate.get(timeout=WAIT_SECONDS)
        assert client.messages.batches.cancel(batch.id).processing_status in {"canceling", "ended"}
        batch = batch_over(client, batch.id)
    finally:
        gate.open()
    assert batch.request_counts.canceled == 2
    kinds = [line.result.type for line in client.messages.batches.results(batch.id)]
    assert kinds == ["canceled", "canceled"]


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        ([], "requests"),
        (messages("a", "b", "a"), r"requests\[2\].custom_id"),
        (messages("a b"), r"requests\[0\].custom_id"),
    ],
)
def test_wrong_batches_of_messages(
    daemon: Daemon, requests: list[dict[str, Any]], named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=named):
        daemon.anthropic.messages.batches.create(requests=requests)


def test_a_key_sees_its_own_alone(tmp_path: Path) -> None:
    keys = key_file(tmp_path, ann={}, bob={}, cid={"models": ["elsewhere"]})
    with Daemon.serving(api_keys_file=keys, batches=tmp_path / "batches") as daemon:
        daemon.say("Fine.")
        with (
            strict_client(daemon.url, secret_of("ann")) as ann,
            strict_client(daemon.url, secret_of("bob")) as bob,
            anthropic_client(daemon.url, secret_of("ann")) as ann_too,
            anthropic_client(daemon.url, secret_of("bob")) as bob_too,
            strict_client(daemon.url, secret_of("cid")) as cid,
        ):
            batch = ended(ann, create(ann, jsonl(chat_line("a"))).id)
            theirs = ann_too.messages.batches.create(requests=messages("a"))
            batch_over(ann_too, theirs.id)
            calls: list[Callable[[], Any]] = [
                lambda: bob.batches.retrieve(batch.id),
                lambda: bob.batches.cancel(batch.id),
                lambda: bob.files.retrieve(batch.input_file_id),
                lambda: bob.files.content(batch.output_file_id),
                lambda: bob.files.delete(batch.output_file_id),
                lambda: create_of(bob, batch.input_file_id),
            ]
            for call in calls:
                with pytest.raises(openai.NotFoundError):
                    call()
            with pytest.raises(anthropic.NotFoundError):
                bob_too.messages.batches.retrieve(theirs.id)
            assert not list(bob.batches.list())
            assert not list(bob.files.list())
            assert not list(bob_too.messages.batches.list())
            assert results(ann, batch.output_file_id)
            refused = ended(cid, create(cid, jsonl(chat_line("a", model="bytes"))).id)
            (line,) = results(cid, refused.error_file_id).values()
            assert line["response"]["status_code"] in {403, 404}
        with httpx.Client(base_url=daemon.url) as nobody:
            for path in ("/v1/files", "/v1/batches", "/v1/messages/batches"):
                assert nobody.get(path).status_code == 401
        with client_of(daemon.url, "ann") as known:
            assert known.get("/v1/files").status_code == 200


def create_of(client: Any, file_id: str) -> Any:
    return client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


def form(*parts: tuple[str, bytes], boundary: bytes = b"xyz") -> bytes:
    """A form of parts, each with what its Content-Disposition says and its content."""
    written = [
        b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n"
        % (boundary, head.encode(), data)
        for head, data in parts
    ]
    return b"".join([*written, b"--%b--\r\n" % boundary])


FILE = ('name="file"; filename="a.jsonl"', b"{}\n")
PURPOSE = ('name="purpose"', b"batch")
HOSTILE: dict[str, tuple[str, bytes]] = {
    "no form": ("application/json", b"{}"),
    "no boundary": ("multipart/form-data", form(PURPOSE, FILE)),
    "long boundary": (f"multipart/form-data; boundary={'x' * 71}", form(PURPOSE, FILE)),
    "other boundary": ("multipart/form-data; boundary=abc", form(PURPOSE, FILE)),
    "cut": ("multipart/form-data; boundary=xyz", form(PURPOSE, FILE)[:-6]),
    "no file": ("multipart/form-data; boundary=xyz", form(PURPOSE)),
    "two files": ("multipart/form-data; boundary=xyz", form(PURPOSE, FILE, FILE)),
    "no purpose": ("multipart/form-data; boundary=xyz", form(FILE)),
    "other purpose": (
        "multipart/form-data; boundary=xyz",
        form(('name="purpose"', b"fine-tune"), FILE),
    ),
    "long field": (
        "multipart/form-data; boundary=xyz",
        form(('name="purpose"', b"b" * 5000), FILE),
    ),
    "not UTF-8": ("multipart/form-data; boundary=xyz", form(('name="purpose"', b"\xff"), FILE)),
    "many parts": ("multipart/form-data; boundary=xyz", form(*[PURPOSE] * 40)),
    "long head": (
        "multipart/form-data; boundary=xyz",
        b"--xyz\r\nX: %b\r\n\r\n" % (b"x" * 20_000),
    ),
    "no name": ("multipart/form-data; boundary=xyz", form(("", b"x"))),
    "preamble without an end": ("multipart/form-data; boundary=xyz", b"x" * 100_000),
    "expiry": (
        "multipart/form-data; boundary=xyz",
        form(PURPOSE, FILE, ('name="expires_after[seconds]"', b"9" * 40)),
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_forms_are_refused_and_leave_nothing(daemon: Daemon, case: str) -> None:
    before = {file.id for file in daemon.openai.files.list()}
    kind, body = HOSTILE[case]
    answer = daemon.http.post("/v1/files", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert {file.id for file in daemon.openai.files.list()} == before


def test_the_form_of_an_upload_is_described(daemon: Daemon) -> None:
    """Whoever sends what is required has a file, and nothing of it can be left out."""
    document = daemon.http.get("/openapi.json").json()
    body = document["paths"]["/v1/files"]["post"]["requestBody"]
    assert body["required"] is True
    schema = body["content"]["multipart/form-data"]["schema"]
    required, known = schema["required"], schema["properties"]
    assert set(required) <= known.keys()
    sent = {
        "file": ("a.jsonl", jsonl(chat_line("a"))),
        "purpose": (None, known["purpose"]["const"]),
        "expires_after[anchor]": (None, known["expires_after[anchor]"]["const"]),
        "expires_after[seconds]": (None, str(known["expires_after[seconds]"]["minimum"])),
    }
    assert sent.keys() == known.keys()
    for fields in (sent, {name: sent[name] for name in required}):
        file = daemon.http.post("/v1/files", files=fields).json()
        lifetime = int(fields.get("expires_after[seconds]", (None, str(MOST_SECONDS)))[1])
        assert file["expires_at"] - file["created_at"] == lifetime
    for left_out in required:
        fields = {name: sent[name] for name in required if name != left_out}
        assert daemon.http.post("/v1/files", files=fields).status_code == 400


def test_a_form_that_comes_in_pieces_of_any_size_is_read(daemon: Daemon) -> None:
    """Seeded: pieces of 1 to 50 bytes, contents with what looks like boundaries."""
    for seed in range(10):
        random = Random(seed)
        print("seed", seed)
        alphabet = [b"\r", b"\n", b"\r\n", b"-", b"--", b"\r\n--xy", b"\r\n--xyz-"[:-2], b"a"]
        content = b"".join(random.choice(alphabet) for _ in range(random.randrange(200)))
        content = content.replace(b"\r\n--xyz", b"\r\n--xy")
        body = form((FILE[0], content), PURPOSE)

        def pieces(body: bytes = body, random: Random = random) -> Iterator[bytes]:
            while body:
                n = random.randrange(1, 50)
                yield body[:n]
                body = body[n:]

        kind = {"Content-Type": 'multipart/form-data; boundary="xyz"'}
        made = daemon.http.post("/v1/files", content=pieces(), headers=kind).json()
        assert daemon.http.get(f"/v1/files/{made['id']}/content").content == content


def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    with Daemon.serving(batches=tmp_path) as daemon:
        address = urlsplit(daemon.url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            head = (
                f"POST /v1/files HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: 9999\r\n"
                "Content-Type: multipart/form-data; boundary=xyz\r\n\r\n"
            )
            connection.sendall(head.encode() + form(PURPOSE, FILE)[:-10])
            until(lambda: list((tmp_path / "files").glob("*.part")))
        until(lambda: not list((tmp_path / "files").iterdir()))


def test_limits_name_themselves_and_the_oldest_file_goes_first(tmp_path: Path) -> None:
    with Daemon.serving(
        batches=tmp_path, max_file_bytes=3000, max_batch_bytes=5000, max_batches=2
    ) as daemon:
        client = daemon.openai
        with pytest.raises(openai.APIStatusError, match="larger than") as refused:
            upload(client, b"x" * 3001)
        assert refused.value.status_code == 413
        first, second, third = [upload(client, b"x" * 2000) for _ in range(3)]
        kept = {file.id for file in client.files.list()}
        assert kept == {second, third}
        assert first not in kept
        gate = Gate()
        daemon.engine.script = Script(gate=gate)
        try:
            busy = create(client, jsonl(chat_line("a", padding="x" * 2500)))
            with pytest.raises(openai.RateLimitError, match="max_batches"):
                create(client, jsonl(chat_line("a")))
            assert client.files.retrieve(busy.input_file_id)
        finally:
            gate.open()


def test_a_full_disk_delays_a_batch_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "DISK_RETRY_SECONDS", 0.05)
    is_full, refused, append = True, list[int](), Part.append

    def appending(part: Part, data: bytes) -> None:
        if is_full and b"batch_req" in data:
            refused.append(len(data))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(part, data)

    monkeypatch.setattr(Part, "append", appending)
    with Daemon.serving(batches=tmp_path) as daemon:
        daemon.say("Fine.")
        batch = create(daemon.openai, jsonl(*(chat_line(f"q{n}") for n in range(20))))
        until(lambda: len(refused) > 60)
        assert daemon.openai.batches.retrieve(batch.id).status == "in_progress"
        assert daemon.http.get("/health").status_code == 200
        is_full = False
        batch = ended(daemon.openai, batch.id)
        assert len(results(daemon.openai, batch.output_file_id)) == 20
        assert daemon.engine.submitted.qsize() == 20, "no line is computed twice"


def test_an_upload_to_a_full_disk_is_a_507(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def appending(part: Part, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Daemon.serving(batches=tmp_path) as daemon:
        monkeypatch.setattr(Part, "append", appending)
        with pytest.raises(openai.APIStatusError, match="No space left") as refused:
            upload(daemon.openai, b"x")
        assert refused.value.status_code == 507
        assert not list((tmp_path / "files").iterdir())


N_ANSWERED = 15


class Stalling(FakeEngine):
    """Answers N_ANSWERED requests, and then none."""

    n_asked = 0

    def generate(self, *arguments: Any) -> Any:
        self.n_asked += 1
        if self.n_asked == N_ANSWERED + 1:
            self.script = Script(gate=Gate())
        return super().generate(*arguments)


def serve_and_stall(folder: Path, pipe: "Connection[str, str]") -> None:
    with Daemon.serving(engine=Stalling, batches=folder) as daemon:
        daemon.say("Before.")
        pipe.send(daemon.url)
        pipe.recv()


def test_a_restart_after_a_kill_goes_on_where_it_was(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    killed = context.Process(target=serve_and_stall, args=(tmp_path, there))
    killed.start()
    try:
        assert here.poll(WAIT_SECONDS)
        with strict_client(here.recv()) as client:
            batch = create(client, jsonl(*(chat_line(f"q{n}") for n in range(40))))
            deleted = upload(client, b"kept")
            until(lambda: client.batches.retrieve(batch.id).request_counts.completed == N_ANSWERED)
        with anthropic_client(client.base_url.copy_with(path="/")) as other:
            theirs = other.messages.batches.create(requests=messages("a", "b"))
    finally:
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        killed.join()
    (part,) = (tmp_path / "files").glob("*o.part")
    with part.open("ab") as torn:  # as a process leaves it that is killed as it writes
        torn.write(b'{"custom_id":"q39","resp')
    (tmp_path / "files" / "file-00.part").write_bytes(b"a cut upload")
    with Daemon.serving(batches=tmp_path) as daemon:
        daemon.say("After.")
        batch = ended(daemon.openai, batch.id)
        lines = results(daemon.openai, batch.output_file_id)
        said = [
            line["response"]["body"]["choices"][0]["message"]["content"] for line in lines.values()
        ]
        assert (said.count("Before."), said.count("After.")) == (N_ANSWERED, 40 - N_ANSWERED)
        assert (batch.status, batch.request_counts.completed) == ("completed", 40)
        assert batch.usage.output_tokens == N_ANSWERED * 7 + (40 - N_ANSWERED) * 6
        assert daemon.openai.files.content(deleted).content == b"kept"
        assert batch_over(daemon.anthropic, theirs.id).request_counts.succeeded == 2
        assert not (tmp_path / "files" / "file-00.part").exists()


def test_a_daemon_that_stops_leaves_its_lines_for_the_next(tmp_path: Path) -> None:
    gate = Gate()
    with Daemon.serving(batches=tmp_path) as daemon:
        daemon.engine.script = Script(gate=gate)
        batch = create(daemon.openai, jsonl(*(chat_line(f"q{n}") for n in range(50))))
        daemon.engine.at_gate.get(timeout=WAIT_SECONDS)
    with Daemon.serving(batches=tmp_path) as daemon:
        daemon.say("Fine.")
        batch = ended(daemon.openai, batch.id)
        assert len(results(daemon.openai, batch.output_file_id)) == 50


def test_a_folder_has_one_daemon(tmp_path: Path) -> None:
    settings = Settings(port=0, batches=tmp_path)
    with Daemon.serving(batches=tmp_path), pytest.raises(OSError, match="another daemon"):
        create_app(registry_of(FakeEngine(), settings), settings)


def test_a_batch_whose_key_is_gone_fails(tmp_path: Path) -> None:
    gate = Gate()
    keys = key_file(tmp_path, ann={}, bob={})
    folder = tmp_path / "batches"
    with (
        Daemon.serving(api_keys_file=keys, batches=folder) as daemon,
        strict_client(daemon.url, secret_of("ann")) as ann,
    ):
        daemon.engine.script = Script(gate=gate)
        create(ann, jsonl(chat_line("a")))
        daemon.engine.at_gate.get(timeout=WAIT_SECONDS)
    (record,) = (folder / "batches").iterdir()
    with Daemon.serving(api_keys_file=key_file(tmp_path, bob={}, cid={}), batches=folder):
        failed = until(
            lambda: json.loads(record.read_bytes()), lambda read: read["status"] == "failed"
        )
    assert failed["errors"][0]["code"] == "invalid_api_key"


def test_without_a_folder_the_routes_say_what_to_do(hermes: Daemon) -> None:
    for call in (
        hermes.openai.batches.list,
        hermes.openai.files.list,
        lambda: upload(hermes.openai, b"x"),
    ):
        with pytest.raises(openai.BadRequestError, match="--batches"):
            call()
    with pytest.raises(anthropic.BadRequestError, match="--batches"):
        hermes.anthropic.messages.batches.list()


def test_metrics_count_lines_and_what_is_stored(tmp_path: Path) -> None:
    with Daemon.serving(batches=tmp_path) as daemon:
        daemon.say("Fine.")
        lines = jsonl(chat_line("a"), chat_line("b"), chat_line("c", model="none"))
        ended(daemon.openai, create(daemon.openai, lines).id)
        text = daemon.http.get("/metrics").text
        listed = daemon.http.get("/admin/requests/log").json()
    assert value(text, "rootstock_batch_lines_total", result="completed") == 2
    assert value(text, "rootstock_batch_lines_total", result="failed") == 1
    assert value(text, "rootstock_batches", state="live") == 0
    assert value(text, "rootstock_batch_files_bytes") > len(lines)
    assert not listed["requests"], "lines of batches do not push chats out of the log"


def test_keys_put_prompts_with_a_common_beginning_together() -> None:
    """Seeded: of prompts with one of several beginnings, those of one beginning are neighbours."""
    for seed in range(20):
        print("seed", seed)
        random = Random(seed)
        beginnings = [
            "".join(random.choices("abc ", k=random.randrange(300, 3000))) for _ in "1234"
        ]
        bodies = []
        for n in range(40):
            beginning = random.randrange(len(beginnings))
            asked = [
                {"role": "system", "content": beginnings[beginning]},
                {"role": "user", "content": str(n)},
            ]
            bodies.append((prefix_key({"messages": asked, "temperature": n / 40}), beginning))
        random.shuffle(bodies)
        found = [beginning for _, beginning in sorted(bodies, key=lambda one: one[0])]
        assert sum(one != other for one, other in pairwise(found)) == (len(set(found)) - 1)
