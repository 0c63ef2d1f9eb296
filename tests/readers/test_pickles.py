"""Pickles: what the unpickler reads, and the hostile ones that it must survive."""

from __future__ import annotations

import collections
import os
import pickle
import pickletools
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import CkptdError, CorruptError, RefusedError
from ckptd.readers.pickles import (
    PickledObject,
    counts,
    read_pickle,
    short_text,
    unread_kind,
    walk_values,
)

LIMIT_S = 5.0
LIMIT_KIB = 256 << 10


def names(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


class Shell:
    def __reduce__(self) -> Any:
        return os.system, ("touch canary",)


class State:
    def __setstate__(self, state: object) -> None:
        raise AssertionError("it ran")


def nested_tuples(n: int) -> bytes:
    return b"\x80\x04)" + b"\x85" * n + b"."


def laughing(n: int, key: bool) -> bytes:
    """Tuples of the same tuple twice, so that its hash takes 2 ** n steps."""
    body = b"\x80\x04)\x94" + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(n))
    return body + (b"}h" + bytes([n]) + b"Ns." if key else b"].")


LAUGH = b")" + b"2\x86" * 60
SYSTEM = names("os", "system")
CALL = text("touch canary") + b"\x85R."
HOSTILE: dict[str, bytes] = {
    "global of os": b"\x80\x02" + SYSTEM + CALL,
    "global of posix": b"\x80\x02" + names("posix", "system") + CALL,
    "global of nt": b"\x80\x02" + names("nt", "system") + CALL,
    "a real reduce": pickle.dumps(Shell(), 2),
    "a real reduce, protocol 0": pickle.dumps(Shell(), 0),
    "stack global": pickle.dumps(Shell(), 4),
    "subprocess": b"\x80\x02" + names("subprocess", "Popen") + CALL,
    "eval": b"\x80\x02" + names("builtins", "eval") + CALL,
    "exec": b"\x80\x02" + names("__builtin__", "exec") + CALL,
    "import": b"\x80\x02" + names("builtins", "__import__") + text("os") + b"\x85R.",
    "compile": b"\x80\x02" + names("builtins", "compile") + CALL,
    "open": b"\x80\x02" + names("builtins", "open") + CALL,
    "importlib": b"\x80\x02" + names("importlib", "import_module") + text("os") + b"\x85R.",
    "runpy": b"\x80\x02" + names("runpy", "run_path") + CALL,
    "pickle in a pickle": b"\x80\x02" + names("pickle", "loads") + b"C\x01.\x85R.",
    "marshal": b"\x80\x02" + names("marshal", "loads") + b"C\x01.\x85R.",
    "ctypes": b"\x80\x02" + names("ctypes", "CDLL") + CALL,
    "a dotted name of an allowed module": b"\x80\x04"
    + text("collections")
    + text("OrderedDict.__init__.__globals__")
    + b"\x93.",
    "getattr chain": b"\x80\x02"
    + names("builtins", "getattr")
    + names("collections", "OrderedDict")
    + text("fromkeys")
    + b"\x86R"
    + b")R.",
    "a call of what a record returned": b"\x80\x02" + names("torch", "Tensor") + b")R)R.",
    "inst": b"(" + b"S'touch canary'\n" + b"ios\nsystem\n.",
    "obj": b"(" + SYSTEM + text("touch canary") + b"o.",
    "newobj": b"\x80\x02" + SYSTEM + text("touch canary") + b"\x85\x81.",
    "newobj_ex": b"\x80\x04" + SYSTEM + text("touch canary") + b"\x85}\x92.",
    "ext1": b"\x80\x02\x82\x01.",
    "ext2": b"\x80\x02\x83\x01\x00.",
    "ext4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "persistent id in text": b"Pstorage\n.",
    "persistent id": b"\x80\x02" + text("x") + b"Q.",
    "persistent id of a tuple": b"\x80\x02(" + text("storage") * 5 + b"tQ.",
    "next buffer": b"\x80\x05\x97.",
    "read-only buffer": b"\x80\x05N\x98.",
    "build on a global": b"\x80\x02" + names("torch", "Tensor") + b"}b.",
    "build on a number": b"\x80\x02K\x01}b.",
    "call of a number": b"\x80\x02K\x01)R.",
    "arguments that are not a tuple": b"\x80\x02" + names("torch", "Size") + b"K\x01R.",
    "a size of no numbers": b"\x80\x02" + names("torch", "Size") + b"K\x01\x85R.",
    "a frame of absurd length": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "text of absurd length": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "text of 4 GiB": b"\x80\x02X\xff\xff\xff\xff.",
    "bytes of absurd length": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
    "a bytearray of absurd length": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "a number of absurd length": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a number of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "an item of a set nested too deeply": b"\x80\x04\x8f("
    + nested_tuples(200_000)[2:-1]
    + b"\x90.",
    "a key nested too deeply": b"\x80\x04}" + nested_tuples(200_000)[2:-1] + b"Ns.",
    "a key that laughs": laughing(60, True),
    "a set that laughs": laughing(60, False)[:-2] + b"(h\x3c\x91.",
    "a key that is a list": b"\x80\x02}]Ns.",
    "a memo that is not there": b"\x80\x02h\x07.",
    "a memo far away": b"\x80\x02j\xff\xff\xff\xff.",
    "the stack is empty": b"\x80\x02\x85.",
    "nothing": b"",
    "no end": b"\x80\x02N",
    "no pickle": b"MZ\x90\x00 this is no pickle",
    "a pop without end": b"\x80\x02" + b"0" * 100_000 + b".",
    "a mark that is not there": b"\x80\x02t.",
    "marks without end": b"(" * 1_000_000 + b".",
    "a protocol of the future": b"\x80\x09N.",
    "states without end": b"\x80\x02"
    + names("torch", "Tensor")
    + b")\x81"
    + b"}("
    + b"".join(text(f"k{i}") + b"N" for i in range(5000))
    + b"u\x94"
    + b"bh\x00" * 20_000
    + b".",
    "copies without end": b"\x80\x02]("
    + b"N" * 50_000
    + b"e\x94"
    + (names("builtins", "list") + b"h\x00\x85R0") * 20_000
    + b".",
    "containers without end": b"\x80\x02" + b"]" * (12 << 20) + b".",
    "a storage of a tuple that laughs": b"\x80\x02("
    + text("storage")
    + LAUGH
    + text("0cpu") * 2
    + b"K\x04tQ.",
    "a type that laughs": b"\x80\x02"
    + names("torch._utils", "_rebuild_tensor_v3")
    + b"(NK\x00K\x04\x85K\x01\x85\x89N"
    + LAUGH
    + b"tR.",
    "a layout that laughs": b"\x80\x02"
    + names("torch.serialization", "_get_layout")
    + LAUGH
    + b"\x85R.",
    "a subclass of a subclass of": b"\x80\x02"
    + names("torch._tensor", "_rebuild_from_type_v2")
    + b"q\x01"
    + b"(h\x01N" * 3000
    + b"(h\x01N)Nt"
    + b"Nt" * 3000
    + b"R.",
    "a list of bytes without end": b"\x80\x02"
    + names("builtins", "list")
    + b"q\x01B"
    + struct.pack("<I", 1 << 20)
    + b"\xff" * (1 << 20)
    + b"q\x02"
    + b"h\x01h\x02\x85R" * 300
    + b".",
    "a size of a global": b"\x80\x02"
    + names("torch", "Size")
    + names("a" * (1 << 20), "b")
    + b"\x85q\x020"
    + b"ctorch\nSize\nh\x02R" * 99
    + b".",
    "memos beyond its length": b"\x80\x04N" + b"\x94" * 5_000_000 + b".",
    "a surrogate": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
    "a tensor of negative strides": b"\x80\x02"
    + names("torch._utils", "_rebuild_tensor_v2")
    + b"(NK\x00(J\xff\xff\xff\xfftK\x01\x85\x88}tR.",
}
HARMLESS = {
    "memos without end": b"\x80\x04N" + b"r\xff\xff\xff\x3f" * 1000 + b".",
    "a tuple nested deeply": nested_tuples(100_000),
    "setstate": pickle.dumps(State(), 4).replace(b"test_pickles", b"torch_pickle"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begun, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CkptdError) as caught:
        read_pickle(HOSTILE[name], "x.pt")
    assert caught.value.kind == "unsafe-pickle" or isinstance(caught.value, CorruptError)
    assert "x.pt" in str(caught.value.where)
    assert time.thread_time() - begun < LIMIT_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LIMIT_KIB
    assert not list(tmp_path.iterdir())


def test_there_are_enough_hostile_pickles() -> None:
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize("name", HARMLESS)
def test_odd_and_harmless(name: str) -> None:
    begun = time.thread_time()
    read_pickle(HARMLESS[name], "x.pt")
    assert time.thread_time() - begun < LIMIT_S


def test_the_global_is_named() -> None:
    for name, wanted in {
        "global of os": "os.system",
        "eval": "builtins.eval",
        "getattr chain": "builtins.getattr",
        "subprocess": "subprocess.Popen",
        "inst": "os.system",
    }.items():
        with pytest.raises(RefusedError) as caught:
            read_pickle(HOSTILE[name], "x.pt")
        assert wanted in str(caught.value.found)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=20,
)


