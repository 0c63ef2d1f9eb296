"""`UnionStore`: tiers read as one store, nearest first; wrong copies and failed tiers left out.

In it: for how long a failed tier is left aside; how many are asked at once; after how many wrong
objects one comes last.

Data folders of attempts never change, so tiers can be united key by key. Nothing is believed for
being near: the reader compares digests, and says `UnionStore.distrust` of what was wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from ckptd.base.grouping import by_key
from ckptd.checkpoint.root.index import tier_of
from ckptd.errors import CkptdError, CorruptError, NotFoundError, StoreError, UsageError
from ckptd.store.base import (
    Capabilities,
    Names,
    ObjectInfo,
    OpenFile,
    ReadOnlyStore,
    Store,
    as_bytes_view,
    check_key,
    check_prefix,
)
from ckptd.types import ByteRange

T = TypeVar("T")

ASIDE_S = 30.0
"""How long a source that failed is left aside, in seconds: a dead node costs one time-out."""
_ASKING = 16
"""Sources that are asked at a time."""
_MOST_WRONG = 2
"""A source of which so many objects were wrong comes last from then on."""


class UnionSource(NamedTuple):
    """A store, and which tier it is: ``memory``, ``peer``, ``local`` or ``remote``.

    Attributes
    ----------
    name
        The same for one source on every rank; empty where ranks do not tell one another.
    keys
        The keys that it has, where they are known: it is asked for no other. Thousands of nodes
        cannot be asked one after the other.
    former
        Of a node that was part of an earlier life only: it is asked last, for keys that no other
        source has.
    """

    store: Store
    tier: str
    name: str = ""
    keys: frozenset[str] | None = None
    former: bool = False


class UnionStore(ReadOnlyStore):
    """Read-only view of several stores; a key is read from the nearest that has it.

    A source that fails is left aside for a while, and the next one is asked. Where none has an
    object, the error is that of the farthest source; what others failed with is in its notes.
    A single source is passed through: nothing is left aside. Thread-safe.

    Parameters
    ----------
    sources
        Nearest first; they stay the caller's to close. A plain store's tier is worked out.
    aside_s
        How long a source is left aside that failed, in seconds.

    Raises
    ------
    UsageError
        No sources; or something is written.
    """

    def __init__(self, sources: Sequence[Store | UnionSource], *, aside_s: float = ASIDE_S) -> None:
        if not sources:
            raise UsageError("an empty union of stores", wanted="at least one")
        self._sources = [_Held(s, i) for i, s in enumerate(sources)]
        self._aside_s = aside_s if len(sources) > 1 else 0.0
        self._lock = threading.Lock()
        self._open = [s for s in self._sources if s.keys is None]
        self._routes = by_key((key, s) for s in self._sources for key in s.keys or ())
        self._serving: dict[str, _Held] = {}
        self._distrusted: dict[str, list[_Held]] = {}
        self.url = self._sources[-1].store.url
        self.options = {}
        self.capabilities = _together([s.store.capabilities for s in self._sources])

    # -- choice of a source ----------------------------------------------------------------------

    def serving(self, key: str) -> object:
        """Return what represents the source that serves `key` at the moment; for `distrust`."""
        with self._lock:
            return self._serving.get(key)

    def distrust(self, key: str, served: object = None) -> bool:
        """Take what serves `key` for wrong; tell whether another source has it.

        Where none has it, all stays as it is: the next read meets the same error again.

        Parameters
        ----------
        served
            What `serving` said before the read. When another source serves `key` by now, because
            another thread met the same, nothing more is done.
        """
        with self._lock:
            wrong = self._serving.get(key)
        if wrong is None or (served is not None and served is not wrong):
            return wrong is not None
        others = [s for s in self._order(key) if s is not wrong]
        other = next((s for s in others if self._has(s, key)), None)
        if other is None:
            return False
        with self._lock:
            self._distrusted.setdefault(key, []).append(wrong)
            self._serving[key] = other
            wrong.wrong += 1
        return True

    def read_bytes(self) -> dict[str, int]:
        """Return how many bytes were read from each tier, of those that gave any."""
        out: dict[str, int] = {}
        with self._lock:
            for source in self._sources:
                out[source.tier] = out.get(source.tier, 0) + source.read
        return {tier: n for tier, n in out.items() if n}

    def count(self, key: str, nbytes: int) -> None:
        """Note that `nbytes` were read through a descriptor that `open_file` gave."""
        with self._lock:
            source = self._serving.get(key)
            if source is not None:
                source.read += nbytes

    def _order(self, key: str) -> list[_Held]:
        """Return the sources to ask for `key`, best first."""
        now = time.monotonic()
        with self._lock:
            distrusted = self._distrusted.get(key, ())
            serving = self._serving.get(key)
            asked = self._asked(key)
            found = [s for s in asked if s.aside_until <= now and s not in distrusted]
            found.sort(key=lambda s: (s.wrong >= _MOST_WRONG, s is not serving))
        return found

    def _asked(self, key: str) -> list[_Held]:
        """Return the sources that may have `key`, nearest first."""
        routed = self._routes.get(key)
        if routed is None:
            return self._open
        return sorted([*routed, *self._open], key=lambda s: s.place) if self._open else routed

    def _has(self, source: _Held, key: str) -> bool:
        try:
            source.store.stat(key)
        except NotFoundError:
            return False
        except StoreError as error:
            self._set_aside(source, error)
            return False
        return True

    def _set_aside(self, source: _Held, error: StoreError) -> None:
        with self._lock:
            source.error = error
            source.aside_until = time.monotonic() + self._aside_s

    def _ask(self, key: str, act: Callable[[Store], T]) -> tuple[_Held, T]:
        """Return what the first source gives that can, and which one it was."""
        failed: dict[_Held, CkptdError] = {}
        for source in self._order(key):
            try:
                result = act(source.store)
            except StoreError as error:
                self._set_aside(source, error)
                failed[source] = error
            except (NotFoundError, CorruptError) as error:
                failed[source] = error
            else:
                with self._lock:
                    self._serving[key], source.error = source, None
                return source, result
        raise self._failure(key, failed)

    def _failure(self, key: str, failed: dict[_Held, CkptdError]) -> CkptdError:
        """Return what tells most: the farthest source's failure, or that of one cut short."""
        asked = self._asked(key) or self._sources[-1:]
        met = {s: failed.get(s) or s.again() for s in asked}
        last = met[asked[-1]]
        short = next((e for e in met.values() if isinstance(e, CorruptError)), None)
        chosen = last if isinstance(last, StoreError) else short or last
        if chosen is None:
            chosen = NotFoundError("no such object", where=f"{self.url.rstrip('/')}/{key}")
        chosen.key = key
        for source, other in met.items():
            if other is not None and other is not chosen and not isinstance(other, NotFoundError):
                chosen.add_note(f"{source.tier} ({source.store.url}): {other.message}")
        return chosen

    # -- reading ---------------------------------------------------------------------------------

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """See `Store.get`; a store that has it shorter than the range is passed over."""
        source, data = self._ask(check_key(key), lambda store: store.get(key, byte_range))
        with self._lock:
            source.read += len(data)
        return data

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`; after an error `buffer` holds anything."""
        view = as_bytes_view(buffer)
        source, _ = self._ask(check_key(key), lambda store: store.read_into(key, offset, view))
        with self._lock:
            source.read += len(view)

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of the object of the source that serves `key` from now on."""
        return self._ask(check_key(key), lambda store: store.stat(key))[1]

    def check_unchanged(self) -> None:
        """Have each source look again."""
        for source in self._sources:
            source.store.check_unchanged()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield what any source has below `prefix`, in key order.

        Sources that fail are left out; the call fails when all of them do.
        """
        check_prefix(prefix)
        found: dict[str, ObjectInfo] = {}
        for infos in self._each(lambda store: tuple(store.list(prefix))):
            for info in infos:
                found.setdefault(info.key, info)
        return iter([found[key] for key in sorted(found)])

    def children(self, prefix: str = "") -> Names:
        """Return the names that any source has directly below `prefix`; errors as for `list`."""
        check_prefix(prefix)
        return sorted({n for names in self._each(lambda s: s.children(prefix)) for n in names})

    def _each(self, act: Callable[[Store], T]) -> tuple[T, ...]:
        """Return what every source gives that does not fail and is not known to be empty."""
        out: tuple[T, ...] = ()
        now = time.monotonic()

        def ask(source: _Held) -> tuple[T, ...]:
            try:
                return (act(source.store),)
            except StoreError as error:
                self._set_aside(source, error)
                return ()

        asked = [s for s in self._sources if s.aside_until <= now and s.keys != frozenset()]
        with ThreadPoolExecutor(max(1, min(_ASKING, len(asked)))) as pool:
            for found in pool.map(ask, asked):
                out += found
        errors = [s.error for s in self._sources if s.error is not None]
        if not out and errors:
            raise errors[-1]
        return out

    def open_file(self, key: str) -> OpenFile | None:
        """Open the object of the source that serves `key`; None when that one cannot."""

        def act(store: Store) -> OpenFile | None:
            opened = store.open_file(key)
            if opened is None:
                store.stat(key)  # stores without files do not look whether the key is there
            return opened

        return self._ask(check_key(key), act)[1]

    def local_path(self, key: str) -> Path | None:
        """Return the file of the source that serves `key`; None where that has none."""

        def act(store: Store) -> Path | None:
            store.stat(key)
            return store.local_path(key)

        return self._ask(check_key(key), act)[1]


class _Held:
    """A source and what was met in it; all but `store` and `tier` belong to the union's lock."""

    def __init__(self, source: Store | UnionSource, place: int) -> None:
        if not isinstance(source, UnionSource):
            source = UnionSource(source, tier_of(source))
        self.store, self.tier, self.keys = source.store, source.tier, source.keys
        self.place = place
        self.aside_until = 0.0
        self.error: StoreError | None = None
        self.read = 0
        self.wrong = 0

    def again(self) -> CkptdError | None:
        """Return the failure for which this one is left aside; a copy, since threads share it."""
        return None if self.error is None else CkptdError.from_dict(self.error.to_dict())


def _together(all_of: Sequence[Capabilities]) -> Capabilities:
    return Capabilities(
        create_only=False,
        consistent_list=all(c.consistent_list for c in all_of),
        durable=all(c.durable for c in all_of),
        local_files=all(c.local_files for c in all_of),
        shared=all(c.shared for c in all_of),
        parallel=max(c.parallel for c in all_of),
        block_bytes=max(c.block_bytes for c in all_of),
    )
