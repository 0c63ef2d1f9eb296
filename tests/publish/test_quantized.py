"""Weights that a worker holds in blocks with a scale each, bit for bit as the formula has them."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptd
from ckptd.base.grids.block import Block
from ckptd.base.torch.tensors import as_bytes
from ckptd.checkpoint.save.arena import Slot
from ckptd.errors import CkptdError, MismatchError, UsageError
from ckptd.lay.copies import Composition
from ckptd.lay.local import local_tensors
from ckptd.publish import pull
from ckptd.publish.blocks import gather_blocks, read_bytes
from ckptd.publish.messages import BlockRead, PublishedAbout, PublishedTensor, TileSteps
from ckptd.publish.quantized import ScaleMemory, quantized_tensors
from ckptd.publish.tiles import along_axes
from ckptd.types import dtype_of
from tests.processes import PATIENCE_S
from tests.publish.test_pull import ArrayServer
from tests.reshard.live.test_move import pair
from tests.reshard.live.world import Values, memories

pytestmark = pytest.mark.usefixtures("writing_thread")

FP8, INT8, POWERS = torch.float8_e4m3fn, torch.int8, torch.float8_e8m0fnu
Sizes = tuple[int, ...]


def reference(
    values: torch.Tensor, sizes: Sizes, dtype: torch.dtype = FP8, scale: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize as DeepSeek-V3 does, block by block: ``s = amax / 448``, ``q = x / s``.

    With e8m0 scales as DeepGEMM does it: ``s = 2 ** ceil(log2(amax / 448))``.
    """
    limit = 127.0 if dtype == INT8 else torch.finfo(dtype).max
    out = torch.empty(values.shape, dtype=dtype)
    grid = [-(-n // b) for n, b in zip(values.shape, sizes, strict=True)]
    scales = torch.ones(grid)
    for at in itertools.product(*map(range, grid)):
        where = tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, sizes, strict=True))
        x = values[where].float()
        amax = x.abs().max()
        s = amax / limit if amax else torch.tensor(1.0)
        if scale == POWERS:
            s = torch.exp2(torch.ceil(torch.log2(s)))
        y = torch.clamp(x / s, -limit, limit)
        out[where] = (y.round() if dtype == INT8 else y).to(dtype)
        scales[at] = s
    return out, scales.to(scale)


# --- a worker's plan, with servers of arrays ------------------------------------------------------

Q = "q(float8_e4m3fn, [{}], scale={{name}}_scale_inv)"
CASES: dict[str, tuple[str, str, Sizes, torch.dtype, torch.dtype]] = {
    # Blocks lie on two ranks of the trainer, and are cut short at the end of the worker's tensor.
    "rows": ("t:3;a = a[n@t:ceil m]", "t:2;a = a[n@t m]", (16, 16), FP8, torch.float32),
    "columns": ("t:3;a = a[n@t:ceil m]", "t:2;a = a[n m@t:ceil]", (16, 16), FP8, torch.float32),
    "turned": ("t:3;a = a[n@t:ceil m]", "t:2;a = a[m@t:ceil n]", (8, 16), FP8, torch.float32),
    "one scale": ("t:2;a = a[n@t m]", "t:3;a = a[n@t:ceil m]", (999, 999), FP8, torch.float32),
    "a scale a row": ("t:2;a = a[n m@t]", "t:2;a = a[n@t m]", (1, 999), FP8, torch.float32),
    "int8": ("t:2;a = a[n@t m]", "t:2;a = a[n m@t]", (1, 999), INT8, torch.float32),
    "mxfp8": ("t:3;a = a[n@t:ceil m]", "t:2;a = a[n m@t]", (1, 8), FP8, POWERS),
    "interleaved": ("t:2;a = a[(m@t n)]", "t:2;a = a[n@t m]", (16, 16), FP8, torch.float32),
    "padded": ("t:2;a = a[n@t m]", "t:2;a = a[pad(n, 64)@t m]", (16, 16), FP8, torch.float32),
    "stacked": (
        "t:3;x.{e}.b = X{e}.b[n@t:bal m]",
        "t:2;w = X.b[e@t n m]",
        (1, 16, 16),
        FP8,
        torch.float32,
    ),
    "grouped": ("t:2;w = X.b[(e@t n) m]", "t:2;w = X.b[e n m@t]", (2, 7, 5), FP8, torch.float32),
    "flat": (
        "t:3;a = a[n m]; flat each @t:ceil of *",
        "t:2;a = a[m@t:ceil n]",
        (16, 8),
        FP8,
        torch.float32,
    ),
}


