"""Probe of a root: whether its newest checkpoint is whole, what its store does."""

from __future__ import annotations

from collections.abc import Iterator

from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.gc import missing_files
from ckptd.errors import CkptdError, NotFoundError
from ckptd.store.base import StoreSpec
from ckptd.store.probe import StoreCheck, guarded, probe_store


def probe(spec: StoreSpec, *, write: bool = True, speed: bool = True) -> Iterator[StoreCheck]:
    """Probe a root, which need not exist yet; yields each finding as it is made.

    Parameters
    ----------
    spec
        Its store.
    write, speed
        See `probe_store`.
    """
    with spec.open() as store:
        catalogue = Catalogue(store)
        yield _root(catalogue)
        yield from probe_store(spec, store, write=write, speed=speed, size=_size(catalogue))


def _root(catalogue: Catalogue) -> StoreCheck:
    try:
        marker = catalogue.open()
    except NotFoundError as error:
        return StoreCheck("root", "info", f"no root yet: {error.message}")
    except CkptdError as error:
        found = f": {error.found}" if error.found else ""
        return StoreCheck("root", "fail", error.message + found)
    return guarded("root", lambda: _newest(catalogue, marker.root_id))


def _newest(catalogue: Catalogue, root_id: str) -> StoreCheck:
    latest = catalogue.latest()
    generation = catalogue.newest_generation()
    if latest is None:
        return StoreCheck("root", "ok", f"{root_id}, generation {generation}, no checkpoint counts")
    missing = missing_files(catalogue, catalogue.commit(latest))
    if missing:
        return StoreCheck("root", "fail", f"{latest} is not complete: {missing}")
    return StoreCheck(
        "root", "ok", f"{root_id}, generation {generation}, newest {latest}, all files there"
    )


def _size(catalogue: Catalogue) -> int:
    try:
        latest = catalogue.latest()
        return catalogue.commit(latest).data_bytes if latest else 0
    except CkptdError:
        return 0  # `root` has said what is wrong
