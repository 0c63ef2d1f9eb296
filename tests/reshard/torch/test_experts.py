"""Experts move between real ranks while they train: losses are those of a job that moved none."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import ckptd
from ckptd.errors import CkptdError
from ckptd.reshard.torch.transport import TorchTransport
from ckptd.testing.ranks import rank_outcomes, run_ranks
from tests.played import Played
from tests.processes import PATIENCE_S
from tests.reshard.torch.moe import EXPERTS, LAYERS, Trainer, evenly, example, layout_of
from tests.reshard.torch.test_relayout_ranks import Deadly, memory

pytestmark = [pytest.mark.usefixtures("writing_thread"), pytest.mark.dist, pytest.mark.timeout(700)]

WORLD = 4
Table = list[list[int]]


def drawn(seed: int, *, alike: bool = False) -> Table:
    """Draw a placement; with `alike` every rank has as many experts as evenly dealt out."""
    rng = random.Random(seed)
    numbers = rng.sample(range(EXPERTS), EXPERTS)
    if alike:
        sizes = [len(t) for t in evenly(WORLD)[0]]
    else:
        cuts = sorted(rng.randint(0, EXPERTS) for _ in range(WORLD - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, EXPERTS], strict=True)]
    return [[numbers.pop() for _ in range(n)] for n in sizes]


def trained(steps: int, *, lists: bool = False) -> list[float]:
    losses: list[float] = Trainer(evenly(WORLD), lists=lists).steps(steps)
    return losses


def random_moves(seeds: Sequence[int], lists: bool) -> tuple[list[float], list[float], list[Any]]:
    """Train with a move between all steps, and without."""
    trainer = Trainer(evenly(WORLD), lists=lists)
    layout = layout_of(WORLD, lists=lists)
    losses = trainer.steps(1)
    prices = []
    for seed in seeds:
        table = drawn(seed, alike=lists)
        # One table for all layers, or other ones for some of them.
        placement: Any = table if seed % 3 == 0 else {seed % LAYERS: table}
        move = ckptd.move_experts(trainer.state, layout, placement, budget_bytes=1 << 18)
        assert move.report is not None
        assert move.report.bytes_sent == move.price.bytes_out
        assert move.report.bytes_received == move.price.bytes_in
        prices.append((move.price.bytes_in, move.price.bytes_out, move.price.all_bytes))
        layout = move.layout
        trainer.place(
            placement if isinstance(placement, dict) else dict.fromkeys(range(LAYERS), table)
        )
        losses += trainer.steps(1)
    return losses, trained(1 + len(seeds), lists=lists), prices


@pytest.mark.parametrize("lists", [False, True])
def test_losses_are_those_of_a_job_that_moved_nothing(four: Played, lists: bool) -> None:
    judge(four.of(f"moves, lists {lists}"))


@pytest.mark.long
@pytest.mark.parametrize("lists", [False, True])
def test_losses_after_many_moves(lists: bool) -> None:
    judge(run_ranks(WORLD, random_moves, range(4, 28), lists, deadline_s=PATIENCE_S))


def judge(done: list[tuple[list[float], list[float], list[Any]]]) -> None:
    for losses, wanted, _ in done:
        assert losses == wanted
    for prices in zip(*(d[2] for d in done), strict=True):
        assert sum(p[0] for p in prices) == sum(p[1] for p in prices) == prices[0][2]
    assert any(p[2] for p in done[0][2])


def saved_and_loaded(root: str) -> tuple[list[list[float]], list[float], list[str]]:
    """Save before and after a move; load each into a job that is placed as the other one was."""
    trainer = Trainer(evenly(WORLD))
    new = {0: drawn(1), 1: drawn(2)}
    with ckptd.Checkpointer(root, layout=layout_of(WORLD)) as ck:
        losses = trainer.steps(2)
        # One for other ranks is refused, and this one goes on.
        assert caught(lambda: ck.change_layout(layout_of(WORLD - 1))).kind == "lay-use"
        ck.save(2, trainer.state)
        move = ckptd.move_experts(trainer.state, layout_of(WORLD), new, checkpointer=ck)
        trainer.place(new)
        losses += trainer.steps(2)
        ck.save(4, trainer.state)
        losses += trainer.steps(2)
    found = [losses]
    # The later one first: a load of the earlier one begins another line.
    for step, tables, layout in ((4, evenly(WORLD), layout_of(WORLD)), (2, new, move.layout)):
        other = Trainer(tables)
        with ckptd.Checkpointer(root, layout=layout) as ck:
            ck.load(other.state, step=step)
        other.number = step
        found.append(other.steps(6 - step))
    return found, trained(6), [move.layout]


def test_checkpoints_of_before_and_after_load_into_each_other(four: Played) -> None:
    for (losses, from_after, from_before), wanted, (program,) in four.of("saved and loaded"):
        assert losses == wanted
        assert from_before == wanted[2:]
        assert from_after == wanted[4:]
        assert program.count(":at[") == 4


def caught(function: Callable[[], object]) -> CkptdError:
    try:
        function()
    except CkptdError as error:
        return error
    raise AssertionError("nothing was raised")


def refused_moves() -> list[tuple[str, str, str]]:
    trainer = Trainer(evenly(WORLD))
    trainer.steps(1)
    layout, state = layout_of(WORLD), trainer.state
    before = {n: t.clone() for n, t in trainer.model.state_dict().items()}

    def refused(placement: Any, lay: str = layout, **options: Any) -> CkptdError:
        return caught(lambda: ckptd.ExpertMove(state, lay, placement, **options))

    found = [
        refused([[0, 1], [2], [3], [4]]),
        refused([[0, 1], [2, 1], [3], [4, 5]]),
        refused([[0, 1], [2], [3, 7], [4, 5]]),
        refused({1: [[0, 1, 2], [3, 4, 5]]}),
        refused(drawn(1), experts="h"),
        refused(drawn(1), budget_bytes=1 << 9),
        refused(drawn(1), layout.replace("mesh M = ep:4", "mesh M = ep:3")),
    ]
    alike = drawn(1, alike=True)
    first = ckptd.ExpertMove(state, layout, alike, bytes_per_s=1000.0)
    assert first.price.seconds == first.price.most_bytes / 1000.0
    assert ckptd.ExpertMove(state, layout, drawn(2)).price.parts == 1
    second = ckptd.ExpertMove(state, layout, drawn(2))
    assert all(t.equal(before[n]) for n, t in trainer.model.state_dict().items())
    first.run()
    trainer.place(dict.fromkeys(range(LAYERS), alike))
    # The second plan, the same one again, and a new one with the layout of before.
    found += [caught(second.run), caught(first.run), refused(drawn(3))]
    trainer.layers[0].w1.sum().backward()
    found.append(refused(drawn(3), first.layout))
    trainer.optim.zero_grad()
    assert trainer.steps(2) == trained(3)[1:]
    lists = Trainer(evenly(WORLD), lists=True)
    lists.steps(1)
    one = caught(
        lambda: ckptd.ExpertMove(
            lists.state, layout_of(WORLD, lists=True), [[0], [1], [2], [3, 4, 5]]
        )
    )
    return [(e.kind, f"{e.where} {e.message} {e.found}", e.hint or "") for e in (*found, one)]


def test_what_cannot_be_moved_is_refused_by_name_and_nothing_has_moved(four: Played) -> None:
    wanted = [
        ("bad-argument", "missing experts: 5"),
        ("bad-argument", "duplicate experts: 1 (at 0, 1)"),
        ("bad-argument", "unknown experts: 7"),
        ("bad-argument", "layer 1"),
        ("bad-argument", "no rule of the program cuts the experts"),
        ("bad-argument", "budget is too small"),
        ("lay-use", "ranks"),
        ("bad-argument", "do not lie where the layout says"),
        ("bad-argument", "has run"),
        ("bad-argument", "do not lie where the layout says"),
        ("bad-argument", "model.layers.0.w1"),
        ("bad-argument", "does not fit the rank's modules"),
    ]
    for found in four.of("refused"):
        assert len(found) == len(wanted)
        for (kind, text, _), (wanted_kind, part) in zip(found, wanted, strict=True):
            assert kind == wanted_kind, text
            assert part in text


def example_run() -> dict[str, Any]:
    found: dict[str, Any] = example.run(3, tell=False)
    return found


def test_the_example_moves_by_load_and_changes_no_loss(two: Played) -> None:
    for found in two.of("example"):
        assert found["equal"]
        assert found["price"]["experts"]


ROWS, COLUMNS = 256, 512
LARGE = """
mesh M = ep:2
let e = 8
let l = 6
space moe { L{l}.X{e}.w[f h] }
layout train of moe on M { layers.{l}.w = L{l}.X.w[e@ep f h] }
"""
BUDGET = 12 << 20


def large() -> tuple[bool, int, tuple[int, int]]:
    """Move 24 MB a rank in parts of at most 6 MB, and measure the memory that it takes."""
    rank = dist.get_rank()
    whole = torch.arange(8.0)[:, None, None].expand(8, ROWS, COLUMNS)
    state = {f"layers.{n}.w": whole[4 * rank : 4 * rank + 4] + n for n in range(6)}
    tables = [[[0, 1, 2, 3, 4, 5], [6, 7]], [[6, 7, 0, 2], [1, 3, 4, 5]]]
    # What is made once for a process is no part of the measure.
    layout = ckptd.move_experts({"model": state}, LARGE, tables[0], budget_bytes=BUDGET).layout
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = memory("VmRSS")
    move = ckptd.move_experts({"model": state}, layout, tables[1], budget_bytes=BUDGET)
    # The state itself may have grown.
    more = max(0, len(tables[1][rank]) - len(tables[0][rank])) * 6 * whole[0].nbytes
    extra = memory("VmHWM") - before - more
    mine = sorted(tables[1][rank])
    good = all(torch.equal(t, whole[mine] + int(n.split(".")[1])) for n, t in state.items())
    return good, extra, (move.price.parts, move.price.staged_bytes)


def test_what_does_not_fit_the_budget_moves_in_parts(two: Played) -> None:
    for good, extra, (parts, staged) in two.of("large"):
        assert good
        assert parts == 2
        assert extra <= BUDGET, extra
        assert staged <= BUDGET


STEPPED = LARGE.replace(
    "w[f h] }", "w[f h]\n  follow m=exp_avg, s=exp_avg_sq\n  scalar step(param)\n}"
)


def stepped_apart() -> tuple[CkptdError, bool, int, bool]:
    """Move stacks of which the last layer's took a step more on rank 1; then swap these whole."""
    rank = dist.get_rank()
    stacks = {f"layers.{n}": torch.nn.Module() for n in range(6)}
    whole = torch.arange(8.0)[:, None, None].expand(8, 64, 64)
    for module in stacks.values():
        module.w = torch.nn.Parameter(whole[4 * rank : 4 * rank + 4].clone())
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(stacks.values())
    optim = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optim.step()
    optim.zero_grad()
    last = list(model.parameters())[-1]
    optim.state[last]["step"] += rank
    state = {"model": model, "optim": optim}
    options: dict[str, Any] = {"budget_bytes": 1 << 18, "timeout_s": PATIENCE_S}
    move = ckptd.ExpertMove(state, STEPPED, [[7, 1, 2, 6], [0, 3, 4, 5]], **options)
    error = caught(move.run)
    same = all(p.equal(whole[4 * rank : 4 * rank + 4]) for p in model.parameters())
    ckptd.move_experts(state, STEPPED, [[4, 5, 6, 7], [0, 1, 2, 3]], **options)
    swapped = last.equal(whole[4 - 4 * rank : 8 - 4 * rank])
    return error, same, move.price.parts, swapped and optim.state[last]["step"].item() == 2 - rank