def quantized_pair(case: str) -> Composition:
    source, target, sizes, dtype, _ = CASES[case]
    kind = str(dtype).removeprefix("torch.")
    said = Q.format(" ".join(map(str, sizes))).replace("float8_e4m3fn", kind)
    return pair(source, f"{target} {said}", n=40, m=36, e=4)


def logical(numbers: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a value for each number, with magnitudes that differ from block to block."""
    table = torch.randn(20000, generator=torch.Generator().manual_seed(3))
    table *= torch.exp2(torch.arange(20000) // 97 % 23 - 14.0)
    table[0], table[700:1100] = 0.0, 0.0  # a fill; blocks of zeros
    return table.to(dtype)[torch.from_numpy(numbers.astype(np.int64))]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_worker_holds_what_the_formula_says(
    monkeypatch: pytest.MonkeyPatch, case: str, local: bool
) -> None:
    composition = quantized_pair(case)
    source, target = composition.source, composition.target
    _, _, sizes, dtype, scale_type = CASES[case]
    numbers, kind = Values(), "bfloat16" if case in ("rows", "stacked", "mxfp8") else "float32"

    def held(form: Any, rank: int) -> dict[str, torch.Tensor]:
        shapes = {t.name: t.shape for t in local_tensors(form, rank) if not t.state}
        found = numbers.arrays(form, rank, dtype_of("float64"))
        return {n: logical(found[n].reshape(s), getattr(torch, kind)) for n, s in shapes.items()}

    servers = {
        r: ArrayServer({n: raw(t) for n, t in held(source, r).items()}, local=local, kind=kind)
        for r in range(source.mesh.world)
    }
    monkeypatch.setattr(pull, "published_layout", lambda about: source.bound)
    about = PublishedAbout("epoch", source.mesh.world, "", {})
    try:
        for rank in range(target.mesh.world):
            wanted = {
                n: reference(t, sizes, dtype, scale_type) for n, t in held(target, rank).items()
            }
            into = {n: torch.zeros_like(q) for n, (q, _) in wanted.items()}
            own = {
                n: torch.full_like(s.float(), 3.0).to(scale_type) for n, (_, s) in wanted.items()
            }
            names = {
                t.name: n for t, _, n in quantized_tensors(target, local_tensors(target, rank))
            }
            assert names == {n: f"{n}_scale_inv" for n in wanted}
            scales = {
                n: ScaleMemory(names[n], memories({n: raw(s)}, str(scale_type)[6:])[n], s.shape)
                for n, s in own.items()
            }
            targets = memories({n: raw(t) for n, t in into.items()}, str(dtype)[6:])
            plan = pull.PullPlan(about, target.bound, rank, targets, scales)
            for _ in range(2):  # what is left of a version must not be in the scales of the next
                staged = plan.stage(1, servers, None)
                staged.apply()
            for name, (values, found) in wanted.items():
                assert torch.equal(own[name].float(), found.float()), (rank, name)
                assert torch.equal(into[name].view(torch.uint8), values.view(torch.uint8)), name
            if not local:
                assert staged.report.bytes_received == staged.report.bytes_needed
                assert staged.report.bytes_needed < 2 * sum(t.nbytes for t in into.values())
    finally:
        for server in servers.values():
            server.slot.close()


def raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return as_bytes(tensor)


def test_copies_are_cut_along_the_axes_of_their_target() -> None:
    generator = np.random.default_rng(5)
    for _ in range(300):
        shape = tuple(int(n) for n in generator.integers(1, 7, generator.integers(1, 4)))
        numel = int(np.prod(shape))
        every = np.arange(numel)
        lo, step = int(generator.integers(0, numel)), int(generator.integers(1, 4))
        positions = every[lo::step]
        inner = int(generator.integers(1, len(positions) + 1))
        rows = len(positions) // inner
        block = Block((rows, inner), 5, (100 * inner, 100), lo, (inner * step, step))
        targets: list[int] = []
        for cut in along_axes(block, shape):
            assert 1 <= len(cut.shape) <= len(shape)
            grid = np.indices(cut.shape).reshape(len(cut.shape), -1)
            at = cut.target_start + np.array(cut.target_strides) @ grid
            source = cut.source_start + np.array(cut.source_strides) @ grid
            assert ((source - 5) // 100 * step + lo == at).all()
            targets += at.tolist()
            coordinates = np.unravel_index(at, shape)
            for axis in coordinates:
                along = axis.reshape(cut.shape)
                assert (
                    sum(bool((np.diff(along, axis=d) != 0).any()) for d in range(along.ndim)) <= 1
                )
        assert sorted(targets) == positions[: rows * inner].tolist()


# --- publisher, server, subscriber ----------------------------------------------------------------

LAYOUT = """
mesh O = x:1
space s { L{l}.g[f h] L{l}.u[f h] L{l}.d[h f] n[h] }
layout trainer of s on O {
  layers.{l}.{gate,up}.weight = L{l}.{g,u}[f h]
  layers.{l}.down.weight = L{l}.d[h f]
  norm.weight = n[h]
}
layout rollout of s on O {
  layers.{l}.gate_up.weight = L{l}[(g:f|u:f) h] q(float8_e4m3fn, [32 32], scale={name}_scale_inv)
  layers.{l}.down.weight = L{l}.d[h f] q(float8_e4m3fn, [1 999], scale={name}_scale)
  norm.weight = n[h]
}
"""
TRAINER, ROLLOUT = f"# layout trainer\n{LAYOUT}", f"# layout rollout\n{LAYOUT}"
F, H = 96, 80


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    out = {"norm.weight": made(H)}
    for i in range(2):
        at = f"layers.{i}"
        out |= {f"{at}.{n}.weight": made(F, H) for n in ("gate", "up")}
        out[f"{at}.down.weight"] = made(H, F)
    return out


def quantized(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the rollout's tensors, with those of the scales."""
    out = {"norm.weight": full["norm.weight"]}
    for i in range(2):
        at = f"layers.{i}"
        both = torch.cat([full[f"{at}.{n}.weight"] for n in ("gate", "up")])
        values, scales = reference(both, (32, 32))
        out |= {f"{at}.gate_up.weight": values, f"{at}.gate_up.weight_scale_inv": scales}
        values, scales = reference(full[f"{at}.down.weight"], (1, F))
        out |= {f"{at}.down.weight": values, f"{at}.down.weight_scale": scales}
    return out


def empty(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(t) for n, t in quantized(full).items()}


def wrong(into: dict[str, torch.Tensor], full: dict[str, torch.Tensor]) -> list[str]:
    wanted = quantized(full)
    return [n for n, t in into.items() if as_bytes(t).tobytes() != as_bytes(wanted[n]).tobytes()]


@pytest.mark.parametrize("far", [False, True])
def test_a_rollout_of_blocks_follows_a_trainer(tmp_path: Path, far: bool) -> None:
    full = weights(1)
    into = empty(full)
    with (
        ckptd.Publisher(TRAINER, tmp_path / "at") as publisher,
        ckptd.Subscriber(ROLLOUT, {"m": into}, tmp_path / "at") as subscriber,
    ):
        subscriber._far = far
        step = 0

        def update() -> Any:
            nonlocal step
            step += 1
            assert publisher.publish(step, {"m": full}).wait(PATIENCE_S)
            report = subscriber.update(wait_s=30)
            assert report is not None
            assert wrong(into, full) == []
            return report

        every = update().bytes_needed
        assert every < 0.6 * sum(t.nbytes for t in full.values())
        assert update().bytes_needed == 0
        full["layers.1.up.weight"][3, 3] = 300.0  # one element: its block has another scale
        report = update()
        assert every / 4 < report.bytes_needed < every / 2
        assert report.bytes_received == (report.bytes_needed if far else 0)
        into["layers.0.down.weight_scale"].view(-1)[2] += 1.0  # somebody else's doing
        assert 0 < update().bytes_needed < every / 2
        full["layers.0.gate.weight"][0, 0] = torch.inf
        held = {n: t.clone() for n, t in into.items()}
        assert publisher.publish(step + 1, {"m": full}).wait(PATIENCE_S)
        with pytest.raises(UsageError) as caught:
            subscriber.update(wait_s=30)
        assert (caught.value.message, caught.value.where) == (
            "a value does not fit the type it is cast to",
            "layers.0.gate_up.weight",
        )
        assert not caught.value.state_corrupted
        assert all(
            torch.equal(into[n].view(torch.uint8), t.view(torch.uint8)) for n, t in held.items()
        )


def test_a_second_rollout_of_blocks_takes_all_of_the_first(tmp_path: Path) -> None:
    full, at = weights(1), tmp_path / "at"
    found = []
    with ckptd.Publisher(TRAINER, at) as publisher, contextlib.ExitStack() as ends:
        assert publisher.publish(1, {"m": full}).wait(PATIENCE_S)
        for _ in range(2):
            into = empty(full)
            one = ckptd.Subscriber(ROLLOUT, {"m": into}, at, pass_on=True)
            ends.enter_context(one)._far = True
            report = one.update(wait_s=30)
            assert report is not None
            assert wrong(into, full) == []
            found.append((report.bytes_received, report.bytes_passed))
    (received, passed), second = found
    assert passed == 0 < received
    assert second == (received, received)  # the magnitudes that scales are made of, too


def test_blocks_that_come_as_they_are_written_have_their_scales(tmp_path: Path) -> None:
    full = weights(2)
    into = empty(full)
    with (
        ckptd.Publisher(TRAINER, tmp_path / "at") as publisher,
        ckptd.Subscriber(
            ROLLOUT, {"m": into}, tmp_path / "at", budget_bytes=9000, in_place=True
        ) as subscriber,
    ):
        subscriber._far = True
        assert publisher.publish(1, {"m": full}).wait(PATIENCE_S)
        assert subscriber.update(wait_s=30) is not None
        assert wrong(into, full) == []


def refusal(at: Path, into: dict[str, torch.Tensor], layout: str = ROLLOUT) -> CkptdError:
    full = weights(3)
    with ckptd.Publisher(TRAINER, at) as publisher:
        assert publisher.publish(1, {"m": full}).wait(PATIENCE_S)
        with pytest.raises(CkptdError) as caught, ckptd.Subscriber(layout, {"m": into}, at) as to:
            to.update(wait_s=30)
    return caught.value


def test_what_cannot_be_quantized_is_refused_by_name(tmp_path: Path) -> None:
    full, at = weights(3), tmp_path / "at"
    name = "layers.1.down.weight"
    error = refusal(at, {n: t for n, t in empty(full).items() if n != f"{name}_scale"})
    assert (error.kind, error.where) == ("lay-fit", f"m.{name}_scale")
    error = refusal(at, empty(full) | {f"{name}_scale": torch.zeros(H, 2)})
    assert isinstance(error, MismatchError)
    assert (error.where, error.wanted) == (
        f"m.{name}_scale",
        f"({H}, 1) in float32 or float8_e8m0fnu",
    )
    error = refusal(at, empty(full) | {f"{name}_scale": torch.zeros(H, 1).bfloat16()})
    assert error.found == f"({H}, 1) in bfloat16"
    error = refusal(at, empty(full) | {name: torch.zeros(H, F)})
    assert (error.kind, error.where, error.found) == ("lay-fit", name, "float8_e4m3fn")
    error = refusal(at, empty(full), ROLLOUT.replace("[1 999]", "[1 9 9]"))
    assert (error.kind, error.where) == ("lay-fit", "m.layers.0.down.weight")
    error = refusal(at, empty(full), ROLLOUT.replace("= L{l}.d[h f]", "= L{l}.d[h f] affine(2, 0)"))
    assert (error.kind, error.where) == ("lay-use", "layers.0.down.weight")
    said = "scale={name}_scale)"
    error = refusal(at, empty(full), ROLLOUT.replace(said, f"{said[:-1]} as float8_e8m0fnu)"))
    assert error.wanted == f"({H}, 1) in float8_e8m0fnu"
    two = ROLLOUT.replace(said, f"{said[:-1]} as float8_e4m3fn, overall={{name}}_two)")
    error = refusal(at, empty(full), two)
    assert (error.kind, error.where) == ("lay-fit", "m.layers.0.down.weight")
    half = ROLLOUT.replace("q(float8_e4m3fn, [1 999]", "q(float4_e2m1fn, [1 999]")
    packed = {f"layers.{i}.down.weight": torch.zeros(H, F, dtype=torch.uint8) for i in range(2)}
    error = refusal(at, empty(full) | packed, half)
    assert (error.kind, error.where) == ("lay-fit", "layers.0.down.weight")
    with pytest.raises(UsageError) as caught, ckptd.Publisher(ROLLOUT, at) as publisher:
        publisher.publish(1, {"m": empty(full)})
    assert caught.value.kind == "lay-use"
    root = str(tmp_path / "root")
    with ckptd.Checkpointer(root, layout=TRAINER) as checkpointer:
        checkpointer.save(1, {"m": full})
    with pytest.raises(UsageError) as caught:
        ckptd.Subscriber(ROLLOUT, {"m": empty(full)}, at, root=root)
    assert caught.value.kind == "lay-use"


# --- what a server is asked -----------------------------------------------------------------------


def test_what_is_asked_of_tiles_is_checked_before_it_is_read() -> None:
    tensors = (PublishedTensor("a", "float32", 0, 10), PublishedTensor("b", "float32", 40, 1 << 30))
    fours = TileSteps(0, 1, 4)
    assert read_bytes(tensors, (BlockRead(0, 0, (10,), (1,), "", (fours,)),)) == 12
    good = BlockRead(0, 0, (10,), (1,), "float8_e4m3fn", (fours,), bytes(12))
    assert read_bytes(tensors, (good,)) == 10
    slot = Slot(0, 40)
    try:
        slot.put(0, np.arange(10, dtype=np.float32).view(np.uint8))
        out = np.zeros(22, np.uint8)
        gather_blocks(slot, tensors, (BlockRead(0, 0, (10,), (1,), "", (fours,)), good), out)
        assert out[:12].view(np.float32).tolist() == [3.0, 7.0, 9.0]
    finally:
        slot.close()
    two = (fours, fours)
    for asked in (
        BlockRead(0, 0, (10,), (1,), "", two),
        BlockRead(0, 0, (10,), (1,), "float8_e4m3fn", (fours,), bytes(8)),
        BlockRead(0, 0, (10,), (1,), "float8_e4m3fn", (fours,)),
        BlockRead(0, 0, (2, 0), (1, 1), "", two),
        BlockRead(0, 8, (10,), (1,), "", (fours,)),
        BlockRead(1, 0, (1 << 25,), (1,), "", (fours,)),
    ):
        with pytest.raises(UsageError) as caught:
            read_bytes(tensors, (asked,))
        assert caught.value.message in (
            "a part is not inside its tensor",
            "unknown part of a tensor",
            "too many bytes requested at once",
        )
    with pytest.raises(UsageError):  # not all at once either, whatever little is sent
        read_bytes(tensors, (BlockRead(1, 0, (1 << 23,), (1,), "", (fours,)),) * 3)
    with pytest.raises(MismatchError):
        read_bytes(tensors, (BlockRead(0, 0, (10,), (1,), "int64", (fours,), bytes(12)),))
