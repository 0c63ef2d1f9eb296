"""Values of the standard library, enums and named tuples come back as they were; no imports."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import functools
import json
import logging
import subprocess
import sys
import uuid
import zoneinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.checkpoint.format import codec
from ckptd.errors import CorruptError, UsageError
from tests.processes import PATIENCE_S


class Colour(enum.Enum):
    RED = "r"
    NONE = object()


class Level(enum.IntEnum):
    LOW = 1


class Name(enum.StrEnum):
    A = "a"


class Bits(enum.Flag):
    X = 1
    Y = 2


class Point(NamedTuple):
    x: float
    y: Any = None


Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024 - the older way of making one


class Counted(Point):
    """One with a constructor of its own, which a load must not run."""

    def __new__(cls, *args: Any) -> Self:
        raise AssertionError("a file made this")


def again(value: Any) -> Any:
    return codec.decode(json.loads(json.dumps(codec.encode(value))))


VALUES = [
    dt.datetime(2026, 3, 1, 12, 30, 5, 7),
    dt.datetime(2026, 3, 1, tzinfo=dt.UTC),
    dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(minutes=-90), "mine")),
    dt.date(2026, 3, 1),
    dt.time(1, 2, 3, 4, fold=1),
    dt.time(1, tzinfo=dt.timezone(dt.timedelta(hours=5, seconds=1))),
    dt.timedelta(days=-3, microseconds=1),
    dt.timedelta.max,
    zoneinfo.ZoneInfo("UTC"),
    Path("/a/b"),
    Path("odd\udcff"),
    PurePosixPath("x"),
    PureWindowsPath("C:\\x"),
    uuid.UUID(int=5),
    Decimal("1.10"),
    Decimal("-0"),
    Decimal("1e-400"),
    Decimal("Infinity"),
    Fraction(-3, 7),
    range(1, 10, 3),
    range(-1, -(1 << 70), -5),
    slice(None, 3, None),
    Colour.RED,
    Colour.NONE,
    Level.LOW,
    Name.A,
    Bits.X | Bits.Y,
    Bits(0),
    Point(1.0, [Level.LOW]),
    Pair(Path("p"), Pair(1, (2,))),
]


@pytest.mark.parametrize(
    "value", VALUES, ids=[f"{i}-{type(v).__name__}" for i, v in enumerate(VALUES)]
)
def test_what_comes_back_is_what_went_in(value: Any) -> None:
    back = again({"v": [value]})["v"][0]
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value)
    assert getattr(back, "fold", 0) == getattr(value, "fold", 0)
    if isinstance(value, enum.Enum):
        assert back is value


@given(
    st.datetimes(timezones=st.none() | st.timezones())
    | st.timedeltas()
    | st.dates()
    | st.times()
    | st.uuids()
    | st.fractions()
    | st.decimals(allow_nan=False)
)
def test_any_such_value(value: Any) -> None:
    back = again(value)
    assert (type(back), repr(back)) == (type(value), repr(value))


def test_signalling_nan_is_kept() -> None:
    assert again(Decimal("sNaN123")).as_tuple() == Decimal("sNaN123").as_tuple()


def test_a_class_that_is_not_loaded_gives_the_plain_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    raw = codec.encode([Level.LOW, Pair(1, "x"), Colour.NONE])
    text = json.dumps(raw).replace(__name__, "this_module_must_not_be_imported")
    with caplog.at_level(logging.WARNING, "ckptd"):
        assert codec.decode(json.loads(text)) == [1, (1, "x"), None]
    assert "this_module_must_not_be_imported" not in sys.modules
    assert "is not loaded here" in caplog.text


def test_names_of_classes_in_a_file_make_one_printable_line_of_a_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    raw = codec.encode([Level.LOW, Pair(1, "x")])
    name = "m\x1b[2J\nERROR all is lost"
    text = json.dumps(raw).replace(__name__, json.dumps(name)[1:-1])
    with caplog.at_level(logging.WARNING, "ckptd"):
        codec.decode(json.loads(text))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(text.isprintable() and "ERROR all is lost" in text for text in said)


def test_a_file_imports_nothing_and_calls_no_constructor() -> None:
    unloaded = next(m for m in ("antigravity", "this", "turtledemo") if m not in sys.modules)
    for name in (
        f"{unloaded}:C",
        "os:environ",
        "subprocess:Popen",
        "builtins:eval",
        "x",
        ":",
        "a:b:c",
    ):
        enum_raw = {"$": "type", "name": "ckptd.Enum", "v": [name, "RED", 3]}
        assert codec.decode(enum_raw) == 3
        named = [name, ["args"], {"$": "tuple", "v": [1]}]
        assert codec.decode({"$": "type", "name": "ckptd.NamedTuple", "v": named}) == (1,)
    assert unloaded not in sys.modules
    counted = [f"{__name__}:Counted", ["x", "y"], {"$": "tuple", "v": [1, 2]}]
    back = codec.decode({"$": "type", "name": "ckptd.NamedTuple", "v": counted})
    assert type(back) is Counted


def test_named_tuples_of_other_fields_are_plain() -> None:
    raw = [f"{__name__}:Pair", ["b", "a"], {"$": "tuple", "v": [1, 2]}]
    back = codec.decode({"$": "type", "name": "ckptd.NamedTuple", "v": raw})
    assert type(back) is tuple


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ckptd.Enum", 3),
        ("ckptd.Enum", [f"{__name__}:Colour", "BLUE", "b"]),
        ("ckptd.NamedTuple", [f"{__name__}:Pair", ["a"], [1]]),
        ("datetime.datetime", ["2026-01-01", 5, 0]),
        ("datetime.timedelta", ["a"]),
        ("zoneinfo.ZoneInfo", "../../etc/passwd"),
        ("decimal.Decimal", "x"),
        ("range", [1, 2, 0]),
        ("uuid.UUID", 7),
        ("pathlib.Path", 7),
    ],
)
def test_what_nobody_wrote_is_corrupt(name: str, value: object) -> None:
    with pytest.raises(CorruptError):
        codec.decode({"$": "type", "name": name, "v": value})


def test_values_survive_in_another_process(tmp_path: Path) -> None:
    raw = tmp_path / "raw.json"
    raw.write_text(json.dumps(codec.encode([Path("/a"), Decimal("1.5"), Level.LOW])))
    code = "import json, sys; from ckptd.checkpoint.format import codec\n"
    code += "print(codec.decode(json.load(open(sys.argv[1]))))"
    command = [sys.executable, "-c", code, str(raw)]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=True
    )
    assert ended.stdout.strip() == "[PosixPath('/a'), Decimal('1.5'), 1]"


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (lambda x: x, "code"),
        (print, "code"),
        (functools.partial(print, 1), "code"),
        (Path("x").exists, "code"),
        (Path, "code"),
        ((i for i in ()), "iterator"),
        (iter([1]), "iterator"),
        (object(), "ckptd.register(object)"),
    ],
)
def test_the_hint_fits_what_cannot_be_saved(value: object, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        codec.encode({"a": value})
    assert caught.value.kind == "unsavable"
    assert hint in str(caught.value.hint)
    assert ("register" in str(caught.value.hint)) == (hint.startswith("ckptd"))
