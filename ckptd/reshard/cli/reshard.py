"""``ckptd reshard``: options, what it prints of rules, costs and results, its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from cyclopts import Parameter

from ckptd.checkpoint.format.manifest import UNORDERED
from ckptd.cli.options import Dequantize, Section, size_of
from ckptd.cli.output import (
    Document,
    Json,
    Reply,
    counted,
    flag,
    note,
    option,
    print_rows,
    seconds_text,
    shorten,
)
from ckptd.errors import first_few, size_text
from ckptd.reshard.reports import Costs, FolderNote, Proved, Resharded, RuleReport, SourceProgram

_SAID = 6
_TOLD = ("unlike", "differs", "unreadable")
"""Of `SourceProgram.kept`: what is said without being asked."""

To = Annotated[
    str,
    Parameter(help="Layout of the target: FILE.lay, FILE.lay:LAYOUT, or a shipped one."),
]
From = Annotated[
    str | None,
    option(
        "Layout of the source. A checkpoint of ckptd needs none: it stores its layout, or its "
        "tensors are taken as they are.",
        "--from",
    ),
]
Rules = Annotated[
    list[str] | None,
    option(
        "A Lay statement, put before those of the target's layout; 'from: ...' for the source's "
        "layout; a 'let' applies to both. May be repeated.",
        "-e",
        "--rule",
    ),
]


class ReshardDocument(Document, frozen=True, kw_only=True, tag="reshard"):
    """The document that ``ckptd reshard --json`` prints.

    Attributes
    ----------
    source, target
        URLs, or the folder of a target of another format.
    source_layout, target_layout
        Names of the layouts as they are used.
    source_program
        What the program that the source keeps says of the one that it is read with.
    step
        Of the target.
    world, files, tensors
        Ranks, data files and tensors of the whole target.
    promise
        Of the reshard as a whole: ``exact``, ``exact up to fill``, ``choice`` or ``lossy``.
    dropped
        Source tensors, parts of them, further names and objects that are left out on purpose.
    simplified
        Objects that are of plainer types in the target: sets as lists, numpy as Python has it.
    notes
        What the program that loads the folder does not find in it, or does not take from it.
    merged
        Copies of tensors, equal to them, that the target has no name for.
    apart
        Tensors that the source's own layout does not speak of, and the target has as they are.
    unread
        Files of weights beside the source's, which are not read.
    unused_rules
        Rules of the target whose tensors the source does not have.
    witness
        Empty, or why the source's witness is not checked.
    order
        ``not verified`` where the source, or what it was made from, has buffers that do not say
        which tensor lies where; the target says so in its metadata. Empty otherwise.
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
    source_program: SourceProgram
    step: int
    world: int
    files: int
    tensors: int
    promise: str
    dropped: tuple[str, ...]
    simplified: tuple[str, ...]
    notes: tuple[FolderNote, ...]
    merged: tuple[str, ...]
    apart: tuple[str, ...]
    unread: tuple[str, ...]
    unused_rules: tuple[str, ...]
    witness: str
    shard: str
    order: str = ""
    rules: tuple[RuleReport, ...] = ()
    costs: Costs | None = None
    proved: Proved | None = None
    done: Resharded | None = None


