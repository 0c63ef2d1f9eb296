"""What lazy copies of CUDA tensors promise, as functions that need a device and no pytest.

`tests/checkpoint/torch/test_cuda_copies.py` and the check `promises` of ``bench/gpu_session.py``
run them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import ckptd
from ckptd.checkpoint.torch import ondevice
from ckptd.checkpoint.torch.ondevice import Pins
from ckptd.errors import SaveError, UsageError

__all__ = ["CHECKS", "DEVICE", "make_small", "settle"]

DEVICE = "cuda"
LONG = 3_000_000_000
"""Cycles of a kernel that outlasts everything that a host does meanwhile: more than a second."""
BUSY = LONG
"""The same for one that the host waits for in the end."""
WIDTH = 1024
LARGE = (5000, 4001)
"""A matrix of several chunks."""
Values = dict[str, torch.Tensor]


def make_small() -> None:
    """Shrink what is checked, for devices where the order of things counts and no rate.

    A kernel that holds up copies ends there when the host waits for it, so it may be as long as a
    busy machine needs.
    """
    global WIDTH, LARGE, BUSY
    WIDTH, LARGE, BUSY = 64, (370, 401), 50 * LONG
    ondevice.CHUNK_BYTES = 1 << 18


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH)).to(DEVICE)


def backward(model: nn.Module) -> None:
    model(torch.randn(8, WIDTH, device=DEVICE)).square().mean().backward()


def values(state: dict[str, Any]) -> Values:
    """Copy a state on the current stream, without waiting."""
    out = {n: t.detach().clone() for n, t in state["model"].state_dict().items()}
    for i, known in enumerate(state["optim"].state.values()):
        out |= {f"{i}.{k}": v.clone() for k, v in known.items() if isinstance(v, torch.Tensor)}
    return out


def trained(make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW) -> dict[str, Any]:
    model = network()
    state = {"model": model, "optim": make(model.parameters())}
    backward(model)
    state["optim"].step()
    return state


def assert_loads(root: str, state: dict[str, Any], wanted: Mapping[int, Values]) -> None:
    with ckptd.Checkpointer(root) as ck:
        for step, values_then in wanted.items():
            assert ck.load(state, step) == step
            found = values(state)
            different = [n for n, t in values_then.items() if not torch.equal(found[n], t)]
            assert found.keys() == values_then.keys()
            assert not different, (step, different)


def settle(ck: ckptd.Checkpointer) -> None:
    """Return when nothing is being copied, and no slot page-locked."""
    ck._saver._copier.submit(int).result(60.0)
    ck._saver._device_copies._locker.submit(int).result(60.0)


def warm(root: str, state: Any, **options: Any) -> ckptd.Checkpointer:
    """Make a checkpointer whose memory is there already, by a save of step 1."""
    ck = ckptd.Checkpointer(root, storage=ckptd.Storage(dedup=False), **options)
    ck.save(1, state)
    ck.wait()
    settle(ck)
    return ck


@contextmanager
def slow_copies(ck: ckptd.Checkpointer) -> Any:
    """Keep the copying stream busy first: what is not ordered behind the copies comes before."""
    (stream,) = ck._saver._device_copies._streams.values()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY)
    yield stream
    torch.cuda.synchronize()


# -- order ---------------------------------------------------------------------------------------


def save_does_not_wait_for_the_device(root: str) -> None:
    """What is stored is what the queue makes of the state, and the host does not wait for it."""
    state = trained()
    with warm(root, state) as ck:
        backward(state["model"])
        torch.cuda._sleep(LONG)
        state["optim"].step()
        wanted = values(state)
        ck.save(2, state)
        assert not torch.cuda.current_stream().query(), "save waited for the device"
    assert_loads(root, state, {2: wanted})


def a_step_waits_on_the_device_alone(root: str) -> None:
    state = trained()
    with warm(root, state) as ck:
        wanted = values(state)
        backward(state["model"])
        with slow_copies(ck) as stream:
            handle = ck.save(2, state)
            state["optim"].step()
            assert not stream.query(), "the host waited for the copies"
        handle.durable(60.0)
        assert not torch.equal(state["model"][0].weight, wanted["0.weight"])
    # BatchNorm's buffers changed in the forward before the save.
    wanted |= {n: t for n, t in values(state).items() if n.startswith("4.") and "running" in n}
    wanted["4.num_batches_tracked"] = state["model"][4].num_batches_tracked.clone()
    assert_loads(root, state, {2: wanted})


def before_mutation_orders_the_current_stream(root: str) -> None:
    for other in (False, True):
        state = trained()
        with warm(f"{root}-{other}", state) as ck:
            wanted = values(state)
            torch.cuda.synchronize()
            side = torch.cuda.Stream() if other else torch.cuda.current_stream()
            with slow_copies(ck) as stream:
                handle = ck.save(2, state)
                with torch.cuda.stream(side), torch.no_grad():
                    ck.before_mutation()
                    for p in state["model"].parameters():
                        p.add_(1.0)
                assert not stream.query(), "the host waited for the copies"
            handle.durable(60.0)
        assert_loads(f"{root}-{other}", state, {2: wanted})


def saves_at_every_step_hold_their_step(root: str) -> None:
    for kind, make in OPTIMIZERS.items():
        state = trained(make)
        where = f"{root}-{kind.replace(' ', '-')}"
        seen = {}
        with ckptd.Checkpointer(where, copy=ckptd.CopyOptions(slots=2)) as ck:
            for step in range(1, 5):
                backward(state["model"])
                state["optim"].step()
                seen[step] = values(state)
                ck.save(step, state)
        assert_loads(where, state, {step: seen[step] for step in (4, 3, 2, 1)})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "adagrad": torch.optim.Adagrad,
}


# -- changes that did not ask --------------------------------------------------------------------


def refused(handle: ckptd.SaveHandle | None, *names: str) -> None:
    assert handle is not None
    found = None
    try:
        handle.durable(60.0)
    except SaveError as error:
        found = error
    assert found is not None, "a mixture of two steps was stored"
    assert found.kind == "mutated", found
    assert all(name in (found.where or "") for name in names), found.where


def a_change_without_asking_is_named(root: str) -> None:
    state = trained()
    with warm(root, state) as ck:
        with slow_copies(ck):
            handle = ck.save(2, state)
            with torch.no_grad():
                state["model"][2].weight.clamp_(-0.01, 0.01)
        refused(handle, "model.2.weight")
        ck.save(3, state)


def a_change_behind_the_first_bytes_is_named(root: str) -> None:
    """What is looked at on the device would not show it; torch counts it."""
    state = trained()
    with warm(root, state) as ck:
        with slow_copies(ck):
            handle = ck.save(2, state)
            with torch.no_grad():
                state["model"][1].weight[WIDTH // 2].add_(1.0)
        refused(handle, "model.1.weight")


def a_change_without_asking_is_named_though_a_step_asks(root: str) -> None:
    state = trained()
    backward(state["model"])
    with warm(root, state) as ck:
        with slow_copies(ck):
            handle = ck.save(2, state)
            with torch.no_grad():
                state["model"][2].weight.clamp_(-0.01, 0.01)
            state["optim"].step()
        refused(handle, "model.2.weight")


def debug_finds_what_torch_does_not_count(root: str) -> None:
    state = trained()
    with warm(root, state, copy=ckptd.CopyOptions(debug=True)) as ck:
        with slow_copies(ck):
            handle = ck.save(2, state)
            state["model"][1].weight.data[WIDTH // 2].add_(1.0)
            torch.cuda.current_stream().synchronize()  # what comes behind the copies does no harm
        refused(handle, "model.1.weight")


def averages_may_change_at_once(root: str) -> None:
    for memory in ("enough", "none"):
        live = {"ema": torch.randn(3 * WIDTH, WIDTH, device=DEVICE)}
        plain = ondevice.CLONE_ALWAYS, ondevice._free_bytes
        try:
            if memory == "none":
                ondevice.CLONE_ALWAYS, ondevice._free_bytes = 0, lambda device: 0
            with warm(f"{root}-{memory}", live) as ck:
                wanted = live["ema"].clone()
                ck.save(2, live)
                live["ema"].zero_()
                ck.wait()
                ck.load(live, 2)
        finally:
            ondevice.CLONE_ALWAYS, ondevice._free_bytes = plain
        assert torch.equal(live["ema"], wanted)


# -- CUDA graphs ---------------------------------------------------------------------------------


def captured(live: dict[str, torch.Tensor]) -> torch.cuda.CUDAGraph:
    """Return a graph that changes every tensor."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for tensor in live.values():
            tensor.add_(0.0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensor in live.values():
            tensor.add_(1.0)
    return graph


def a_replay_that_asks_waits_on_the_device(root: str) -> None:
    live = {f"w{i}": torch.randn(WIDTH, WIDTH, device=DEVICE) for i in range(8)}
    graph = captured(live)
    with warm(root, live, copy=ckptd.CopyOptions(lazy="all")) as ck:
        wanted = {n: t.clone() for n, t in live.items()}
        with slow_copies(ck) as stream:
            handle = ck.save(2, live)
            ck.before_mutation()
            graph.replay()
            assert not stream.query(), "the host waited for the copies"
        assert handle is not None
        handle.durable(60.0)
        ck.load(live, 2)
    assert not [n for n in wanted if not torch.equal(live[n], wanted[n])]


def a_replay_that_does_not_ask_is_found(root: str) -> None:
    live = {f"w{i}": torch.randn(WIDTH, WIDTH, device=DEVICE) for i in range(8)}
    graph = captured(live)
    with warm(root, live, copy=ckptd.CopyOptions(lazy="all")) as ck:
        with slow_copies(ck):
            handle = ck.save(2, live)
            graph.replay()
            torch.cuda.current_stream().synchronize()
        refused(handle)


def a_save_inside_a_capture_is_refused(root: str) -> None:
    live = {"w": torch.zeros(WIDTH, device=DEVICE)}
    with warm(root, live) as ck:
        said = ""
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            live["w"].add_(1.0)
            try:
                ck.save(2, live)
            except UsageError as error:
                said = error.message
        assert "cannot be part of a graph" in said, said
        ck.save(3, live)


# -- tensors of all kinds ------------------------------------------------------------------------


def all_kinds() -> Values:
    """Sizes around the chunk, every way to lie in memory, the dtypes of training."""
    chunk = ondevice.CHUNK_BYTES
    sizes = [0, 1, 3, 4095, chunk // 4, chunk // 4 + 1, chunk // 2 + 7]
    out: Values = {f"flat{n}": torch.arange(n, device=DEVICE).float() for n in sizes}
    wide = torch.randn(3, chunk // 4 + 5, device=DEVICE)
    out |= {"scalar": torch.tensor(3.0, device=DEVICE), "wide": wide, "wide.t": wide.clone().t()}
    square = torch.randn(*LARGE, device=DEVICE)
    out |= {"transposed": square.t(), "every other": square.clone()[::2, 1::3]}
    image = torch.randn(8, 16, 9, 9, device=DEVICE)
    out["channels last"] = image.to(memory_format=torch.channels_last)
    complex_ = torch.randn(33, 17, dtype=torch.complex64, device=DEVICE)
    out |= {"complex": complex_, "conj": complex_.clone().conj()}
    out["neg"] = complex_.clone().conj().imag
    for name in ("bfloat16", "float16", "float64", "int8", "int64", "bool", "float8_e4m3fn"):
        numbers = torch.arange(-100, 100, device=DEVICE).float()
        out[name] = numbers.to(getattr(torch, name))
    return out


def plain(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8)


def tensors_of_all_kinds(root: str) -> None:
    for lazy in ("auto", "all", "off"):
        live = all_kinds()
        with ckptd.Checkpointer(f"{root}-{lazy}", copy=ckptd.CopyOptions(lazy=lazy)) as ck:
            wanted = {n: plain(t).clone() for n, t in live.items()}
            ck.save(1, live)
            ck.before_mutation()
            for tensor in live.values():
                tensor.zero_()
            ck.wait()
            ck.load(live, 1)
        different = [n for n, t in live.items() if not torch.equal(plain(t), wanted[n])]
        assert not different, (lazy, different)


def off_copies_before_it_returns(root: str) -> None:
    state = trained()
    with warm(root, state, copy=ckptd.CopyOptions(lazy="off")) as ck:
        wanted = values(state)
        handle = ck.save(2, state)
        assert handle is not None
        handle.staged(0.0)
        with torch.no_grad():
            state["model"][0].weight.zero_()
    assert_loads(root, state, {2: wanted})


# -- memory --------------------------------------------------------------------------------------


def page_locked_memory_is_given_back(root: str) -> None:
    state = trained()
    ck = warm(root, state)
    pins = ck._saver._device_copies.pins
    assert pins.locked > 0
    larger = {"more": torch.zeros(8 * WIDTH, WIDTH, device=DEVICE), **state}
    before = pins.locked
    ck.save(2, larger)
    ck.wait()
    settle(ck)
    assert pins.locked > before
    ck.close()
    assert pins.locked == 0


def a_slot_that_cannot_be_locked_is_filled_through_buffers(root: str) -> None:
    state = trained()
    with ckptd.Checkpointer(root) as ck:
        ck._saver._device_copies.pins = Pins(budget=1)
        wanted = values(state)
        backward(state["model"])
        ck.save(1, state)
        state["optim"].step()
        ck.wait()
        assert ck._saver._device_copies.pins.locked == 0
    wanted |= {n: t for n, t in values(state).items() if n.startswith("4.") and "running" in n}
    wanted["4.num_batches_tracked"] = state["model"][4].num_batches_tracked.clone()
    assert_loads(root, state, {1: wanted})
    torch.zeros(1, device=DEVICE)


def clones_are_freed(root: str) -> None:
    live = {"ema": torch.randn(3 * WIDTH, WIDTH, device=DEVICE)}
    with warm(root, live) as ck:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for step in range(2, 6):
            ck.save(step, live)
            ck.wait()
        assert torch.cuda.memory_allocated() <= before + (1 << 20)


CHECKS: dict[str, Callable[[str], None]] = {
    check.__name__: check
    for check in (
        save_does_not_wait_for_the_device,
        a_step_waits_on_the_device_alone,
        before_mutation_orders_the_current_stream,
        saves_at_every_step_hold_their_step,
        a_change_without_asking_is_named,
        a_change_behind_the_first_bytes_is_named,
        a_change_without_asking_is_named_though_a_step_asks,
        debug_finds_what_torch_does_not_count,
        averages_may_change_at_once,
        a_replay_that_asks_waits_on_the_device,
        a_replay_that_does_not_ask_is_found,
        a_save_inside_a_capture_is_refused,
        tensors_of_all_kinds,
        off_copies_before_it_returns,
        page_locked_memory_is_given_back,
        a_slot_that_cannot_be_locked_is_filled_through_buffers,
        clones_are_freed,
    )
}
