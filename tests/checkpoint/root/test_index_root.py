"""Roots: the marker, and stores that cannot decide who came first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from ckptd.checkpoint.format.names import CommitName, commit_key, generation_key
from ckptd.checkpoint.format.records import RootMarker
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import (
    CorruptError,
    NotFoundError,
    RefusedError,
)
from ckptd.store.base import FaultSpec, Store, Wrapper
from tests.checkpoint.root.checkpoints import error_of, memory, put_attempt, save
from tests.processes import PATIENCE_S


def test_a_root_is_created_once(store: Store) -> None:
    first = Catalogue(store).create_or_open()
    assert Catalogue(store).create_or_open() == first
    assert Catalogue(store).open() == first
    assert len(first.root_id) == 32
    assert store.children() == ["ckptd.json"]


def test_opening_nothing(store: Store) -> None:
    error = error_of(Catalogue(store).open, NotFoundError)
    assert error.kind == "no-root"
    assert store.children() == []


def test_opening_foreign_content(store: Store) -> None:
    store.put("model.safetensors", b"x")
    error = error_of(Catalogue(store).open, NotFoundError)
    assert (error.kind, error.found) == ("no-root", "model.safetensors")
    assert error.hint


def test_a_root_may_begin_in_a_folder_with_other_things(store: Store) -> None:
    store.put("train.log", b"x")
    marker = Catalogue(store).create_or_open()
    assert Catalogue(store).open() == marker


@pytest.mark.parametrize("key", [generation_key(1), commit_key(CommitName(1, 1))])
def test_a_root_without_marker_is_not_continued(store: Store, key: str) -> None:
    store.put(key, b"{}")
    assert "this folder has" in error_of(Catalogue(store).create_or_open, RefusedError).message
    assert error_of(Catalogue(store).open, NotFoundError).kind == "no-root"


def test_a_root_of_a_newer_version(store: Store) -> None:
    store.put("ckptd.json", b'{"version": 2, "fields": "that nobody knows yet"}')
    for act in (Catalogue(store).create_or_open, Catalogue(store).open):
        error = error_of(act, CorruptError)
        assert error.kind == "version"
        assert "ckptd.json" in str(error.where)


def test_a_damaged_marker(store: Store) -> None:
    store.put("ckptd.json", b"\x00\x01")
    assert "not JSON" in error_of(Catalogue(store).create_or_open, CorruptError).message


def test_two_who_create_one_root_agree(store: Store) -> None:
    markers: list[RootMarker] = []
    barrier = threading.Barrier(8)

    def create() -> None:
        barrier.wait(PATIENCE_S)
        markers.append(Catalogue(store).create_or_open())

    threads = [threading.Thread(target=create) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE_S)
    assert len(markers) == 8
    assert len(set(markers)) == 1


class Undecided(Wrapper):
    """A store that cannot decide a race."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, FaultSpec())
        self.capabilities = replace(inner.capabilities, create_only=False)


def test_stores_without_create_only_are_refused() -> None:
    inner = memory()
    weak = Catalogue(Undecided(inner))
    error = error_of(weak.create_or_open, RefusedError)
    assert error.kind == "no-create-only"
    assert error.hint == f"ckptd doctor {inner.url}"
    strong = Catalogue(inner)
    strong.create_or_open()
    generation = strong.claim(None, 1).generation
    name = save(strong, 1, generation)
    attempt = put_attempt(inner, CommitName(2, generation))
    acts: list[Callable[[], object]] = [
        lambda: weak.claim(None, 1),
        lambda: weak.publish(attempt),
        lambda: weak.pin(name),
        lambda: weak.rollback(1),
    ]
    for act in acts:
        assert error_of(act, RefusedError).kind == "no-create-only"
    assert weak.latest() == name
    assert weak.line() == [name]
