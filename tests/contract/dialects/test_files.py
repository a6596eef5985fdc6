"""A file that is text is read in a chat and in a response; another is refused by its place."""

import base64
from typing import Any

import httpx
import pytest

from tests.contract.scripted import Daemon

TEXT = "Größe: 3\n{}"
DATA = base64.b64encode(TEXT.encode()).decode()


def sent(daemon: Daemon, path: str, file: dict[str, Any]) -> httpx.Response:
    part: dict[str, Any]
    if path == "/v1/responses":
        part = {"type": "input_file", **file}
        body: dict[str, Any] = {"input": [{"role": "user", "content": [part]}]}
    else:
        part = {"type": "file", "file": file}
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "See"}, part]}]}
    return daemon.http.post(path, json={"model": "bytes", **body})


PATHS = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])


@PATHS
@pytest.mark.parametrize(
    "data",
    [
        DATA,
        f"data:text/plain;base64,{DATA}",
        f"data:text/markdown;charset=utf-8;base64,{DATA}",
        f"data:application/json;base64,{DATA}",
        f"data:;base64,{DATA}",
        "data:text/plain,Gr%C3%B6%C3%9Fe: 3%0A{}",
    ],
)
def test_a_text_is_read_with_its_name(hermes: Daemon, path: str, data: str) -> None:
    answer = sent(hermes, path, {"filename": "sizes.txt", "file_data": data})
    assert answer.status_code == 200, answer.text
    assert hermes.given[0][-1]["content"].endswith(f"sizes.txt\n{TEXT}")


@PATHS
@pytest.mark.parametrize(
    "file",
    [
        {"file_data": "data:application/pdf;base64,JVBERi0="},
        {"file_data": base64.b64encode(b"\xff\xfe").decode()},
        {"file_data": "no base64!"},
        {"file_id": "file-1"},
        {"file_url": "http://example.com/a.txt"},
        {},
    ],
    ids=repr,
)
def test_another_file_is_refused(hermes: Daemon, path: str, file: dict[str, Any]) -> None:
    answer = sent(hermes, path, {"filename": "a", **file})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "unsupported"
    assert "content[" in error["param"]


def test_files_in_a_tools_output_are_read_or_replaced(hermes: Daemon) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    files = [
        {"type": "input_file", "file_data": DATA},
        {"type": "input_file", "file_id": "file-1"},
        {"type": "input_image", "image_url": "x"},
    ]
    result = {"type": "function_call_output", "call_id": "a", "output": files}
    body = {"model": "bytes", "input": [{"role": "user", "content": "Hi"}, call, result]}
    assert hermes.http.post("/v1/responses", json=body).status_code == 200
    note = "(An image or a file stood here. This model reads text alone.)"
    assert hermes.given[0][-1]["content"] == "\n".join((TEXT, note, note))
