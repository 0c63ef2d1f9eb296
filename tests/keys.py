"""Keys that sign, and a forger that finds other bytes with the same XXH3."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def key_pair(folder: Path, name: str, private: object = None) -> tuple[str, str]:
    """Return the paths of a private and a public key."""
    made = private or ed25519.Ed25519PrivateKey.generate()
    paths = folder / f"{name}.pem", folder / f"{name}.pub"
    with os.fdopen(os.open(paths[0], os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
        file.write(
            made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())  # type: ignore[attr-defined]
        )
    public = made.public_key()  # type: ignore[attr-defined]
    paths[1].write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return str(paths[0]), str(paths[1])


def forged(data: bytes) -> bytes:
    """Return other bytes with the same XXH3-128: five words of a lane repair its two sums."""
    secret = bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    )
    word = (1 << 64) - 1
    block, lane = bytearray(data[:1024]), 3

    def key(stripe: int) -> int:
        return int(struct.unpack_from("<Q", secret, 8 * stripe + 8 * lane)[0])

    def product(n: int, value: int) -> int:
        mixed = value ^ key(n)
        return (mixed & 0xFFFFFFFF) * (mixed >> 32) & word

    words = [struct.unpack_from("<Q", block, 64 * n + 8 * lane)[0] for n in range(16)]
    total = sum(words) & word
    products = sum(product(n, words[n]) for n in range(16)) & word
    words[5:] = [0x4141414141414141] * 11
    products = (products - sum(product(n, words[n]) for n in range(5, 16))) & word
    high, carry = products & 0x7FFFFFFF, products >> 31
    other = min(carry, 0xFFFFFFFF)
    words[0] = key(0) ^ (1 | high << 32)
    words[1] = key(1) ^ (1 << 31 | other << 32)
    words[2] = key(2) ^ (1 << 31 | (carry - other) << 32)
    total = (total - sum(words[:3]) - sum(words[5:])) & word
    words[3] = (key(3) & ~0xFFFFFFFF & word) | (total - (key(4) & 0xFFFFFFFF)) & 0xFFFFFFFF
    words[4] = (total - words[3]) & word
    for n, value in enumerate(words):
        struct.pack_into("<Q", block, 64 * n + 8 * lane, value)
    return bytes(block) + data[1024:]
