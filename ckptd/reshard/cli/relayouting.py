"""What ``ckptd relayout`` does; imported when it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ckptd.cli.options import size_of
from ckptd.elastic.placement import NodeSlot
from ckptd.elastic.policy import JobSpec, MemoryNeed, Shape
from ckptd.errors import UsageError
from ckptd.lay.syntax import File, Mesh, library, show
from ckptd.reshard.cli.resharding import open_stock
from ckptd.reshard.compose import compose_layouts
from ckptd.reshard.explain import (
    Explanation,
    SurvivorsRow,
    cluster_of,
    explain,
    row_of,
    survivors_of,
)
from ckptd.reshard.layouts import LayoutProgram, read_program, wrapped
from ckptd.reshard.moved import Moved, moved, moved_whole
from ckptd.reshard.prepare import apart_from, inferred, source_program
from ckptd.reshard.source import Stock, StockTensor

__all__ = [
    "Model",
    "Question",
    "RelayoutAnswer",
    "draw",
    "memory_of",
    "model_of",
    "range_of",
    "shape_of",
]

_AXES = ("pp", "dp", "tp")
_GROUPS = "groups"
_MEMORY = ("replicated", "sharded", "activations", "limit")


# -- what people write -----------------------------------------------------------------------------


def shape_of(text: str) -> Shape:
    """Return the sizes of ``pp=2,dp=4,tp=2``; what is left out is 1.

    Raises
    ------
    UsageError
        It is no such thing.
    """
    found = _pairs(text, "--layout", _AXES)
    return Shape(**{axis: _number(value, "--layout") for axis, value in found.items()})


def _pairs(text: str, where: str, names: Sequence[str]) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    found = {name.strip(): value.strip() for name, _, value in pairs}
    if len(found) < len(pairs) or not set(found) <= set(names) or not all(found.values()):
        wanted = ",".join(f"{n}=..." for n in names)
        raise UsageError(
            "not understood", kind="bad-argument", where=where, wanted=wanted, found=text
        )
    return found


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise UsageError(
            "not a number", kind="bad-argument", where=where, wanted="0, 1, 2, ...", found=text
        )
    return int(text)


def numbers(text: str | None, where: str) -> tuple[int, ...]:
    """Return the numbers of ``1,2,4``; none for None."""
    return () if text is None else tuple(_number(part.strip(), where) for part in text.split(","))


def range_of(text: str) -> range:
    """Return the numbers of ``13`` or of ``1:16``, whose end counts.

    Raises
    ------
    UsageError
        It is neither.
    """
    first, colon, last = text.partition(":")
    low = _number(first, "--survivors")
    high = _number(last, "--survivors") if colon else low
    if high < low:
        raise UsageError(
            "a range that is empty",
            kind="bad-argument",
            where="--survivors",
            wanted="LOW:HIGH, with LOW not above HIGH",
            found=text,
        )
    return range(low, high + 1)


# -- the model -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Model:
    """What a checkpoint says of its model.

    Attributes
    ----------
    stock
        The checkpoint.
    source
        The program that its tensors are read with.
    program
        Its layout on ranks; None if every rank holds everything.
    """

    stock: Stock
    source: LayoutProgram
    program: LayoutProgram | None

    def memory(self, before: Shape) -> dict[str, int]:
        """Return bytes of the whole model, as `MemoryNeed` has them.

        Parameters and gradients of the same size, and the optimizer's state; a part counts as
        shared out among the replicas where the checkpoint cuts it further than a replica does.
        """
        found = {"replicated": 0, "sharded": 0}
        for optimizer in (False, True):
            tensors = [t for t in self.stock.tensors if self._of_optimizer(t.name) == optimizer]
            size = sum(_bytes(t) for t in tensors if not t.encoded)
            most = max((t.grid.npieces for t in tensors), default=1)
            kind = "sharded" if most > before.pp * before.tp else "replicated"
            found[kind] += size if optimizer else 2 * size
        return found

    def _of_optimizer(self, name: str) -> bool:
        heads = (o.name.removesuffix(_GROUPS) for o in self.stock.objects if o.kind == _GROUPS)
        return any(name.startswith(head) for head in heads)

    def moved(
        self, job: JobSpec, seats: Sequence[NodeSlot], shape: Shape, left: Sequence[NodeSlot]
    ) -> Moved:
        """Count what moves; see `ckptd.reshard.moved`."""
        if self.program is None:
            whole = sum(_bytes(t) for t in self.stock.tensors)
            return moved_whole(whole, seats, left)
        before, after = (
            compose_layouts(self.source.resolve(), _on_mesh(self.program, s).resolve(), self.stock)
            for s in (job.planned, shape)
        )
        itemsize = {k.tensor.name: k.dtype.itemsize for k in after.links}
        # States that the checkpoint does not have, and copies of what others hold, cost nothing.
        bounds = (c.composition.target.bound for c in (before, after))
        return moved(
            *bounds,
            shape=shape,
            seats=seats,
            left=left,
            itemsize=lambda name: itemsize.get(name, 0),
        )


def _bytes(tensor: StockTensor) -> int:
    return tensor.dtype.itemsize * math.prod(tensor.shape)


@contextmanager
def model_of(checkpoint: str, program: str | None, shape: Shape) -> Iterator[Model]:
    """Open a checkpoint and find out how its ranks hold it.

    Parameters
    ----------
    program
        A layout as `ckptd reshard --to` takes it; the one that the checkpoint keeps, or what its
        tensors say, if None.
    shape
        Sizes of the layout.

    Raises
    ------
    UsageError
        kind ``bad-argument``: it cannot be known how ranks hold it.
    """
    with open_stock(checkpoint, 0) as stock:
        own = source_program(stock, None)
        if program is not None:
            named = read_program(program, "--program", lambda run: run.target)
            if named.is_recipe:
                own = inferred(stock)
                named = wrapped(named, own)
            layout = named if named.resolve().mesh is not None else None
            yield Model(apart_from(stock, own), own, layout)
        elif stock.lay and not stock.hinted:
            layout = own if own.resolve().mesh is not None else None
            yield Model(apart_from(stock, own), own, layout)
        else:
            yield Model(apart_from(stock, own), own, _from_tensors(stock, shape))


def _from_tensors(stock: Stock, shape: Shape) -> LayoutProgram | None:
    """Tell data parallelism from FSDP by how tensors are cut."""
    cut = [t for t in stock.tensors if t.ranks is None and t.grid.npieces > 1]
    rows_only = all(axis.ncells == 1 for t in cut for axis in t.grid.axes[1:])
    if shape.pp * shape.tp > 1 or not rows_only:
        raise UsageError(
            "the checkpoint does not say how its ranks hold it",
            kind="bad-argument",
            wanted="a layout program with the axes of the mesh",
            found=f"{len(cut)} tensors that are cut, and {shape}",
            hint="--program LAYOUT, for example megatron.gpt",
        )
    return wrapped(LayoutProgram(File(()), "fsdp"), inferred(stock)) if cut else None


def _on_mesh(program: LayoutProgram, shape: Shape) -> LayoutProgram:
    """Return a program on a mesh of these sizes."""
    items = program.file.items or library.load(program.layout).items
    meshes = [i for i in items if isinstance(i, Mesh)]
    names = {a.name for m in meshes for a in m.axes}
    sizes = dict(zip(_AXES, (shape.pp, shape.dp, shape.tp), strict=True))
    missing = [a for a, n in sizes.items() if n > 1 and a not in names]
    if len(meshes) != 1 or missing:
        raise UsageError(
            "the mesh of this program cannot have these sizes",
            kind="bad-argument",
            wanted=f"one mesh with the axes of {shape}",
            found="; ".join(show(m) for m in meshes) or "no mesh",
            hint="--program LAYOUT",
        )
    axes = tuple(replace(a, extent=sizes[a.name]) if a.name in sizes else a for a in meshes[0].axes)
    return program.with_rules([show(replace(meshes[0], axes=axes))])


def memory_of(text: str, model: Model | None, before: Shape) -> MemoryNeed:
    """Return what ``replicated=40GB,limit=80GiB`` says; with a model, the rest is taken from it.

    Raises
    ------
    UsageError
        It says nothing of the limit, or something that is no size.
    """
    given = _pairs(text, "--memory", _MEMORY)
    sizes = model.memory(before) if model is not None else {}
    sizes |= {name: size_of(v, f"--memory {name}") if v != "0" else 0 for name, v in given.items()}
    if "limit" not in sizes:
        raise UsageError(
            "no limit of memory", kind="bad-argument", where="--memory", wanted="limit=80GiB"
        )
    return MemoryNeed(**sizes)


# -- the question and the answer -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RelayoutAnswer:
    """What is to be shown; `choice`, or with a range `rows`."""

    job: JobSpec
    choice: Explanation | None = None
    rows: tuple[SurvivorsRow, ...] = ()
    moved: Moved | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """What was asked.

    Attributes
    ----------
    job
        What is allowed.
    cluster
        All slots, with the places that they have.
    slots_per_node
        Of each node.
    lost
        Nodes that are gone.
    counts
        Numbers of survivors; None for all that `lost` leaves.
    """

    job: JobSpec
    cluster: Sequence[NodeSlot]
    slots_per_node: int
    lost: tuple[str, ...] = ()
    counts: range | None = None

    @staticmethod
    def of(
        layout: str,
        microbatches: int,
        slots_per_node: int,
        spare_nodes: int,
        pp: str | None,
        tp: str | None,
        nodes_lost: str | None,
        survivors: str | None,
    ) -> Question:
        """Read the arguments of the command.

        Raises
        ------
        UsageError, RefusedError
            One of them means nothing, or the layout does not fit its own nodes.
        """
        job = JobSpec(
            microbatches=microbatches,
            planned=shape_of(layout),
            pp=numbers(pp, "--pp"),
            tp=numbers(tp, "--tp"),
        )
        return Question(
            job=job,
            cluster=cluster_of(job, slots_per_node, spare_nodes),
            slots_per_node=slots_per_node,
            lost=tuple(n.strip() for n in nodes_lost.split(",")) if nodes_lost else (),
            counts=range_of(survivors) if survivors else None,
        )

    def answer(
        self, memory: str | None, checkpoint: str | None, program: str | None
    ) -> RelayoutAnswer:
        """Answer it; see `ckptd.reshard.cli.relayout.relayout`."""
        with ExitStack() as stack:
            model = None
            if checkpoint is not None:
                model = stack.enter_context(model_of(checkpoint, program, self.job.planned))
            job = self.job
            if memory is not None:
                job = msgspec.structs.replace(job, memory=memory_of(memory, model, job.planned))
            if self.counts is not None and len(self.counts) > 1:
                return RelayoutAnswer(
                    job=job, rows=tuple(row_of(job, left, job.planned) for left in self._ranges())
                )
            return self._one(job, model)

    def _ranges(self) -> Iterator[list[NodeSlot]]:
        for count in self.counts or ():
            yield survivors_of(self.cluster, self.lost, count)

    def _one(self, job: JobSpec, model: Model | None) -> RelayoutAnswer:
        count = self.counts[0] if self.counts else None
        left = survivors_of(self.cluster, self.lost, count)
        choice = explain(job, left, job.planned, self.slots_per_node)
        by_place = {(s.node, s.number): s for s in left}
        seats = [by_place[s.node, s.slot] for s in choice.seats]
        moved = model.moved(job, seats, choice.shape, left) if model is not None else None
        return RelayoutAnswer(job=job, choice=choice, moved=moved)


# -- the curve -------------------------------------------------------------------------------------


def draw(rows: Sequence[SurvivorsRow], planned: Shape, path: Path) -> None:
    """Write a picture of throughput over survivors, as SVG or PNG by the name of the file.

    Raises
    ------
    UsageError
        kind ``missing-package``: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "a picture needs matplotlib",
            kind="missing-package",
            where="--plot",
            hint="pip install 'ckptd[plot]'",
        ) from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    count = [r.survivors for r in rows]
    axes.plot(count, [100 * r.ideal for r in rows], ":", color="0.5", label="ideal")
    axes.step(
        count, [100 * r.throughput for r in rows], "o-", where="post", ms=3, label="chosen layout"
    )
    axes.set_xlabel(f"slots that are left ({planned} needs {planned.world})")
    axes.set_ylabel("throughput, % of before")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)
