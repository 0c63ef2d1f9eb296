"""Tensors of any model, each cut along its first dimension over some ranks: as a layout.

verl hands over whole tensors by name and knows no more of them. So the layout is made from names
and shapes: trainers and rollouts, each with as many ranks as they have, speak of the same tensors.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import torch

from ckptd.decoding import json_decoder
from ckptd.errors import CorruptError

__all__ = ["Published", "WholeTensor", "read_published", "shares_layout", "write_published"]

_MOST_BYTES = 64 << 20


class WholeTensor(NamedTuple):
    """Shape and type of a tensor; the type as torch calls it, without ``torch.``."""

    shape: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)], ...]
    dtype: str

    @staticmethod
    def of(tensor: torch.Tensor) -> WholeTensor:
        """Return what `tensor` is."""
        return WholeTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise CorruptError("unknown torch dtype", found=self.dtype[:100])
        return found

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The shape that is cut: a scalar is a row."""
        return self.shape or (1,)

    def rows(self, world: int) -> int:
        """Return how many rows a share has, but for the last ones."""
        return -(-self.cut_shape[0] // world)

    def share(self, rank: int, world: int) -> torch.Tensor:
        """Return memory for the part of a rank; perhaps it has no rows."""
        rows, all_rows = self.rows(world), self.cut_shape[0]
        mine = max(0, min(rows, all_rows - rank * rows))
        return torch.zeros((mine, *self.cut_shape[1:]), dtype=self.torch_dtype)

    def part_of(self, tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        """Return what a rank keeps of the whole tensor, as ``torch.chunk`` cuts."""
        rows = self.rows(world)
        return tensor.reshape(self.cut_shape)[rank * rows : (rank + 1) * rows]


def shares_layout(tensors: Mapping[str, WholeTensor], world: int) -> str:
    """Return the program of `world` ranks that hold a share of each tensor.

    Tensors whose names differ in the last number alone are one rule, so that layers and experts do
    not make it long.
    """
    lets, families, rules = [], [], []
    for number, (name, shape, count) in enumerate(_patterns(tensors)):
        axes = [f"a{number}_{dim}" for dim in range(len(shape))]
        sizes = dict(zip(axes, shape, strict=True))
        family = f"F{number}"
        if count:
            family += f".n{{i{number}}}"
            sizes[f"i{number}"] = count
        lets += [f"  let {axis} = {size}" for axis, size in sizes.items()]
        families.append(f"  {family}[{' '.join(axes)}]")
        axes[0] += "@dp:ceil"
        rules.append(f'  "{name.format(number)}" = {family}[{" ".join(axes)}]')
    return "\n".join(
        [
            f"mesh verl = dp:{world}",
            *("space tensors {", *families, *lets, "}"),
            *("layout shares of tensors on verl {", *rules, "}", ""),
        ]
    )


def _patterns(
    tensors: Mapping[str, WholeTensor],
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield quoted names, with ``{{i{}}}`` for an index, their shape and how long the index is."""
    groups: dict[tuple[str, str, WholeTensor], dict[int, str]] = {}
    for name, tensor in tensors.items():
        before, number, after = _last_number(name)
        groups.setdefault((before, after, tensor), {})[number] = name
    for (before, after, tensor), found in groups.items():
        if set(found) == set(range(len(found))):
            yield f"{_quoted(before)}{{{{i{{}}}}}}{_quoted(after)}", tensor.cut_shape, len(found)
        else:
            for name in found.values():
                yield _quoted(name), tensor.cut_shape, 0


def _last_number(name: str) -> tuple[str, int, str]:
    """Return a name before and behind its last component that is a number, and this; -1: none."""
    parts = name.split(".")
    for at in reversed(range(len(parts))):
        text = parts[at]
        if text.isascii() and text.isdigit() and (text == "0" or text[0] != "0"):
            before = "".join(f"{p}." for p in parts[:at])
            return before, int(text), "".join(f".{p}" for p in parts[at + 1 :])
    return name, -1, ""


def _quoted(name: str) -> str:
    """Return a name as it stands in quotes of Lay, and in a format of Python."""
    for letter in '\\"':
        name = name.replace(letter, f"\\{letter}")
    for letter in "*,":
        name = name.replace(letter, f"\\{letter}")
    return name.replace("{", "\\{{").replace("}", "\\}}")


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tensors a publisher has, and the name of the folder in which it is found."""

    place: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,30}\Z")]
    tensors: dict[str, WholeTensor]


_published = json_decoder(Published)


def write_published(path: Path, published: Published) -> None:
    """Write it down; readers see all of it or what was there before."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    draft.write_bytes(msgspec.json.encode(published))
    os.replace(draft, path)


def read_published(path: Path) -> Published | None:
    """Return what `write_published` wrote; None where there is nothing yet.

    Raises
    ------
    CorruptError
        It is something else.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        return _published.decode(raw)
    except FileNotFoundError:
        return None
    except ValueError as error:  # msgspec's are
        raise CorruptError(
            "invalid list of tensors", where=str(path), found=str(error)[:200]
        ) from None
