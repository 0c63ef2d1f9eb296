"""``ckptd reshard``: write a checkpoint of one layout as one of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from ckptd.cli.address import Address, held, opened, spec_of
from ckptd.cli.export import size_of
from ckptd.cli.output import (
    Document,
    Json,
    flag,
    note,
    print_document,
    print_table,
    progress_bar,
    shorten,
    size_text,
)
from ckptd.engine.catalogue import Catalogue
from ckptd.engine.reshard.execute import Budget
from ckptd.engine.reshard.explain import (
    Costs,
    Proved,
    RuleReport,
    costs_of,
    prove_target,
    rules_of,
)
from ckptd.engine.reshard.folder import open_folder
from ckptd.engine.reshard.hf import HfJob, hf_target
from ckptd.engine.reshard.job import Job, Resharded, Share, check_share
from ckptd.engine.reshard.layouts import read_program
from ckptd.engine.reshard.own import open_own
from ckptd.engine.reshard.prepare import Prepared, prepare, source_program
from ckptd.engine.reshard.ranks import open_ranks
from ckptd.engine.reshard.samples import Expected
from ckptd.engine.reshard.stock import Stock
from ckptd.engine.reshard.target import Target
from ckptd.engine.values import Reader
from ckptd.errors import NotFoundError, UsageError
from ckptd.layout.lay.equation import Resolved
from ckptd.store.spec import StoreSpec

__all__ = ["ReshardDocument", "open_stock", "reshard"]

_SAID = 6
_FROM = "from:"
_LET = "let "


class ReshardDocument(Document, frozen=True, kw_only=True, tag="reshard"):
    """What ``ckptd reshard --json`` prints.

    Attributes
    ----------
    source, target
        URLs, or the folder of a Hugging Face target.
    source_layout, target_layout
        Names of the layouts as they are used.
    step
        Of the target.
    world, files, tensors
        Ranks, data files and tensors of the whole target.
    promise
        Of the reshard as a whole: ``exact``, ``exact up to fill``, ``choice`` or ``lossy``.
    dropped
        Source tensors and objects that are left out on purpose.
    unused_rules
        Rules of the target whose tensors the source does not have.
    witness
        Empty, or why the source's witness is not checked.
    shard
        ``number/count`` of this process.
    rules, costs
        With --explain.
    proved
        With --prove.
    done
        What this process did; null with --dry-run, --explain and --prove.
    """

    source: str
    target: str
    source_layout: str
    target_layout: str
    step: int
    world: int
    files: int
    tensors: int
    promise: str
    dropped: tuple[str, ...]
    unused_rules: tuple[str, ...]
    witness: str
    shard: str
    rules: tuple[RuleReport, ...] = ()
    costs: Costs | None = None
    proved: Proved | None = None
    done: Resharded | None = None


def reshard(
    source: Annotated[str, Parameter(help="ROOT, ROOT@STEP, or a folder of safetensors files.")],
    target: Annotated[str, Parameter(help="Root to write to, or a folder with --format hf.")],
    /,
    *,
    to: Annotated[
        str,
        Parameter(help="Layout of the target: FILE.lay, FILE.lay:LAYOUT, or a shipped one."),
    ],
    from_: Annotated[
        str | None,
        Parameter(
            name="--from",
            help="Layout of the source. A checkpoint of ckptd needs none: it keeps its program, or"
            " its tensors stand for themselves.",
            show_default=False,
        ),
    ] = None,
    rule: Annotated[
        list[str] | None,
        Parameter(
            name=("-e", "--rule"),
            help="A statement of Lay that goes before those of the target's layout; 'from: ...'"
            " for the source's; a 'let' is for both. May be repeated.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[str, Parameter(help="Most memory for data: 4GiB, 500MB.")] = "2GiB",
    shard: Annotated[str, Parameter(help="The share of this process, such as 3/16.")] = "1/1",
    format: Annotated[
        Literal["ckptd", "hf"],
        Parameter(help="hf: a Hugging Face folder, parameters only."),
    ] = "ckptd",
    step: Annotated[int, Parameter(help="Step of the target, where the source has none.")] = 0,
    max_shard_size: Annotated[
        str, Parameter(help="Largest file of a Hugging Face folder.")
    ] = "5GB",
    allow: Annotated[
        Literal["lossy"] | None,
        Parameter(help="lossy: values may change, or be left out.", show_default=False),
    ] = None,
    explain: Annotated[bool, flag("Say what would be done and what it costs.")] = False,
    prove: Annotated[
        bool, flag("Prove that every element of the target would be written once.")
    ] = False,
    dry_run: Annotated[bool, flag("Plan and check, and write nothing.")] = False,
    force: Annotated[bool, flag("Replace a Hugging Face model that is there.")] = False,
    json: Json = False,
) -> int:
    """Write a checkpoint of one layout as one of another.

    Nothing is committed unless the values of the source's witness are where the target's layout
    wants them. A reshard that is killed goes on where it stopped when it is started again, and
    several processes may share the work with --shard, without speaking to each other.
    """
    rules = [r.strip() for r in rule or ()]
    # Sizes are facts about the model: both sides may need them.
    mine = [r.removeprefix(_FROM).strip() for r in rules if r.startswith((_FROM, _LET))]
    theirs = [r for r in rules if not r.startswith(_FROM)]
    wanted = read_program(to, "--to", lambda run: run.target).with_rules(theirs)
    given = read_program(from_, "--from", lambda run: run.source) if from_ else None
    part, memory = check_share(shard), size_of(budget, "--budget")
    described = given.with_rules(mine).resolve() if given else None
    with open_stock(source, step, described) as stock:
        own = source_program(stock, given).with_rules(mine)
        prepared = prepare(stock, own, wanted, allow_lossy=allow == "lossy")
        most = size_of(max_shard_size, "--max-shard-size") if format == "hf" else 0
        run = _Run(prepared, part, memory, most)
        document = run.document(source, target, explain=explain, prove=prove)
        if not (explain or prove or dry_run):
            done = run.do(target, force)
            document = msgspec.structs.replace(document, done=done)
    if json:
        print_document(document)
    else:
        _show(document, dry_run=dry_run)
    return 0


@contextmanager
def open_stock(source: str, step: int, layout: Resolved | None = None) -> Iterator[Stock]:
    """Open a source: a root of ckptd, or any folder of safetensors files.

    With a layout that says which file is which rank's, these are files of ranks.
    """
    address = Address.of(source)
    try:
        with opened(address.root) as catalogue:
            with held(catalogue, address.find(catalogue), "reshard") as commit:
                yield open_own(catalogue, Reader(catalogue, commit.name))
                return
    except NotFoundError as error:
        if error.kind not in ("not-a-root", "no-root"):
            raise
    with spec_of(source).open() as store:
        if layout is not None and layout.files is not None:
            yield open_ranks(store, layout, step)
        else:
            yield open_folder(store, step)


class _Run:
    """One command."""

    def __init__(self, prepared: Prepared, share: Share, memory: int, most: int) -> None:
        self._prepared = prepared
        self._share = share
        self._is_hf = most > 0
        self._target: Target = prepared.assembled.target
        self._expected: Mapping[int, Expected] = prepared.expected
        self._left_out: list[str] = list(prepared.assembled.dropped_objects)
        if self._is_hf:
            self._target, self._expected, left_out = hf_target(
                prepared.assembled, prepared.expected, most
            )
            self._left_out += left_out
        self._budget = Budget.of(memory, prepared.stock.source.store)

    def document(self, source: str, target: str, *, explain: bool, prove: bool) -> ReshardDocument:
        prepared, composed = self._prepared, self._prepared.assembled.composed
        files = self._share.files(self._target)
        every = Share().files(self._target)
        return ReshardDocument(
            source=source,
            target=target,
            source_layout=prepared.source.layout,
            target_layout=prepared.target.layout,
            step=prepared.stock.step,
            world=self._target.world,
            files=len(every),
            tensors=len(self._target.tensors),
            promise=composed.promise,
            dropped=(*composed.dropped, *self._left_out),
            unused_rules=tuple(composed.left_out),
            witness=prepared.stock.witness_note,
            shard=f"{self._share.number}/{self._share.count}",
            rules=tuple(rules_of(composed)) if explain else (),
            costs=costs_of(prepared, self._target, files, self._budget) if explain else None,
            proved=prove_target(composed, self._target, files) if prove else None,
        )

    def do(self, target: str, force: bool) -> Resharded:
        """Write this process's share."""
        source = self._prepared.stock.source
        with progress_bar("resharding") as bar:
            if self._is_hf:
                if "://" in target:
                    raise UsageError(
                        "a Hugging Face folder is a local one", where=target, wanted="a path"
                    )
                hf = HfJob(
                    source,
                    self._target,
                    self._expected,
                    Path(target),
                    identity=self._prepared.identity,
                    force=force,
                    progress=bar,
                )
                return hf.run(self._share, self._budget)
            with spec_of(target).open() as store, StoreSpec(target).open() as bulk:
                job = Job(
                    source,
                    self._target,
                    Catalogue(store),
                    step=self._prepared.stock.step,
                    identity=self._prepared.identity,
                    bulk=bulk,
                    expected=self._expected,
                    progress=bar,
                )
                return job.run(self._share, self._budget)


