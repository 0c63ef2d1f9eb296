"""Tiny real checkpoints, put into a store object by object, and a store that lets others in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import pytest

from ckptd.base.digest import DigestIndex, digest, digest_hex
from ckptd.checkpoint.format.manifest import FileEntry, Manifest, encode_manifest
from ckptd.checkpoint.format.names import (
    CommitName,
    commit_key,
    data_folder,
    digests_key,
    file_key,
    part_key,
)
from ckptd.checkpoint.format.records import Commit
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import GcPlan, missing_files, run_gc
from ckptd.checkpoint.root.index import stamp
from ckptd.errors import CkptdError, NotFoundError
from ckptd.store.base import FaultSpec, Names, ObjectInfo, Store, Wrapper
from ckptd.store.memory import MemoryStore
from ckptd.types import ByteRange

HEADER = b"h" * 64
_write_ids = itertools.count(1)
_stores = itertools.count(1)


def memory() -> MemoryStore:
    """A new, empty store."""
    return MemoryStore(f"checkpoints-{next(_stores)}")


def error_of(act: Callable[[], object], kind: type[CkptdError] = CkptdError) -> CkptdError:
    with pytest.raises(kind) as info:
        act()
    return info.value


def put_attempt(
    store: Store,
    name: CommitName,
    attempt: str = "a",
    *,
    reuse: Commit | None = None,
    created: float | None = None,
    metadata: dict[str, object] | None = None,
) -> Commit:
    """Write everything but the commit record, as the save path does; return that record.

    With `reuse` the first file is that checkpoint's, as for chunks that did not change.
    """
    folder = data_folder(name, attempt)
    files = []
    if reuse is not None:
        body = Catalogue(store).manifest_of(reuse).files[0]
        files.append(body)
    own = file_key(folder, 1)
    data = f"{name.stem} {attempt}".encode()
    store.put(own, HEADER + data)
    index = DigestIndex.build(len(data), [digest(data)], [digest(data)]).encode()
    store.put(digests_key(own), index)
    files.append(FileEntry(own, 1, len(HEADER), len(data), digest_hex(index)))
    store.put(part_key(folder, 1), b"part")
    manifest = Manifest(name.step, name.generation, attempt, 1, tuple(files), (), (), ())
    file_name, raw = encode_manifest(manifest)
    store.put(folder + file_name, raw)
    return Commit(
        step=name.step,
        generation=name.generation,
        attempt=attempt,
        folder=folder,
        folders=tuple(sorted({f.path.rpartition("/")[0] + "/" for f in files})),
        manifest=file_name,
        manifest_digest=digest_hex(raw),
        manifest_bytes=len(raw),
        write_id=f"w{next(_write_ids)}",
        created=stamp(created),
        world_size=1,
        data_bytes=sum(f.data_bytes for f in files),
        metadata=metadata or {},
    )


def save(
    catalogue: Catalogue,
    step: int,
    generation: int,
    attempt: str = "a",
    *,
    reuse: Commit | None = None,
    created: float | None = None,
    metadata: dict[str, object] | None = None,
) -> CommitName:
    """Write and publish a checkpoint."""
    name = CommitName(step, generation)
    catalogue.publish(
        put_attempt(catalogue.store, name, attempt, reuse=reuse, created=created, metadata=metadata)
    )
    return name


def one(catalogue: Catalogue) -> Commit:
    return catalogue.commit(save(catalogue, 7, catalogue.claim(None, 1).generation))


def manifest_key(record: Commit) -> str:
    return record.folder + record.manifest


def steps(names: Iterable[CommitName]) -> list[int]:
    return [n.step for n in names]


def assert_whole(store: Store, names: Iterable[CommitName]) -> None:
    """Every one of these commits has all of its files."""
    catalogue = Catalogue(store)
    for name in names:
        assert missing_files(catalogue, catalogue.commit(name)) is None, name


class Visited(Wrapper):
    """Calls `visit` once, before operation number `at`, as somebody else's work in between."""

    def __init__(self, inner: Store, at: int, visit: Callable[[], None]) -> None:
        super().__init__(inner, FaultSpec())
        self.count = 0
        self._at = at
        self._visit = visit

    def _step(self) -> None:
        self.count += 1
        if self.count == self._at:
            self._visit()

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self._step()
        return self.inner.get(key, byte_range)

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        self._step()
        self.inner.put(key, data, create_only=create_only)

    def stat(self, key: str) -> ObjectInfo:
        self._step()
        return self.inner.stat(key)

    def exists(self, key: str) -> bool:
        self._step()
        return self.inner.exists(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._step()
        return self.inner.list(prefix)

    def children(self, prefix: str = "") -> Names:
        self._step()
        return self.inner.children(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._step()
        self.inner.delete(keys)

    def sync(self, prefix: str) -> None:
        self._step()
        self.inner.sync(prefix)

    def sweep(
        self, prefix: str = "", *, older_than_s: float = 86_400.0, deep: bool = True
    ) -> Names:
        self._step()
        return self.inner.sweep(prefix, older_than_s=older_than_s, deep=deep)


def relied_on_at_each_operation(
    planned: Callable[[], tuple[Catalogue, CommitName, GcPlan]],
    act: Callable[[Catalogue, CommitName], object],
) -> Iterator[Catalogue]:
    """Run a clean-up, and before each of its operations another's `act` on what may be deleted.

    One that was refused may lose it, one that was not has it; both happen. Each root is yielded.
    """
    refused, kept = 0, 0
    for number in itertools.count(1):
        catalogue, name, plan = planned()
        done: list[bool] = []

        def rely(c: Catalogue = catalogue, n: CommitName = name, out: list[bool] = done) -> None:
            with suppress(NotFoundError):
                act(Catalogue(c.store), n)
                out.append(True)

        visited = Visited(catalogue.store, number, rely)
        run_gc(visited, plan)
        if visited.count < number:
            break
        there = catalogue.store.exists(commit_key(name))
        assert there or not done
        yield catalogue
        refused += not done
        kept += there
    assert refused
    assert kept
