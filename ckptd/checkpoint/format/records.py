"""Records of a root: commit, generation, lease, pin, annotation; fields, digest, largest size."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ckptd.base.digest import DIGEST_BYTES, digest_hex
from ckptd.checkpoint.format.manifest import (
    CONVERTERS,
    MAX_MANIFEST_BYTES,
    OfCheckpoint,
    convert,
    decode_json,
    newer,
)
from ckptd.checkpoint.format.names import (
    MAX_GENERATION,
    MAX_RANK,
    MAX_STEP,
    data_folder,
    is_attempt,
    is_data_folder,
)
from ckptd.decoding import converter
from ckptd.errors import CorruptError

RECORD_VERSION = 1
MAX_RECORD_BYTES = 1 << 20
MAX_EXPIRES = float(1 << 40)
MANIFEST_NAMES = ("manifest.json", "manifest.json.zst")

_TAIL = b'"\n}\n'
"""The bytes after the digest, which is the last field."""

R = TypeVar("R", "RootMarker", "Generation", "Commit", "Lease", "Pin", "Annotation")


class RootMarker(msgspec.Struct, frozen=True):
    """``ckptd.json``: this folder is a root. `root_id` tells two roots of one URL apart."""

    root_id: str
    created: str
    version: int = RECORD_VERSION


class Parent(OfCheckpoint, frozen=True):
    """The checkpoint that a generation resumed from: a commit, or a snapshot that has none."""


class Generation(msgspec.Struct, frozen=True):
    """One life of the job. `claim_id` is unique, so that a lost reply can be recognised."""

    generation: int
    claim_id: str
    parent: Parent | None
    created: str
    world_size: int
    reason: str = ""
    root: str = ""
    """`RootMarker.root_id` of the root that it was claimed in; empty in older records."""
    version: int = RECORD_VERSION


class Commit(OfCheckpoint, frozen=True):
    """Exists if and only if the checkpoint is complete.

    Attributes
    ----------
    folder
        Data folder of the attempt that won; ends in "/".
    folders
        Every data folder that the manifest refers to, `folder` included.
    manifest
        File name of the manifest inside `folder`.
    manifest_digest, manifest_bytes
        XXH3-128 (hexadecimal) and length of the manifest as stored.
    write_id
        Unique to this write: a committer that lost the reply finds itself by it.
    data_bytes
        Sum of the data sections.
    metadata
        What the user attached (metrics, tags).
    root, claim
        `RootMarker.root_id` and `Generation.claim_id` of the life that wrote it: a record that
        came into another root, or under another claim of its generation, does not count. Empty
        in older records.
    """

    attempt: str
    folder: str
    folders: tuple[str, ...]
    manifest: str
    manifest_digest: str
    manifest_bytes: int
    write_id: str
    created: str
    world_size: int
    data_bytes: int
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    root: str = ""
    claim: str = ""
    version: int = RECORD_VERSION


class Lease(OfCheckpoint, frozen=True):
    """A reader at work on a checkpoint until `expires` (seconds since 1970)."""

    expires: float
    holder: str = ""
    version: int = RECORD_VERSION


class Pin(OfCheckpoint, frozen=True):
    """A checkpoint never to be deleted; where its name is a word, a tag, which may move."""

    created: str
    reason: str = ""
    version: int = RECORD_VERSION


class Annotation(OfCheckpoint, frozen=True):
    """Metadata that was added to a checkpoint after its commit.

    Attributes
    ----------
    manifest_digest
        Of the commit. One of the same name that is another attempt has nothing of this.
    metadata
        What was added: a key has the value of the newest annotation that has it.
    """

    manifest_digest: str
    created: str
    metadata: dict[str, Any]
    version: int = RECORD_VERSION


_KINDS = (RootMarker, Generation, Commit, Lease, Pin, Annotation)
CONVERTERS |= {kind: converter(kind) for kind in _KINDS}


def encode_record(record: RootMarker | Generation | Commit | Lease | Pin | Annotation) -> bytes:
    """Return the record as JSON, one field a line; the last one is the digest of all before."""
    body = msgspec.json.format(msgspec.json.encode(record), indent=1)
    head = body[: -len(b"\n}")] + b',\n "digest": "'
    return head + digest_hex(head).encode() + _TAIL


def decode_record(raw: bytes, kind: type[R], where: str) -> R:
    """Parse a record and check its ranges.

    Raises
    ------
    CorruptError
        Not JSON, wrong types, numbers out of range, a newer version, or too large. Kind
        ``digest``: it is not what was written.
    """
    if len(raw) > MAX_RECORD_BYTES:
        raise CorruptError("record too large", where=where)
    document = decode_json(raw, where)
    # First, because a newer version may have other fields.
    version = document.get("version")
    if type(version) is int and version > RECORD_VERSION:
        raise newer(where, RECORD_VERSION, f"version {version}")
    record = convert(document, kind, where)
    check_record(record, where)
    _check_digest(raw, document, where)
    return record


def _check_digest(raw: bytes, document: dict[str, Any], where: str) -> None:
    """Raise when a record has a digest and is not what that says.

    Records of versions before the digest have none. A flipped bit in the field's own name must not
    make a record pass for one of those: its last field then looks like a digest, and is none.
    """
    stated = document.get("digest")
    last = next(reversed(document), "")
    if stated is None and not _looks_like_digest(last, document.get(last)):
        return
    found = ""
    if isinstance(stated, str) and raw.endswith(stated.encode() + _TAIL):
        found = digest_hex(raw[: -len(stated.encode() + _TAIL)])
        if found == stated:
            return
    raise CorruptError(
        "a record is corrupt: digest mismatch",
        kind="digest",
        where=where,
        wanted=str(stated)[:64],
        found=found or "a digest that is not the last field, or has another name",
        hint="bring the file back from a copy of the root",
    )


def _looks_like_digest(field: str, value: object) -> bool:
    alike = (
        len(field) == len("digest")
        and sum(a != b for a, b in zip(field, "digest", strict=True)) <= 2
    )
    return alike and isinstance(value, str) and len(value) == 2 * DIGEST_BYTES


def check_record(record: object, where: str) -> None:
    """Raise `CorruptError`, unless a record keeps the rules of its kind."""
    step, generation = getattr(record, "step", 0), getattr(record, "generation", 1)
    parent = getattr(record, "parent", None)
    good = 0 <= step <= MAX_STEP and 0 <= generation <= MAX_GENERATION
    if parent is not None:
        good = good and 0 <= parent.step <= MAX_STEP and 0 <= parent.generation < generation
    good = good and 0 <= getattr(record, "world_size", 0) <= MAX_RANK + 1
    if isinstance(record, Commit):
        good = good and _is_commit(record)
    if isinstance(record, Lease):
        good = good and 0 <= record.expires <= MAX_EXPIRES
    if not good:
        raise CorruptError("record breaks a rule", where=where)


def _is_commit(record: Commit) -> bool:
    """Tell whether a commit refers to nothing but data folders of the root, its own among them."""
    return (
        is_attempt(record.attempt)
        and record.folder == data_folder(record.name, record.attempt)
        and record.folder in record.folders
        and len(set(record.folders)) == len(record.folders)
        and all(map(is_data_folder, record.folders))
        and record.manifest in MANIFEST_NAMES
        and 0 < record.manifest_bytes <= MAX_MANIFEST_BYTES
        and 0 <= record.data_bytes < 1 << 62
    )
