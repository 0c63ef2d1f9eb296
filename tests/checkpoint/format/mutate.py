"""Hostile versions of good files: flipped bytes, broken JSON, other structure, bombs.

Everything follows from a `random.Random`, so that a seed and a number name one mutation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import zstandard


class Pairs(list[tuple[str, Any]]):
    """A JSON object as pairs: keys may repeat."""


class Verbatim(str):
    """Text that goes into JSON as it is."""

    __slots__ = ()


def parse(raw: bytes) -> Any:
    """Parse JSON into lists and `Pairs`."""
    return json.loads(raw, object_pairs_hook=Pairs)


def dump(tree: Any) -> bytes:
    """Write what `parse` gave, and `Verbatim` text."""
    if isinstance(tree, Verbatim):
        return tree.encode("utf-8", "surrogatepass")
    if isinstance(tree, Pairs):
        inner = (json.dumps(k).encode() + b":" + dump(v) for k, v in tree)
        return b"{" + b",".join(inner) + b"}"
    if isinstance(tree, list):
        return b"[" + b",".join(map(dump, tree)) + b"]"
    return json.dumps(tree).encode()


HOSTILE: list[Any] = [
    *(None, True, False, "", [], Pairs(), 0, 1, -1, 2, 7, 64, 65, 4096, 4097, 0.5, -0.0, 1e308),
    *(2**k + d for k in (31, 32, 53, 61, 62, 63, 64) for d in (-1, 0, 1)),
    *(-(2**63), -(2**63) - 1, 10**30, Verbatim("9" * 5000), Verbatim("1e999"), Verbatim("NaN")),
    *(Verbatim("-Infinity"), Verbatim("nul"), Verbatim("[" * 3000), Verbatim('{"a":' * 3000)),
    *(Verbatim("[" * 900 + "]" * 900), Verbatim('{"$":"tuple","v":[' * 400 + "]}" * 400)),
    *("../../../etc/passwd", "/etc/passwd", "data/../commits/x.json", "..", "a/./b", "C:\\x"),
    *("data/000000000012-g00000003-a1/../../x.safetensors", "s3://other/bucket", "x\x00y"),
    *("\ud800", "\u202e", "%", "%2e", "@", "__metadata__", "x" * 5000, "0f" * 16, "sample-1"),
    *("full-1", "float32", "complex128", "U8", "array", "pickle", "$", "data/", "reseed"),
    *([0], [[0, 1]], [[1, 2**62]], [[2**62, 2]], [[0, 0, 2**40]], [[0, 1, 2**62]], [[-1, 0, 5]]),
    *([[1, 1]] * 50, [[[1, 2**20]]] * 3, [[[2**31, 2**31]]] * 70, [2**31] * 3, [0] * 100),
    *(Pairs([("$", "array"), ("dtype", "uint8"), ("shape", [2**40]), ("v", "")]),),
    *(Pairs([("$", "type"), ("name", "os.system"), ("v", "true")]), Pairs([("$", "set")])),
]


def _sites(tree: Any) -> list[tuple[Any, int]]:
    """Every place in a tree: a container and an index into it."""
    out: list[tuple[Any, int]] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, list) and not isinstance(node, str):
            out += [(node, i) for i in range(len(node))]
            stack += [v for _, v in node] if isinstance(node, Pairs) else node
    return out


def _get(node: Any, i: int) -> Any:
    return node[i][1] if isinstance(node, Pairs) else node[i]


def _set(node: Any, i: int, value: Any) -> None:
    node[i] = (node[i][0], value) if isinstance(node, Pairs) else value


def _hostile(rng: random.Random) -> Any:
    return deepcopy(rng.choice(HOSTILE))


def _near(value: Any, rng: random.Random) -> Any:
    """Return something of the same type, a little or much different."""
    if isinstance(value, bool) or value is None:
        return _hostile(rng)
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, value * 2, -value, value << 20, value << 40, 0])
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice(
            [value[:at], value[:at] + rng.choice("./@%\x00é") + value[at:], value * 2]
        )
    return _hostile(rng)


def change_tree(tree: Any, rng: random.Random) -> None:
    """Change one place of a tree: replace, delete, repeat, swap, rename."""
    sites = _sites(tree)
    if not sites:
        return
    node, i = rng.choice(sites)
    action = rng.randrange(8)
    if action <= 2:
        _set(node, i, _hostile(rng))
    elif action == 3:
        _set(node, i, _near(_get(node, i), rng))
    elif action == 4:
        del node[i]
    elif action == 5:
        # Repeats of repeats grow without end; what is large already is repeated once.
        count = rng.choice([1, 1, 2, 300]) if len(repr(node[i])) < 2000 else 1
        node[i:i] = [deepcopy(node[i]) for _ in range(count)]
    elif action == 6:
        other, j = rng.choice(sites)
        value = _get(other, j)
        _set(node, i, value if isinstance(value, int | str | float | None) else _hostile(rng))
    elif isinstance(node, Pairs):
        node[i] = (
            rng.choice([node[rng.randrange(len(node))][0], "requires", "$", "x" * 99]),
            node[i][1],
        )
    else:
        rng.shuffle(node)


def change_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat, insert or append bytes."""
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        at = rng.randrange(len(data) + 1)
        action = rng.randrange(7)
        if action <= 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif action == 2:
            del data[at:]
        elif action == 3:
            del data[at : at + rng.choice([1, 2, 8, 100])]
        elif action == 4:
            data[at:at] = rng.randbytes(rng.choice([1, 8, 64]))
        elif action == 5:
            data[at : at + 8] = rng.choice(
                [b"\xff" * 8, b"\x00" * 8, (1 << 40).to_bytes(8, "little")]
            )
        else:
            data += data[at : at + 4096]
    return bytes(data)


def change_json(raw: bytes, rng: random.Random) -> bytes:
    """Change the structure of a JSON document in one or a few places; bytes now and then."""
    if rng.randrange(6) == 0:
        return change_bytes(raw, rng)
    tree = [parse(raw)]
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        change_tree(tree, rng)
    return dump(tree[0]) if tree else b""


def change_packed(raw: bytes, rng: random.Random) -> bytes:
    """Change a zstd frame: its bytes, what is in it, or make it a bomb."""
    action = rng.randrange(4)
    pack = zstandard.ZstdCompressor(level=1, write_content_size=rng.randrange(4) > 0).compress
    if action == 0:
        return change_bytes(raw, rng)
    inner = zstandard.ZstdDecompressor().decompress(raw)
    if action == 1:
        return pack(change_json(inner, rng))
    if action == 2:
        return pack(inner.rstrip()[:-1] + b" " * (1 << rng.randrange(10, 26)) + b"}")
    return pack(b"[" * rng.choice([10, 10**5, 10**7])) + rng.choice([b"", b"more", raw])


def change_prefixed(raw: bytes, rng: random.Random) -> bytes:
    """Change a safetensors file: its JSON with the length mended, or any byte of it."""
    length = int.from_bytes(raw[:8], "little")
    if rng.randrange(3) == 0:
        return change_bytes(raw, rng)
    text = change_json(raw[8 : 8 + length].rstrip(), rng)
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


Change = Callable[[bytes, random.Random], bytes]
