"""Facts of data that are compared at a resume: length, samples, sampler, batch size, a batch.

In it: how many samples are digested; words of the error.

A position is a count, or the loader's own state, and fits any data.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from ckptd.base.digest import digest_hex
from ckptd.checkpoint.torch.replicas import sample_digest

_NUMBERS = ("seed", "shuffle", "replacement", "drop_last")
"""Of a sampler, where they are plain numbers: what decides on its order."""
_SAMPLES = 8
_MOST = 64
"""Values of a batch that are digested at its top; a quarter of that, and so on, below."""
_DEEPEST = 6
_DIGEST = "2:"
"""How digests of batches begin. Those of older checkpoints, of tensors alone, are of no use."""
_WORDS = {
    "loader": "the loader",
    "dataset": "the data set",
    "length": "the number of samples",
    "batch_size": "the batch size",
    "drop_last": "drop_last",
    "order": "the order",
    "workers": "the number of workers",
    "samples": "sampled items",
}


def facts_of(source: Any, parts: Sequence[Any], *, workers: bool) -> dict[str, Any]:
    """Return what is known of the data of a loader, as plain values.

    Parameters
    ----------
    parts
        The loader, its samplers and its data set, as far as it tells them.
    workers
        Whether their number decides which batches come.
    """
    data = getattr(source, "dataset", None)
    found: dict[str, Any] = {"loader": type(source).__qualname__}
    if data is not None:
        found["dataset"] = type(data).__qualname__
    found["length"] = _length(source if data is None else data)
    for name in ("batch_size", "drop_last"):
        found[name] = next((v for p in parts if (v := _plain(p, name)) is not None), None)
    samplers = [p for p in parts if p is not source and p is not data]
    found["order"] = ", ".join(map(_sampler, samplers))
    if workers or isinstance(data, IterableDataset):
        found["workers"] = _plain(source, "num_workers")
    found["samples"] = _digest(source if data is None else data)
    return {name: value for name, value in found.items() if value not in (None, "")}


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the facts that differ now, a phrase each; facts of only one side are left out."""
    both = [name for name in _WORDS if name in saved and name in now and saved[name] != now[name]]
    return [
        f"{_WORDS[name]} differ" if name == "samples" else _changed(name, saved[name], now[name])
        for name in both
    ]


def _changed(name: str, before: object, now: object) -> str:
    return f"{_WORDS[name]} was {str(before)[:200]} and is {now}"


def batch_form(batch: Any) -> str:
    """Return types and shapes of what is in a batch."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return f"({', '.join(map(batch_form, batch[:8]))})"
    return type(batch).__name__


def batch_digest(batch: Any) -> str:
    """Return a digest of samples of a batch: of tensors on the host, arrays, text and numbers.

    They may lie in dictionaries, lists, tuples and dataclasses. Of other objects nothing is known.
    """
    found = "".join(_values(batch, 0))
    return f"{_DIGEST}{digest_hex(found.encode())}" if found else ""


def saved_digest(digest: str) -> str:
    """Return a digest that was saved if it can be compared; else an empty one."""
    return digest if digest.startswith(_DIGEST) else ""


def _values(value: Any, depth: int) -> Iterator[str]:
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name, None) for field in fields(value)]
    elif isinstance(value, dict | UserDict):  # another mapping may make its values now
        value = list(value.values())
    elif isinstance(value, str):
        value = value.encode(errors="surrogatepass")
    elif isinstance(value, np.ndarray | np.generic):
        step = max(1, value.nbytes >> 14)
        value = list(value.flat[:_MOST]) if value.dtype.hasobject else value.flat[::step].tobytes()
    if not isinstance(value, list | tuple):
        yield digest_hex(value) if type(value) is bytes else _piece(value)
    elif depth < _DEEPEST:
        step = -(-len(value) // max(4, _MOST >> 2 * depth)) or 1
        for inner in value[::step]:
            yield from _values(inner, depth + 1)


def _plain(part: Any, name: str) -> int | None:
    value = getattr(part, name, None)
    return value if isinstance(value, int) else None


def _sampler(sampler: Any) -> str:
    numbers = [f"{n}={v}" for n in _NUMBERS if (v := _plain(sampler, n)) is not None]
    return f"{type(sampler).__qualname__}({', '.join(numbers)})"


def _length(data: Any) -> int | None:
    if isinstance(data, IterableDataset):
        return None  # what its __len__ says need not be what it gives
    try:
        return len(data)
    except Exception:  # noqa: BLE001 - what does not tell how long it is has no length
        return None


def batches_of(source: Any) -> int | None:
    """Return how many batches an epoch has, where the loader knows it for certain."""
    return (
        None if isinstance(getattr(source, "dataset", None), IterableDataset) else _length(source)
    )


def _digest(data: Any) -> str:
    """Return a digest of a few samples of data in memory; empty where they would have to be made.

    What a data set of the program's own makes may be dear, draw, or count.
    """
    pieces = list(_pieces(data))
    return digest_hex("".join(pieces).encode())[:16] if pieces and all(pieces) else ""


def _pieces(data: Any) -> Iterable[str]:
    if type(data) is TensorDataset:
        yield from map(_piece, data.tensors)
    elif type(data) is Subset:
        yield from map(_piece, (data.indices, data.dataset))
    else:
        yield _piece(data)


def _piece(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        plain = value.device.type == "cpu" and value.layout is torch.strided
        return sample_digest(value) if plain else ""
    if isinstance(value, np.ndarray):
        rows = value[:: max(1, len(value) // _SAMPLES)][:_SAMPLES] if value.ndim else value
        return "" if value.dtype.hasobject else digest_hex(rows.tobytes())
    if type(value) in (list, tuple, range):
        step = max(1, len(value) // _SAMPLES)
        inner = [_piece(v) for v in value[::step][:_SAMPLES]]
        return f"[{', '.join(inner)}]" if all(inner) else ""
    if type(value) in (int, float, str, bytes, bool, type(None)):
        return repr(value)[:4096]
    return _piece([*value.keys(), *value.values()]) if type(value) is dict else ""
