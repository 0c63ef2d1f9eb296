"""Signs a checkpoint that exists, after verifying it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptd.base.runtime.pool import cores, run_all
from ckptd.checkpoint.format.names import ROOT_MARKER, CommitName, commit_key, is_data_path
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.index import Index
from ckptd.checkpoint.root.signing import CommitSigner, signed_keys
from ckptd.store.signed import hash_object

if TYPE_CHECKING:
    from ckptd.base.signatures import PrivateKey

_STALL_S = 300.0


def sign(
    index: Index,
    name: CommitName,
    key: PrivateKey,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Sign a checkpoint, with files of older ones that it refers to; return the signature's key.

    Raises
    ------
    NotFoundError
        A file is missing.
    """
    reader = CkptdReader(index, index.commit(name))
    store, commit = reader.store, reader.commit
    record = commit_key(name)
    keys = signed_keys(commit, reader.manifest) - {ROOT_MARKER, record}
    # The hashes of windows are made here, whatever lies there.
    keys = {k for k in keys if not k.endswith(".blake3")}
    signer = CommitSigner(store, key, "")
    total, done = sum(store.stat(k).size for k in keys), [0]

    def count(more: int) -> None:
        done[0] += more
        if progress is not None:
            progress(done[0], total)

    def one(key: str) -> None:
        folder = commit.folder if is_data_path(key) else ""
        for where, windows in signer.hashed(key, hash_object(store, key, count), folder).items():
            store.put(where, windows)

    threads = max(2, min(8, cores()))
    run_all(sorted(keys), one, threads=threads, stall_s=_STALL_S, what="reading the checkpoint")
    return signer.sign(commit, store.get(record), reader.manifest)
