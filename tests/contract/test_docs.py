"""`/docs`, the API's description for people: served whole by the daemon itself."""

import re
from urllib.parse import urljoin

import httpx
import pytest

KINDS = "text/css|(text|application)/javascript|image/svg"
POLICY = "default-src 'self'"


@pytest.fixture(scope="module")
def page(http: httpx.Client) -> httpx.Response:
    return http.get("/docs")


def test_it_is_a_page_that_may_load_nothing_from_elsewhere(page: httpx.Response) -> None:
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert POLICY in page.headers["content-security-policy"].split("; ")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|//", page.text)


def test_what_it_loads_is_there(http: httpx.Client, page: httpx.Response) -> None:
    paths = re.findall(r'(?:src|href)="(/dashboard/[^"]+)"', page.text)
    assert {path.rpartition(".")[2] for path in paths} == {"css", "js", "svg"}
    for path in paths:
        answer = http.get(path)
        assert answer.status_code == 200
        assert re.match(KINDS, answer.headers["content-type"])
        assert answer.headers["x-content-type-options"] == "nosniff"
        paths += [
            urljoin(path, name) for name in re.findall(r'^import .* from "(.+)"', answer.text, re.M)
        ]
    assert len(paths) > 4


def test_a_file_is_sent_once(http: httpx.Client, page: httpx.Response) -> None:
    again = http.get("/docs", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        *("", "none.js", ".", "..%2fapp.py", "%2e%2e/app.py", "%2fetc/passwd", "%00", "a" * 5000),
        *("..%5capp.py", "docs", "docs/docs.js/docs.css"),
    ],
)
def test_nothing_else_of_the_disk_is_served(http: httpx.Client, path: str) -> None:
    answer = http.get(f"/dashboard/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"
