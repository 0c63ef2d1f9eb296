"""What a value holds again and again: a file of a few bytes stands for no more than it may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.manifest import INLINE, SHARING
from ckptd.errors import CorruptError, SaveError, UsageError
from ckptd.store import open_store
from ckptd.store.base import Store
from ckptd.testing.ranks import run_ranks
from tests.checkpoint.torch.state.test_values_oracle import WAYS, Maker, Speaks, differences, ours
from tests.cli.running import Cli
from tests.processes import PATIENCE_S
from tests.reshard.llama import latest


def doubled(entries: int, last: Any = 1) -> Any:
    """Return an encoded list of so many entries; the last one stands for 2 ** entries parts."""
    raw: list[Any] = [{"$": "shared", "id": 0, "v": [last]}]
    for n in range(1, entries):
        twice = [{"$": "again", "v": n - 1}] * 2
        raw.append({"$": "shared", "id": n, "v": twice})
    return raw


def nested(levels: int, kind: Any = list) -> Any:
    """Return a container of two that are one, and so on."""
    value = kind([1])
    for _ in range(levels):
        value = kind([value, value])
    return value


def root_with(value: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Save what no ckptd would encode, as an object and as that of a rank."""
    state = {"h": Speaks(0), "p": ckptd.PerRank([0], on_change="drop"), "w": torch.ones(3)}
    with monkeypatch.context() as patch, ckptd.Checkpointer(path) as ck:
        patch.setattr(codec, "encode", lambda *args, **more: value)
        ck.save(1, state).durable(PATIENCE_S)
    return str(path)


pytestmark = pytest.mark.usefixtures("writing_thread")


