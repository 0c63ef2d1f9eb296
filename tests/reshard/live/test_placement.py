"""Programs that say where experts lie: one placement after another, whichever layers each is of."""

from __future__ import annotations

import random

import pytest

from ckptd.errors import UsageError
from ckptd.lay.agree import agreed
from ckptd.lay.bind import bind_sizes
from ckptd.lay.copies import Composition
from ckptd.lay.live import Transfers
from ckptd.lay.resolve import Bound
from ckptd.reshard.layouts import LayoutProgram, read_text
from ckptd.reshard.live.placement import (
    ExpertTable,
    expert_forms,
    place_experts,
    tables_of,
    unit_key,
)
from ckptd.reshard.live.plan import Roles, make_plan

LAYERS, EXPERTS, EP, DP = 4, 7, 3, 2
PROGRAM = """
mesh M = dp:2 ep:3
let e = 7
let f = 2
let h = 3
let l = 4
space moe {
  L{l}.router[e h]
  L{l}.X{e}.w1[f h]
  L{l}.X{e}.w2[h f]
  follow m
}
layout train of moe on M {
  layers.{l}.router = L{l}.router[e h]
  layers.{l}.w1 = L{l}.X.w1[e@ep:bal f h]
  layers.{l}.experts.{#e@ep:bal}.w2 = L{l}.X{e}.w2[h f]
}
"""


def drawn(rng: random.Random) -> list[list[int]]:
    table: list[list[int]] = [[] for _ in range(EP)]
    for expert in rng.sample(range(EXPERTS), EXPERTS):
        table[rng.randrange(EP)].append(expert)
    return table


def homes(table: ExpertTable) -> tuple[int, ...]:
    return tuple(next(c for c, mine in enumerate(table) if e in mine) for e in range(EXPERTS))


def bound_of(program: LayoutProgram) -> Bound:
    return bind_sizes(program.resolve(), {})


def moved_elements(before: Bound, after: Bound) -> int:
    """Return how many elements all ranks receive of others, and check that each is sent."""
    forms = expert_forms(before, "e"), expert_forms(after, "e")
    transfers = Transfers(Composition(*agreed(forms[0].bound, forms[1].bound)))
    ranks = tuple(range(EP * DP))
    sent: dict[tuple[int, int], int] = {}
    received: dict[tuple[int, int], int] = {}
    for rank in ranks:
        plan = make_plan(
            transfers,
            Roles(ranks, ranks),
            rank,
            states=frozenset(["", "m"]),
            sources={},
            targets={},
        )
        for peer, out in plan.outgoing.items():
            sent[rank, peer] = sum(o.segment.numel for o in out)
        for peer, arriving in plan.incoming.items():
            received[peer, rank] = sum(i.segment.numel for i in arriving)
            for i in arriving:
                piece = i.tensor.pieces[0]
                assert unit_key(forms[1], piece.rule, piece.indexes, i.tensor.state, "e")[0]
    assert sent == received
    return sum(n for (a, b), n in received.items() if a != b)


@pytest.mark.parametrize("seed", range(6))
def test_placements_follow_each_other(seed: int) -> None:
    rng = random.Random(seed)
    program = read_text(PROGRAM, "test")
    first: tuple[int, ...] = (0, 0, 0, 1, 1, 2, 2)
    wanted = dict.fromkeys(range(LAYERS), first)
    for _ in range(4):
        before, old = bound_of(program), dict(wanted)
        if rng.random() < 0.3:
            table = drawn(rng)
            program = place_experts(program, table)
            wanted = dict.fromkeys(range(LAYERS), homes(table))
        else:
            tables = {n: drawn(rng) for n in rng.sample(range(LAYERS), rng.randint(1, LAYERS))}
            program = place_experts(program, tables)
            wanted |= {n: homes(t) for n, t in tables.items()}
        # As a checkpoint keeps it.
        program = read_text(program.text, "again")
        after = bound_of(program)
        found = tables_of(after, "e")
        equations = after.layout.equations
        for family in ("L{l}.X{e}.w1", "L{l}.X{e}.w2"):
            mine = {
                layer: table
                for (rule, layer), table in found.items()
                if family in {f.name for f in equations[rule].families.values()}
            }
            assert mine == wanted
        changed = sum(a != b for n in range(LAYERS) for a, b in zip(old[n], wanted[n], strict=True))
        # Each expert that changes its coordinate travels once for each replica, with its state.
        assert moved_elements(before, after) == changed * DP * 2 * (2 * 3 + 3 * 2)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("layers.{l}.w1 = L{l}.X.w1[(e f)@ep h]", "together with another axis"),
        ("layers.{l}.w1 = L{l}.X.w1[(e@ep:bal f)@dp h]", "together with another axis"),
        ("layers.{l}.{#e@ep:bal@dp:bal}.w1 = L{l}.X{e}.w1[f h]", "cut twice, in a name"),
        ("layers.{l}.w1 = L{l}.X.w1[e f@ep:bal h]", "none"),
    ],
)
def test_experts_that_no_table_can_place(rules: str, said: str) -> None:
    start = PROGRAM.index("layout train")
    text = f"{PROGRAM[:start]}layout train of moe on M {{\n  {rules}\n}}\n"
    with pytest.raises(UsageError) as caught:
        place_experts(read_text(text, "test"), drawn(random.Random(1)))
    assert caught.value.message in (
        "experts that a table places must be cut separately",
        "no rule of the program cuts the experts",
    )
    assert said in f"{caught.value.found}"
