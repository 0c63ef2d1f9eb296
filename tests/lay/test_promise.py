"""What rules promise."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.lay.promise import promise
from ckptd.lay.resolve import Equation
from ckptd.lay.syntax.tree import (
    Affine,
    Atom,
    Average,
    Cast,
    Dim,
    Modifier,
    Name,
    Number,
    Pad,
    Product,
    Quantized,
    Replicas,
    Split,
    Text,
)

PLAIN = Atom("v")
PADDED = Split(Pad(Atom("v"), Number(8)), "tp")


def rule(*modifiers: Modifier, dim: Dim = PLAIN) -> Equation:
    return Equation(Name((Text("a"),)), {}, (Product((dim,)),), modifiers)


@pytest.mark.parametrize(
    ("equation", "promised"),
    [
        (rule(), "exact"),
        (rule(Replicas("same")), "exact"),
        (rule(dim=PADDED), "exact up to fill"),
        (rule(Replicas("any"), dim=PADDED), "choice"),
        (rule(Average("avg", "tp")), "lossy"),
        (rule(Average("sum", "dp"), dim=PADDED), "lossy"),
        (rule(Affine(1.0, 1.0)), "lossy"),
        (rule(Affine(1.0, 0.0)), "exact"),
        (rule(Cast("bfloat16")), "lossy"),
        (rule(Quantized("int8", (8,), Name((Text("s"),)))), "lossy"),
    ],
)
def test_promises(equation: Equation, promised: str) -> None:
    assert promise(equation) == promised


FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("source", [*FLOATS, *INTEGERS, "bool"])
@pytest.mark.parametrize("target", [*FLOATS, *INTEGERS])
def test_a_cast_is_exact_if_numpy_calls_it_safe(source: str, target: str) -> None:
    """NumPy also calls int64 to float64 safe, which it is not beyond 2**53."""
    safe = np.can_cast(source, target, "safe") and (source, target) not in {
        ("int64", "float64"),
        ("uint64", "float64"),
    }
    assert (promise(rule(Cast(target)), source) == "exact") == safe


def test_narrow_floats() -> None:
    def exact(source: str, target: str) -> bool:
        return promise(rule(Cast(target)), source) == "exact"

    assert exact("bfloat16", "float32")
    assert exact("float8_e4m3fn", "bfloat16")
    assert exact("float8_e5m2", "float16")
    assert not exact("float16", "bfloat16")
    assert not exact("float8_e4m3fn", "float8_e5m2")
    assert not exact("float32", "bfloat16")
