"""The log in a folder, in memory, and in a real etcd."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckptd.elastic.log import FOLDER, MembershipLog, entry_key, entry_number
from ckptd.elastic.membership import encode_record
from ckptd.elastic.policy import Shape
from ckptd.errors import ConflictError, CorruptError, NotFoundError
from ckptd.store import open_store
from ckptd.store.memory import MemoryStore
from ckptd.types import ByteRange
from tests.elastic.test_membership import record
from tests.plugins.etcd.server import etcd as etcd


@pytest.fixture(params=["folder", "etcd"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> MembershipLog:
    if request.param == "folder":
        return MembershipLog(open_store(str(tmp_path)))
    etcd = request.getfixturevalue("etcd")
    return MembershipLog(open_store(f"etcd://{etcd}/jobs/{tmp_path.name}-{id(request)}"))


def test_records_are_read_in_their_order(log: MembershipLog) -> None:
    assert log.read() == []
    records = [record(Shape(dp=2), k + 1, step=k) for k in range(70)]
    for number, one in enumerate(records):
        log.append(one, number)
    assert log.read() == records


def test_one_of_two_wins(log: MembershipLog) -> None:
    log.append(record(Shape(), 1, by="a"), 0)
    with pytest.raises(ConflictError) as caught:
        log.append(record(Shape(), 1, by="b"), 0)
    assert "another controller wrote to the log first" in caught.value.message
    assert [r.by for r in log.read()] == ["a"]


def test_what_was_written_and_not_heard_of_may_be_written_again(
    log: MembershipLog, request: pytest.FixtureRequest
) -> None:
    one = record(Shape(), 1, by="a")
    log.append(one, 0)
    if request.node.callspec.params["log"] == "etcd":  # a local folder loses no answers
        log.append(one, 0)
    assert log.read() == [one]


def test_of_many_at_once_one_wins(log: MembershipLog) -> None:
    outcomes = []

    def append(name: str) -> None:
        try:
            log.append(record(Shape(), 1, by=name), 0)
        except ConflictError:
            return
        outcomes.append(name)

    threads = [threading.Thread(target=append, args=(f"c{k}",)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [r.by for r in log.read()]


def test_a_gap_is_an_error(log: MembershipLog) -> None:
    log.append(record(Shape(), 1), 0)
    log.append(record(Shape(), 3), 2)
    with pytest.raises(CorruptError, match="missing"):
        log.read()


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    log = MembershipLog(open_store(str(tmp_path)))
    log.append(record(Shape(), 1), 0)
    path = tmp_path / FOLDER / entry_key(0)
    path.write_bytes(encode_record(record(Shape(), 1))[:-3])
    with pytest.raises(CorruptError) as caught:
        log.read()
    assert entry_key(0) in str(caught.value.where)


def test_other_objects_are_none_of_the_log(tmp_path: Path) -> None:
    log = MembershipLog(open_store(str(tmp_path)))
    log.append(record(Shape(), 1), 0)
    (tmp_path / FOLDER / "notes.txt").write_text("mine")
    (tmp_path / FOLDER / "1.json").write_text("{}")
    assert len(log.read()) == 1


@pytest.mark.parametrize(
    "name", ["1.json", "000000000001", "-00000000001.json", "٠" * 12 + ".json"]
)
def test_names_that_are_no_records(name: str) -> None:
    assert entry_number(name) is None
    assert entry_number(entry_key(7)) == 7


def test_a_newest_record_that_vanishes_while_it_is_read_is_an_error() -> None:
    """Left out, the log would look as it was before, and a generation would be begun over it."""

    class Vanishing(MemoryStore):
        def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
            if key == FOLDER + entry_key(1):
                raise NotFoundError("no such object", where=key)
            return super().get(key, byte_range)

    store = Vanishing("vanishing")
    log = MembershipLog(store)
    for number in range(2):
        log.append(record(Shape(), number + 1), number)
    with pytest.raises(CorruptError) as caught:
        log.read()
    assert "a record of the membership log cannot be read" in caught.value.message
