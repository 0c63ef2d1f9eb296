from __future__ import annotations

import numpy as np
import pytest
import torch

from ckptd.base.torch.tensors import as_bytes, dtype_name, torch_dtype
from ckptd.errors import CorruptError, UsageError
from ckptd.types import DTYPES

# Making a tensor of this type warns, once a process.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.parametrize("name", DTYPES)
def test_names_go_both_ways_and_sizes_agree(name: str) -> None:
    assert dtype_name(torch_dtype(name)) == name
    assert torch_dtype(name).itemsize == DTYPES[name].itemsize


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_bytes_are_the_memory_itself(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape, dtype=torch_dtype(name))
    raw = as_bytes(tensor)
    assert raw.dtype == np.uint8
    assert raw.shape == (tensor.numel() * DTYPES[name].itemsize,)
    raw[:] = np.arange(raw.size) % 2
    assert as_bytes(tensor).tolist() == raw.tolist()
    if raw.size:
        assert raw.ctypes.data == tensor.data_ptr()


def test_bytes_are_those_that_numpy_has() -> None:
    values = np.array([[1.5, -2.0], [3.25, np.inf]], dtype="<f4")
    assert as_bytes(torch.from_numpy(values.copy())).tobytes() == values.tobytes()


def test_a_parameter_that_needs_gradients_has_bytes_too() -> None:
    assert as_bytes(torch.nn.Parameter(torch.zeros(2))).size == 8


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4).t()[1:],
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, device="meta"),
    ],
    ids=["strided", "conjugated", "meta"],
)
def test_memory_that_is_not_the_bytes_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UsageError) as caught:
        as_bytes(tensor)
    assert "this tensor's memory does not hold its bytes in order" in caught.value.message


def test_a_dtype_without_a_name_is_refused_with_the_tensors_name() -> None:
    with pytest.raises(UsageError) as caught:
        dtype_name(torch.quint8, "model.weight")
    assert (caught.value.message, caught.value.where) == (
        "a tensor of this dtype cannot be saved",
        "model.weight",
    )
    assert caught.value.found == "quint8"


def test_a_name_without_a_dtype_is_corrupt() -> None:
    with pytest.raises(CorruptError):
        torch_dtype("float7")


def test_a_dtype_that_this_torch_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(UsageError) as caught:
        torch_dtype("float8_e8m0fnu")
    assert "this PyTorch lacks a dtype of the checkpoint" in caught.value.message
