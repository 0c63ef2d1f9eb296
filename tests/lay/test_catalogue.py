"""Each of the 26 facts about layouts has a program that works: docs/reference/lay-catalogue."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptd.lay.bind import bind_ranks, bind_sizes, bind_stored
from ckptd.lay.check import check, check_bound
from ckptd.lay.copies import Copy, compose
from ckptd.lay.live import LivePlan, Transfers
from ckptd.lay.promise import PROMISES, Promise, promises
from ckptd.lay.resolve import Bound, resolve
from ckptd.lay.syntax import format_text, parse
from ckptd.lay.syntax.tree import Affine, Average, Cast, Modifier, Quantized
from tests.lay.agreement.brute import Brute, Numbering, filled, load, save
from tests.lay.agreement.brute_judge import Judge, apply, piece_of
from tests.lay.catalogue import CATALOGUE, Program

Floats = NDArray[Any]
EXACT = [p for p in CATALOGUE if p.promise != "lossy"]
LOSSY = [p for p in CATALOGUE if p.promise == "lossy"]


def named(programs: list[Program]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("program", programs, ids=[p.name for p in programs])


def test_every_fact_has_a_program() -> None:
    assert [p.name[:2] for p in CATALOGUE] == [f"{i:02}" for i in range(1, 27)]
    assert [p.name[:2] for p in LOSSY] == ["08", "20", "21", "23"]


@named(CATALOGUE)
def test_is_right(program: Program) -> None:
    """It is in normal form, nothing is to be said against it, and it promises what it says."""
    assert format_text(program.text) == program.text
    assert program.layouts[:2] == ["src", "dst"]
    worst: list[Promise] = []
    for name in program.layouts:
        bound = program.bound(name)
        found = [*check(bound.layout), *check_bound(bound)]
        assert not found, "\n".join(f.render() for f in found)
        worst += promises(bound.layout)
    assert max(worst, key=PROMISES.index) == program.promise


@named(CATALOGUE)
def test_moves_the_right_cells(program: Program) -> None:
    """From each of its layouts to each other one: as the brute force says."""
    for source, target in permutations(program.layouts, 2):
        Judge(program.bound(source), program.bound(target)).check()


@named(CATALOGUE)
def test_observed_shapes_fit(program: Program) -> None:
    """Names and shapes in a checkpoint, and on all ranks, are what the layout expects."""
    for name in program.layouts:
        bound = program.bound(name)
        meaning = Brute(bound)
        stored = {n: c.shape for n, (_, c) in meaning.stored().items()}
        ranks = {
            r: {n: c.shape for n, (_, c) in meaning.local(r).items()}
            for r in range(meaning.mesh.world)
        }
        resolved = resolve([program.file], name)
        for found, observed in (
            (bind_stored(resolved, stored, program.sizes), stored),
            (bind_ranks(resolved, ranks, program.sizes), ranks),
        ):
            assert {a: n for a, n in found.sizes.items() if a in bound.sizes} == bound.sizes
            assert not check_bound(found, observed)


# --- round trips --------------------------------------------------------------------------------


class Checkpoint:
    """All pieces of a layout's stored tensors, of random values."""

    def __init__(self, meaning: Brute, bound: Bound, values: dict[str, Floats]) -> None:
        self.bound = bound
        stored = {n: filled(meaning, c, values[s]) for n, (s, c) in meaning.stored().items()}
        form = compose(bound, bound).source
        self.pieces: dict[tuple[str, int], Floats] = {
            (t.name, i): piece_of(stored[t.name], t.grid.piece(i)).astype(np.float32)
            for t in form.tensors()
            for i in range(t.grid.npieces)
        }

    def moved(self, target: Bound) -> dict[tuple[str, int], Floats]:
        """Return the pieces of another layout's checkpoint, by plans."""
        composition = compose(self.bound, target)
        form = composition.target
        return {
            (name, i): apply(composition.piece(key, i), self.pieces, np.float32, np.float32)
            for name, key in form.by_name.items()
            for i in range(form.tensor(*key).grid.npieces)
        }


def random_values(meaning: Brute) -> dict[str, Floats]:
    """Return values of all bit patterns, but for those that are no number."""
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 0x7F7FFFFF, (len(meaning.states), meaning.numbering.total), np.uint32)
    return dict(zip(meaning.states, bits.view(np.float32), strict=True))


@named(EXACT)
def test_round_trip_is_exact(program: Program) -> None:
    """Checkpoint to checkpoint and back: the same bits, fills among them."""
    for source, target in permutations(program.layouts, 2):
        there, here = program.bound(target), program.bound(source)
        numbering = Numbering.of(here, there)
        meaning, other = Brute(here, numbering), Brute(there, numbering)
        values = random_values(meaning)
        first = Checkpoint(meaning, here, values)
        second = Checkpoint(other, there, values)
        moved = first.moved(there)
        assert_same_bits(moved, second.pieces)
        second.pieces = moved
        assert_same_bits(second.moved(here), first.pieces)


