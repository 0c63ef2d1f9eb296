"""`FsspecStore` where it decides races itself, and where it must not pretend to."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import ConflictError, RefusedError, StoreError, TransientStoreError, UsageError
from ckptd.store import generic, open_store
from ckptd.store.generic import FsspecStore
from ckptd.testing.racing import race_threads
from tests.servers import MOTO, s3_url
from tests.store.proxy import Proxy


@pytest.fixture(params=[MOTO])
def creating(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FsspecStore:
    """A service whose driver maps mode="create" to one conditional request, as gs and az do.

    s3fs does so too for small objects; `FsspecStore` does not claim it there only because large
    ones would go by a multipart condition, which some services ignore.
    """
    monkeypatch.setattr(generic, "_CREATE_ONLY", {"s3"})
    server: dict[str, Any] = request.getfixturevalue(request.param)
    options = {n: server[n] for n in ("endpoint_url", "key", "secret")}
    store = open_store(f"fsspec+{s3_url()}", **options)
    assert isinstance(store, FsspecStore)
    assert store.capabilities.create_only
    return store


def test_a_race_has_one_winner(creating: FsspecStore) -> None:
    for i in range(3):
        winners = race_threads(creating, f"race/{i}", [f"t{t}" for t in range(8)])
        assert len(winners) == 1
        assert creating.get(f"race/{i}").decode() == winners[0]


def test_what_the_driver_repeated_is_our_own_success(creating: FsspecStore) -> None:
    creating.put("a", b"mine", create_only=True)
    creating.put("a", b"mine", create_only=True)  # as a driver's second try finds it
    with pytest.raises(ConflictError):
        creating.put("a", b"other", create_only=True)


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_no_race_is_decided_elsewhere(scheme: str, tmp_path: Path) -> None:
    url = f"fsspec+{scheme}://{tmp_path}/{uuid.uuid4().hex}"
    store = open_store(url)
    with pytest.raises(RefusedError) as caught:
        store.put("a", b"1", create_only=True)
    assert caught.value.kind == "no-create-only"
    assert not store.exists("a")
    alone = open_store(url, single_writer=True)
    alone.put("a", b"1", create_only=True)
    with pytest.raises(ConflictError):
        alone.put("a", b"2", create_only=True)
    assert alone.describe().options == {"single_writer": True}


def test_errors_of_a_driver_become_ours(moto_options: dict[str, Any]) -> None:
    with Proxy(moto_options["endpoint_url"], lambda request: "403 AccessDenied") as proxy:
        options = {**moto_options, "endpoint_url": proxy.endpoint}
        store = open_store(f"fsspec+{s3_url()}", **options)
        with pytest.raises(StoreError) as caught:
            store.get("a")
        assert caught.value.kind == "permission", caught.value


@pytest.fixture(params=[MOTO])
def moto_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    server: dict[str, Any] = request.getfixturevalue(request.param)
    return {n: server[n] for n in ("endpoint_url", "key", "secret")}


class Raising:
    """A file system whose every call raises what a driver may come up with."""

    protocol = "weird"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def cat_file(self, path: str, **options: object) -> bytes:
        raise self._error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("slow"), TransientStoreError),
        (ConnectionResetError("gone"), TransientStoreError),
        (RuntimeError("a driver's own"), StoreError),
        (OSError("without a number"), StoreError),
    ],
)
def test_no_error_of_a_driver_gets_out(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type
) -> None:
    monkeypatch.setattr(generic, "_connect", lambda url, options: (Raising(error), "root"))
    with pytest.raises(StoreError) as caught:
        FsspecStore("weird://root").get("a")
    assert type(caught.value) is kind


def test_wrong_options_are_told() -> None:
    with pytest.raises(UsageError):
        open_store("fsspec+sftp://host/x", prot=1)
