"""Signposts: files by which ``ckptd ctl`` finds the controllers that run on this machine."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from ckptd.base.runtime.agentlink import run_folder
from ckptd.decoding import json_decoder

_MOST_BYTES = 16 << 10
_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Signpost(msgspec.Struct, frozen=True, kw_only=True):
    """Where a controller listens.

    Attributes
    ----------
    job
        Whose it is.
    address
        ``HOST:PORT``.
    log
        URL of its membership log.
    pid
        Its process.
    """

    job: _Text
    address: _Text
    log: _Text
    pid: Annotated[int, msgspec.Meta(ge=1)]


_posts = json_decoder(Signpost)


@contextmanager
def put_up(post: Signpost, folder: Path | None = None) -> Iterator[None]:
    """Announce a controller to others of this user while the block runs; mode 0600.

    Parameters
    ----------
    folder
        The run folder; the usual one if left out.
    """
    name = hashlib.sha256(f"{post.job}\n{post.pid}".encode()).hexdigest()[:20]
    path = (folder or run_folder()) / f"controller-{name}.json"
    draft = path.with_suffix(".part")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(post))
    os.replace(draft, path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def signposts(folder: Path | None = None) -> list[Signpost]:
    """Return the controllers of this user that run on this machine.

    What one that was killed left behind is removed.
    """
    found = []
    for path in sorted((folder or run_folder()).glob("controller-*.json")):
        with suppress(OSError, msgspec.MsgspecError):
            post = _posts.decode(path.read_bytes()[:_MOST_BYTES])
            if _runs(post.pid):
                found.append(post)
            else:
                path.unlink(missing_ok=True)
    return found


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError, OverflowError):
        return False  # or it is another user's by now
    return True