def _show(document: ReshardDocument, *, dry_run: bool) -> None:
    d = document
    if d.rules:
        _show_rules(d)
    if d.costs is not None:
        _show_costs(d, d.costs)
    if d.proved is not None:
        print(
            f"proved: each of {d.proved.elements:,} elements in {d.proved.chunks:,} chunks is"
            f" written exactly once, by {d.proved.copies:,} copies"
        )
    if d.done is not None:
        _show_done(d, d.done)
    elif dry_run:
        print(
            f"{d.source_layout} -> {d.target_layout}: {d.tensors} tensors in {d.files} files,"
            f" {d.promise}; nothing was written"
        )
    if d.dropped:
        more = f" and {len(d.dropped) - _SAID} more" if len(d.dropped) > _SAID else ""
        note(f"left out: {', '.join(d.dropped[:_SAID])}{more}")
    if d.witness and d.done is not None:
        note(f"{d.witness}: that every value is in its place was not checked")


def _show_rules(d: ReshardDocument) -> None:
    rows = [[shorten(r.rule, 72), str(r.tensors), size_text(r.bytes), r.promise] for r in d.rules]
    print_table(["RULE OF THE TARGET", ">TENSORS", ">SIZE", "PROMISE"], rows)
    for r in d.rules:
        print(f"\n{r.rule}")
        for source in r.sources:
            print(f"  from {source}")
    for text in d.unused_rules[:_SAID]:
        print(f"\n{text}\n  not used: the source has nothing for it")
    print()