def test_experts_of_different_steps_are_refused_before_any_moves(two: Played) -> None:
    """The part of the layer that has them was reached when others had moved."""
    for error, same, parts, swapped in two.of("stepped apart"):
        assert (error.kind, error.state_corrupted) == ("lay-fit", False), error
        assert "step of layers.5.w" in f"{error.where}"
        assert parts > 1
        assert same
        assert swapped


def dying(after: int) -> tuple[str, str | None, bool, str, bool]:
    trainer = Trainer(evenly(WORLD))
    trainer.steps(1)
    before = {n: t.clone() for n, t in trainer.model.state_dict().items()}
    inner: Any = TorchTransport()
    transport = Deadly(inner, after) if dist.get_rank() == 2 else inner
    move = ckptd.ExpertMove(
        trainer.state,
        layout_of(WORLD),
        [[5, 3], [4, 0], [2], [1]],
        transport=transport,
        timeout_s=60.0,
    )
    error = caught(move.run)
    same = all(t.equal(before[n]) for n, t in trainer.model.state_dict().items())
    return error.kind, error.where, error.state_corrupted, error.hint or "", same


@pytest.mark.parametrize("after", [0, 2])
def test_a_rank_that_dies_is_named_and_what_others_have_is_as_before(after: int) -> None:
    outcomes = rank_outcomes(WORLD, dying, after, deadline_s=PATIENCE_S, grace_s=PATIENCE_S)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for rank in (0, 1, 3):
        found = outcomes[rank].value
        assert found is not None, outcomes[rank]
        assert found[:3] == ("rank-died", "rank 2", True)
        assert f"on rank {rank} 0 of 1 parts" in found[3]
        assert found[4]


