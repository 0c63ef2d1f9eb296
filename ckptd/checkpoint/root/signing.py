"""Signature of a commit: which objects are hashed and signed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.base.signatures import need_blake3, signature_key, signed, voucher
from ckptd.checkpoint.format.manifest import Manifest
from ckptd.checkpoint.format.names import ROOT_MARKER, WITNESS, commit_key, digests_key
from ckptd.checkpoint.format.records import Commit, RootMarker, decode_record
from ckptd.errors import ConflictError, CorruptError
from ckptd.store.base import Store
from ckptd.store.signed import WINDOW_BYTES, HashedStore, windows_key

if TYPE_CHECKING:
    from ckptd.base.signatures import PrivateKey


def signed_keys(commit: Commit, manifest: Manifest) -> set[str]:
    """Return the keys of all that a load of a checkpoint reads."""
    folder = commit.folder
    keys = {ROOT_MARKER, commit_key(commit.name), folder + commit.manifest}
    for file in manifest.files:
        if file.data_start:
            keys |= {file.path} if file.digests else {file.path, digests_key(file.path)}
            if file.data_start + file.data_bytes > WINDOW_BYTES:
                keys.add(windows_key(folder, file.path))
    if manifest.witness is not None and manifest.witness.digest:
        keys.add(folder + WITNESS)
    return keys


class CommitSigner(HashedStore):
    """Hashes what a commit writes, and signs it.

    Parameters
    ----------
    about
        See `ckptd.base.signatures.voucher`.

    Attributes
    ----------
    hashes
        Has those that ranks report as well.
    """

    def __init__(self, inner: Store, key: PrivateKey, about: str) -> None:
        super().__init__(inner, voucher(key, about))
        self._key = key

    def sign(self, commit: Commit, record: bytes, manifest: Manifest) -> str:
        """Write the signature of a commit, whose record need not exist yet; return its key.

        Raises
        ------
        CorruptError
            The hash of an object is not known.
        ConflictError
            Kind ``other-root``.
        """
        marker = self.inner.get(ROOT_MARKER)
        found = decode_record(marker, RootMarker, ROOT_MARKER).root_id
        if commit.root and found != commit.root:
            raise ConflictError("this is another root", kind="other-root", found=found)
        for key, raw in ((ROOT_MARKER, marker), (commit_key(commit.name), record)):
            self.hashes[key] = need_blake3()(raw).hexdigest()
        keys = signed_keys(commit, manifest)
        for lost in sorted(keys - self.hashes.keys()):
            raise CorruptError("a part of the checkpoint was not hashed", where=lost)
        where = signature_key(commit.folder, commit.write_id, self._key.public_key())
        files = {key: self.hashes[key] for key in keys}
        self.inner.put(where, signed(f"{found} {commit.name.stem}", files, self._key))
        return where
