"""`CheckpointReader`: any checkpoint as named tensors and objects; sections.

In it: errors of unknown tensors, and of kinds that are not read.

Tools (diff, export, inspect, reshard) read checkpoints through `CheckpointReader` and know no
format. ckptd's own is `ckptd.checkpoint.load.reader.CkptdReader`; another format is one more
subclass.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

from msgspec.structs import replace
from numpy.typing import NDArray

from ckptd.base.grids.grid import Grid
from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.format.words import TensorLayout, unread_tensors
from ckptd.errors import NotFoundError
from ckptd.types import Box, DType

Array = NDArray[Any]
T = TypeVar("T")


class PerRankValues(dict[int, Any]):
    """The values of a per-rank object, by the rank that saved them."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A logical tensor: its name, logical type and shape, and other names under which it is known.

    Tied tensors are stored once; `aliases` are the other names.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointReader(ABC):
    """Reads one checkpoint. What it returns has been verified as far as the format can.

    A subclass sets the attributes and implements the abstract methods; the rest follows from them.

    Attributes
    ----------
    url
        Where the checkpoint is, for errors and reports.
    title
        What the checkpoint is called there.
    program
        The layout program (Lay) that the checkpoint keeps; empty if it keeps none.
    entries
        The objects.
    has_sections
        Whether names begin with a section of a state, as a job of ckptd saves it; else ``model.``
        is a part of weights' own names.
    is_foreign
        Whether the files are those of another program.
    unread
        Tensors of kinds that are not read, by name: what each is. They are not in `infos`.
    wrapped
        Names below which tensors are the parts of one of a wrapper subclass: which class it is.
    """

    url: str
    title: str
    program: str
    entries: Sequence[ObjectEntry]
    has_sections: bool = True
    is_foreign: bool = False
    unread: Mapping[str, str] = MappingProxyType({})
    wrapped: Mapping[str, str] = MappingProxyType({})

    @property
    @abstractmethod
    def infos(self) -> Mapping[str, TensorInfo]:
        """The tensors by name, in the order of the checkpoint; without those that hold objects."""

    @abstractmethod
    def read(
        self, wanted: Sequence[tuple[str, Box]], *, allow_absent: bool = False
    ) -> Sequence[Array]:
        """Return boxes of tensors; types that numpy lacks are those of ml_dtypes.

        Raises
        ------
        MismatchError
            The checkpoint leaves out, on purpose, what is wanted, unless `allow_absent`: then
            absent pieces are zeros.
        CorruptError
            The data is not what was written, or not there.
        """

    @abstractmethod
    def raw_object(self, entry: ObjectEntry) -> Any:
        """Return an object as JSON data, undecoded (spec section 7).

        Per-rank objects are `PerRankValues`. Needs no type to be registered.
        """

    @abstractmethod
    def layout(self, name: str) -> TensorLayout:
        """Return how a tensor is cut, and which ranks wrote it."""

    @abstractmethod
    def absent_elements(self, name: str) -> int:
        """Return the number of elements of a tensor that no file holds."""

    @abstractmethod
    def grid(self, name: str) -> Grid:
        """Return the pieces in which a tensor is stored."""

    def refuse_unread(self, asked: Callable[[str], bool] | None = None) -> None:
        """Refuse to go on without a tensor of a kind that is not read.

        Parameters
        ----------
        asked
            Tells which names matter; None is all of them.

        Raises
        ------
        RefusedError
            kind ``unreadable-format``: names them, and says what each is.
        """
        self._refuse(self.unread, asked)

    def refuse_wrapped(self, asked: Callable[[str], bool], hint: str) -> None:
        """Refuse to take the parts of wrapped tensors for tensors; as `refuse_unread`."""
        self._refuse(self.wrapped, asked, hint)

    def _refuse(
        self, names: Mapping[str, str], asked: Callable[[str], bool] | None, hint: str = ""
    ) -> None:
        found = {n: kind for n, kind in names.items() if asked is None or asked(n)}
        if found:
            raise unread_tensors(found, f"{self.url}, {self.title}", hint)

    # -- tensors -------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in order, without aliases."""
        return list(self.infos)

    @cached_property
    def _known(self) -> Mapping[str, TensorInfo]:
        return {a: info for info in self.infos.values() for a in (info.name, *info.aliases)}

    def find(self, *names: str) -> str:
        """Return the name under which one of these names or aliases is stored, or ""."""
        return next((self._known[n].name for n in names if n in self._known), "")

    def info(self, name: str) -> TensorInfo:
        """Return a tensor, by name or alias.

        Raises
        ------
        NotFoundError
            No tensor has that name, or matches that pattern.
        """
        if name not in self._known:
            raise NotFoundError("the checkpoint has no such tensor", where=name[:200])
        return self._known[name]

    def tensor(self, name: str, *, allow_absent: bool = False) -> Array:
        """Return a whole tensor; raises as `info` and `read`."""
        return self.tensors([name], allow_absent=allow_absent)[name]

    def tensors(self, names: Iterable[str], *, allow_absent: bool = False) -> dict[str, Array]:
        """Return several whole tensors in one read; raises as `info` and `read`."""
        names = list(dict.fromkeys(names))
        boxes = [(n, Box.whole(self.info(n).shape)) for n in names]
        return dict(zip(names, self.read(boxes, allow_absent=allow_absent), strict=True))

    def slabs(
        self, name: str, max_bytes: int, *, allow_absent: bool = False
    ) -> Iterator[tuple[Box, Array]]:
        """Yield a tensor in parts of at most `max_bytes` bytes, row-major: ``(box, values)``.

        One element is the least that a part can be. Raises as `info` and `read`.
        """
        info = self.info(name)
        boxes = Box.whole(info.shape).cut(info.dtype.itemsize, max_bytes) if info.nbytes else ()
        for box in boxes:
            yield box, self.read([(name, box)], allow_absent=allow_absent)[0]

    # -- objects -------------------------------------------------------------------------------

    def raw_objects(self) -> dict[str, Any]:
        """Return all objects by name, each as of `raw_object`."""
        return {o.name: self.raw_object(o) for o in self.entries}

    def object(self, entry: ObjectEntry) -> Any:
        """Return an object; a per-rank object is `PerRankValues`.

        Raises
        ------
        UsageError
            This program has not registered a type that is used.
        CorruptError
            A stored object does not decode.
        """
        raw = self.raw_object(entry)
        if isinstance(raw, PerRankValues):
            return PerRankValues((r, codec.decode(v, entry.name)) for r, v in raw.items())
        return codec.decode(raw, entry.name)

    def objects(self) -> dict[str, Any]:
        """Return all objects by name; raises as `object`."""
        return {o.name: self.object(o) for o in self.entries}


