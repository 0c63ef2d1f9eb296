"""One run of ``ckptd reshard``: opens source and target format, combines, proves, runs.

In it: the table of target formats; rules and sizes given on the command line; which shapes files of
ranks state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckptd.checkpoint.cli.address import CheckpointAddress, held, opened, spec_of
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.cli.output import left_out, progress_bar
from ckptd.errors import NotFoundError, UsageError
from ckptd.lay.resolve import Resolved
from ckptd.reshard.execute import Budget
from ckptd.reshard.job import ReshardJob, ReshardShare, check_share
from ckptd.reshard.layouts import LayoutProgram, read_program
from ckptd.reshard.plan import Target
from ckptd.reshard.prepare import (
    LIVE,
    Prepared,
    costs_of,
    prepare,
    prove_target,
    rules_of,
    section_of,
    source_program,
)
from ckptd.reshard.ranks import RankShapes, open_ranks, rank_shapes
from ckptd.reshard.reports import Costs, FolderNote, Proved, Resharded, RuleReport
from ckptd.reshard.source import SourceTensors, open_own
from ckptd.reshard.verify import ExpectedValues, check_duplicates
from ckptd.reshard.writers.dcp import DcpPlace
from ckptd.reshard.writers.folder import FolderJob, OutputFormat
from ckptd.reshard.writers.hf import HfPlace
from ckptd.reshard.writers.rankfiles import RanksPlace
from ckptd.reshard.writers.torchdist import TorchDistPlace
from ckptd.reshard.writers.universal import UniversalPlace
from ckptd.store.base import StoreSpec

_FROM = "from:"
_LET = "let "


@contextmanager
def open_stock(
    source: str,
    step: int,
    layout: Resolved | None = None,
    *,
    section: str | None = None,
    dequantize: bool = False,
) -> Iterator[SourceTensors]:
    """Open a source, or what it has below a name: a root of ckptd, or a foreign checkpoint.

    With a layout that says which file is which rank's, these are files of ranks.
    """
    address = CheckpointAddress.of(source)
    ranks = layout if layout is not None and layout.files is not None else None
    try:
        with opened(address.root, step, foreign=ranks is None) as catalogue:
            with held(catalogue, address.find(catalogue), "reshard") as commit:
                own = open_own(CkptdReader(catalogue, commit), dequantize=dequantize)
                yield own if section is None else section_of(own, section)
                return
    except NotFoundError as error:
        if ranks is None or error.kind != "no-root":
            raise
    with spec_of(source).open() as store:
        stock = open_ranks(store, ranks, step)
        yield stock if section is None else section_of(stock, section)
        left_out(source, *stock.left_out)


def shapes_of_ranks(source: str, layout: Resolved) -> RankShapes | None:
    """Return the shapes in files of ranks; None where there are none, or a root of ckptd is.

    Parameters
    ----------
    layout
        Says which file is which rank's.
    """
    try:
        with opened(CheckpointAddress.of(source).root, 0, foreign=False):
            return None
    except NotFoundError as error:
        if error.kind != "no-root":
            raise
    with spec_of(source).open() as store:
        try:
            return rank_shapes(store, layout)
        except NotFoundError as error:
            if error.kind != "no-root":
                raise
            return None


class ReshardRun:
    """One command.

    Attributes
    ----------
    target
        What is written.
    """

    def __init__(
        self,
        prepared: Prepared,
        shard: str,
        memory: int,
        *,
        format: str = "ckptd",
        most: int = 0,
        untie: bool = True,
    ) -> None:
        self._prepared = prepared
        self._share = check_share(shard)
        self._place = _place_of(prepared, format, most, untie=untie)
        self.target: Target = prepared.assembled.target
        self._expected: ExpectedValues = prepared.expected
        self._left_out: list[str] = list(prepared.assembled.dropped_objects)
        if self._place is not None:
            self.target, self._expected = self._place.target, self._place.expected
            self._left_out += self._place.left_out
        self._budget = Budget.of(memory, prepared.stock.source.store)

    @property
    def shard(self) -> str:
        """The share, as it is written."""
        return f"{self._share.number}/{self._share.count}"

    @property
    def files(self) -> int:
        """Number of data files of the target."""
        return len(ReshardShare().files(self.target))

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names of the values that are left out."""
        composed = self._prepared.assembled.composed
        outside = self._prepared.stock.outside
        return (*composed.dropped, *composed.lost, *self._left_out, *outside)

    @property
    def simplified(self) -> tuple[str, ...]:
        """Objects that are of plainer types in the target."""
        return tuple(self._place.simplified) if self._place is not None else ()

    @property
    def notes(self) -> tuple[FolderNote, ...]:
        """Notes on a folder: what a program that loads it lacks, or does not take."""
        notes = tuple(self._place.notes) if self._place is not None else ()
        _, chosen, family = self._prepared.target.layout.partition(f".{LIVE}")
        if chosen:
            text = (
                "experts are stacked, as models of transformers 5 hold them; one tensor an expert:"
                f" --to hf.{family} -e 'use names...'"
            )
            notes = (FolderNote(text), *notes)
        return notes

    @property
    def apart(self) -> tuple[str, ...]:
        """Names that the target has though no layout describes them."""
        assembled, left_out = self._prepared.assembled, set(self._left_out)
        names = (assembled.target.tensors[n].name for n in assembled.apart)
        return tuple(n for n in names if n not in left_out)

    def rules(self) -> tuple[RuleReport, ...]:
        """Return what each rule gets."""
        return tuple(rules_of(self._prepared.assembled.composed))

    def costs(self) -> Costs:
        """Return what the share costs."""
        files = self._share.files(self.target)
        return costs_of(self._prepared, self.target, files, self._budget)

    def prove(self) -> Proved:
        """Prove that every element of the share is written once."""
        files = self._share.files(self.target)
        return prove_target(self._prepared.assembled.composed, self.target, files)

    def do(self, target: str, force: bool) -> Resharded:
        """Write this process's share."""
        source = self._prepared.stock.source
        if self._share.number == 1:
            # Without the files of this share no process commits.
            check_duplicates(self._prepared.stock, self._prepared.assembled.composed.duplicates)
        with progress_bar("resharding") as bar:
            if self._place is not None:
                if "://" in target:
                    raise UsageError(
                        "a folder of another format is a local one", where=target, wanted="a path"
                    )
                folder = FolderJob(
                    source,
                    self._place,
                    Path(target),
                    identity=self._prepared.identity,
                    force=force,
                    progress=bar,
                )
                return folder.run(self._share, self._budget)
            with spec_of(target).open() as store, StoreSpec(target).open() as bulk:
                job = ReshardJob(
                    source,
                    self.target,
                    Catalogue(store),
                    step=self._prepared.stock.step,
                    identity=self._prepared.identity,
                    bulk=bulk,
                    expected=self._expected,
                    progress=bar,
                )
                return job.run(self._share, self._budget)