@given(PLAIN, st.integers(0, 5))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), "x") == value


@given(PLAIN, st.data())
def test_damage_is_an_error_or_another_value(value: object, data: st.DataObject) -> None:
    raw = bytearray(pickle.dumps(value, data.draw(st.integers(0, 5))))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_pickle(bytes(raw), "x")
    except CkptdError as error:
        assert error.kind == "unsafe-pickle" or isinstance(error, CorruptError)  # noqa: PT017


def test_every_opcode_is_known() -> None:
    from ckptd.readers import pickles

    assert {op.code.encode("latin-1") for op in pickletools.opcodes} == set(pickles._OPS)


def test_classes_become_records() -> None:
    made = (
        b"\x80\x04" + text("some.model") + text("Config") + b"\x93)\x81}" + text("a") + b"K\x01sb."
    )
    found = read_pickle(made, "x")
    assert isinstance(found, PickledObject)
    assert (found.cls, found.short, found.fields) == ("some.model.Config", "Config", {"a": 1})


def test_ordered_dicts_and_attributes_of_theirs() -> None:
    value = collections.OrderedDict(a=[1, 2], b=(3,))
    value._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    assert read_pickle(pickle.dumps(value, 2), "x") == {"a": [1, 2], "b": (3,)}
    assert list(walk_values(dict(value))) == [("a.0", 1), ("a.1", 2), ("b.0", 3)]


