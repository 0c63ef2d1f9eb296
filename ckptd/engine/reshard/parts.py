"""What is known of a target file that is complete: written last, below ``parts/``.

Whoever finds the part of a file need not write the file. The parts of all files are what a commit
is made from, by any process.
"""

from __future__ import annotations

import msgspec

from ckptd.decoding import msgpack_decoder
from ckptd.errors import CorruptError, NotFoundError
from ckptd.format.manifest import FileEntry
from ckptd.format.names import PARTS
from ckptd.store.base import Store

__all__ = ["FilePart", "load_part", "save_part"]


class FilePart(msgspec.Struct, frozen=True):
    """A complete file.

    Attributes
    ----------
    file
        Its entry in the manifest.
    slots, values
        The target witness's values that lie in it: slots as little-endian uint32, 8 bytes each.
    """

    file: FileEntry
    slots: bytes = b""
    values: bytes = b""


_file_parts = msgpack_decoder(FilePart)


def _key(folder: str, number: int) -> str:
    return f"{folder}{PARTS}f{number:05d}"


def save_part(store: Store, folder: str, number: int, part: FilePart) -> None:
    """Record that a file is complete; durable on return."""
    store.put(_key(folder, number), msgspec.msgpack.encode(part))


def load_part(store: Store, folder: str, number: int) -> FilePart | None:
    """Return the part of a file when the file is complete and has the length that it says."""
    key = _key(folder, number)
    try:
        part = _file_parts.decode(store.get(key))
        size = store.stat(part.file.path).size if part.file.data_start else 0
    except NotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise CorruptError(
            "a part is not one", kind="bad-record", where=key, found=str(error)[:200]
        ) from None
    return part if size == part.file.data_start + part.file.data_bytes else None
