"""The job's secret (``CKPTD_SECRET``, its file, length, checks), derived keys, MACs of requests.

In it: the least and longest secret, patterns that are refused, mode of its file; tokens of access
and of reading; the challenge of a daemon; errors of wrong or repeated MACs.

The secret itself never leaves a process that was given it. What has to prove something to another
process does so with a key of one purpose, so a key that leaks opens one thing only.

Every message to a daemon, and its answer, carries a MAC. Clocks of nodes may differ by minutes, so
no time is signed. Each life of a daemon draws a challenge that every MAC includes, so what was
recorded before a restart is worth nothing after it; within one life the signed body carries its
source and its number, and a number counts once.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from ckptd.base.net.address import is_loopback
from ckptd.errors import RefusedError, StoreError, UsageError

SECRET_VARIABLE = "CKPTD_SECRET"
_LEAST_SECRET = 16
_MOST_SECRET = 1024
_LEAST_RUNS = 10
_GOOD = f"export {SECRET_VARIABLE}=$(openssl rand -hex 32), the same on all nodes"
MAC_HEADER = "Ckptd-Mac"
"""Header of a signed request, and of its answer."""
CHALLENGE_PATH = "/api/v1/challenge"
"""GET, without a MAC: JSON ``{"challenge": text, "job": text}``."""
SHEETS_PATH = "/api/v1/sheets"
FOUND_PATH = "/api/v1/found"

_VERSION = "v1"
_MOST_SECRET_FILE = 4096
_MOST_HEADER = 256


def given_secret() -> bytes | None:
    """Return the job's secret as ``CKPTD_SECRET`` gives it; None where it is not set.

    Raises
    ------
    UsageError
        It is too short or too long.
    """
    given = os.environ.get(SECRET_VARIABLE)
    return checked_secret(os.fsencode(given), SECRET_VARIABLE) if given else None


def need_secret(
    host: str, what: str, environ: Mapping[str, str] = os.environ, *, where: str | None = None
) -> None:
    """Refuse to let `what` listen at `host` where others reach it and ``CKPTD_SECRET`` is not set.

    Parameters
    ----------
    where
        For the error, in place of `host`.

    Raises
    ------
    RefusedError
        A daemon, or a controller, is to listen where others reach it, and ``CKPTD_SECRET`` is not
        set.
    """
    if not is_loopback(host) and not environ.get(SECRET_VARIABLE):
        raise RefusedError(
            f"{what} would be reachable from the network without a secret",
            where=where or host,
            hint=f"set {SECRET_VARIABLE} to the same long random text on all nodes",
        )


def checked_secret(secret: bytes, where: str) -> bytes:
    """Return `secret`, any text of 16 to 1024 bytes that is no pattern.

    Raises
    ------
    UsageError
        It is too short or too long, or a word or a pattern that repeats.
    """
    if not _LEAST_SECRET <= len(secret) <= _MOST_SECRET:
        raise UsageError(
            "the secret has the wrong length",
            where=where,
            wanted=f"from {_LEAST_SECRET} to {_MOST_SECRET} bytes",
            found=f"{len(secret)} bytes",
            hint=_GOOD,
        )
    if not _varied(secret):
        raise UsageError(
            "the secret is too easy to guess",
            where=where,
            wanted="random text",
            found="a short text that repeats",
            hint=_GOOD,
        )
    return secret


def _varied(secret: bytes) -> bool:
    """Whether a secret has as many different runs of three bytes as few random ones lack."""
    folded = secret.lower()
    return len({folded[k : k + 3] for k in range(len(folded) - 2)}) >= _LEAST_RUNS


def derived_key(secret: bytes, *purpose: str) -> bytes:
    """Return 32 bytes for one purpose, which reveal neither `secret` nor another purpose's key.

    HMAC-SHA256 of the parts, each with its length before it, as the expansion step of HKDF
    (RFC 5869): no part can pass for the end of another.
    """
    mac = hmac.new(secret, b"ckptd key", hashlib.sha256)
    for part in purpose:
        data = part.encode()
        mac.update(len(data).to_bytes(8, "little") + data)
    return mac.digest()


def new_secret() -> str:
    """Return a fresh secret, as hexadecimal digits."""
    return secrets.token_hex(32)


def check_secret(text: str | None, where: str) -> bytes:
    """Return the secret that `text` spells in hexadecimal; `UsageError` when it is none."""
    try:
        secret = bytes.fromhex(text or "")
    except ValueError:
        secret = b""
    if len(secret) < _LEAST_SECRET or not _varied(secret):
        raise UsageError(
            "a server on the network needs a secret",
            where=where,
            wanted=f"secret: at least {2 * _LEAST_SECRET} hexadecimal digits, random",
        )
    return secret


def secret_path(job: str, folder: Path) -> Path:
    """Return where the secret of `job` lies below `folder`, a run folder."""
    return folder / f"secret-{hashlib.sha256(job.encode()).hexdigest()[:20]}"


def job_secret(job: str, folder: Path) -> bytes:
    """Return the job's secret: ``CKPTD_SECRET``, or that of a file, made on first use.

    Parameters
    ----------
    job
        Name of the job.
    folder
        A run folder of mode 0700. Processes that make the file at the same time agree on one.

    Raises
    ------
    UsageError
        It is too short or too long.
    RefusedError
        Another user made the file, or others may read it.
    """
    if (given := given_secret()) is not None:
        return given
    return secret_of(secret_path(job, folder))


def secret_of(path: Path) -> bytes:
    """Return the secret in a file of this user, made on first use, in a folder of this user.

    Raises
    ------
    UsageError
        It is too short or too long.
    RefusedError
        The file is a link, another user's, or one that others may read; or others may write into
        its folder, and so put a file of theirs there.
    """
    check_folder(path.parent)
    try:
        return _read(path)
    except FileNotFoundError:
        _make(path)
        return _read(path)


def check_folder(folder: Path) -> None:
    """Refuse a folder in which another user may put files, or that is a link.

    Raises
    ------
    RefusedError
        The folder for agents' sockets, or a job's secret, belongs to another user, is a link, or
        others may enter, write or read it.
    """
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise _not_ours(folder, info, "a folder", "0700")


def _make(path: Path) -> None:
    """Write a new secret; a name that another process took meanwhile is left as it is."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(new_secret().encode())
        os.link(draft, path)
    except FileExistsError:
        return
    except OSError as error:
        raise StoreError(
            "the job's secret cannot be kept here",
            where=str(path),
            wanted="a file system with room and with hard links",
            found=str(error),
            hint=f"set {SECRET_VARIABLE}",
        ) from error
    finally:
        draft.unlink()


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _not_ours(path, os.lstat(path), "a file", "0600") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise _not_ours(path, info, "a file", "0600")
        return checked_secret(os.read(fd, _MOST_SECRET_FILE).strip(), str(path))
    finally:
        os.close(fd)


