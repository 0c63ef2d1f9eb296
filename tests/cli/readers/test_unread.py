"""Tensors of kinds that no reader knows: each is refused by name by what asks for it."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckptd
from ckptd.errors import RefusedError
from tests.cli.running import Cli
from tests.readers.opening import open_reader

pytestmark = pytest.mark.usefixtures("writing_thread")

REFUSED = 5


class Tagged(torch.Tensor):
    """A subclass whose values need a tensor among its attributes."""


def tagged() -> Any:
    found: Any = torch.ones(3).as_subclass(Tagged)
    found.scale = torch.ones(1)
    return found


def two() -> TwoTensor:
    return TwoTensor(torch.ones(2, 2), torch.zeros(2, 2))


def values(kind: str) -> Any:
    warnings.simplefilter("ignore")
    eye = torch.eye(4)
    made: dict[str, Callable[[], Any]] = {
        "coo": eye.to_sparse,
        "csr": eye.to_sparse_csr,
        "bsr": lambda: eye.to_sparse_bsr((2, 2)),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": lambda: torch.nested.nested_tensor(
            [torch.ones(2), torch.ones(3)], layout=torch.jagged
        ),
        "meta": lambda: torch.empty(3, device="meta"),
        "wrapper": two,
        "parameter": lambda: nn.Parameter(two()),
        "attributes": tagged,
        "array": lambda: np.ones(1 << 14),
        "storage": torch.ones(3).untyped_storage,
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        "conjugated": torch.tensor([1 + 2j]).conj,
        "lazy": nn.UninitializedParameter,
        "module": lambda: nn.Sequential(nn.Linear(2, 2)),
    }
    return made[kind]()


KINDS = """coo csr bsr nested jagged meta wrapper parameter attributes array storage quantized
conjugated lazy module"""


@pytest.mark.parametrize("kind", KINDS.split())
@pytest.mark.filterwarnings("ignore")
def test_each_verb_refuses_it_by_name(cli: Cli, tmp_path: Path, kind: str) -> None:
    file, out = str(tmp_path / "m.pt"), tmp_path / "out"
    torch.save({"model": {"w": torch.ones(2), "odd": values(kind)}, "step": 3}, file)
    for verb in (
        ["export", file, str(out)],
        ["cp", file, str(out)],
        ["reshard", file, str(out), "--to", "names.dcp", "--format", "dcp"],
        ["diff", file, file],
    ):
        result = cli(*verb, "--json")
        assert result.code == REFUSED, (verb, result)
        assert result.error["kind"] == "unreadable-format"
        assert "model.odd (" in result.error["found"]
        assert not out.exists() or not list(out.rglob("*.safetensors"))
    report = cli.json("verify", file, code=REFUSED)
    (finding,) = report["checkpoints"][0]["findings"]
    assert (finding["kind"], finding["tensor"]) == ("unreadable-format", "model.odd")
    assert "model.odd (" in cli("inspect", file).err


@pytest.mark.filterwarnings("ignore")
def test_what_does_not_ask_for_it_goes_on(cli: Cli, tmp_path: Path) -> None:
    file = str(tmp_path / "m.pt")
    state = {"w": torch.ones(2)}
    torch.save({"model": state, "ema": {"w": two()}, "optim": {"m": two()}}, file)
    # By default all weights are asked for, and states are not.
    assert (
        "weights outside of the section"
        in cli("export", file, str(tmp_path / "all"), "--json").error["message"]
    )
    result = cli("export", file, str(tmp_path / "out"), "--section", "model")
    assert result.code == 0
    assert "ema.w" in result.err
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [1, 1]
    drops = [a for n in ("ema", "optim") for a in ("-e", f"from: {n}.** = drop")]
    to = ["reshard", file, str(tmp_path / "dcp"), "--to", "names.dcp", "--format", "dcp"]
    assert "values would change or be dropped" in cli(*to, *drops, "--json").error["message"]
    found = cli.json(*to, *drops, "--allow", "lossy")
    assert sorted(found["dropped"]) == ["ema.w", "optim.m"]
    live = {"model": {"w": torch.zeros(2)}}
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.load(live, source=file, only="model.*")
        assert live["model"]["w"].tolist() == [1, 1]
        for strict in (True, False):
            more = {**live, "ema": {"w": torch.zeros(2, 2)}}
            with pytest.raises(RefusedError, match=r"ema\.w \(torch"):
                ck.load(more, source=file, only=["model.*", "ema.*"], strict=strict)
    torch.save({"optim": {"m": two()}}, file)
    assert cli("inspect", file, "--json").error["kind"] == "unreadable-format"


def test_values_that_are_left_out_are_counted(cli: Cli, tmp_path: Path) -> None:
    file = str(tmp_path / "m.pt")
    rng: Any = np.random.RandomState(3).get_state()
    many = {f"o{n}": {n} for n in range(300)}
    torch.save({"model": {"w": torch.ones(2)}, "rng": rng, "x": np.float32(2), **many}, file)
    for verb in (
        ["export", file, str(tmp_path / "hf")],
        ["cp", file, str(tmp_path / "root")],
        ["reshard", file, str(tmp_path / "dcp"), "--to", "names.dcp", "--format", "dcp"],
    ):
        if verb[0] == "cp":
            text = cli(*verb)
            assert (
                f"{file}: left out, neither tensors nor plain values: 300: o0, o1, o2, o3"
                in text.err
            )
            shutil.rmtree(tmp_path / "root")
        (found,) = cli.json(*verb)["values_left_out"]
        assert (found["source"], found["count"], found["names"][:2]) == (file, 300, ["o0", "o1"])
    # Small arrays and numbers of numpy are kept.
    objects = {o["name"]: o for o in cli.json("inspect", str(tmp_path / "root"))["objects"]}
    assert {"rng.0", "rng.1", "rng.2", "x"} <= set(objects)
    kept: Any = open_reader(tmp_path, only="m.pt").objects()
    assert np.array_equal(kept["rng.1"], rng[1])
    assert (kept["rng.1"].dtype, kept["rng.2"], kept["x"]) == (np.uint32, rng[2], 2)


def test_arrays_among_weights_are_refused(cli: Cli, tmp_path: Path) -> None:
    file = str(tmp_path / "m.pt")
    torch.save({"w": torch.ones(2), "mean": np.ones((2, 3), ">f4", order="F")}, file)
    assert "mean (an array" in cli("export", file, str(tmp_path / "o"), "--json").error["found"]


@pytest.mark.filterwarnings("ignore")
def test_items_of_dcp_that_are_subclasses(cli: Cli, tmp_path: Path) -> None:
    """One is shorter than the tensor that it represents, the other longer: both are healthy."""
    wide = torch.zeros(1 << 14)
    folder = tmp_path / "dcp"
    state = {"model": {"w": torch.ones(3)}, "optim": {"long": two(), "short": Small(wide)}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    assert cli("export", str(folder), str(tmp_path / "hf")).code == 0
    assert load_file(tmp_path / "hf" / "model.safetensors")["w"].tolist() == [1, 1, 1]
    assert cli("inspect", str(folder)).code == 0
    report = cli.json("verify", str(folder), code=REFUSED)
    findings = report["checkpoints"][0]["findings"]
    assert sorted(f["tensor"] for f in findings) == ["optim.long", "optim.short"]
    assert {f["kind"] for f in findings} == {"unreadable-format"}
    error = cli("cp", str(folder), str(tmp_path / "root"), "--json").error
    assert error["kind"] == "unreadable-format"
    assert ": optim." in error["where"]


class Small(torch.Tensor):
    """A subclass that takes less room than the tensor that it represents."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Self:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        made.small = like[:1].to(torch.int8)
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["small"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        pinned = func is torch.ops.aten.is_pinned.default
        return False if pinned else cls(torch.zeros(args[0].shape))


def test_a_module_and_the_legacy_format_say_what_they_are(cli: Cli, tmp_path: Path) -> None:
    module, old = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    torch.save(nn.Linear(2, 2), module)
    torch.save({"w": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    error = cli("export", module, str(tmp_path / "o"), "--json").error
    assert "a module, pickled whole: torch.nn.modules.linear.Linear" in error["found"]
    assert "torch.save(torch.load(OLD, weights_only=False).state_dict(), NEW)" in error["hint"]
    error = cli("export", old, str(tmp_path / "o"), "--json").error
    assert "legacy format" in error["message"]
    hint = error["hint"]
    line = hint[: hint.index(" converts")]
    exec(line, {"torch": torch, "OLD": old, "NEW": str(tmp_path / "c.pt")})
    assert cli("export", str(tmp_path / "c.pt"), str(tmp_path / "o")).code == 0