def _show_costs(d: ReshardDocument, costs: Costs) -> None:
    share = "" if d.shard == "1/1" else f" (shard {d.shard})"
    print(f"{d.source_layout} -> {d.target_layout}, {d.promise}{share}")
    rows = [
        ["writes", f"{size_text(costs.bytes_written)} in {costs.files} of {d.files} files"],
        ["reads", f"{size_text(costs.bytes_read)} from {costs.source_files} files"],
        ["", f"{costs.read_amplification:.3f} bytes for each needed"],
        ["memory", f"{size_text(costs.peak_bytes)} at most"],
        ["rounds", f"{costs.rounds}, with {costs.copies} copies"],
    ]
    for name, text in rows:
        print(f"  {name:8}{text}")


def _show_done(d: ReshardDocument, done: Resharded) -> None:
    if done.state == "present":
        print(f"step {done.step} is there already (generation {done.generation})")
        return
    again = f", {done.reused_files} of them there already" if done.reused_files else ""
    rate = done.bytes_written / max(done.seconds, 1e-9)
    print(
        f"{d.source_layout} -> {d.target_layout}: {size_text(done.bytes_written)} in {done.files}"
        f" files{again}, {done.seconds:.1f} s, {size_text(rate)}/s"
    )
    if done.witness_values:
        print(f"  {done.witness_values:,} values of the source's witness are in their places")
    if done.state == "waiting":
        print(f"  waiting for {done.missing_files} files of other shards; the last one commits")
    elif done.generation:
        print(f"  now step {done.step} of generation {done.generation} in {d.target}")
    else:
        print(f"  now in {d.target}")
