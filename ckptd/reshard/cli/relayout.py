"""``ckptd relayout``: what the layout policy would do with what is left, without doing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from msgspec import to_builtins

from ckptd.cli.output import Document, Json, Reply, note, option, print_rows, print_table, size_text

if TYPE_CHECKING:
    from ckptd.reshard.cli.relayouting import RelayoutAnswer
    from ckptd.reshard.explain import Explanation, SurvivorsRow
    from ckptd.reshard.moved import Moved

__all__ = ["RelayoutDocument", "relayout"]

_SHOWN = 64


class RelayoutDocument(Document, frozen=True, kw_only=True, tag="relayout"):
    """What ``ckptd relayout --json`` prints.

    Attributes
    ----------
    microbatches
        Of a step.
    before
        Sizes of the layout until now.
    choice
        What is chosen and why, see `ckptd.reshard.explain.Explanation`; null with a range.
    rows
        With a range of survivors, one for each number: survivors, shape, throughput, ideal, moves,
        parked, refused.
    moved
        With --checkpoint, bytes: ``sources`` (``own``, ``node``, ``peer``, ``root``), ``received``
        by node and source, ``sent`` by node.
    memory
        Bytes of the whole model that were reckoned with; null without --memory.
    """

    microbatches: int
    before: dict[str, int]
    choice: dict[str, Any] | None = None
    rows: tuple[dict[str, Any], ...] = ()
    moved: dict[str, Any] | None = None
    memory: dict[str, int] | None = None


def relayout(
    *,
    layout: Annotated[str, Parameter(help="Sizes until now: pp=2,dp=4,tp=2.")],
    microbatches: Annotated[int, Parameter(help="Of a step, on all ranks together.")],
    survivors: Annotated[
        str | None,
        option("Slots that are left: 13; or a range, 1:16."),
    ] = None,
    nodes_lost: Annotated[str | None, option("Nodes that are gone: n1,n3.")] = None,
    slots_per_node: Annotated[int, Parameter(help="Ranks that a node can run.")] = 8,
    spare_nodes: Annotated[int, Parameter(help="Nodes beyond those of the layout.")] = 0,
    pp: Annotated[str | None, option("Other pipeline sizes that are allowed.")] = None,
    tp: Annotated[
        str | None,
        option("Other tensor-parallel sizes that are allowed."),
    ] = None,
    memory: Annotated[
        str | None,
        option(
            "replicated=40GB,sharded=80GB,activations=2GB,limit=80GiB: of the whole model, and"
            " the limit of a rank. With --checkpoint the first two are known."
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        option("ROOT or ROOT@STEP: say how many bytes would move."),
    ] = None,
    program: Annotated[
        str | None,
        option("Layout of the job, where the checkpoint keeps none."),
    ] = None,
    plot: Annotated[
        Path | None,
        option("Picture of a range: FILE.svg or FILE.png."),
    ] = None,
    json: Json = False,
) -> Reply:
    """Say what the layout policy would do with what is left of a job, and why.

    Nodes are n0, n1 and so on. Nothing is started, moved or written. The exit code is 5 when no
    layout fits; with a range it is 0, and the table says so.
    """
    from ckptd.reshard.cli.relayouting import Question, draw

    question = Question.of(
        layout, microbatches, slots_per_node, spare_nodes, pp, tp, nodes_lost, survivors
    )
    answer = question.answer(memory, checkpoint, program)
    if plot is not None:
        draw(answer.rows, question.job.planned, plot)
        note(f"the picture is {plot}")
    return Reply(_document(answer), lambda _: _show_answer(answer))


def _document(answer: RelayoutAnswer) -> RelayoutDocument:
    return RelayoutDocument(
        microbatches=answer.job.microbatches,
        before=to_builtins(answer.job.planned),
        choice=to_builtins(answer.choice),
        rows=tuple(to_builtins(answer.rows)),
        moved=to_builtins(answer.moved),
        memory=to_builtins(answer.job.memory),
    )


def _show_answer(answer: RelayoutAnswer) -> None:
    if answer.choice is None:
        _show_rows(answer.rows)
    else:
        _show(answer.choice, answer.moved)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _show_rows(rows: tuple[SurvivorsRow, ...]) -> None:
    print_rows(
        rows,
        {
            ">LEFT": lambda r: r.survivors,
            "LAYOUT": lambda r: "-" if r.shape is None else r.shape,
            ">THROUGHPUT": lambda r: _percent(r.throughput),
            ">IDEAL": lambda r: _percent(r.ideal),
            ">MOVE": lambda r: r.moves,
            ">PARKED": lambda r: r.parked,
            "WHY NOT": lambda r: r.refused,
        },
    )


def _show(e: Explanation, moved: Moved | None) -> None:
    print(f"{e.before} -> {e.shape}, on {e.survivors} slots")
    for reason in e.why:
        print(f"  {reason}")
    of_ideal = e.throughput / e.ideal if e.ideal else 0.0
    print(
        f"throughput: {_percent(e.throughput)} of before, {_percent(of_ideal)} of what"
        f" {e.survivors} slots could give"
    )
    if e.lost:
        lost = ", ".join(_at(*c) for c in e.lost[:_SHOWN])
        more = f" and {len(e.lost) - _SHOWN} more" if len(e.lost) > _SHOWN else ""
        print(f"places without a holder: {lost}{more}")
    print(f"with one more node: {_grown(e)}")
    print()
    _show_seats(e)
    if e.parked:
        print(f"parked: {', '.join(e.parked)}")
    if moved is not None:
        print()
        _show_moved(moved)


def _grown(e: Explanation) -> str:
    row = e.grown
    if row.shape is None:
        return row.refused
    if row.shape == e.shape:
        return f"{row.shape} as well: {row.parked} slots would be parked"
    return f"{row.shape}, {_percent(row.throughput)} of before, {row.moves} ranks move"


def _at(pp: int, dp: int, tp: int) -> str:
    return f"{pp}.{dp}.{tp}"


def _show_seats(e: Explanation) -> None:
    print_rows(
        e.seats,
        {
            ">RANK": lambda s: s.rank,
            "SLOT": lambda s: f"{s.node}/{s.slot}",
            "PP.DP.TP": lambda s: _at(s.pp, s.dp, s.tp),
            "MICRO-BATCHES": lambda s: f"{s.microbatches[0]}..{s.microbatches[1] - 1}",
            "PARAMETERS": lambda s: (
                "stays" if s.stays else "from " + (_at(*s.before) if s.before else "nothing")
            ),
        },
    )


def _show_moved(moved: Moved) -> None:
    total = sum(moved.sources.values())
    own = moved.sources["own"]
    print(f"of {size_text(total)} that the ranks need, {size_text(total - own)} move")
    rows = [
        [node, *(size_text(n) for n in sources.values()), size_text(moved.sent.get(node, 0))]
        for node, sources in moved.received.items()
    ]
    rows += [
        [node, *["0 B"] * len(moved.sources), size_text(n)]
        for node, n in moved.sent.items()
        if node not in moved.received
    ]
    rows.append(
        [
            "all",
            *(size_text(n) for n in moved.sources.values()),
            size_text(sum(moved.sent.values())),
        ]
    )
    head = [">OWN", ">SAME NODE", ">OTHER NODES", ">ROOT", ">GIVES"]
    print_table(["NODE", *head], rows)
