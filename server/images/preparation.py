"""Makes of the images in a request what the model is shown."""

from collections import Counter
from pathlib import Path
from typing import TypeAlias

from anyio import Lock

from engine.api import Engine, InvalidImage
from engine.values.images import Detail, PreparedImage
from server.errors import InvalidField
from server.fairness import Workers
from server.generation.conversation import ImageData, ImagePart, ImageUrl, StoredImage
from server.generation.images import UnpreparedImages
from server.http.attachments import Attachments
from server.images.encoded import decode_image
from server.images.fetch import ImageFetcher
from server.images.store import ImageStore
from server.record import KnownImage, RequestRecord

_Key: TypeAlias = tuple[str, Detail, bytes]
"""A model's fingerprint, the detail, and the digest of an image's bytes."""

MAX_REMEMBERED = 4096
"""Prepared images of which the tokens are remembered, whose arrays may be there."""


class Images:
    """The images of all requests. Belongs to one event loop."""

    def __init__(self, store: ImageStore, fetcher: ImageFetcher, workers: Workers) -> None:
        self.store = store
        self.fetcher = fetcher
        self.outcomes = Counter(shown=0, refused=0, failed=0)
        """The images of requests so far, by what came of them."""
        self._workers = workers
        self._prepared: dict[_Key, PreparedImage] = {}  # the least recently used first
        self._locks: dict[_Key, tuple[Lock, int]] = {}

    async def prepare(
        self,
        needed: UnpreparedImages,
        record: RequestRecord,
        attachments: Attachments | None = None,
    ) -> None:
        """Prepare the images, note them in the record, and keep their files until the request is
        over. Raises ApiError and EngineError.
        """
        for part in needed.images:
            key = (part.source, part.detail)
            if key not in record.images:
                record.images[key] = await self._known(part, needed.engine, record, attachments)

    async def _known(
        self,
        part: ImagePart,
        engine: Engine,
        record: RequestRecord,
        attachments: Attachments | None,
    ) -> KnownImage:
        outcome = "failed"
        try:
            original = await self._original(part, record, attachments)
            prepared = await self._shown(original, part.detail, engine, record)
            outcome = "shown"
        except InvalidImage as error:
            outcome = "refused"
            raise InvalidField(part.place, str(error), "invalid_image") from error
        finally:
            self.outcomes[outcome] += 1
        return KnownImage(original, prepared)

    async def _original(
        self, part: ImagePart, record: RequestRecord, attachments: Attachments | None
    ) -> bytes:
        """The digest of the image's bytes, whose file is pinned."""
        match part.source:
            case ImageData(text):
                digest = await self._decoded(text, record, attachments)
            case StoredImage(digest):
                if digest.hex() not in self.store:
                    raise InvalidImage(
                        "the image of this stored item is no longer kept; send it again"
                    )
            case ImageUrl(url):
                digest = await self._fetched(url, record)
        record.held.enter_context(self.store.pinned(digest.hex()))
        return digest

    async def _decoded(
        self, text: str, record: RequestRecord, attachments: Attachments | None
    ) -> bytes:
        source = attachments.files.get(text, text) if attachments else text
        target = self.store.new_file()
        n_bytes = len(source) if isinstance(source, str) else source.stat().st_size
        try:
            digest, n_bytes = await self._workers.run(
                record.client, n_bytes, lambda: decode_image(source, target)
            )
            self._add(digest, target, n_bytes)
        finally:
            target.unlink(missing_ok=True)
        return digest

    async def _fetched(self, url: str, record: RequestRecord) -> bytes:
        known = self.fetcher.known(url)
        if known is not None and known.hex() in self.store:
            return known
        target = self.store.new_file()
        try:
            digest, n_bytes = await self.fetcher.fetch(url, target, record.client)
            self._add(digest, target, n_bytes)
        finally:
            target.unlink(missing_ok=True)
        return digest

    def _add(self, digest: bytes, target: Path, n_bytes: int) -> None:
        target.replace(self.store.path(digest.hex()))
        self.store.add(digest.hex(), n_bytes)

    async def _shown(
        self, original: bytes, detail: Detail, engine: Engine, record: RequestRecord
    ) -> PreparedImage:
        """The prepared image, whose array is pinned. Requests that need the same one at once
        prepare it once.
        """
        key = (engine.card.fingerprint, detail, original)
        lock, n_users = self._locks.get(key, (Lock(), 0))
        self._locks[key] = lock, n_users + 1
        try:
            async with lock:
                prepared = self._prepared.pop(key, None)
                if prepared is None or _name(prepared) not in self.store:
                    source, folder = str(self.store.path(original.hex())), str(self.store.folder)
                    prepared = await engine.prepare_image(source, folder, detail)
                    name = _name(prepared)
                    self.store.add(name, self.store.path(name).stat().st_size)
                self._prepared[key] = prepared
                while len(self._prepared) > MAX_REMEMBERED:
                    del self._prepared[next(iter(self._prepared))]
                record.held.enter_context(self.store.pinned(_name(prepared)))
                return prepared
        finally:
            lock, n_users = self._locks.pop(key)
            if n_users > 1:
                self._locks[key] = lock, n_users - 1


def _name(prepared: PreparedImage) -> str:
    return prepared.image.file.rpartition("/")[2]
