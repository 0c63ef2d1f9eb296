"""Block-scaled quantization: read, written, and followed by the witness."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ckptd.base.grids.grid import Axis, Grid
from ckptd.errors import CkptdError, MismatchError, RefusedError
from ckptd.reshard.job import ReshardShare
from ckptd.store import open_store
from tests.checkpoint.load.builder import Array, Saved
from tests.reshard.llama import everything, latest, program, resharded, save

ROWS, COLUMNS, BLOCK = 50, 42, (16, 8)
LAY = """
space s { L{l}.w[o i]  L{l}.b[o] }
mesh M = tp:2
layout plain of s on none {
  l.{l}.weight = L{l}.w[o i]
  l.{l}.bias = L{l}.b[o]
}
layout turned of s on none {
  l.{l}.t = L{l}.w[i o]
  l.{l}.bias = L{l}.b[o]
}
layout fp8 of s on M {
  l.{l}.weight = L{l}.w[o@tp:ceil/16 i] q(float8_e4m3fn, [16 8], scale={name}_scale_inv)
  l.{l}.bias = L{l}.b[o]
}
layout int8 of s on none {
  l.{l}.weight = L{l}.w[o i] q(int8, [16 8], scale={name}.scales)
  l.{l}.bias = L{l}.b[o]
}
"""


@pytest.fixture
def lay(tmp_path: Path) -> str:
    path = tmp_path / "q.lay"
    path.write_text(LAY)
    return str(path)


def data() -> dict[str, Array]:
    rng = np.random.default_rng(5)
    out: dict[str, Array] = {}
    for i in range(2):
        w = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
        w[:, 20:] *= 300
        w[:16, :8] = 0
        out[f"l.{i}.weight"] = w
        out[f"l.{i}.bias"] = rng.standard_normal(ROWS).astype(np.float32)
    return out


def by_blocks(scales: Array) -> Array:
    """Return the scale of each element."""
    wide = np.repeat(np.repeat(scales, BLOCK[0], axis=0), BLOCK[1], axis=1)
    return wide[:ROWS, :COLUMNS]


def test_quantized_values_are_the_logical_ones_over_their_scale(tmp_path: Path, lay: str) -> None:
    wanted = data()
    with open_store(tmp_path / "a") as store:
        save(store, wanted)
    plain, fp8 = program(f"{lay}:plain"), program(f"{lay}:fp8")
    with pytest.raises(RefusedError):
        resharded(tmp_path / "a", tmp_path / "b", fp8, plain)
    resharded(tmp_path / "a", tmp_path / "b", fp8, plain, allow_lossy=True)
    found = everything(tmp_path / "b")
    for i in range(2):
        w, q = wanted[f"l.{i}.weight"], found[f"l.{i}.weight"]
        scales = found[f"l.{i}.weight_scale_inv"]
        assert q.dtype == ml_dtypes.float8_e4m3fn
        assert scales.shape == (4, 6)
        padded = np.zeros((64, 48), dtype=np.float32)
        padded[:ROWS, :COLUMNS] = np.abs(w)
        maxima = padded.reshape(4, 16, 6, 8).max(axis=(1, 3))
        assert np.allclose(scales, np.where(maxima == 0, 1, maxima / 448), rtol=1e-6)
        assert np.array_equal(q, (w / by_blocks(scales)).astype(ml_dtypes.float8_e4m3fn))
    with open_store(tmp_path / "b") as store:
        reader = latest(store)
        entry = reader.manifest.tensors[reader.number("l.0.weight_scale_inv")]
        assert reader.filemap.grid_of(reader.number("l.0.weight_scale_inv")).cell_shape == (2, 1)
        assert reader.filemap.owners[entry.owners].array(entry.base).tolist() == [0, 1]


@pytest.mark.parametrize("layout", ["fp8", "int8"])
@pytest.mark.parametrize("back", ["plain", "turned"])
def test_reading_multiplies_and_the_witness_agrees(
    tmp_path: Path, lay: str, layout: str, back: str
) -> None:
    wanted = data()
    with open_store(tmp_path / "a") as store:
        save(store, wanted)
    narrow, plain = program(f"{lay}:{layout}"), program(f"{lay}:plain")
    resharded(tmp_path / "a", tmp_path / "b", narrow, plain, allow_lossy=True)
    done = resharded(tmp_path / "b", tmp_path / "c", program(f"{lay}:{back}"), allow_lossy=True)
    # Every weight and every bias is a value of the witness, or as many as it takes.
    assert done.witness_values >= 2 * (1024 + ROWS)
    quantized, found = everything(tmp_path / "b"), everything(tmp_path / "c")
    end = {"fp8": "_scale_inv", "int8": ".scales"}[layout]
    for i in range(2):
        q = quantized[f"l.{i}.weight"].astype(np.float32)
        values = q * by_blocks(quantized[f"l.{i}.weight{end}"])
        name = f"l.{i}.t" if back == "turned" else f"l.{i}.weight"
        assert np.array_equal(found[name], values.T if back == "turned" else values)
        assert np.array_equal(found[f"l.{i}.bias"], wanted[f"l.{i}.bias"])
        error = np.abs(values - wanted[f"l.{i}.weight"])
        assert error.max() <= 300 * 5 / 16


def test_any_cut_gives_the_same_quantized_bytes(tmp_path: Path, lay: str) -> None:
    wanted = data()
    with open_store(tmp_path / "a") as store:
        save(store, wanted)
    with open_store(tmp_path / "c") as store:
        grid = Grid((Axis(((7, 7), (1, 1))), Axis(((5, 8), (2, 1)))))
        cut = Saved(wanted["l.0.weight"], grid, [i % 3 for i in range(grid.npieces)])
        rest = {n: v for n, v in wanted.items() if n != "l.0.weight"}
        save(store, rest, extra={"l.0.weight": cut})
    plain = program(f"{lay}:plain")
    resharded(tmp_path / "a", tmp_path / "b", program(f"{lay}:fp8"), plain, allow_lossy=True)
    for number in (2, 1):
        part = ReshardShare(number, 2)
        fp8 = program(f"{lay}:fp8")
        resharded(tmp_path / "c", tmp_path / "d", fp8, plain, part, allow_lossy=True)
    one, two = everything(tmp_path / "b"), everything(tmp_path / "d")
    assert one.keys() == two.keys()
    for name, values in one.items():
        assert values.tobytes() == two[name].tobytes(), name


def test_scales_that_are_missing_are_named(tmp_path: Path, lay: str) -> None:
    with open_store(tmp_path / "a") as store:
        q = {n: v.astype(ml_dtypes.float8_e4m3fn) if v.ndim == 2 else v for n, v in data().items()}
        save(store, q)
    with pytest.raises(MismatchError) as caught:
        fp8, plain = program(f"{lay}:fp8"), program(f"{lay}:plain")
        resharded(tmp_path / "a", tmp_path / "b", plain, fp8, allow_lossy=True)
    assert caught.value.kind == "lay-cover"
    assert caught.value.wanted == "l.0.weight_scale_inv"


MX = """
space s { W[o i] }
mesh M = tp:2
layout fp8 of s on none {
  w = W[o i] q(float8_e4m3fn, [1 32], scale={name}_scale as float8_e8m0fnu)
}
layout fp4 of s on M { w = W[o i@tp] q(float4_e2m1fn, [1 32], scale={name}_scale as uint8) }
layout nv of s on M {
  w = W[o@tp i] q(float4_e2m1fn, [1 16], scale={name}_s as float8_e4m3fn, overall={name}_s2)
}
layout cut of s on M { w = W[o@tp i] cast(float32) }
layout turned of s on none { w = W[i o] cast(float32) }
layout mx of s on none { w = W[o i] q(float8_e4m3fn, [1 32], scale={name}_scale) }
layout bytes of s on none { w = W[o i] q(uint8, [1 32], scale={name}_scale) }
layout plain of s on none { w = W[o i] cast(float32) }
"""


def microscaled() -> dict[str, Array]:
    """Return MXFP8: blocks of 32 values with a power of two each."""
    values = np.random.default_rng(7).standard_normal((8, 64)).astype(np.float32)
    blocks = values.reshape(8, 2, 32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))) - 8
    scaled = (blocks / np.exp2(exponents)[..., None]).clip(-448, 448)
    return {
        "w": scaled.astype(ml_dtypes.float8_e4m3fn).reshape(8, 64),
        "w_scale": np.exp2(exponents).astype(ml_dtypes.float8_e8m0fnu),
    }


def test_blocks_of_a_row_with_powers_of_two(tmp_path: Path) -> None:
    (tmp_path / "q.lay").write_text(MX)
    made = microscaled()
    with open_store(tmp_path / "a") as store:
        save(store, made)
    mx, plain = (program(f"{tmp_path}/q.lay:{n}") for n in ("mx", "plain"))
    resharded(tmp_path / "a", tmp_path / "b", plain, mx, allow_lossy=True)
    blocks = made["w"].astype(np.float32).reshape(8, 2, 32)
    wanted = (blocks * made["w_scale"].astype(np.float32)[..., None]).reshape(8, 64)
    assert everything(tmp_path / "b")["w"].tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("layout", "kinds", "where"),
    [
        ("mx", {"w_scale": "uint8"}, "w_scale"),  # the bits of the exponents
        ("mx", {"w": "uint8"}, "w"),
        ("mx", {"w": "float8_e5m2"}, "w"),
        ("bytes", {"w": "uint8"}, "w"),  # two values of four bits each
        ("fp8", {"w_scale": "uint8"}, "w_scale"),
        ("fp4", {"w": "float8_e4m3fn"}, "w"),
    ],
)
def test_bytes_are_not_taken_for_numbers(
    tmp_path: Path, layout: str, kinds: dict[str, str], where: str
) -> None:
    (tmp_path / "q.lay").write_text(MX)
    made = microscaled()
    for name, kind in kinds.items():
        made[name] = made[name].view(getattr(ml_dtypes, kind, kind))
    with open_store(tmp_path / "a") as store:
        save(store, made)
    mx, plain = (program(f"{tmp_path}/q.lay:{n}") for n in (layout, "plain"))
    with pytest.raises(MismatchError) as caught:
        resharded(tmp_path / "a", tmp_path / "b", plain, mx, allow_lossy=True)
    assert (caught.value.kind, caught.value.where) == ("lay-fit", where)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def codes_of(values: Array) -> Array:
    """Return the code of the nearest value of four bits; of two that are as near, the even one."""
    apart = np.abs(np.abs(values)[..., None] - E2M1)
    code = apart.argmin(-1)
    tied = np.take_along_axis(apart, np.minimum(code + 1, 7)[..., None], -1)[..., 0]
    code += (tied == apart.min(-1)) & (code % 2 == 1) & (code < 7)
    return np.where(np.signbit(values), code + 8, code).astype(np.uint8)


def read_pairs(data: Array) -> Array:
    codes = np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)
    return np.where(codes > 7, -E2M1[codes % 8], E2M1[codes % 8]).astype(np.float32)


def powers(maxima: Array, limit: float) -> Array:
    """Return the least powers of two under which nothing is over the limit."""
    found = 2.0 ** np.arange(-127, 128)
    return found[np.searchsorted(found * limit, maxima)].astype(np.float32)


def weights() -> Array:
    """Return values of many magnitudes, some halfway between two of four bits, a block of zeros."""
    rng = np.random.default_rng(11)
    w = rng.standard_normal((24, 128)) * 2.0 ** rng.integers(-9, 9, (24, 1))
    w[:4] = rng.integers(-24, 25, (4, 128)) / 4
    w[:4, ::16] = 6
    w[9, :64] = 0
    return w.astype(np.float32)


def written(tmp_path: Path, layout: str) -> dict[str, Array]:
    (tmp_path / "q.lay").write_text(MX)
    with open_store(tmp_path / "a") as store:
        save(store, {"w": weights()}, parts=3)
    to, plain = (program(f"{tmp_path}/q.lay:{n}") for n in (layout, "plain"))
    resharded(tmp_path / "a", tmp_path / "b", to, plain, allow_lossy=True)
    return everything(tmp_path / "b")


@pytest.mark.parametrize("layout", ["fp8", "fp4"])
def test_microscaled_values_are_the_nearest_ones(tmp_path: Path, layout: str) -> None:
    found, w = written(tmp_path, layout), weights()
    limit = {"fp8": 448, "fp4": 6}[layout]
    maxima = np.abs(w.reshape(24, 4, 32)).max(-1)
    scales = np.where(maxima == 0, np.float32(1), powers(maxima, limit))
    kind = found["w_scale"].dtype
    assert kind == {"fp8": ml_dtypes.float8_e8m0fnu, "fp4": np.uint8}[layout]
    assert np.array_equal(found["w_scale"].view(ml_dtypes.float8_e8m0fnu).astype("f4"), scales)
    over = w / np.repeat(scales, 32, axis=1)
    if layout == "fp8":
        assert found["w"].tobytes() == over.astype(ml_dtypes.float8_e4m3fn).tobytes()
    else:
        codes = codes_of(over)
        assert np.array_equal(found["w"], codes[:, ::2] | codes[:, 1::2] << 4)


def test_two_levels_of_scales(tmp_path: Path) -> None:
    found, w = written(tmp_path, "nv"), weights()
    overall = np.abs(w).max() / np.float32(6 * 448)
    assert (found["w_s2"].shape, found["w_s2"]) == ((), overall)
    maxima = np.abs(w.reshape(24, 8, 16)).max(-1)
    wanted = np.clip(maxima / np.float32(6) / overall, 2**-9, 448)
    wanted = np.where(maxima == 0, 1, wanted).astype(ml_dtypes.float8_e4m3fn)
    assert found["w_s"].tobytes() == wanted.tobytes()
    each = np.repeat(wanted.astype(np.float32) * overall, 16, axis=1)
    codes = codes_of(np.clip(w / each, -6, 6))
    assert np.array_equal(found["w"], codes[:, ::2] | codes[:, 1::2] << 4)


@pytest.mark.parametrize("layout", ["fp8", "fp4", "nv"])
@pytest.mark.parametrize("back", ["plain", "turned", "cut"])
def test_what_was_packed_is_read(tmp_path: Path, layout: str, back: str) -> None:
    found = written(tmp_path, layout)
    narrow, to = (program(f"{tmp_path}/q.lay:{n}") for n in (layout, back))
    done = resharded(tmp_path / "b", tmp_path / "c", to, narrow, allow_lossy=True)
    values = found["w"].astype(np.float32) if layout == "fp8" else read_pairs(found["w"])
    if layout == "nv":
        scales = found["w_s"].astype(np.float32) * found["w_s2"]
    else:
        scales = found["w_scale"].view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    values = values * np.repeat(scales, 128 // scales.shape[1], axis=1)
    wanted = values.T if back == "turned" else values
    assert everything(tmp_path / "c")["w"].tobytes() == np.ascontiguousarray(wanted).tobytes()
    assert done.witness_values >= 1024


def test_any_cut_gives_the_same_pairs(tmp_path: Path) -> None:
    found = written(tmp_path, "fp4")
    w = weights()
    with open_store(tmp_path / "d") as store:
        grid = Grid((Axis(((5, 4), (4, 1))), Axis(((7, 18), (2, 1)))))
        cut = Saved(w, grid, [i % 3 for i in range(grid.npieces)])
        save(store, {}, extra={"w": cut})
    to, plain = (program(f"{tmp_path}/q.lay:{n}") for n in ("fp4", "plain"))
    resharded(tmp_path / "d", tmp_path / "e", to, plain, allow_lossy=True)
    again = everything(tmp_path / "e")
    assert {n: v.tobytes() for n, v in again.items()} == {n: v.tobytes() for n, v in found.items()}


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("w = W[o i@tp/3] q(float4_e2m1fn, [1 32], scale={name}_s as uint8)", "lay-fit"),
        ("w = W[o pad(i, 200)] q(float4_e2m1fn, [1 32], scale={name}_s as uint8)", "lay-fit"),
        ("w = W[o i] q(float4_e2m1fn, [1 32], scale={name}_s as int8)", "lay-rule"),
        ("w = W[o i] q(float4_e2m1fn, [1 16], scale={name}_s as float8_e4m3fn)", "lay-rule"),
        ("w = W[o i] q(int8, [1 16], scale={name}_s, overall={name}_t)", "lay-rule"),
        ("w = W[o i] q(float4_e2m1fn_x2, [1 32], scale={name}_s)", "lay-fit"),
    ],
)
def test_what_has_no_bytes_is_refused(tmp_path: Path, rule: str, kind: str) -> None:
    (tmp_path / "q.lay").write_text(MX + f"layout odd of s on M {{ {rule} }}\n")
    with open_store(tmp_path / "a") as store:
        save(store, {"w": weights()})
    to, plain = (program(f"{tmp_path}/q.lay:{n}") for n in ("odd", "plain"))
    with pytest.raises(CkptdError) as caught:
        resharded(tmp_path / "a", tmp_path / "b", to, plain, allow_lossy=True)
    assert caught.value.kind == kind


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_has_no_scale(tmp_path: Path, value: float) -> None:
    (tmp_path / "q.lay").write_text(MX)
    w = weights()
    w[3, 5] = value
    with open_store(tmp_path / "a") as store:
        save(store, {"w": w})
    to, plain = (program(f"{tmp_path}/q.lay:{n}") for n in ("fp8", "plain"))
    with pytest.raises(CkptdError) as caught:
        resharded(tmp_path / "a", tmp_path / "b", to, plain, allow_lossy=True)
    assert (caught.value.message, caught.value.where) == (
        "a value does not fit the type it is cast to",
        "w",
    )