def _place_of(prepared: Prepared, format: str, most: int, *, untie: bool) -> OutputFormat | None:
    """Return the folder that a format writes; None for a root of ckptd."""
    match format:
        case "hf":
            return HfPlace(prepared.assembled, prepared.expected, most, untie=untie)
        case "dcp":
            return DcpPlace(prepared.assembled, prepared.expected)
        case "ranks":
            return RanksPlace(prepared.assembled, prepared.expected)
        case "universal":
            return UniversalPlace(prepared.assembled, prepared.expected)
        case "torch_dist":
            return TorchDistPlace(prepared.assembled, prepared.expected)
        case _:
            return None


@contextmanager
def prepared(
    source: str,
    to: str,
    given: str | None,
    rules: Sequence[str],
    step: int,
    *,
    section: str | None = None,
    allowed: Collection[str] = (),
    trust: bool = False,
    dequantize: bool = False,
) -> Iterator[Prepared]:
    """Open the source and combine it with both layouts, as the command line names them.

    Parameters
    ----------
    rules
        Statements; those that begin with ``from:`` are the source's.
    section
        The name below which the source is read.
    allowed
        ``lossy``, ``layout``.
    trust
        As of `ckptd.reshard.prepare.prepare`.
    dequantize
        As of `ckptd.reshard.source.open_own`.
    """
    # Sizes are facts about the model: both sides may need them.
    mine = [r.removeprefix(_FROM).strip() for r in rules if r.startswith((_FROM, _LET))]
    theirs = [r for r in rules if not r.startswith(_FROM)]
    wanted = read_program(to, "--to", lambda run: run.target).with_rules(theirs)
    own: LayoutProgram | None = None
    described = None
    if given is not None:
        own = read_program(given, "--from", lambda run: run.source).with_rules(mine)
        described = own.resolve()
    with open_stock(source, step, described, section=section, dequantize=dequantize) as stock:
        if own is None:
            own = source_program(stock, None).with_rules(mine)
        yield prepare(
            stock,
            own,
            wanted,
            rules=mine,
            allow_lossy="lossy" in allowed,
            allow_layout="layout" in allowed,
            trust=trust,
        )
