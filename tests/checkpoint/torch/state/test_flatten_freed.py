"""Between saves nothing that was saved is kept alive, and what comes in its place is not confused.

Objects that are made after others have died get their ids and their addresses.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

import ckptd
from ckptd.base.torch.tensors import local_tensor
from ckptd.checkpoint.torch.state.flatten import Flattener, flatten
from ckptd.errors import SaveError
from ckptd.testing.ranks import run_ranks
from tests.checkpoint.torch.cuda_checks import settle
from tests.processes import PATIENCE_S

State = dict[str, Any]
WIDTH = 128


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> None:
    """Collect what other tests have left once, and not with each of these."""
    gc.collect()
    gc.freeze()


def make() -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    optim = torch.optim.Adam(model.parameters())
    model(torch.randn(5, WIDTH)).sum().backward()
    optim.step()
    return {"model": model, "optim": optim, "plain": {"w": torch.randn(WIDTH, WIDTH)}}


def check(flattener: Flattener, state: State) -> None:
    found, wanted = flattener.flatten(state), flatten(state)
    assert found.aliases == wanted.aliases
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, leaf in wanted.tensors.items():
        recalled = found.tensors[name]
        assert torch.equal(recalled.tensor, leaf.tensor), name
        assert recalled.tensor.data_ptr() == leaf.tensor.data_ptr(), name
        assert recalled.origin is leaf.origin, name
        assert torch.equal(recalled.local, leaf.local), name
        assert recalled.local.data_ptr() == leaf.local.data_ptr(), name
        assert recalled.local._version == local_tensor(leaf.origin)._version, name
        assert (recalled.kind, recalled.own) == (leaf.kind, leaf.own), name
    assert list(map(id, found.optimizers)) == list(map(id, wanted.optimizers))


def new_parameter(s: State) -> Any:
    weight = s["model"][0].weight
    gone = id(weight), weight.data_ptr()
    grad = weight.grad
    del s["model"][0].weight, s["model"][2].weight, weight, grad
    s["optim"].state.clear()
    s["optim"].param_groups[0]["params"].clear()
    s["model"][0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    s["model"][2].weight = s["model"][0].weight
    s["optim"].param_groups[0]["params"] += s["model"].parameters()
    return gone == (id(s["model"][0].weight), s["model"][0].weight.data_ptr())


def new_tensor(s: State) -> Any:
    gone = id(s["plain"]["w"]), s["plain"]["w"].data_ptr()
    del s["plain"]["w"]
    s["plain"]["w"] = torch.randn(WIDTH, WIDTH)
    return gone == (id(s["plain"]["w"]), s["plain"]["w"].data_ptr())


def new_data(s: State) -> Any:
    weight = s["model"][0].weight
    at = weight.data_ptr()
    weight.data = torch.empty(0)
    weight.data = torch.randn(WIDTH, WIDTH)
    return at == weight.data_ptr()


def other_storage(s: State) -> Any:
    weight = s["model"][0].weight
    at = weight.data_ptr()
    with torch.no_grad():
        weight.set_(torch.empty(0))
        weight.set_(torch.randn(WIDTH, WIDTH))
    return at == weight.data_ptr()


def storage_made_again(s: State) -> Any:
    storage = s["plain"]["w"].untyped_storage()
    at, size = storage.data_ptr(), storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    s["plain"]["w"].fill_(5.0)
    return at == storage.data_ptr()


def resized(s: State) -> Any:
    s["plain"]["w"].resize_(WIDTH + 1, WIDTH).fill_(3.0)
    s["plain"]["w"].resize_(WIDTH, WIDTH)


def moved(s: State) -> Any:
    s["model"].to(torch.float64)
    s["model"].to(torch.float32)


def swapped(s: State) -> Any:
    torch.utils.swap_tensors(s["model"][0].weight, nn.Parameter(torch.randn(WIDTH, WIDTH)))


def called_with_others(s: State) -> Any:
    others = {n: torch.randn_like(p) for n, p in s["model"].named_parameters()}
    torch.func.functional_call(s["model"], others, torch.randn(5, WIDTH))


def new_optimizer(s: State) -> Any:
    gone = id(s.pop("optim"))
    optim = s["optim"] = torch.optim.Adam(s["model"].parameters())
    s["model"](torch.randn(5, WIDTH)).sum().backward()
    optim.step()
    return gone == id(optim)


def new_modules(s: State) -> Any:
    gone = id(s["model"][0])
    bias = s["model"][0].bias
    s["model"][0] = nn.Identity()
    s["model"][0] = nn.Linear(WIDTH, WIDTH)
    s["model"][0].weight, s["model"][0].bias = s["model"][2].weight, bias
    return gone == id(s["model"][0])


def swapped_modules(s: State) -> Any:
    model = s["model"]
    model[0], model[2] = model[2], model[0]


def other_shares(s: State) -> Any:
    """One of two names of one memory gets memory that looks the same."""
    s["plain"]["v"] = s["plain"]["w"].clone() if "v" in s["plain"] else s["plain"]["w"]


def all_new(s: State) -> Any:
    s.clear()
    s.update(make())


CHANGES: dict[str, Callable[[State], Any]] = {
    f.__name__: f
    for f in (
        new_parameter,
        new_tensor,
        new_data,
        other_storage,
        storage_made_again,
        resized,
        moved,
        swapped,
        called_with_others,
        new_optimizer,
        new_modules,
        swapped_modules,
        other_shares,
        all_new,
    )
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_comes_after_is_not_taken_for_what_was(change: str) -> None:
    state, flattener = make(), Flattener()
    flattener.flatten(state)
    for _ in range(6):
        CHANGES[change](state)
        gc.collect()
        check(flattener, state)
        check(flattener, state)


def test_a_tensor_with_the_id_and_the_address_of_one_that_died_is_another() -> None:
    memory = bytearray(4 * WIDTH)
    state: State = {"w": torch.frombuffer(memory, dtype=torch.float32)}
    flattener = Flattener()
    known = set()
    for _ in range(3):
        check(flattener, state)
        known.add(flattener.flatten(state).known)
        died = id(state.pop("w"))
        others = []  # they take the other free places
        while id(made := torch.frombuffer(memory, dtype=torch.float32)) != died:
            others.append(made)
            assert len(others) < 100_000, "this is no test: the tensors can be told apart"
        state["w"] = made
    check(flattener, state)
    assert len(known | {flattener.flatten(state).known}) == 4


def test_nothing_is_kept_by_a_flattener() -> None:
    state, flattener = make(), Flattener()
    assert flattener.flatten(state).known is not None
    assert flattener.flatten(state).known is not None
    tensors = [*state["model"].parameters(), *state["model"].buffers(), state["plain"]["w"]]
    tensors += [t for held in state["optim"].state.values() for t in held.values()]
    memory = [StorageWeakRef(t.untyped_storage()) for t in tensors]
    owners = [weakref.ref(state["model"]), weakref.ref(state["optim"])]
    del tensors
    state.clear()
    gc.collect()
    assert [m.expired() for m in memory] == [True] * len(memory)
    assert [o() for o in owners] == [None, None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def sharded() -> State:
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = Block()
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    optim = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 9)).sum().backward()
    optim.step()
    rest = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    return {"model": model, "optim": optim, "rest": {"d": rest}}


def fool_with_meshes() -> None:
    state, flattener = sharded(), Flattener()

    def known() -> object:
        check(flattener, state)
        return flattener.flatten(state).known

    first = known()
    assert first is not None
    assert known() is first
    # Gathered and let go again: other parameters are registered meanwhile.
    with torch.no_grad():
        state["model"](torch.randn(2, 9))
    assert known() is first
    wrapper = state["rest"]["d"]
    wrapper._local_tensor = wrapper._local_tensor.clone()
    assert known() is not first
    second = known()
    wrapper._local_tensor.set_(torch.full_like(wrapper._local_tensor, 2.0))
    assert known() is not second
    third = known()
    mesh = wrapper.device_mesh
    state["rest"]["d"] = wrapper = DTensor.from_local(wrapper._local_tensor, mesh, [Shard(1)])
    assert known() is not third
    pinned = flattener.flatten(state).tensors["rest.d"].local
    wanted = pinned.clone()
    wrapper._local_tensor = torch.zeros_like(wanted)
    assert torch.equal(pinned, wanted), "a leaf has the memory that was there when it was made"
    locals = [local_tensor(p) for p in state["model"].parameters()]
    memory = [StorageWeakRef(x.untyped_storage()) for x in [*locals, pinned]]
    del locals, pinned, wrapper
    flattener.flatten(state)
    state.clear()
    gc.collect()
    assert [m.expired() for m in memory] == [True] * len(memory)


@pytest.mark.dist
def test_shards_are_not_taken_for_those_that_were() -> None:
    run_ranks(2, fool_with_meshes)


@pytest.mark.parametrize("lazy", ["auto", "all", "off"])
def test_a_checkpointer_keeps_nothing_between_saves(tmp_path: Any, lazy: Any) -> None:
    with ckptd.Checkpointer(str(tmp_path), copy=ckptd.CopyOptions(lazy=lazy)) as ck:
        state = make()
        for step in (1, 2):
            ck.save(step, state)
            ck.wait()
        weight = state["model"][0].weight
        momentum = state["optim"].state[weight]["exp_avg"]
        replaced = StorageWeakRef(weight.untyped_storage())
        settle(ck)
        weight.data = torch.zeros(WIDTH, WIDTH)
        assert replaced.expired(), "replaced memory of a parameter that lives on"
        memory = [StorageWeakRef(t.untyped_storage()) for t in (momentum, state["plain"]["w"])]
        del weight, momentum
        state.clear()
        gc.collect()
        assert [m.expired() for m in memory] == [True, True]


def test_what_is_deleted_while_it_is_saved_is_saved(tmp_path: Any) -> None:
    def big() -> State:
        torch.manual_seed(3)
        return {f"w{i}": torch.randn(512, 512) for i in range(16)}

    with ckptd.Checkpointer(str(tmp_path), copy=ckptd.CopyOptions(lazy="all")) as ck:
        state = big()
        ck.save(1, state)
        ck.wait()
        for step in (2, 3):
            memory = StorageWeakRef(state["w0"].untyped_storage())
            ck.save(step, state)
            state.clear()
            junk = [torch.full((512, 512), float(i)) for i in range(16)]
            ck.wait()
            settle(ck)
            assert memory.expired()
            del junk
            state.update(big())
        for step in (3, 2):
            into = {name: torch.zeros(512, 512) for name in state}
            ck.load(into, step=step)
            assert all(torch.equal(into[n], x) for n, x in big().items())


def test_the_handle_of_a_failed_save_keeps_nothing(tmp_path: Any) -> None:
    def fail() -> tuple[ckptd.SaveHandle, list[Callable[[], object]]]:
        state = make()
        with ckptd.Checkpointer(
            str(tmp_path), copy=ckptd.CopyOptions(lazy="all"), when_failed="warn"
        ) as ck:
            go = threading.Event()
            ck._saver._copier.submit(go.wait, 60.0)
            handle = ck.save(1, state)
            state["plain"]["w"].add_(1.0)
            go.set()
            with pytest.raises(SaveError):
                handle.durable(PATIENCE_S)
            settle(ck)
        memory = [t.untyped_storage() for t in (state["plain"]["w"], *state["model"].parameters())]
        return handle, [weakref.ref(ck._saver), *(_alive(m) for m in memory)]

    handle, kept = fail()
    gc.collect()
    assert [k() for k in kept] == [None] * len(kept)
    assert handle.error is not None
    assert handle.error.kind == "mutated"


def _alive(memory: torch.UntypedStorage) -> Callable[[], object]:
    weak = StorageWeakRef(memory)
    return lambda: None if weak.expired() else weak
