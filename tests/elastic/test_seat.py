"""The controller's seat: create-only, the newest counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.elastic.etcd import Etcd, EtcdLog, EtcdSeat
from ckptd.elastic.log import StoreLog, entry_key
from ckptd.elastic.places import open_places, own_log
from ckptd.elastic.seat import FOLDER, SeatBook, StoreSeat, stand_in_pause_s
from ckptd.errors import ConflictError, CorruptError, UsageError
from ckptd.store import open_store
from tests.elastic.test_log import etcd as etcd


def check_seat(seat: SeatBook) -> None:
    assert seat.newest() is None
    assert not seat.still("a")
    first = seat.take(0, "h:1", "a")
    assert seat.newest() == first
    assert seat.still("a")
    with pytest.raises(ConflictError) as caught:
        seat.take(0, "h:2", "b")
    assert caught.value.kind == "seat-taken"
    for number in range(1, 12):
        last = seat.take(number, f"h:{number}", "b")
    assert seat.newest() == last
    assert (seat.still("a"), seat.still("b")) == (False, True)


def test_in_a_folder(tmp_path: Path) -> None:
    check_seat(StoreSeat(open_store(tmp_path)))


def test_in_etcd(etcd: str) -> None:
    check_seat(EtcdSeat(Etcd([etcd]), "/seats/controller/"))


def test_a_damaged_seat_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    seat = StoreSeat(store)
    seat.take(0, "h:1", "a")
    store.put(FOLDER + entry_key(1), b'{"number":1}')
    with pytest.raises(CorruptError) as caught:
        seat.newest()
    assert caught.value.kind == "bad-seat"


def test_places_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "run"))
    here = open_places("j", str(tmp_path / "log"))
    assert isinstance(here.log, StoreLog)
    there = open_places("j", "etcd://a:1,b:2/jobs/j")
    assert isinstance(there.log, EtcdLog)
    assert open_places("j").url == own_log("j") != own_log("k")
    for url in ("etcd://a:1", "etcd:///x", "etcd://a:1/", "etcd://[::1/x"):
        with pytest.raises(UsageError) as caught:
            open_places("j", url)
        assert caught.value.kind == "bad-url"


def test_the_first_node_stands_in_first() -> None:
    assert 1.0 <= stand_in_pause_s(0) <= 1.2 < stand_in_pause_s(1)
    assert stand_in_pause_s(10_000) < 6
