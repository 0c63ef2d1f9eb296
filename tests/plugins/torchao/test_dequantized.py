"""Quantized weights of torchao, read as `dequantize` has them, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptd
from ckptd.store import open_store
from ckptd.testing.ranks import run_ranks
from tests.cli.running import Cli
from tests.reshard.llama import latest

pytestmark = [pytest.mark.plugins, pytest.mark.filterwarnings("ignore")]

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("Int8WeightOnlyConfig", {}),
    "int8 both": ("Int8DynamicActivationInt8WeightConfig", {}),
    "fp8": ("Float8WeightOnlyConfig", {}),
    "int4": ("IntxWeightOnlyConfig", {"weight_dtype": "int4"}),
    "groups": ("IntxWeightOnlyConfig", {"weight_dtype": "int4", "granularity": 32}),
}


def model(kind: str) -> nn.Sequential:
    warnings.simplefilter("ignore")
    import torchao.quantization as ao
    from torchao.quantization.granularity import PerGroup

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16), nn.Linear(32, 8))
    name, given = KINDS[kind]
    if "weight_dtype" in given:
        given = {**given, "weight_dtype": getattr(torch, str(given["weight_dtype"]))}
    if "granularity" in given:
        given = {**given, "granularity": PerGroup(32)}
    ao.quantize_(net[0], getattr(ao, name)(**given))
    return net


def plain(net: nn.Module) -> dict[str, torch.Tensor]:
    state = net.state_dict()
    return {
        n: v.dequantize() if hasattr(v, "__tensor_flatten__") else v.detach()
        for n, v in state.items()
    }


LAY = """
space s { a[f h] b[f] c[g f] d[g] }
layout plain of s on none { 0.weight = a[f h]; 0.bias = b[f]; 1.weight = c[g f]; 1.bias = d[g] }
layout turned of s on none { 0.weight = a[h f]; 0.bias = b[f]; 1.weight = c[g f]; 1.bias = d[g] }
mesh M = tp:2
layout cut of s on M { 0.weight = a[f@tp h]; 0.bias = b[f]; 1.weight = c[g f]; 1.bias = d[g] }
"""


def layouts(tmp_path: Path, to: str) -> list[str]:
    (tmp_path / "p.lay").write_text(LAY)
    from_ = ["--section", "model", "--from", f"{tmp_path}/p.lay:plain"]
    return [*from_, "--to", f"{tmp_path}/p.lay:{to}"]


@pytest.mark.parametrize("kind", KINDS)
def test_as_dequantize_has_them(tmp_path: Path, cli: Cli, kind: str) -> None:
    net = model(kind)
    root, hf = str(tmp_path / "r"), str(tmp_path / "hf")
    with ckptd.Checkpointer(root) as c:
        c.save(1, {"model": net}).durable()
    wanted = plain(net)
    refused = cli("export", root, hf)
    assert refused.code
    assert "--dequantize" in refused.err
    document = cli.json("export", root, hf, "--dequantize")
    assert document["objects"] == []
    assert equal(load_file(f"{hf}/model.safetensors"), wanted)
    for to in ("plain", "turned"):
        out = str(tmp_path / to)
        more = [*layouts(tmp_path, to), "--format", "hf", "--allow", "lossy"]
        assert cli("reshard", root, out, *more).code
        assert not cli("reshard", root, out, *more, "--dequantize").code
        again = dict(wanted)
        if to == "turned":
            again["0.weight"] = wanted["0.weight"].T.contiguous()
        assert equal(load_file(f"{out}/model.safetensors"), again)
    # The witness follows them.
    more = [*layouts(tmp_path, "cut"), "--allow", "lossy", "--dequantize"]
    done = cli.json("reshard", root, str(tmp_path / "cut"), *more)
    assert done["done"]["witness_values"] > 1000


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[n].dtype == wanted[n].dtype and torch.equal(found[n], wanted[n]) for n in wanted
    )


def test_slabs_begin_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptd.reshard import dequantized, export

    monkeypatch.setattr(export, "_SLAB_BYTES", 200)
    monkeypatch.setattr(dequantized, "_ELEMENTS", 50)
    net = model("groups")
    with ckptd.Checkpointer(str(tmp_path / "r")) as c:
        c.save(1, {"model": net}).durable()
    with open_store(tmp_path / "r") as store:
        reader = latest(store)
        plan = export.plan_export(reader, dequantize=True)
        export.run_export(reader, plan, tmp_path / "hf")
    assert equal(load_file(tmp_path / "hf/model.safetensors"), plain(net))


def test_others_stay_refused(tmp_path: Path, cli: Cli) -> None:
    warnings.simplefilter("ignore")
    from torchao.quantization import to_nf4

    weight = to_nf4(torch.randn(64, 64), 32, 2)
    root = str(tmp_path / "r")
    with ckptd.Checkpointer(root) as c:
        c.save(1, {"model": {"w": weight}}).durable()
    result = cli("export", root, str(tmp_path / "hf"), "--dequantize")
    assert result.code
    assert "model.w (torchao" in result.err


def sharded(root: str, kind: str) -> dict[str, torch.Tensor]:
    """Save under FSDP2; return what the whole model is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    net = model(kind)
    mesh = init_device_mesh("cpu", (2,))
    weight: Any = net[0].weight
    half = weight.shape[0] // 2
    mine = weight[half * mesh.get_local_rank() :][:half]
    cut = DTensor.from_local(
        mine, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=(64, 1)
    )
    rest = {n: v for n, v in net.state_dict().items() if n != "0.weight"}
    with ckptd.Checkpointer(root) as ck:
        ck.save(1, {"model": {"0.weight": cut, **rest}}).durable()
    return plain(net)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["fp8"])  # the others cannot be in a DTensor
def test_rows_on_ranks(tmp_path: Path, cli: Cli, kind: str) -> None:
    root, hf = str(tmp_path / "r"), str(tmp_path / "hf")
    wanted, _ = run_ranks(2, sharded, root, kind, deadline_s=200.0)
    cli.json("export", root, hf, "--dequantize")
    assert equal(load_file(f"{hf}/model.safetensors"), wanted)
    more = [*layouts(tmp_path, "plain"), "--format", "hf", "--allow", "lossy", "--dequantize"]
    assert not cli("reshard", root, str(tmp_path / "out"), *more).code
    assert equal(load_file(tmp_path / "out/model.safetensors"), wanted)
