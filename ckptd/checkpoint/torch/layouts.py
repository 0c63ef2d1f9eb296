"""Layouts as the core uses them: interface, and `NoLayout`; the slice `reshard` implements it.

The slice `reshard` is the part ``layouts``: its classes derive from these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from ckptd.errors import UsageError
from ckptd.parts import part

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ckptd.base.torch.ranks import Agreement
    from ckptd.checkpoint.format.container import ChunkRef, FileMap
    from ckptd.checkpoint.format.witness import Witness, WitnessPlan
    from ckptd.checkpoint.load.plan import Want
    from ckptd.checkpoint.save.structure import ReplicaHolders, Shared, Structure
    from ckptd.checkpoint.torch.feed import CopyStep
    from ckptd.checkpoint.torch.filling import Filling
    from ckptd.checkpoint.torch.replicas import Samples
    from ckptd.checkpoint.torch.state.describe import Describer
    from ckptd.checkpoint.torch.state.leaves import Leaves, SavedNames, TensorLeaf
    from ckptd.checkpoint.torch.state.restore import Matching, SavedState

Rename: TypeAlias = Callable[[str], str]


class LayoutFile(Protocol):
    """A program of Lay that was read."""

    @property
    def items(self) -> Sequence[Any]:
        """Its statements."""


LayoutSpec: TypeAlias = str | os.PathLike[str] | LayoutFile
"""A ``.lay`` file, perhaps with ``:layout``; a shipped layout's name; a program as text; or a
program that was read."""


class LayoutSave:
    """The leaves of a state in one save.

    Attributes
    ----------
    leaves
        What is saved as without a layout, by the names that it has in checkpoints.
    """

    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves

    @property
    def known(self) -> object:
        """Equal for saves of the same views of the same memory; None: equal to no other."""
        return self.leaves.known

    @property
    def sources(self) -> Mapping[str, TensorLeaf]:
        """The leaf that each tensor of the checkpoint is copied from, by its name there."""
        return self.leaves.tensors

    def structure(self, bare: Structure) -> Structure:
        """Add what the layout describes to the structure of everything else."""
        return bare

    def steps(self, name: str, chunk: ChunkRef) -> Iterable[CopyStep] | None:
        """Return the copies of one chunk of a tensor that the layout describes; None for others."""
        return None

    def views(self, holders: ReplicaHolders) -> Mapping[int, Sequence[torch.Tensor]]:
        """Return what other ranks hold of the layout's tensors, by the id of this rank's part."""
        return {}

    def replica_tables(
        self, holders: ReplicaHolders, sample: Samples
    ) -> Mapping[Shared, Mapping[str, str]] | None:
        """Return digests by name, for each group of ranks that hold the same by the layout.

        Raises
        ------
        SaveError
            kind ``replicas-differ``: this rank has a copy of a tensor that differs from it.
        """
        return None


class LayoutLoad:
    """One load of one rank: `match` plans it, `finish` comes when everything has been read.

    Attributes
    ----------
    rest
        What of the checkpoint no layout names.
    describer
        Of the job.
    wants
        For `ckptd.checkpoint.load.plan.read_plan`, beside those of the filling.
    hint
        What else helps where types differ.
    """

    hint = ""

    def __init__(self, rest: SavedState, describer: Describer) -> None:
        self.rest = rest
        self.describer = describer
        self.wants: list[Want] = []

    def to_saved(self, rename: Rename) -> Rename:
        """Return `rename`, with what the layout calls otherwise than the checkpoint."""
        return rename

    def names(self, rest: SavedNames, wanted: Callable[[str], bool]) -> SavedNames:
        """Add what the layout offers to the names of everything else."""
        return rest

    def others(self, leaves: Leaves) -> Leaves:
        """Return the leaves that the layout does not speak of."""
        return leaves

    def match(
        self, leaves: Leaves, wanted: Callable[[str], bool], filling: Filling, found: Matching
    ) -> None:
        """Plan the filling of everything that the layout speaks of.

        Parameters
        ----------
        leaves
            All leaves of the state.
        wanted
            Which of them are to be filled, by name.
        filling
            Gives the targets.
        found
            Gets what was filled, what is missing, what differs, and what has no place here.
        """

    def row_by_row(
        self, leaf: TensorLeaf, number: int, target: NDArray[np.uint8]
    ) -> tuple[Sequence[Want], Callable[[], None]]:
        """Return what gives a tensor of this rank in the order of its rows, and what ends it.

        `number` is the one that matching gave it.
        """
        from ckptd.checkpoint.load.plan import Want

        held = self.describer.held(leaf.name, leaf.tensor)
        return [Want(number, held.regions, target)], lambda: None

    def objects(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return decoded objects, with this rank's names in optimizer groups."""
        return values

    def finish(self, filling: Filling) -> None:
        """Write what no element of the checkpoint represents.

        Raises
        ------
        MismatchError
            kind ``lay-fit``: numbers that become one disagree (`state_corrupted`).
        """

    def check_witness(self, filling: Filling, plan: WitnessPlan, witness: Witness) -> None:
        """Compare what the layout filled with the checkpoint's witness.

        Raises
        ------
        CorruptError
            Names the tensors; the live state is wrong (`state_corrupted`).
        """


