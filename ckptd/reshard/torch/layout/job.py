"""`StateLayouts`: the answers to what the core asks of layouts: of a state, save and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptd.base.torch.ranks import Agreement
from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.witness import Witness, WitnessPlan
from ckptd.checkpoint.torch.filling import Filling
from ckptd.checkpoint.torch.layouts import (
    LayoutLoad,
    LayoutSpec,
    LoadLayouts,
    NoLayout,
    StateLayouts,
)
from ckptd.checkpoint.torch.state.describe import Describer
from ckptd.checkpoint.torch.state.leaves import Leaves
from ckptd.checkpoint.torch.state.restore import SavedState, look
from ckptd.reshard.layouts import LayoutProgram
from ckptd.reshard.torch.layout.binder import BoundLayout, JobLayout
from ckptd.reshard.torch.layout.loading import BoundLoad
from ckptd.reshard.torch.layout.program import read_layout
from ckptd.reshard.torch.layout.saving import BoundLeaves, laid_leaves
from ckptd.reshard.torch.layout.source import BoundSource, source_program
from ckptd.reshard.torch.layout.stacks import stacked
from ckptd.reshard.torch.layout.witness import check_laid_witness


class BoundStates(BoundLayout, NoLayout):
    """The layout of a job's states, for its saves and loads."""

    def saving(self, leaves: Leaves) -> BoundLeaves:
        """Sort the leaves; raises as `laid_leaves`."""
        leaves.refuse_wrapped("saved with a layout")  # the job could not load what it saves
        return laid_leaves(self.bind(lambda: leaves), leaves)

    def loading(
        self, look: Callable[[], Leaves], source: LayoutSpec | None, allow: str | None
    ) -> LoadLayouts:
        """Return the layouts of a load; raises as `read_layout` and `BoundLayout.bind`."""
        program = None if source is None else read_layout(source)
        return _LaidLoads(self.bind(look), program, allow)


@dataclass(frozen=True)
class _LaidLoads(LoadLayouts):
    """The job's layout, and the one that is given for the checkpoint."""

    job: JobLayout
    given: LayoutProgram | None = None
    allow: str | None = None

    def stacked(self, state: Mapping[str, Any], saved: SavedState) -> LoadLayouts:
        return self

    def load(self, saved: SavedState, filemap: FileMap, describer: Describer) -> LayoutLoad:
        program = source_program(saved, self.given, self.job)
        source = BoundSource(self.job, program, saved, filemap)
        if self.given is not None and self.allow != "layout":
            source.check_kept()
        return _WitnessedLoad(source, describer)


class _WitnessedLoad(BoundLoad):
    """A load that is compared with its witness by other arithmetic than it was planned by."""

    def check_witness(self, filling: Filling, plan: WitnessPlan, witness: Witness) -> None:
        check_laid_witness(self, filling, plan, witness)


class _Layouts:
    def layout(self, spec: LayoutSpec, agreement: Agreement) -> NoLayout:
        return BoundStates(spec, agreement)

    def stacked(self, state: Mapping[str, Any], saved: SavedState) -> LoadLayouts:
        found = stacked(state, look(state), saved.tensors)
        return LoadLayouts() if found is None else _LaidLoads(*found)


LAYOUTS: StateLayouts = _Layouts()
"""The part ``layouts``."""