def without_memory() -> tuple[str, str, bool, str]:
    trainer = Trainer(evenly(WORLD))
    trainer.steps(1)
    placement = [[5, 3], [4, 0], [2], [1]]
    move = ckptd.ExpertMove(trainer.state, layout_of(WORLD), placement, timeout_s=PATIENCE_S)
    if dist.get_rank() == 2:

        def no_memory() -> None:
            raise torch.OutOfMemoryError("no memory left")

        vars(move._groups[0][0].tensors[-1])["open"] = no_memory
    error = caught(move.run)
    return error.kind, error.found or "", error.state_corrupted, error.hint or ""


def test_a_rank_that_has_no_memory_left_ends_the_move_on_all_of_them(four: Played) -> None:
    for rank, found in enumerate(four.of("without memory")):
        assert found[0] == "crashed", found
        assert "no memory left" in found[1]
        assert found[2]
        assert f"on rank {rank} 0 of 1 parts" in found[3]


def broken_off(folder: str) -> list[Any]:
    """Break a move off behind its first part; then save, and move again, as if nothing were."""
    rank = dist.get_rank()
    whole = torch.arange(8.0)[:, None, None].expand(8, ROWS, COLUMNS)
    mine = whole[4 * rank : 4 * rank + 4]
    state = {f"layers.{n}.w": (mine + n).clone() for n in range(6)}
    placement = [[7, 1, 2, 6], [0, 3, 4, 5]]
    with ckptd.Checkpointer(folder, layout=LARGE) as checkpointer:
        checkpointer.save(1, {"model": state})
        checkpointer.wait()
        move = ckptd.ExpertMove(
            {"model": state}, LARGE, placement, budget_bytes=BUDGET, checkpointer=checkpointer
        )
        if rank == 1:

            def no_memory() -> None:
                raise torch.OutOfMemoryError("no memory left")

            vars(move._groups[1][0].tensors[-1])["open"] = no_memory
        broken = caught(move.run)
        save = caught(lambda: checkpointer.save(2, {"model": state}))
        again = caught(
            lambda: ckptd.move_experts({"model": state}, LARGE, placement, budget_bytes=BUDGET)
        )
        anew = {name: torch.zeros_like(t) for name, t in state.items()}
        checkpointer.load({"model": anew})
        exact = all(torch.equal(anew[f"layers.{n}.w"], mine + n) for n in range(6))
        checkpointer.save(3, {"model": anew})  # after a load saves go on, and moves
        checkpointer.wait()
        ckptd.move_experts({"model": anew}, LARGE, placement, budget_bytes=BUDGET)
    return [broken.hint or "", save.kind, again.message, exact]


