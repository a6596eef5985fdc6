"""Responses that are asked for again: by id, as what another continues, item by item."""

from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError

from tests.contract.access.helpers import client_of, key_file
from tests.contract.responses.conftest import Created
from tests.contract.scripted import Daemon

USER = {"role": "user", "content": "Hi"}


def path(hermes: Daemon, id: str) -> str:
    return f"{hermes.url}/v1/responses/{id}"


def test_a_response_is_there_as_it_was(hermes: Daemon, create: Created) -> None:
    made = create(metadata={"a": "b"}, instructions="Be brief.")
    assert hermes.openai.responses.retrieve(made.id) == made
    *_, streamed = create(stream=True)
    assert hermes.openai.responses.retrieve(streamed.response.id) == streamed.response


def test_what_shall_not_be_stored_is_not(hermes: Daemon, create: Created) -> None:
    made = create(store=False)
    assert made.store is False
    with pytest.raises(NotFoundError) as missing:
        hermes.openai.responses.retrieve(made.id)
    assert missing.value.code == "response_not_found"
    with pytest.raises(BadRequestError) as refused:
        create(previous_response_id=made.id)
    assert refused.value.code == "previous_response_not_found"


def test_a_deleted_response_is_gone(hermes: Daemon, create: Created) -> None:
    made = create()
    deleted = httpx.delete(path(hermes, made.id))
    assert deleted.json() == {"id": made.id, "object": "response", "deleted": True}
    with pytest.raises(NotFoundError):
        hermes.openai.responses.delete(made.id)


def test_a_response_continues_another(hermes: Daemon, create: Created) -> None:
    """With all that was said before; instructions are of their own response alone."""
    first = create(input="One", instructions="Be brief.")
    hermes.say("Yes.")
    second = create(input="Two", previous_response_id=first.id)
    create(input=[{"role": "developer", "content": "Hm."}, {"role": "user", "content": "Three"}],
           instructions="Be long.", previous_response_id=second.id)  # fmt: skip
    assert [(said["role"], said["content"]) for said in hermes.given[0]] == [
        ("system", "Be long."),
        ("user", "One"),
        ("assistant", "Fine."),
        ("user", "Two"),
        ("assistant", "Yes."),
        ("system", "Hm."),
        ("user", "Three"),
    ]
    assert second.previous_response_id == first.id


def test_one_may_be_continued_twice_and_outlive_its_beginning(
    hermes: Daemon, create: Created
) -> None:
    first = create(input="One")
    second = create(input="Two", previous_response_id=first.id)
    hermes.openai.responses.delete(first.id)
    for text in ("Three", "Four"):
        create(input=text, previous_response_id=second.id)
        said = [message["content"] for message in hermes.given[0]]
        assert said == ["One", "Fine.", "Two", "Fine.", text]


@pytest.mark.parametrize("told", [{"type": "item_reference"}, {"type": None}, {}], ids=str)
def test_items_by_reference(hermes: Daemon, create: Created, told: dict[str, Any]) -> None:
    """As clients have them that keep ids alone. OpenAI's reference needs no type."""
    hermes.say("<think>\nWell.\n</think>\n\nYes.")
    made = create()
    references = [{"id": item.id, **told} for item in made.output]
    create(input=[USER, *references, USER], store=False)
    answer = hermes.given[0][1]
    assert (answer["content"], answer["reasoning_content"]) == ("Yes.", "Well.")
    hermes.openai.responses.delete(made.id)
    with pytest.raises(BadRequestError) as refused:
        create(input=[USER, *references])
    assert refused.value.param == "input[1].id"


def test_input_items_are_all_that_the_model_was_given(hermes: Daemon, create: Created) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    first = create(input=[USER, call, output])
    second = create(input=[{"id": "msg_own", **USER}], previous_response_id=first.id)
    listed = hermes.openai.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == [
        *("message", "function_call", "function_call_output", "message", "message"),
    ]
    assert listed[0].content[0].text == "Hi"
    assert listed[3] == first.output[0]
    assert listed[4].id == "msg_own"
    assert len({item.id for item in listed}) == len(listed)