def test_a_tree_without_end_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CorruptError) as caught:
        list(walk_values(loop))
    assert "a pickle is nested too deeply, holds too many values" in caught.value.message
    for names_too_long in ({"k" * 5000: [1]}, {9**9999: 1}, {("k" * 2000, "k" * 3000): 1}):
        with pytest.raises(CorruptError):
            list(walk_values(names_too_long))
    with pytest.raises(CorruptError):
        list(walk_values({"k" * 4000: [[1]] * 100_000}))
    wide: object = 1
    for _ in range(40):
        wide = [wide, wide]
    with pytest.raises(CorruptError):
        sum(1 for _ in walk_values(wide))


def test_references_of_a_few_bytes_are_not_followed_for_long() -> None:
    raw = b"\x80\x02K\x01" + b"2\x86" * 29 + b"."
    assert len(raw) <= 64
    leaves = walk_values(read_pickle(raw, "x"))
    with pytest.raises(CorruptError, match="holds too many values"):
        for _ in range(1 << 16):
            next(leaves)


def test_what_is_referred_to_a_few_times_is_read() -> None:
    model = {f"{k}": [k, (k,)] for k in range(20_000)}
    raw = pickle.dumps(dict.fromkeys(("model", "ema", "best", "last"), model))
    assert sum(1 for _ in walk_values(read_pickle(raw, "x"))) == 160_000


def test_modules_that_hold_each_other_are_looked_at_once() -> None:
    module = PickledObject("a.M")
    for _ in range(40):
        outer = PickledObject("a.M")
        outer.fields = {"_parameters": {}, "_modules": {"a": module, "b": module}}
        module = outer
    assert unread_kind(module) is None


def test_long_lists_of_plain_values_are_one_leaf() -> None:
    long, mixed = list(range(20_000)), [*range(20_000), {"a": 1}]
    assert list(walk_values({"x": long})) == [("x", long)]
    assert sum(1 for _ in walk_values(mixed)) == 20_001


def test_a_large_text_of_protocol_2() -> None:
    """What is copied once is no attack: numpy's arrays are such in files of torch."""
    value = bytes(range(256)) * 20_000
    assert read_pickle(pickle.dumps(value, 2), "x") == value


def test_texts_of_values_have_an_end() -> None:
    laugh: object = ()
    for _ in range(60):
        laugh = laugh, laugh
    assert short_text(laugh) == "a tuple"
    assert [short_text(v) for v in ("x", 3, None, 9**999)] == ["x", "3", "None", "a int"]
    for value in (laugh, [1 << 62], [True], "12", [1] * 65, [-1]):
        with pytest.raises(ValueError, match="siz"):
            counts(value)