def reshard(
    source: Annotated[str, Parameter(help="ROOT, ROOT@STEP, or a foreign checkpoint.")],
    target: Annotated[str, Parameter(help="Root to write to, or with --format a folder.")],
    /,
    *,
    to: To,
    from_: From = None,
    rule: Rules = None,
    section: Section = None,
    budget: Annotated[str, Parameter(help="Memory limit for data: 4GiB, 500MB.")] = "2GiB",
    shard: Annotated[str, Parameter(help="The share of this process, such as 3/16.")] = "1/1",
    format: Annotated[
        Literal["ckptd", "hf", "ranks", "dcp", "universal", "torch_dist"],
        Parameter(
            help="hf: a Hugging Face folder, parameters only. ranks: one file per rank, by the "
            "layout's 'files' line. dcp: for torch.distributed.checkpoint, with optimizer and "
            "objects. universal: for DeepSpeed. torch_dist: for Megatron-core."
        ),
    ] = "ckptd",
    step: Annotated[int, Parameter(help="Step of the target, if the source has none.")] = 0,
    max_shard_size: Annotated[
        str, Parameter(help="Largest file of a Hugging Face folder.")
    ] = "5GB",
    allow: Annotated[
        list[Literal["lossy", "layout"]] | None,
        option(
            "lossy: values may change or be dropped. layout: --from may contradict the layout "
            "stored in the source. May be repeated."
        ),
    ] = None,
    trust: Annotated[
        bool,
        flag("Trust the order of tensors in the source's buffers, once ckptd diff confirmed it."),
    ] = False,
    dequantize: Dequantize = False,
    explain: Annotated[bool, flag("Show what would be done and its cost.")] = False,
    prove: Annotated[
        bool, flag("Prove that every element of the target is written exactly once.")
    ] = False,
    dry_run: Annotated[bool, flag("Plan and check, and write nothing.")] = False,
    untie: Annotated[
        bool,
        Parameter(
            help="In a Hugging Face folder, write tied weights under each of their names, or once.",
            negative="--no-untie",
        ),
    ] = True,
    force: Annotated[bool, flag("Replace a checkpoint of the same format in the folder.")] = False,
    json: Json = False,
) -> Reply:
    """Write a checkpoint of one layout as one of another.

    Nothing is committed unless the values of the source's witness are where the target's layout
    wants them. A reshard that is killed goes on where it stopped when it is started again, and
    several processes may share the work with --shard, without speaking to each other.
    """
    # Imported when it runs, so that the help of it costs little.
    from ckptd.reshard.cli.resharding import ReshardRun, prepared

    memory = size_of(budget, "--budget")
    most = size_of(max_shard_size, "--max-shard-size")
    rules = [r.strip() for r in rule or ()]
    with prepared(
        source,
        to,
        from_,
        rules,
        step,
        section=section,
        allowed=allow or (),
        trust=trust,
        dequantize=dequantize,
    ) as found:
        run = ReshardRun(found, shard, memory, format=format, most=most, untie=untie)
        composed = found.assembled.composed
        document = ReshardDocument(
            source=source,
            target=target,
            source_layout=found.source.layout,
            target_layout=found.target.layout,
            source_program=found.read_with,
            step=found.stock.step,
            world=run.target.world,
            files=run.files,
            tensors=len(run.target.tensors),
            promise=composed.promise,
            dropped=run.dropped,
            simplified=run.simplified,
            notes=run.notes,
            merged=tuple(composed.merged),
            apart=run.apart,
            unread=tuple(found.stock.unread),
            unused_rules=tuple(composed.left_out),
            witness=found.stock.witness_note,
            order=str(found.stock.metadata.get(UNORDERED, "")),
            shard=run.shard,
            rules=run.rules() if explain else (),
            costs=run.costs() if explain else None,
            proved=run.prove() if prove else None,
            done=None if explain or prove or dry_run else run.do(target, force),
        )
    return Reply(document, lambda d: _show(d, dry_run=dry_run))


def _show(document: ReshardDocument, *, dry_run: bool) -> None:
    d = document
    if d.rules:
        _show_rules(d)
    if d.costs is not None:
        _show_costs(d, d.costs)
        print(f"  {'source':8}{_source(d)}")
    if d.proved is not None:
        print(
            f"proved: each of {d.proved.elements:,} elements in {d.proved.chunks:,} chunks is"
            f" written exactly once, by {d.proved.copies:,} copies"
        )
    if d.done is not None:
        _show_done(d, d.done)
    elif dry_run:
        print(
            f"{d.source_layout} -> {d.target_layout}: {counted(d.tensors, 'tensor')} in"
            f" {counted(d.files, 'file')}, {d.promise}; nothing was written"
        )
    for text in d.source_program.sizes:
        note(text)
    # Where hints are other logical tensors, or do not fit, the user has said so.
    told = ("differs", "hint") if d.source_program.hinted else _TOLD
    if d.costs is None and d.source_program.kept in told:
        note(f"the source was {_source(d)}")
    if d.dropped:
        note(f"left out: {_counted(d.dropped)}")
    if d.simplified:
        note(f"objects with lists for sets, or plain numbers for numpy's: {_counted(d.simplified)}")
    for one in d.notes:
        note(f"{one.text}: {_counted(one.names)}" if one.names else one.text)
    if d.merged:
        note(f"copies that are not written again: {_counted(d.merged)}")
    if d.apart:
        note(f"copied unchanged, as no layout mentions them: {_counted(d.apart)}")
    if d.unread:
        note(f"files of the source that were not read: {_counted(d.unread)}")
    if d.witness and d.done is not None:
        note(f"{d.witness}: positions of values were not checked")
    if d.order:
        note(
            f"order {d.order}: ckptd diff with a checkpoint of known layout tells whether it is"
            " right, and --trust says that it did"
        )


