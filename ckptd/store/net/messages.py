"""Messages of store client and server; sizes of pieces, puts and pages.

A request is answered by one message, or by a series that ends with a `Complete`; `Failed` takes the
place of any of them and ends the answer. Bytes of objects travel behind `ObjectPiece` messages.
"""

from __future__ import annotations

import msgspec

PURPOSE = "store"
"""Of these connections, see `ckptd.base.net.connection.Hello`."""
PIECE_BYTES = 4 << 20
"""Bytes behind one `ObjectPiece`, as they are sent."""
MOST_PIECE_BYTES = 8 << 20
"""Bytes behind one `ObjectPiece` that a server takes."""
MOST_PUT_BYTES = 1 << 30
"""Largest object of one put, which the server holds in memory; larger ones need a writer."""
PAGE = 500
"""Names in one `Page` and keys in one `Delete`; of the longest names, most of a message."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Get(_Message, frozen=True, tag="get"):
    """The whole object, or bytes [`start`, `end`). Answer: `Sized`, pieces, `Complete`."""

    key: str
    start: int = 0
    end: int | None = None


class Read(_Message, frozen=True, tag="read"):
    """`length` bytes from `offset`. Answer: pieces, `Complete`."""

    key: str
    offset: int
    length: int


class Put(_Message, frozen=True, tag="put"):
    """A small object of `size` bytes; pieces follow at once. Answer: `Complete`."""

    key: str
    size: int
    create_only: bool


class BeginWriter(_Message, frozen=True, tag="begin"):
    """A writer. Answer: `Complete`; then `Writing` messages."""

    key: str
    size: int


class ObjectPiece(_Message, frozen=True, tag="piece"):
    """Bytes of an object follow."""


class CommitWriter(_Message, frozen=True, tag="commit"):
    """End of a writer. Answer: `Complete`, or the `Failed` that an earlier piece caused."""


class AbortWriter(_Message, frozen=True, tag="abort"):
    """Drop of a writer, if there is one. Answer: `Complete`, maybe after an earlier `Failed`."""


class Stat(_Message, frozen=True, tag="stat"):
    """Answer: `ObjectFound`."""

    key: str


class List(_Message, frozen=True, tag="list"):
    """Answer: pages of ``(key, size, modified)``, `Complete`."""

    prefix: str


class Children(_Message, frozen=True, tag="children"):
    """Answer: pages of names, `Complete`."""

    prefix: str


class Delete(_Message, frozen=True, tag="delete"):
    """Answer: `Complete`."""

    keys: tuple[str, ...]


class Sync(_Message, frozen=True, tag="sync"):
    """Answer: `Complete`."""

    prefix: str


class Sweep(_Message, frozen=True, tag="sweep"):
    """Answer: pages of names, `Complete`."""

    prefix: str
    older_than_s: float
    deep: bool


class Open(_Message, frozen=True, tag="open"):
    """Over Unix sockets. Answer: `FileOpened` and a descriptor; `Complete` when there is none."""

    key: str


class Complete(_Message, frozen=True, tag="done"):
    """It is done, and has had its effect."""


class Failed(_Message, frozen=True, tag="failed"):
    """`CkptdError.to_dict` of what was raised."""

    error: dict[str, str | None]


class Sized(_Message, frozen=True, tag="sized"):
    """Bytes that follow in pieces."""

    size: int


class ObjectFound(_Message, frozen=True, tag="found"):
    """Size in bytes, time and tag of one object."""

    size: int
    modified: float
    tag: str = ""


class Page(_Message, frozen=True, tag="page"):
    """A part of a listing."""

    names: tuple[str, ...] = ()
    objects: tuple[tuple[str, int, float], ...] = ()


class FileOpened(_Message, frozen=True, tag="opened"):
    """`ckptd.store.base.OpenFile` without its descriptor."""

    shift: int


Request = (
    Get
    | Read
    | Put
    | BeginWriter
    | AbortWriter
    | Stat
    | List
    | Children
    | Delete
    | Sync
    | Sweep
    | Open
)
Writing = ObjectPiece | CommitWriter | AbortWriter
Answer = Complete | Failed | Sized | ObjectFound | Page | FileOpened | ObjectPiece
