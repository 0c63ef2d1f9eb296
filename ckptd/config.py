"""What the environment says: the job's secret, and the keys that are derived from it.

The secret itself never leaves a process that was given it. Whatever has to prove something to
another process does so with a key of one purpose, so that who learns one key can do one thing.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from ckptd.errors import UsageError

__all__ = ["SECRET_VARIABLE", "checked_secret", "derived_key", "given_secret"]

SECRET_VARIABLE = "CKPTD_SECRET"
_LEAST_SECRET = 16
_MOST_SECRET = 1024


def given_secret() -> bytes | None:
    """Return the job's secret as ``CKPTD_SECRET`` gives it; None where it is not set.

    Raises
    ------
    UsageError
        kind ``bad-secret``: it is too short or too long.
    """
    given = os.environ.get(SECRET_VARIABLE)
    return checked_secret(os.fsencode(given), SECRET_VARIABLE) if given else None


def checked_secret(secret: bytes, where: str) -> bytes:
    """Return `secret`, any text of 16 to 1024 bytes.

    Raises
    ------
    UsageError
        kind ``bad-secret``: it is too short or too long.
    """
    if not _LEAST_SECRET <= len(secret) <= _MOST_SECRET:
        raise UsageError(
            "the secret has the wrong length",
            kind="bad-secret",
            where=where,
            wanted=f"from {_LEAST_SECRET} to {_MOST_SECRET} bytes",
            found=f"{len(secret)} bytes",
            hint=f"export {SECRET_VARIABLE}=$(openssl rand -hex 32), the same on all nodes",
        )
    return secret


def derived_key(secret: bytes, *purpose: str) -> bytes:
    """Return 32 bytes for one purpose, from which nobody learns `secret` or another purpose's key.

    HMAC-SHA256 of the parts, each with its length before it, as the expansion step of HKDF
    (RFC 5869): no part can pass for the end of another.
    """
    mac = hmac.new(secret, b"ckptd key", hashlib.sha256)
    for part in purpose:
        data = part.encode()
        mac.update(len(data).to_bytes(8, "little") + data)
    return mac.digest()