@named(EXACT)
def test_ranks_get_the_right_values(program: Program) -> None:
    """Checkpoint of the source to ranks of the target, and what they hold is what was there."""
    here, there = program.bound("src"), program.bound("dst")
    numbering = Numbering.of(here, there)
    meaning, other = Brute(here, numbering), Brute(there, numbering)
    values = random_values(meaning)
    first = Checkpoint(meaning, here, values)
    composition = compose(here, there)
    held: dict[int, dict[str, Floats]] = {
        rank: {
            t.name: apply(plan, first.pieces, np.float32, np.float32).reshape(t.shape)
            for t, plan in composition.local(rank)
        }
        for rank in range(other.mesh.world)
    }
    back = load(other, held)
    for state in other.states:
        there = cells_of(meaning, state)
        assert back[state][there].astype(np.float32).tobytes() == values[state][there].tobytes()
        assert np.isnan(back[state]).sum() == len(values[state]) - len(there)
    wanted = save(other, values)
    for rank, tensors in held.items():
        assert {n: a.tobytes() for n, a in tensors.items()} == {
            n: a.astype(np.float32).tobytes() for n, a in wanted[rank].items()
        }


def cells_of(meaning: Brute, state: str) -> NDArray[np.int64]:
    """Return the cells that there are: some layers may lack some tensors."""
    found = [c.reshape(-1) for s, c in meaning.stored().values() if s == state]
    cells = np.unique(np.concatenate(found))
    return cells[cells >= 0]


def assert_same_bits(
    found: dict[tuple[str, int], Floats], wanted: dict[tuple[str, int], Floats]
) -> None:
    assert found.keys() == wanted.keys()
    for key, piece in wanted.items():
        assert found[key].tobytes() == piece.tobytes(), key


# --- values -------------------------------------------------------------------------------------