class SectionReader(CheckpointReader):
    """One section of a checkpoint: the names below it, without its own name in front.

    Parameters
    ----------
    whole
        The checkpoint.
    section
        The name.

    Raises
    ------
    NotFoundError
        There is nothing.
    """

    def __init__(self, whole: CheckpointReader, section: str) -> None:
        self._whole, self._above = whole, f"{section}."
        self.url, self.title, self.program = whole.url, whole.title, ""
        self.is_foreign = whole.is_foreign
        self.entries = [replace(o, name=n) for o in whole.entries for n in self._inside(o.name)]
        unread, wrapped = (
            {n: kind for name, kind in names.items() for n in self._inside(name)}
            for names in (whole.unread, whole.wrapped)
        )
        self.unread, self.wrapped = unread, wrapped
        if not (self.entries or self.infos or unread):
            raise NotFoundError(
                f"the checkpoint has no section {section!r}", where=f"{self.url}, {self.title}"
            )

    def _inside(self, *names: str) -> list[str]:
        return [n.removeprefix(self._above) for n in names if n.startswith(self._above)]

    @cached_property
    def infos(self) -> Mapping[str, TensorInfo]:
        """The tensors by name."""
        infos = [(i, self._inside(i.name, *i.aliases)) for i in self._whole.infos.values()]
        return {n[0]: TensorInfo(n[0], i.dtype, i.shape, tuple(n[1:])) for i, n in infos if n}

    def read(
        self, wanted: Sequence[tuple[str, Box]], *, allow_absent: bool = False
    ) -> Sequence[Array]:
        """Return boxes of tensors."""
        return self._whole.read(
            [(self._above + n, b) for n, b in wanted], allow_absent=allow_absent
        )

    def raw_object(self, entry: ObjectEntry) -> Any:
        """Return an object as JSON data."""
        return self._whole.raw_object(entry)

    def layout(self, name: str) -> TensorLayout:
        """Return how a tensor is cut."""
        return self._whole.layout(self._above + name)

    def absent_elements(self, name: str) -> int:
        """Return the number of elements of a tensor that no file holds."""
        return self._whole.absent_elements(self._above + name)

    def grid(self, name: str) -> Grid:
        """Return the pieces of a tensor."""
        return self._whole.grid(self._above + name)
