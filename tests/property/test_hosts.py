"""By which names an unguarded daemon may be called: whatever is sent, nobody's page has that name
but who is on this network.
"""

import ipaddress
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.access.admission import Hosts
from server.access.hosts import is_host_name

LABELS = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=12)
PRIVATE = st.sampled_from(["localhost", "local", "internal", "LOCAL", "Internal"])
PUBLIC = st.sampled_from(["com", "org", "example", "locall", "internals", "arpa", "dev"])
PORTS = st.sampled_from(["", ":80", ":8000", ":65535"])
LISTENING = st.sampled_from(["127.0.0.1", "::1", "localhost", "192.168.1.2", "0.0.0.0", "::"])


def dotted(labels: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(labels, min_size=1, max_size=4).map(".".join)


@given(LISTENING, dotted(LABELS), PUBLIC, PORTS)
def test_no_name_of_the_public_dns_is_taken(
    listening: str, below: str, domain: str, port: str
) -> None:
    assert not Hosts(listening).has(f"{below}.{domain}{port}")


@given(LISTENING, dotted(LABELS), PRIVATE, PORTS)
def test_private_names_are_taken(listening: str, below: str, domain: str, port: str) -> None:
    assert Hosts(listening).has(f"{below}.{domain}{port}")
    assert not Hosts(listening).has(f"{below}{domain}.example{port}")


@given(LISTENING, st.text(max_size=40))
def test_whatever_is_taken_is_an_address_or_a_private_name(listening: str, header: str) -> None:
    if Hosts(listening).has(header):
        host = header.lower()
        host = host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
        private = host.rpartition(".")[2] in {"localhost", "local", "internal"}
        assert private or ipaddress.ip_address(host)


@given(st.ip_addresses(), PORTS)
def test_addresses_are_taken_where_the_daemon_listens_on_all(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: str
) -> None:
    header = f"[{address}]{port}" if address.version == 6 else f"{address}{port}"
    assert Hosts("0.0.0.0").has(header)
    assert Hosts("::").has(header)
    assert Hosts(str(address)).has(header)
    assert Hosts("127.0.0.1").has(header) == address.is_loopback


@given(dotted(LABELS), PUBLIC, LABELS, PORTS)
def test_names_that_were_allowed_are_taken_in_any_case(
    name: str, domain: str, below: str, port: str
) -> None:
    host = f"{name}.{domain}"
    assert is_host_name(host)
    exactly = Hosts("127.0.0.1", [host.upper()])
    assert exactly.has(f"{host}{port}")
    assert exactly.has(f"{host.upper()}{port}")
    assert not exactly.has(f"{below}.{host}{port}")
    assert not exactly.has(f"{below}{host}{port}")
    assert is_host_name(f"*.{host}")
    all_below = Hosts("127.0.0.1", [f"*.{host}"])
    assert all_below.has(f"{below}.{host}{port}")
    assert not all_below.has(f"{host}{port}")
    assert not all_below.has(f"{below}{host}{port}")


@pytest.mark.parametrize(
    "header", ["", ":8000", ".local", "..local", "-.local", "a..local", "local", "[localhost]x"]
)
def test_what_is_no_name_is_not_taken(header: str) -> None:
    assert not Hosts("0.0.0.0").has(header)


@pytest.mark.parametrize("text", ["a:80", "http://a", "*", "a.*", "*.", "", "a b", "*.a*"])
def test_what_cannot_be_allowed(text: str) -> None:
    assert not is_host_name(text)
