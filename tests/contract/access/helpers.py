"""Keys for a daemon, and what no well-mannered client would send."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from server.access.keys import digest_of
from tests.contract.scripted import CLIENT_SECONDS
from tests.polling import until

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, object] = {"messages": MESSAGES}


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def secret_of(name: str) -> str:
    return f"sk-test-{name}"


def key_file(folder: Path, **keys: dict[str, object]) -> Path:
    """A file with a key for each name, whose secret is `secret_of` it."""
    entries = [
        {"name": name, "sha256": digest_of(secret_of(name)), **fields}
        for name, fields in keys.items()
    ]
    path = folder / "keys.yaml"
    path.write_text(yaml.safe_dump(entries))
    return path


def client_of(base_url: str, name: str) -> httpx.Client:
    """Who has the key of that name."""
    return httpx.Client(base_url=base_url, headers=bearer(secret_of(name)), timeout=CLIENT_SECONDS)


def status_of(base_url: str, *lines: str) -> int:
    """The status of the answer to these lines."""
    address = urlsplit(base_url)
    with socket.create_connection((address.hostname, address.port), CLIENT_SECONDS) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        with connection.makefile("rb") as received:
            return int(received.readline().split()[1])


def refusals(base_url: str) -> dict[tuple[str, str], float]:
    """What /metrics says of who was not let in, by reason and name of the key."""
    counts = {}
    for line in httpx.get(f"{base_url}/metrics").text.splitlines():
        if line.startswith("rootstock_access_refused_total{"):
            labels, value = line.partition("{")[2].split("} ")
            pairs = dict(label.split("=") for label in labels.split(","))
            counts[pairs["reason"].strip('"'), pairs["key"].strip('"')] = float(value)
    return {labels: count for labels, count in counts.items() if count}


def line_with(caplog: pytest.LogCaptureFixture, text: str) -> str:
    """The access line that has the text. It is written when nobody is there to be told."""
    return until(lambda: next((line for line in access_lines(caplog) if text in line), ""))


def access_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = tuple(caplog.records)
    return [record.message for record in records if record.name == "rootstock.access"]
