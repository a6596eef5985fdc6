"""What the page is made of: libraries as they were published, small files, text as text."""

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[2] / "server" / "dashboard"
VENDOR = DASHBOARD / "vendor"
MANIFEST = VENDOR / "manifest.json"
PACKAGES: list[dict[str, Any]] = json.loads(MANIFEST.read_text("utf-8"))
LICENCES = {"Apache-2.0", "MIT"}
MOST_FOREIGN_BYTES = 120_000
MOST_LINES = 400
OWN = sorted(path for path in DASHBOARD.rglob("*.*") if VENDOR not in path.parents)
MARKUP_FROM_TEXT = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|\beval\(|new Function"
    r"|createContextualFragment|DOMParser"
)
INLINE = re.compile(r"<script(?![^>]*\bsrc=)|<style|\sstyle=[\"']|\son[a-z]+=[\"']")
ELSEWHERE = re.compile(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", re.IGNORECASE)
NAMES_OF_FORMATS = ("http://www.w3.org/2000/svg",)


def test_libraries_are_as_they_were_published() -> None:
    hashes = {
        name: file["sha256"] for package in PACKAGES for name, file in package["files"].items()
    }
    assert hashes == {name: sha256((VENDOR / name).read_bytes()).hexdigest() for name in hashes}


def test_every_library_has_a_version_and_its_licence_and_all_are_small() -> None:
    for package in PACKAGES:
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        assert package["licence"] in LICENCES
        assert (VENDOR / package["licence_file"]).read_text("utf-8").strip()
    files = [VENDOR / name for package in PACKAGES for name in package["files"]]
    assert sum(path.stat().st_size for path in files) <= MOST_FOREIGN_BYTES


def test_nothing_stands_there_that_the_manifest_does_not_name() -> None:
    named = {name for package in PACKAGES for name in (*package["files"], package["licence_file"])}
    assert {path.name for path in VENDOR.iterdir()} == named | {MANIFEST.name}


def test_own_files_are_small_and_make_no_markup_of_text() -> None:
    assert OWN
    for path in OWN:
        text = path.read_text("utf-8")
        assert len(text.splitlines()) <= MOST_LINES, path
        assert not MARKUP_FROM_TEXT.search(text), path
        assert not INLINE.search(text), path
        for name in NAMES_OF_FORMATS:
            text = text.replace(name, "")
        assert not ELSEWHERE.search(text), path
