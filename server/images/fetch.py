"""Fetches images from hosts that the settings allow, and from public addresses alone."""

import socket
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import BinaryIO, TypeAlias

import httpx
from anyio import current_time, fail_after, getaddrinfo
from blake3 import blake3

from engine.api import InvalidImage
from server.access.hosts import BELOW
from server.fairness import FairLimiter
from server.images.encoded import MAX_IMAGE_BYTES, too_large_image

FETCH_SECONDS = 20.0
"""Of one image, redirects included: a host that sends a byte now and then is cut off."""

MAX_REDIRECTS = 3
MAX_URL_CHARACTERS = 8192

AT_ONCE = 8
EACH_AT_ONCE = 2
"""Images that are fetched at once, of all clients and of one."""

REMEMBERED_SECONDS = 300.0
MAX_REMEMBERED = 1024
"""For how long, and of how many URLs, it is remembered what was there: a conversation sends its
images with each turn."""

Address: TypeAlias = IPv4Address | IPv6Address

_GLOBAL_IPV6 = IPv6Network("2000::/3")
_SPECIAL_IPV4 = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24")))
"""Of protocols; Python's releases differ in which of them are public."""
_EMBEDDING_IPV4 = tuple(map(IPv6Network, ("2002::/16", "2001::/23", "64:ff9b::/96")))
"""6to4, Teredo and NAT64: addresses behind which may be any IPv4 address."""


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet: no private, local or shared one, and none
    that stands for another.
    """
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address not in _GLOBAL_IPV6 or any(address in net for net in _EMBEDDING_IPV4):
            return False
    elif any(address in net for net in _SPECIAL_IPV4):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


class ImageFetcher:
    """Fetches images by http and https from `hosts`: exact names, or `*.example.org` for every name
    below example.org. Belongs to one event loop.

    A name is looked up once for each request to it, and the connection goes to the address that was
    checked, so that a name whose address changes gains nothing.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        names = [host.lower().strip("[]") for host in hosts]
        self._names = frozenset(name for name in names if not name.startswith(BELOW))
        self._domains = tuple(name.removeprefix("*") for name in names if name.startswith(BELOW))
        self._limiter = FairLimiter(AT_ONCE, EACH_AT_ONCE)
        self._known: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self.outcomes = Counter(fetched=0, refused=0, failed=0)

    def known(self, url: str) -> bytes | None:
        """The digest of what was at the URL a short time ago."""
        until, digest = self._known.get(url, (0.0, None))
        return digest if current_time() < until else None

    async def fetch(self, url: str, target: Path, client: str) -> tuple[bytes, int]:
        """Write what is at the URL into a file. Returns its digest and size. Raises InvalidImage.

        `client` is whose request it is: one client holds a part of all slots at most.
        """
        outcome = "refused"
        try:
            self._check(_parsed(url))
            outcome = "failed"
            async with self._limiter.slot(client):
                found = await self._in_time(url, target)
            outcome = "fetched"
        finally:
            self.outcomes[outcome] += 1
        self._known[url] = current_time() + REMEMBERED_SECONDS, found[0]
        self._known.move_to_end(url)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return found

    async def _in_time(self, url: str, target: Path) -> tuple[bytes, int]:
        try:
            with fail_after(FETCH_SECONDS):
                return await self._followed(url, target)
        except TimeoutError:
            message = f"fetching the image took more than {FETCH_SECONDS:g} seconds"
        except httpx.HTTPError as error:
            message = f"the image cannot be fetched: {type(error).__name__}"
        raise InvalidImage(message)

    async def _followed(self, url: str, target: Path) -> tuple[bytes, int]:
        async with httpx.AsyncClient(
            trust_env=False,  # a proxy would look the name up again
            timeout=FETCH_SECONDS,
            follow_redirects=False,
        ) as http:
            place = _parsed(url)
            for _ in range(MAX_REDIRECTS + 1):
                request = await self._request(http, place)
                answer = await http.send(request, stream=True)
                try:
                    if not answer.has_redirect_location:
                        return await _received(answer, target)
                    place = _parsed(answer.headers["location"], place)
                finally:
                    await answer.aclose()
        raise InvalidImage(f"the image's URL redirects more than {MAX_REDIRECTS} times")

    async def _request(self, http: httpx.AsyncClient, url: httpx.URL) -> httpx.Request:
        """The request to the address that the URL's host has now. Raises InvalidImage."""
        self._check(url)
        address = await _public_address(url)
        request = http.build_request(
            "GET",
            url.copy_with(host=address),
            headers={
                "Host": url.netloc.decode("ascii"),
                "Accept": "image/*",
                "Accept-Encoding": "identity",
                "User-Agent": "rootstock",
            },
        )
        request.extensions["sni_hostname"] = url.raw_host.decode("ascii")
        return request

    def _check(self, url: httpx.URL) -> None:
        host = url.host.lower().removesuffix(".")
        if host not in self._names and not host.endswith(self._domains or ("\0",)):
            raise InvalidImage(
                f"images are not fetched from the host '{host[:128]}' (fetch_images); send the "
                "image's data"
            )
        if url.userinfo:
            raise InvalidImage("the image's URL has a user name or a password")


def _parsed(url: str, base: httpx.URL | None = None) -> httpx.URL:
    """The URL, or the place where a redirect leads. Raises InvalidImage."""
    try:
        parsed = httpx.URL(url) if base is None else base.join(url)
    except (httpx.InvalidURL, ValueError):
        raise InvalidImage("the image's URL cannot be read") from None
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise InvalidImage("the image's URL is none of http or https")
    if len(str(parsed)) > MAX_URL_CHARACTERS:
        raise InvalidImage("the image's URL is too long")
    return parsed


async def _public_address(url: httpx.URL) -> str:
    """An address of the URL's host. Raises InvalidImage unless all that it has are public."""
    port = url.port or (443 if url.scheme == "https" else 80)
    found = list[Address]()
    with suppress(OSError, UnicodeError):
        for *_, socket_address in await getaddrinfo(
            url.raw_host.decode("ascii").strip("[]"), port, type=socket.SOCK_STREAM
        ):
            found.append(ip_address(str(socket_address[0]).partition("%")[0]))
    if not found:
        raise InvalidImage(f"the host '{url.host[:128]}' is not known")
    if not all(map(is_public, found)):
        raise InvalidImage(f"the host '{url.host[:128]}' has an address that is not public")
    return str(found[0])


async def _received(answer: httpx.Response, target: Path) -> tuple[bytes, int]:
    if answer.status_code != httpx.codes.OK:
        raise InvalidImage(f"the image cannot be fetched: status {answer.status_code}")
    declared = answer.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > MAX_IMAGE_BYTES:
        raise too_large_image()
    with _opened(target) as file:
        return await _written(answer, file)


def _opened(target: Path) -> BinaryIO:
    return target.open("wb")


async def _written(answer: httpx.Response, file: BinaryIO) -> tuple[bytes, int]:
    digest, n_bytes = blake3(), 0
    async for chunk in answer.aiter_raw():
        n_bytes += len(chunk)
        if n_bytes > MAX_IMAGE_BYTES:
            raise too_large_image()
        digest.update(chunk)
        file.write(chunk)
    if not n_bytes:
        raise InvalidImage("the image is empty")
    return digest.digest(), n_bytes