def test_input_items_come_in_pages(hermes: Daemon, create: Created) -> None:
    made = create(input=[{"role": "user", "content": str(n)} for n in range(5)])
    items = hermes.openai.responses.input_items

    def numbers(page: Any) -> list[str]:
        return [item.content[0].text for item in page.data]

    page = items.list(made.id, limit=2)
    assert (numbers(page), page.has_more) == (["4", "3"], True)
    assert (page.first_id, page.last_id) == (page.data[0].id, page.data[1].id)
    assert [item.content[0].text for item in page] == ["4", "3", "2", "1", "0"]
    page = items.list(made.id, order="asc", after=page.first_id)
    assert (numbers(page), page.has_more) == ([], False)
    page = items.list(made.id, order="asc")
    assert (numbers(page), page.has_more) == (["0", "1", "2", "3", "4"], False)


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=many", "limit"), ("order=up", "order"), ("after=x", "after")],
)
def test_a_wrong_page_is_refused(hermes: Daemon, create: Created, query: str, param: str) -> None:
    answer = httpx.get(f"{path(hermes, create().id)}/input_items?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_response_is_not_streamed_again(hermes: Daemon, create: Created) -> None:
    answer = httpx.get(path(hermes, create().id), params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")


def test_what_is_not_there_is_404_everywhere(hermes: Daemon) -> None:
    absent = path(hermes, "resp_0")
    answers = [httpx.get(absent), httpx.delete(absent), httpx.post(f"{absent}/cancel"),
               httpx.get(f"{absent}/input_items")]  # fmt: skip
    assert [answer.status_code for answer in answers] == [404] * 4
    assert {answer.json()["error"]["code"] for answer in answers} == {"response_not_found"}


def test_every_method_of_a_path_is_named(hermes: Daemon) -> None:
    answer = httpx.put(path(hermes, "resp_0"))
    assert answer.status_code == 405
    assert answer.headers["allow"] == "DELETE, GET, HEAD"


SEALED = {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "x" * 1000}
THOUGHTS = {
    "type": "reasoning",
    "id": "rs_y",
    "summary": [{"type": "summary_text", "text": ""}] * 1000,
}


def test_what_is_only_named_may_be_no_longer_than_a_body() -> None:
    with Daemon.serving(max_body_bytes=4000) as small:
        create = partial(small.openai.responses.create, model="bytes")
        ids = [create(input=[SEALED, USER]).id]
        with pytest.raises(BadRequestError) as often:
            create(input=[{"type": "item_reference", "id": "rs_x"}] * 4)
        with pytest.raises(BadRequestError) as long:  # noqa: PT012
            for _ in range(4):
                ids.append(create(input=[SEALED, USER], previous_response_id=ids[-1]).id)
        assert len(ids) == 3
        create(input="Hi", previous_response_id=ids[1])
    assert (often.value.param, long.value.param) == ("input", "previous_response_id")
    assert "4000 bytes" in often.value.message


def test_what_is_only_named_may_have_no_more_parts_than_a_body(
    hermes: Daemon, create: Created
) -> None:
    """The item has some 3,000: a text has three."""
    create(input=[THOUGHTS, USER])
    reference = {"type": "item_reference", "id": "rs_y"}
    create(input=[reference, USER])
    with pytest.raises(BadRequestError) as refused:
        create(input=[reference] * 40)
    assert "100000 objects" in refused.value.message


def test_nobody_finds_the_responses_of_another_key(tmp_path: Path) -> None:
    keys = key_file(tmp_path, alice={}, bob={})
    with (
        Daemon.serving(api_keys_file=keys) as made,
        client_of(made.url, "alice") as alice,
        client_of(made.url, "bob") as bob,
    ):
        id = alice.post("/v1/responses", json={"input": "Hi"}).json()["id"]
        stored = f"/v1/responses/{id}"
        assert bob.get(stored).status_code == 404
        assert bob.get(f"{stored}/input_items").status_code == 404
        assert bob.delete(stored).status_code == 404
        followed = bob.post("/v1/responses", json={"input": "Hi"} | {"previous_response_id": id})
        assert followed.json()["error"]["code"] == "previous_response_not_found"
        assert alice.get(stored).status_code == 200
