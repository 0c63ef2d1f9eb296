"""From a source and two programs to everything that a reshard does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ckptd.engine.reshard.assemble import Assembled, assemble_target
from ckptd.engine.reshard.composed import Link, compose_layouts
from ckptd.engine.reshard.expect import expect
from ckptd.engine.reshard.inferred import infer
from ckptd.engine.reshard.layouts import Program, read_text, wrapped
from ckptd.engine.reshard.samples import Expected
from ckptd.engine.reshard.stock import Stock
from ckptd.errors import RefusedError

__all__ = ["Prepared", "prepare", "source_program"]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A reshard, ready to be explained, proved or done.

    Attributes
    ----------
    stock
        The source.
    source, target
        The programs as they are used.
    assembled
        What is to be written.
    """

    stock: Stock
    source: Program
    target: Program
    assembled: Assembled

    @cached_property
    def expected(self) -> Mapping[int, Expected]:
        """What the source's witness wants to see, by target tensor."""
        return expect(self.assembled.composed)

    @property
    def identity(self) -> str:
        """Text that is the same for all processes of this reshard, and for no others."""
        return f"{self.stock.identity}\n{self.source.text}\n{self.target.text}"


def source_program(stock: Stock, given: Program | None) -> Program:
    """Return the source's program: the one given, the one it keeps, or one made from its names."""
    if given is not None:
        return given
    if stock.lay:
        return read_text(stock.lay, f"the program of step {stock.step}")
    return infer(stock.shapes)


def prepare(
    stock: Stock, source: Program, target: Program, *, allow_lossy: bool = False
) -> Prepared:
    """Combine everything. Reads nothing but small tensors and objects.

    Parameters
    ----------
    stock
        The source.
    source, target
        Their programs. A recipe as target is applied to the source's layout, or to its stored
        tensors when that has a mesh of its own.
    allow_lossy
        Values may change.

    Raises
    ------
    UsageError, MismatchError
        A program is wrong, does not fit the source, or the two do not fit each other.
    RefusedError
        kind ``lossy``: values would change, or something would be left out.
    """
    resolved = source.resolve()
    if target.is_recipe:
        if resolved.mesh is not None:
            # Its rules are cut over other axes than the recipe's.
            source = infer(stock.shapes)
            resolved = source.resolve()
        target = wrapped(target, source)
    composed = compose_layouts(resolved, target.resolve(), stock)
    if composed.promise == "lossy" and not allow_lossy:
        raise _lossy(composed.dropped, [k for k in composed.links if k.promise == "lossy"])
    assembled = assemble_target(composed, target.text)
    return Prepared(stock, source, target, assembled)


def _lossy(dropped: Sequence[str], links: Sequence[Link]) -> RefusedError:
    names = [link.tensor.name for link in links] + [f"{n} (dropped)" for n in dropped]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return RefusedError(
        "values would change, or be left out",
        kind="lossy",
        where=", ".join(names[:4]) + more,
        wanted="a reshard that can be undone",
        found="casts to narrower types, averages, scales or drops",
        hint="--allow lossy",
    )