# A walk of all that such a file stands for would not end.
@pytest.mark.parametrize("entries", [30, 60, 1000])
def test_a_small_file_that_stands_for_much_is_refused(
    entries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    one = root_with(doubled(entries), tmp_path / "a", monkeypatch)
    for part in ("h", "p"):
        live = {"h": Speaks(0)} if part == "h" else {"p": ckptd.PerRank([0], on_change="drop")}
        with ckptd.Checkpointer(one) as ck, pytest.raises(CorruptError) as caught:
            ck.load(live, only=lambda name, part=part: name == part)
        assert caught.value.where == part
        assert "parts that come again" in str(caught.value.found)
    with open_store(one) as store, pytest.raises(CorruptError):
        latest(store).objects()
    cli.good("inspect", one)
    to_dcp = ("reshard", one, str(tmp_path / "dcp"), "--to", "ddp", "--format", "dcp")
    assert "does not decode" in cli(*to_dcp).err


def test_what_does_not_decode_can_be_compared_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    one, other = (
        root_with(doubled(60, x), tmp_path / name, monkeypatch) for x, name in enumerate("ab")
    )
    assert "h[0] " in cli("diff", one, other).out
    cli.good("verify", one)
    cli.good("cp", one, str(tmp_path / "copy"))
    cli.good("reshard", one, str(tmp_path / "ddp"), "--to", "ddp")


@pytest.mark.parametrize("kind", [list, tuple, lambda pair: dict(enumerate(pair))])
@pytest.mark.parametrize("way", WAYS)
def test_what_stands_for_too_much_is_refused_by_name(
    way: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MAX_AGAIN", 1 << 10)  # tuples are written as often as they come
    with pytest.raises(UsageError) as caught:
        ours(way, nested(40, kind))
    assert caught.value.kind == "unsavable"
    assert str(caught.value.where).startswith("s")
    assert "again and again" in caught.value.message


@pytest.mark.parametrize("way", WAYS)
def test_what_comes_often_comes_back(way: Any) -> None:
    settings = {str(n): n for n in range(300)}
    assert differences(way, [nested(16), *({"n": n, "of": settings} for n in range(900))]) == ""


def test_what_is_saved_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    # The bound is one: where it is narrower, both refuse from the same size on.
    values = [Maker(n).some() for n in range(40)]
    found = {}
    for most in (1 << 24, 64, 32, 16, 8, 4, 2, 1, 0):
        for number, value in enumerate(values):
            monkeypatch.setattr(codec, "MAX_AGAIN", 1 << 24)
            try:
                raw = codec.encode(value, shared=True)
            except UsageError:
                continue  # of a kind that is not saved
            monkeypatch.setattr(codec, "MAX_AGAIN", most)
            saved = refused(codec.encode, value, shared=True)
            found[most, number] = saved, refused(codec.decode, raw)
    both = [f for f in found.values() if f[0]]
    assert [k for k, (saved, loaded) in found.items() if loaded and not saved] == []
    assert len(both) > 10
    assert len(both) < len(found) - 10


def refused(function: Any, *args: Any, **more: Any) -> bool:
    try:
        function(*args, **more)
    except (UsageError, CorruptError) as error:
        return "again" in str(error)
    return False


# --- ranks ----------------------------------------------------------------------------------------


def saved_by_two(root: str) -> list[tuple[str, str, str]]:
    first, held = dist.get_rank() == 0, [1]
    found = []
    for name, value in {
        "sharing": [held, held if first else [1]],
        "flag": [torch.ones(2).requires_grad_(first)],
        "alike": [held, held],
    }.items():
        with ckptd.Checkpointer(f"{root}/{name}") as ck:
            try:
                ck.save(1, {"o": Speaks(value)}).durable(PATIENCE_S)
                found.append(("", "", ""))
            except SaveError as error:
                found.append((error.kind, str(error.where), str(error.hint)))
    return found


@pytest.mark.dist
def test_ranks_whose_values_differ_in_sharing_or_flags_alone(tmp_path: Path) -> None:
    for sharing, flag, alike in run_ranks(2, saved_by_two, str(tmp_path)):
        assert sharing == flag
        assert sharing[:2] == ("replicas-differ", "o")
        assert "one object in several places" in sharing[2]
        assert alike == ("", "", "")


# --- older readers --------------------------------------------------------------------------------


def told_of_values(store: Store) -> tuple[str, ...]:
    """What a reader must know of the values; that they are few is said, too."""
    return tuple(word for word in latest(store).manifest.requires if word != INLINE)


def test_an_older_reader_is_kept_from_what_it_would_misread(tmp_path: Path) -> None:
    held = [1]
    plain = {"o": Speaks([held, [1]]), "p": ckptd.PerRank([held])}
    for number, (value, wanted) in enumerate(
        [
            (plain, ()),
            ({"o": Speaks([held, held])}, (SHARING,)),
            ({"o": Speaks([held, held, list(range(9000))])}, (SHARING,)),
            ({"p": ckptd.PerRank([held, held])}, (SHARING,)),
            ({"o": Speaks([torch.ones(2).requires_grad_()])}, (SHARING,)),
            ({"o": Speaks([torch.nn.Linear(1, 1).state_dict()])}, (SHARING,)),
            ({"o": Speaks(['{"$":"shared"}', torch.ones(2)])}, ()),
        ]
    ):
        root = tmp_path / str(number)
        with ckptd.Checkpointer(root) as ck:
            ck.save(1, {"w": torch.ones(2), **value}).durable(PATIENCE_S)
        with open_store(str(root)) as store:
            assert told_of_values(store) == wanted, number


def test_the_word_stays_in_copies(tmp_path: Path, cli: Cli) -> None:
    held = [1]
    with ckptd.Checkpointer(tmp_path / "a") as ck:
        ck.save(1, {"w": torch.ones(2), "o": Speaks([held, held])}).durable(PATIENCE_S)
    cli.good("cp", str(tmp_path / "a"), str(tmp_path / "b"))
    cli.good("reshard", str(tmp_path / "a"), str(tmp_path / "c"), "--to", "ddp")
    for name in "bc":
        with open_store(str(tmp_path / name)) as store:
            assert told_of_values(store) == (SHARING,)