def _counted(names: Sequence[str]) -> str:
    """Return the first of some names, and how many there are."""
    return f"{first_few(names, _SAID)} ({len(names)} in all)"


def _source(d: ReshardDocument) -> str:
    """Say which program the source is read with, and whether its own one agrees."""
    p = d.source_program
    by = f"read with {d.source_layout}"
    kept = "layout that its files hint at" if p.hinted else "kept program"
    match p.kept:
        case "none":
            return f"{by}; it stores no program to compare with"
        case "same":
            return f"{by}, its stored program"
        case "agrees":
            number = "all" if p.compared == p.tensors else f"{p.compared} of"
            return f"{by}, which agrees with the {kept} on {number} {p.tensors} tensors"
        case "unlike":
            return f"{by}; the {kept} has other logical tensors: nothing was compared"
        case "differs":
            return f"{by}, which contradicts the {kept}: {p.note}"
        case "unused":
            return "its stored tensors: a recipe cuts them"
        case "hint" if p.note:
            return f"{by}; the {kept}, {p.note}"
        case "hint":
            return f"{by}, as its files hint{': ' if p.known else ''}{' '.join(p.known)}"
        case "unreadable":
            return f"{by}; the {kept} was not compared: {p.note}"


def _show_rules(d: ReshardDocument) -> None:
    print_rows(
        d.rules,
        {
            "RULE OF THE TARGET": lambda r: shorten(r.rule, 72),
            ">TENSORS": lambda r: r.tensors,
            ">SIZE": lambda r: size_text(r.bytes),
            "PROMISE": lambda r: r.promise,
        },
    )
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
        [
            "writes",
            f"{size_text(costs.bytes_written)} in {costs.files} of {counted(d.files, 'file')}",
        ],
        ["reads", f"{size_text(costs.bytes_read)} from {counted(costs.source_files, 'file')}"],
        ["", f"{costs.read_amplification:.3f} bytes for each needed"],
        ["memory", f"{size_text(costs.peak_bytes)} at most"],
        ["rounds", f"{costs.rounds}, with {costs.copies} copies"],
    ]
    for name, text in rows:
        print(f"  {name:8}{text}")


def _show_done(d: ReshardDocument, done: Resharded) -> None:
    if done.state == "present":
        if done.generation:
            print(f"step {done.step} exists already (generation {done.generation})")
        else:
            print(f"another process has finished it: it is in {d.target}")
        return
    again = f", {done.reused_files} of them there already" if done.reused_files else ""
    rate = done.bytes_written / max(done.seconds, 1e-9)
    print(
        f"{d.source_layout} -> {d.target_layout}: {size_text(done.bytes_written)} in"
        f" {counted(done.files, 'file')}{again}, {seconds_text(done.seconds)}, {size_text(rate)}/s"
    )
    if done.witness_values:
        print(f"  {done.witness_values:,} values of the source's witness are at their positions")
    if done.state == "waiting":
        files = counted(done.missing_files, "file")
        print(f"  waiting for {files} of other shards; the last one commits")
    elif done.generation:
        print(f"  now step {done.step} of generation {done.generation} in {d.target}")
    else:
        print(f"  now in {d.target}")