class LoadLayouts:
    """The layouts of one load: that of the live state, and that of the checkpoint."""

    def stacked(self, state: Mapping[str, Any], saved: SavedState) -> LoadLayouts:
        """Return the layouts of experts that the state holds stacked and foreign files do not."""
        return layouts().stacked(state, saved)

    def load(self, saved: SavedState, filemap: FileMap, describer: Describer) -> LayoutLoad:
        """Begin the load of one checkpoint.

        Raises
        ------
        UsageError, MismatchError
            A layout does not fit the checkpoint, or the two do not fit each other.
        """
        return LayoutLoad(saved, describer)


class NoLayout:
    """The layout of a job's states; this one is that of a job without."""

    def change(self, layout: LayoutSpec) -> None:
        """Save and load by another layout from now on; every rank calls it between the same saves.

        Raises
        ------
        UsageError
            kind ``lay-use``: there was no layout before, or the program is for another number of
            ranks; ``lay-syntax``, ``lay-rule``: it is no program.
        """
        raise UsageError(
            "a checkpointer without a layout cannot change it",
            kind="lay-use",
            hint="Checkpointer(root, layout=...)",
        )

    def saving(self, leaves: Leaves) -> LayoutSave:
        """Sort the leaves of a state by what the layout says of them."""
        return LayoutSave(leaves)

    def loading(
        self, look: Callable[[], Leaves], source: LayoutSpec | None, allow: str | None
    ) -> LoadLayouts:
        """Return the layouts of a load.

        Parameters
        ----------
        look
            Returns the leaves of the live state.
        source
            The layout of the checkpoint, where it is given.
        allow
            ``"layout"``: `source` may contradict the program that the checkpoint keeps.

        Raises
        ------
        UsageError
            kind ``lay-use``: `source` is of no use here.
        """
        if source is not None:
            raise UsageError(
                "a checkpoint's layout needs a layout of the live state too",
                kind="lay-use",
                hint="give Checkpointer(..., layout=...) the layout of the live state",
            )
        return LoadLayouts()


class StateLayouts(Protocol):
    """The part ``layouts``."""

    def layout(self, spec: LayoutSpec, agreement: Agreement) -> NoLayout:
        """Return the layout of a job's states."""

    def stacked(self, state: Mapping[str, Any], saved: SavedState) -> LoadLayouts:
        """See `LoadLayouts.stacked`."""


def layouts() -> StateLayouts:
    """Return what knows layouts; it brings all of Lay."""
    return cast("StateLayouts", part("layouts"))


def layout_of(spec: LayoutSpec | None, agreement: Agreement) -> NoLayout:
    """Return the layout of a job's states; `NoLayout` where none is given."""
    return NoLayout() if spec is None else layouts().layout(spec, agreement)