def _not_ours(path: Path, info: os.stat_result, what: str, mode: str) -> RefusedError:
    return RefusedError(
        "the file of the job's secret is accessible to others",
        where=str(path),
        wanted=f"{what} of user {os.geteuid()} with mode {mode}, not a link",
        found=f"user {info.st_uid}, {stat.filemode(info.st_mode)}",
        hint=f"remove it, or set {SECRET_VARIABLE}",
    )


def access_token(secret: bytes) -> str:
    """Return what people and scripts show instead of a MAC; it does not tell the secret."""
    return _mac(secret, b"token")[:40]


def reader_token(token: str) -> str:
    """Return what lets its holder read where `token` lets its holder act as well."""
    return derived_key(token.encode(), "reader").hex()[:40]


def new_challenge() -> str:
    """Return the challenge of a new life of a daemon."""
    return secrets.token_hex(16)


def sign_request(secret: bytes, method: str, path: str, challenge: str, body: bytes) -> str:
    """Return the value of ``Ckptd-Mac`` for a request.

    Parameters
    ----------
    secret
        The job's.
    method, path
        As in the request line, without a query.
    challenge
        The daemon's present one; see `CHALLENGE_PATH`. An answer 401 says a new one, in the same
        form: sign again with that.
    body
        All of it, as sent.
    """
    mac = _mac(secret, b"request", method, path, challenge, hashlib.sha256(body).digest())
    return f"{_VERSION} {challenge} {mac}"


def check_request(
    header: str | None, secret: bytes, method: str, path: str, challenge: str, body: bytes
) -> None:
    """Check the value of ``Ckptd-Mac`` of a request.

    Raises
    ------
    RefusedError
        kind ``stale-mac``: it was made for another life of the daemon; kind ``bad-mac``: it is
        missing, or made with another secret or of another message.
    """
    version, _, rest = (header or "")[:_MOST_HEADER].partition(" ")
    sent, _, _ = rest.partition(" ")
    if version != _VERSION or not sent:
        raise _refused(f"a header {MAC_HEADER}: {_VERSION} CHALLENGE MAC")
    if not _same(sent, challenge):
        raise _refused("the challenge of this life of the daemon", "stale-mac")
    if not _same(header or "", sign_request(secret, method, path, challenge, body)):
        raise _refused("the MAC of this message with the job's secret")


def sign_answer(secret: bytes, request_mac: str, body: bytes) -> str:
    """Return the value of ``Ckptd-Mac`` for the answer to the request that `request_mac` signed."""
    return f"{_VERSION} {_mac(secret, b'answer', request_mac, hashlib.sha256(body).digest())}"


def check_answer(header: str | None, secret: bytes, request_mac: str, body: bytes) -> None:
    """Check the value of ``Ckptd-Mac`` of an answer.

    Raises
    ------
    RefusedError
        kind ``bad-mac``: the peer that answered does not know the job's secret.
    """
    if not _same(header or "", sign_answer(secret, request_mac, body)):
        raise _refused("an answer signed with the job's secret")


def _refused(wanted: str, kind: str = "bad-mac") -> RefusedError:
    return RefusedError("bad signature on a message", kind=kind, wanted=wanted)


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(errors="replace"), b.encode(errors="replace"))


def _mac(secret: bytes, *parts: str | bytes) -> str:
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        # With its length before it, no part can pass for the end of another.
        mac.update(len(data).to_bytes(8, "little") + data)
    return mac.hexdigest()
