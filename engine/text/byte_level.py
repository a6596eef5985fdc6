"""The alphabet of byte-level vocabularies. It needs no tokenizer."""


def _byte_of() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF = _byte_of()


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token as the ByteLevel decoder reads them: a token with any
    character outside the byte alphabet is plain text.
    """
    if BYTE_OF.keys() >= set(token):
        return bytes(BYTE_OF[character] for character in token)
    return token.encode()