def bfloat16(x: Floats) -> Floats:
    """Round to the nearest bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def done(x: Floats, modifiers: tuple[Modifier, ...]) -> Floats:
    """Return what a rule holds of logical values."""
    for m in modifiers:
        if isinstance(m, Affine):
            x = m.scale * x + m.shift
        elif isinstance(m, Cast):
            x = bfloat16(x) if m.dtype == "bfloat16" else x.astype(np.float32)
    return x


def undone(x: Floats, modifiers: tuple[Modifier, ...]) -> Floats:
    """Return the logical values of what a rule holds."""
    for m in reversed(modifiers):
        if isinstance(m, Affine):
            x = (x - m.shift) / m.scale
    return x


def change(copy: Copy, x: Floats) -> Floats:
    """Do to values what a copy says."""
    if copy.values is None:
        return x
    return done(undone(x, copy.values.source), copy.values.target)


def modifiers_of(meaning: Brute, state: str) -> dict[str, tuple[Modifier, ...]]:
    """Return what is said of the values of each stored tensor of a state, by name.

    Types are those of parameters; shifts and scales also concern the master copy. A parameter that
    is twice as large has gradients that are half as large.
    """
    bound = Bound(meaning.layout, meaning.sizes)
    return {
        t.name: tuple(
            _of_state(m, state)
            for m in meaning.layout.equations[t.rule].modifiers
            if isinstance(m, Affine) or (isinstance(m, Cast) and not state)
        )
        for t in compose(bound, bound).source.tensors()
        if t.state == state
    }


def _of_state(m: Modifier, state: str) -> Modifier:
    if isinstance(m, Affine) and state in ("m", "s"):
        return Affine(1 / m.scale if state == "m" else 1 / (m.scale * m.scale), 0.0)
    return m


def physical(meaning: Brute, values: dict[str, Floats]) -> dict[str, Floats]:
    """Return what the stored tensors of a layout hold of logical values, by name."""
    stored = meaning.stored()
    out = {}
    for state in meaning.states:
        for name, modifiers in modifiers_of(meaning, state).items():
            logical = filled(meaning, stored[name][1], values[state])
            out[name] = done(logical, modifiers)
    return out


@pytest.mark.parametrize("way", [("src", "dst"), ("dst", "src")])
@pytest.mark.parametrize("number", ["20", "23"])
def test_values_change_as_the_rules_say(number: str, way: tuple[str, str]) -> None:
    program = next(p for p in CATALOGUE if p.name.startswith(number))
    here, there = map(program.bound, way)
    numbering = Numbering.of(here, there)
    meaning, other = Brute(here, numbering), Brute(there, numbering)
    rng = np.random.default_rng(3)
    values = {s: bfloat16(rng.normal(size=numbering.total)) for s in meaning.states}
    assert any(modifiers_of(b, "")[n] for b in (meaning, other) for n in modifiers_of(b, ""))
    held = physical(meaning, values)
    composition = compose(here, there)
    pieces = {
        (t.name, i): piece_of(held[t.name], t.grid.piece(i))
        for t in composition.source.tensors()
        for i in range(t.grid.npieces)
    }
    wanted = physical(other, values)
    for name, key in composition.target.by_name.items():
        tensor = composition.target.tensor(*key)
        for i in range(tensor.grid.npieces):
            plan = composition.piece(key, i)
            found = apply(plan, pieces, float, np.float64, change)
            assert np.allclose(found, piece_of(wanted[name], tensor.grid.piece(i)), atol=1e-6)


def test_replicas_are_combined() -> None:
    """Live ranks: ``avg(tp)`` is the mean over tp, ``sum(dp)`` the sum over dp."""
    program = next(p for p in CATALOGUE if p.name.startswith("08"))
    here, there = program.bound("src"), program.bound("dst")
    numbering = Numbering.of(here, there)
    meaning, other = Brute(here, numbering), Brute(there, numbering)
    rng = np.random.default_rng(5)
    held: dict[tuple[int, str], Floats] = {}
    for rank in range(meaning.mesh.world):
        for name, (_, cells) in meaning.local(rank).items():
            drifts = name.endswith(("drifted", "partial", "either"))
            held[rank, name] = rng.normal(size=cells.shape) if drifts else cells * 1.0
    coordinates = [meaning.mesh.coordinates(r) for r in range(meaning.mesh.world)]
    for rank in range(other.mesh.world):
        for tensor, plan in Transfers(compose(here, there)).local(rank):
            out = np.zeros(plan.numel)
            for copy in plan.copies:
                alone = LivePlan(plan.numel, (copy,), ())
                found = apply(alone, held, float, np.float64, whole=False)
                modifiers = () if copy.values is None else copy.values.source
                assert copy.of == (1 if not modifiers else {"avg": 3, "sum": 2}[kind(modifiers)])
                out += found / copy.of if kind(modifiers) == "avg" else found
            each = {r: held[r, tensor.name] for r in range(meaning.mesh.world)}
            if tensor.name.endswith("drifted"):
                # Over tp, at any one dp.
                sums = [
                    sum(each[r] for r, c in enumerate(coordinates) if c["dp"] == d) / 3
                    for d in range(2)
                ]
                assert any(np.allclose(out, s) for s in sums)
            elif tensor.name.endswith("partial"):
                sums = [
                    sum(each[r] for r, c in enumerate(coordinates) if c["tp"] == t)
                    for t in range(3)
                ]
                assert any(np.allclose(out, s) for s in sums)
            else:
                assert any(np.array_equal(out, a) for a in each.values())


def kind(modifiers: tuple[Modifier, ...]) -> str:
    return next((m.kind for m in modifiers if isinstance(m, Average)), "")


def test_scales_follow_their_blocks() -> None:
    """Values of blocks with a scale each, read through a plan, are what numpy makes of them."""
    program = next(p for p in CATALOGUE if p.name.startswith("21"))
    here, there = program.bound("src"), program.bound("dst")
    judge = Judge(here, there)
    rng = np.random.default_rng(11)
    logical = rng.normal(size=judge.source.numbering.total)
    pieces: dict[tuple[str, int], Floats] = {}
    for tensor in judge.composition.source.tensors():
        cells = judge.source.stored()[tensor.name][1]
        (quantized,) = (
            m for m in here.layout.equations[tensor.rule].modifiers if isinstance(m, Quantized)
        )
        scales, numbers = block_quantized(logical[cells], quantized.block)
        whole = np.kron(scales, np.ones(quantized.block))[: cells.shape[0], : cells.shape[1]]
        for i in range(tensor.grid.npieces):
            piece = tensor.grid.piece(i)
            # A piece is whole blocks, but for the ends of the tensor: it can be read alone.
            for lo, n, size, block in zip(
                piece.box.offset, piece.box.shape, tensor.shape, quantized.block, strict=True
            ):
                assert lo % block == 0
                assert (lo + n) % block == 0 or lo + n == size
            pieces[tensor.name, i] = piece_of(numbers * whole, piece)
    for rank in range(judge.target.mesh.world):
        for local, plan in judge.composition.local(rank):
            assert all(c.values is not None and c.values.source for c in plan.copies)
            found = apply(plan, pieces, float, np.float64)
            cells = judge.target.local(rank)[local.name][1].reshape(-1)
            assert np.abs(found - logical[cells]).max() < 0.05 * np.abs(logical).max()


def block_quantized(x: Floats, block: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Return a scale for each block, and whole numbers up to 100 for each element."""
    rows, columns = (-(-n // b) for n, b in zip(x.shape, block, strict=True))
    padded = np.zeros((rows * block[0], columns * block[1]))
    padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.reshape(rows, block[0], columns, block[1])
    scales = np.abs(blocks).max(axis=(1, 3)) / 100
    numbers = np.round(padded / np.kron(scales, np.ones(block)))
    return scales, numbers[: x.shape[0], : x.shape[1]]


def test_a_split_inside_of_a_block_is_found() -> None:
    program = next(p for p in CATALOGUE if p.name.startswith("21"))
    text = program.text.replace("f@tp/4", "f@tp")
    bound = bind_sizes(resolve([parse(text)], "src"), {**program.sizes, "f": 12})
    assert [f.code for f in check_bound(bound)] == ["block", "block"]
