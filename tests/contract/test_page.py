"""`GET /`, `/docs` and their files: served without a key, unless the page is turned off."""

import re
from collections.abc import Iterator

import httpx
import pytest

from server.settings import Settings
from tests.contract.daemon import running
from tests.contract.fake_engine import FakeEngine
from tests.contract.scripted import CLIENT_SECONDS

TYPES = {
    "css": "text/css",
    "js": "text/javascript|application/javascript",
    "svg": r"image/svg\+xml",
}
IMPORT = re.compile(r"""\bfrom ["'](\.{1,2}/[^"']+)["']""")


@pytest.fixture(scope="module")
def without(no_settings_from_outside: None) -> Iterator[httpx.Client]:
    """A daemon that has no page."""
    with (
        running(FakeEngine(), Settings(port=0, dashboard=False)) as url,
        httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as client,
    ):
        yield client


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_loads_nothing_from_elsewhere_and_stands_in_no_frame(
    http: httpx.Client, path: str
) -> None:
    page = http.get(path)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"].split("; ")
    assert {"default-src 'self'", "frame-ancestors 'none'", "form-action 'none'"} <= {*policy}
    assert page.headers["x-content-type-options"] == "nosniff"
    again = http.get(path, headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_description_has_no_script_or_style_of_its_own(http: httpx.Client) -> None:
    page = http.get("/docs").text
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|//", page)


@pytest.mark.parametrize(("page", "n_files"), [("/", 20), ("/docs", 4)])
def test_all_that_a_page_loads_is_there_with_its_type(
    http: httpx.Client, page: str, n_files: int
) -> None:
    """From the page over every import, as a browser goes."""
    found = re.findall(r'(?:src|href)="([^"]+)"', http.get(page).text)
    joined = [httpx.URL("/").join(path).path for path in found]
    paths = [path for path in joined if path.endswith(tuple(TYPES))]
    for path in paths:  # which grows
        answer = http.get(path)
        assert answer.status_code == 200, path
        ending = path.rpartition(".")[2].removeprefix("m")
        assert re.match(TYPES[ending], answer.headers["content-type"]), path
        assert answer.headers["x-content-type-options"] == "nosniff"
        imported = [httpx.URL(path).join(name).path for name in IMPORT.findall(answer.text)]
        paths += [name for name in imported if name not in paths]
    assert len(paths) > n_files


def test_it_can_be_left_out(without: httpx.Client) -> None:
    for path in ("/", "/admin/cache/tree", "/admin/cache/tree/stream", "/admin/cache/nodes/1"):
        assert without.get(path).status_code == 404
    assert without.get("/admin/cache/stats").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        *(
            "",
            "none.js",
            ".",
            "..%2fapp.py",
            "%2e%2e/app.py",
            "%2fetc/passwd",
            "%00",
            "net",
            "a" * 5000,
        ),
        *("..%5capp.py", "docs", "docs/docs.js/docs.css"),
    ],
)
def test_nothing_else_of_the_disk_is_served(http: httpx.Client, path: str) -> None:
    answer = http.get(f"/dashboard/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"