def test_nothing_is_made_of_experts_whose_move_broke_off(two: Played) -> None:
    """A save by the old layout had the wrong experts, and a second move permuted them twice."""
    for found in two.of("broken off"):
        assert "1 of" in found[0], found
        assert found[1:] == ["crashed", "an earlier move of these experts failed", True], found


SHARDED = """
mesh M = dp:2 ep:2
let e = 8
let l = 2
space moe { L{l}.X{e}.w[f h]
  follow m=exp_avg, s=exp_avg_sq
  scalar step(param)
}
layout train of moe on M { layers.{l}.w = L{l}.X.w[%s] }
"""
EVEN, UNEVEN = [[7, 1, 2, 6], [0, 3, 4, 5]], [[7, 1, 2], [6, 0, 3, 4, 5]]


class Stack(torch.nn.Module):
    """All experts of a layer that a rank has, as a DTensor over `mesh` or, without one, plain."""

    def __init__(self, number: int, coordinate: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(number)
        mine = torch.randn(8, 6, 4, generator=made).chunk(2)[coordinate].clone()
        part = mine if mesh is None else DTensor.from_local(mine, mesh, [Shard(0)])
        self.w = torch.nn.Parameter(part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.w.to_local() if isinstance(self.w, DTensor) else self.w
        return (own * x).square().sum()


def stepped(model: Any, optim: torch.optim.Optimizer) -> torch.Tensor:
    losses = [layer(torch.arange(1.0, 5.0)) for layer in model.layers]
    loss = torch.stack(losses).sum()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def shard_of(dim: int, _: torch.Tensor) -> Shard:
    return Shard(dim)


def sharded_whole(p: Any, optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t.full_tensor() for t in (p.detach(), optim.state[p]["exp_avg"])]


def sharded_by_fsdp() -> None:
    """Move stacks as torchtitan has them: over ep, and by FSDP2 over dp, each rank as many."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    order = [n for part in EVEN for n in sorted(part)]
    for dim, rule in ((0, "e@ep@dp:ceil f h"), (1, "e@ep f@dp h")):
        model: Any = torch.nn.Module()
        coordinate = mesh["ep"].get_local_rank()
        model.layers = torch.nn.ModuleList(Stack(n, coordinate, mesh["ep"]) for n in range(2))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=partial(shard_of, dim))
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        state, layout = {"model": model, "optim": optim}, SHARDED % rule
        stepped(model, optim)

        before = [sharded_whole(p, optim) for p in model.parameters()]
        # A DTensor has equal parts.
        uneven = caught(partial(ckptd.ExpertMove, state, layout, UNEVEN))
        assert (uneven.message, uneven.found) == (
            "a tensor cannot change its number of experts in place",
            "a DTensor",
        )
        ckptd.move_experts(state, layout, EVEN)
        for p, old in zip(model.parameters(), before, strict=True):
            assert isinstance(p, DTensor)
            for found, was in zip(sharded_whole(p, optim), old, strict=True):
                assert torch.equal(found, was[order])
        stepped(model, optim)  # FSDP has not lost its memory
        for p, old in zip(model.parameters(), before, strict=True):
            assert not torch.equal(sharded_whole(p, optim)[0], old[0][order])


def watched() -> None:
    """Move stacks whose gradients hooks see, and that graphs and DDP hold."""
    rank = dist.get_rank()
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Stack(n, rank % 2, None) for n in range(2))
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    state, layout = {"model": model, "optim": optim}, SHARDED % "e@ep f h"
    first = next(model.parameters())
    seen: list[tuple[str, torch.Size]] = []
    first.register_hook(lambda grad: seen.append(("tensor", grad.shape)))
    first.register_post_accumulate_grad_hook(
        lambda p: seen.append(("after", p.grad.shape if p.grad is not None else p.shape))
    )
    loss = stepped(model, optim)
    held = caught(lambda: ckptd.ExpertMove(state, layout, UNEVEN))
    assert "a parameter cannot change its number of experts while" in held.message
    assert "del loss" in f"{held.hint}"
    del loss
    whole = torch.cat([p.detach() for p in exchanged(first)])
    layout = ckptd.move_experts(state, layout, UNEVEN).layout
    assert torch.equal(first.detach(), whole[sorted(UNEVEN[rank % 2])])
    seen.clear()
    stepped(model, optim)
    assert seen == [("tensor", first.shape), ("after", first.shape)]

    # What DDP holds moves where it keeps its shape, and DDP reduces its gradients as before.
    group = [dist.new_group([place, place + 2]) for place in (0, 1)][rank % 2]
    wrapped = [DistributedDataParallel(layer, process_group=group) for layer in model.layers]
    assert (
        "a parameter cannot change its number of experts while"
        in caught(lambda: ckptd.ExpertMove(state, layout, EVEN)).message
    )
    ckptd.move_experts(state, layout, [[0, 1, 3], [2, 4, 5, 6, 7]])
    for layer in wrapped:
        layer(torch.full((4,), 1.0 + rank // 2)).backward()
    mean = (1.0 + 4.0) / 2 * 2 * first.detach()
    assert first.grad is not None
    torch.testing.assert_close(first.grad, mean)


def exchanged(p: torch.Tensor) -> list[torch.Tensor]:
    """Return what the two coordinates of ep have of a stack."""
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, p.detach())
    return found[:2]


@pytest.mark.parametrize("wrapper", ["sharded by fsdp", "watched"])
def test_experts_that_wrappers_have(four: Played, wrapper: str) -> None:
    """A DTensor that got another number of experts was no DTensor any more; a held node failed."""
    four.of(wrapper)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, writing_thread: None) -> Played:
    """What a world of four ranks did; the case that breaks a move is the last."""
    folder = tmp_path_factory.mktemp("four")
    return Played(
        WORLD,
        folder / "played",
        {
            "moves, lists False": (random_moves, (range(4), False)),
            "moves, lists True": (random_moves, (range(4), True)),
            "saved and loaded": (saved_and_loaded, (str(folder / "root"),)),
            "refused": (refused_moves, ()),
            "sharded by fsdp": (sharded_by_fsdp, ()),
            "watched": (watched, ()),
            "without memory": (without_memory, ()),
        },
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, writing_thread: None) -> Played:
    """The same of two ranks; the first case measures memory."""
    folder = tmp_path_factory.mktemp("two")
    return Played(
        2,
        folder / "played",
        {
            "large": (large, ()),
            "example": (example_run, ()),
            "stepped apart": (stepped_apart, ()),
            "broken off": (broken_off, (str(folder / "root"),)),
        },
    )
