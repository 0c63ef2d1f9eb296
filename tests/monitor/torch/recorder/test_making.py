"""Who waits while a process group is made is seen to wait."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from ckptd.monitor.ring import RingIdentity, RingReader, RingWriter
from ckptd.monitor.torch.recorder.making import Making


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand in for what makes a group: it waits until it is let go, and says what it was given."""
    calls: list[Any] = []

    def helper(size: int, rank: int, ranks: list[int], *args: Any, **more: Any) -> str:
        calls.append((size, rank, ranks))
        if isinstance(more.get("store"), threading.Event):
            more["store"].wait()
        if more.get("store") == "broken":
            raise ConnectionError
        return "group"

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", helper)
    return calls


@pytest.fixture
def making(tmp_path: Path, made: list[Any]) -> Any:
    ring = RingWriter(tmp_path / "a.ring", RingIdentity(rank=1, world=4))
    broken: list[BaseException] = []
    one = Making(ring, broken.append)
    one.install()
    yield one, tmp_path / "a.ring"
    one.remove()
    assert broken == []


def test_while_it_is_made_the_rank_is_inside_a_call(made: list[Any], making: Any) -> None:
    go = threading.Event()
    make = distributed_c10d._new_process_group_helper
    thread = threading.Thread(
        target=make, args=(4, 1, []), kwargs={"store": go, "timeout": timedelta(seconds=70)}
    )
    thread.start()
    with RingReader(making[1]) as reader:
        while not made:
            pass
        view = reader.view()
        assert (view.pending_seq, len(view.calls)) == (1, 0)
        (row,) = view.groups
        assert (row["group"], row["size"]) == (view.pending_group, 4)
        assert view.members[view.pending_group] == (0, 1, 2, 3)
        (info,) = reader.group_infos()
        assert info[1:] == ("making", "making", 70.0)
        go.set()
        thread.join()
        assert reader.view().pending_group == 0
        assert reader.view().groups["completed"].tolist() == [1]


def test_one_row_for_the_same_members_and_none_where_nobody_waits(
    made: list[Any], making: Any
) -> None:
    make: Any = distributed_c10d._new_process_group_helper
    for _ in range(3):
        assert make(2, 0, [1, 3], "gloo") == "group"
    make(2, None, [0, 2], "gloo")  # it is no member, and does not wait
    make(3, 1, [], "gloo")  # a world of another size: nobody knows who it is
    make(1, 0, [1], "gloo")
    assert len(made) == 6
    with RingReader(making[1]) as reader:
        (row,) = reader.view().groups
        assert (row["size"], row["entered"], row["completed"]) == (2, 3, 3)


def test_what_fails_is_over_too_and_comes_through(made: list[Any], making: Any) -> None:
    make: Any = distributed_c10d._new_process_group_helper
    with pytest.raises(ConnectionError):
        make(4, 1, [], store="broken")
    with RingReader(making[1]) as reader:
        assert reader.view().pending_group == 0


def test_it_is_taken_away_again(made: list[Any], making: Any) -> None:
    one, path = making
    one.remove()
    make: Any = distributed_c10d._new_process_group_helper
    assert make(4, 1, []) == "group"
    with RingReader(path) as reader:
        assert len(reader.view().groups) == 0
