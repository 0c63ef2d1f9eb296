"""Writes a file a rank with local tensors, in safetensors or torch.save (Megatron and its like).

What each rank of the target's layout holds is written as it holds it: cut, fused, replicated,
packed into buffers. The layout's line ``files`` says which file is whose; the end of its name says
whether it is one of safetensors or of torch.save.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ckptd.base.grids.block import Region
from ckptd.base.grids.grid import strides_of, whole
from ckptd.base.grids.owners import single_owner
from ckptd.checkpoint.format.container import FileMap, build_header
from ckptd.checkpoint.format.witness import select
from ckptd.errors import MismatchError, UsageError
from ckptd.lay.copies import TargetPlan
from ckptd.lay.indexes import write_name
from ckptd.lay.local import BoundTensor, LocalPiece, local_tensors
from ckptd.lay.stored import StoredForm, TensorKey, local_cells
from ckptd.reshard.compose import TensorLink, link_of
from ckptd.reshard.execute import FileDraft
from ckptd.reshard.job import safetensors_draft
from ckptd.reshard.plan import ChunkFeed
from ckptd.reshard.ranks import rank_file_pattern
from ckptd.reshard.reports import FolderNote
from ckptd.reshard.target import Assembled
from ckptd.reshard.verify import Expected, ExpectedValues
from ckptd.reshard.writers.folder import ChosenTensors, check_safetensors
from ckptd.reshard.writers.pickling import StorageTensor
from ckptd.reshard.writers.states import KeyPath, StateKeys, nested
from ckptd.reshard.writers.torchzip import TorchFrame, TorchJoints, torch_file
from ckptd.types import DTYPES

_SAFETENSORS = ".safetensors"


@dataclass(frozen=True, slots=True)
class _Local:
    """A tensor of a file: the rank that it is planned for, what it is there, and its type.

    Attributes
    ----------
    holds
        What it holds of which rank-local tensors: equal on ranks that hold the same.
    """

    rank: int
    laid: BoundTensor
    dtype: str
    holds: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    """Values of the source's witness in local tensors; computed when asked for."""

    _form: StoredForm
    _expected: Mapping[int, Expected]
    _numbers: Mapping[TensorKey, int]
    _locals: Sequence[_Local]

    def get(self, number: int, /) -> Expected | None:
        """Return the values of a local tensor; None when there are none."""
        local = self._locals[number]
        found = [
            part
            for piece in local.laid.pieces
            for part in self._of_piece(local, piece)
            if len(part[0])
        ]
        if not found:
            return None
        at, values, sources = (np.concatenate(some) for some in zip(*found, strict=True))
        order = np.argsort(at, kind="stable")
        return Expected(at[order], values[order], sources[order])

    def _of_piece(
        self, local: _Local, piece: LocalPiece
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        link = self._numbers.get((piece.rule, piece.indexes, local.laid.state))
        wanted = None if link is None else self._expected.get(link)
        if wanted is None:
            return
        rule = self._form.rules[piece.rule]
        who = rule.who(self._form.mesh.coordinates(local.rank))
        strides = strides_of(rule.local_shape(who))
        for cell, box in local_cells(rule, who):
            start = sum(o * s for o, s in zip(box.offset, strides, strict=True))
            region = Region(rule.grid.cell_box(cell), start, strides)
            which, at = select(wanted.positions, rule.shape, region, 0)
            inside = (at >= piece.lo) & (at < piece.hi)
            which, at = which[inside], at[inside] - piece.lo + piece.at
            yield at, wanted.values[which], wanted.sources[which]


class RanksPlace:
    """Files with the local tensors of each rank of a target.

    Parameters
    ----------
    assembled, expected
        The target, and the values of the source's witness.

    Raises
    ------
    UsageError
        kind ``lay-rule``: the layout lacks a 'files' line, or ranks of one file hold
        different parts of a tensor. Safetensors lacks a type.
    MismatchError
        kind ``lay-fit``, ``lay-cover``: a buffer would hold several types, or tensors that the
        source lacks.
    """

    def __init__(self, assembled: Assembled, expected: Mapping[int, Expected]) -> None:
        composed = assembled.composed
        self._form = form = composed.composition.target
        layout = form.bound.layout
        if layout.files is None:
            raise UsageError(
                "the layout lacks a 'files' line",
                kind="lay-rule",
                where=layout.name,
                wanted="a line 'files'",
                hint="-e 'files \"rank_{dp}.safetensors\"', with the axes of its mesh",
            )
        self._pattern = rank_file_pattern(layout)
        self._composed = composed
        self._stored = form.stored_numbers
        self._links = {link.key: n for n, link in enumerate(composed.links)}
        self._copies: dict[TensorKey, TensorLink | None] = {}
        self.files: dict[str, dict[str, _Local]] = {}
        for rank in range(form.mesh.world):
            file = write_name(layout.files, form.mesh.coordinates(rank))
            self._add(self.files.setdefault(file, {}), file, rank)
        self._names = list(self.files)
        self._keys = StateKeys(layout)
        chosen = ChosenTensors(assembled, {})
        locals_: list[_Local] = []
        for number, (file, tensors) in enumerate(self.files.items()):
            tied = {} if file.endswith(_SAFETENSORS) else self._tied(tensors)
            for name, local in tensors.items():
                if name in tied:
                    continue
                aliases = tuple(f"{file}: {n}" for n, of in tied.items() if of == name)
                grid, feed = whole(local.laid.shape), partial(self._feed, local)
                if file.endswith(_SAFETENSORS):
                    check_safetensors(local.dtype, f"{file}: {name}")
                chosen.add(
                    f"{file}: {name}",
                    -1,
                    grid,
                    single_owner(0),
                    number,
                    aliases,
                    feed,
                    local.dtype,
                )
                locals_.append(local)
        self._locals = locals_
        self.target = replace(chosen.target(len(self._names)), plan=self._plan)
        self.expected: ExpectedValues = _Found(form, expected, self._links, locals_)
        whole_target = assembled.target
        self.left_out: Sequence[str] = [
            *(t.name for t in whole_target.tensors[len(composed.links) :]),
            *(o.name for o in whole_target.objects if not o.tensor),
        ]
        self.simplified: Sequence[str] = ()
        self.notes: Sequence[FolderNote] = ()
        self.options = ""

    # --- what ranks hold --------------------------------------------------------------------------

    def _add(self, tensors: dict[str, _Local], file: str, rank: int) -> None:
        """Add what a rank holds to the tensors of its file."""
        coordinates = self._form.mesh.coordinates(rank)
        for laid in local_tensors(self._form, rank):
            dtype = self._dtype(laid, tensors)
            if dtype is None:
                continue
            holds = tuple(
                (p.rule, p.indexes, p.lo, p.hi, p.at, self._form.rules[p.rule].who(coordinates))
                for p in laid.pieces
            )
            local = tensors.setdefault(laid.name, _Local(rank, laid, dtype, holds))
            if (local.laid.shape, local.holds) != (laid.shape, holds):
                raise UsageError(
                    "ranks of one file hold different parts of a tensor",
                    kind="lay-rule",
                    where=f"{file}: {laid.name}",
                    wanted="a line 'files' with all axes of the mesh that something is cut over",
                    found=f"ranks {local.rank} and {rank}",
                )

    def _dtype(self, laid: BoundTensor, beside: Mapping[str, _Local]) -> str | None:
        """Return the type of a local tensor; None for one that the source has nothing of."""
        links = [self._link((p.rule, p.indexes, laid.state)) for p in laid.pieces]
        if laid.state and all(p.rule not in self._stored for p in laid.pieces) and laid.pieces:
            return None  # a copy has no states of its own
        found = dict.fromkeys(link.dtype.name for link in links if link is not None)
        if not laid.pieces:
            # Padding alone: it is of the type that the other buffers of its state have.
            others = (t.dtype for t in beside.values() if t.laid.state == laid.state)
            known = (
                link.dtype.name
                for link in self._composed.links
                if link.key[2] == laid.state and self._is_packed(link.key)
            )
            return next(others, next(known, None)) if laid.numel else None
        if not found:
            return None
        if None in links or len(found) > 1:
            raise MismatchError(
                "a buffer would mix dtypes, or hold tensors that the source lacks",
                kind="lay-fit" if len(found) > 1 else "lay-cover",
                where=laid.name,
                found=", ".join(found),
            )
        return next(iter(found))

    def _is_packed(self, key: TensorKey) -> bool:
        return self._form.packing.flat_of(*key) is not None

    def _link(self, key: TensorKey) -> TensorLink | None:
        """Return where a tensor comes from: a stored one, or a copy under another name."""
        number = self._links.get(key)
        if number is not None:
            return self._composed.links[number]
        if key[0] in self._stored:
            return None
        if key not in self._copies:
            self._copies[key] = link_of(self._composed.composition, self._composed.stock, key)
        return self._copies[key]

    def _tied(self, tensors: Mapping[str, _Local]) -> dict[str, str]:
        """Return the names of copies that are equal to another tensor of the file, and its name."""
        composition = self._composed.composition
        out: dict[str, str] = {}
        for name, local in tensors.items():
            if all(p.rule in self._stored for p in local.laid.pieces):
                continue
            plan = composition.local_tensor(local.rank, local.laid)
            for other, t in tensors.items():
                if other == name or other in out or t.laid.state != local.laid.state:
                    continue
                same = (t.dtype, t.laid.shape) == (local.dtype, local.laid.shape)
                if same and composition.local_tensor(t.rank, t.laid).sources == plan.sources:
                    out[name] = other
                    break
        return out

    def _feed(self, local: _Local, piece: int) -> ChunkFeed:
        return self._composed.local_feed(local.rank, local.laid, DTYPES[local.dtype])

    def _plan(self, number: int, piece: int) -> TargetPlan:
        local = self._locals[number]
        return self._composed.composition.local_tensor(local.rank, local.laid)

    # --- files ------------------------------------------------------------------------------------

    def name(self, number: int) -> str:
        """Return the name of a file."""
        return self._names[number]

    def draft(self, filemap: FileMap, number: int, key: str) -> FileDraft:
        """Return a file, its tensors under local names."""
        file = self._names[number]
        chunks = filemap.chunks(number)
        entries = [self.target.tensors[c.tensor] for c in chunks]
        before = len(file) + 2
        if file.endswith(_SAFETENSORS):
            named = [(e.name[before:], DTYPES[e.dtype], e.shape) for e in entries]
            return safetensors_draft(filemap, number, key, named, {"format": "pt"})
        values: dict[KeyPath, StorageTensor] = {}
        for at, entry in enumerate(entries):
            tensor = StorageTensor(str(at), entry.dtype, entry.shape)
            for name in (entry.name, *entry.aliases):
                values[self._keys.path(name[before:])] = tensor
        frame = TorchFrame(nested(values), [c.end - c.start for c in chunks])
        return FileDraft(number, key, frame.head, frame.ends[-1], joints=TorchJoints(frame))

    def is_mine(self, name: str, beside: Collection[str]) -> bool:
        """Tell whether a file, or a folder, is of some rank."""
        if not name.endswith("/"):
            return self._pattern.matches(name)
        return self._pattern.may_hold(name)

    def last(self) -> Sequence[tuple[str, bytes]]:
        """Return the files of ranks that hold nothing: all of them are the checkpoint."""
        return [
            (file, build_header([], {"format": "pt"})[0])
            if file.endswith(_SAFETENSORS)
            else (file, torch_file({}))
            for file, tensors in self.files.items()
            if not tensors
        ]
