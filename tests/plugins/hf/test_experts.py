"""Folders of Hugging Face in models of transformers 5, which hold experts stacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import ckptd
from ckptd.errors import MismatchError
from ckptd.reshard.torch.layout.stacks import FAMILIES
from ckptd.testing.ranks import run_ranks
from tests.cli.running import Cli

pytestmark = [
    pytest.mark.plugins,
    pytest.mark.filterwarnings("ignore"),  # transformers' own, of tiny configurations
]

transformers = pytest.importorskip(
    "transformers", reason="needs frameworks: scripts/test --plugins"
)

TINY: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_experts"), 4),
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_num_shared_experts", "num_dense_layers"), 1),
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL = ["full_attention"] * 4
SPARSE = ["dense", "sparse", "sparse", "sparse"]
MORE: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": FULL},
    "cohere2_moe": {"layer_types": FULL},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2},
    "exaone_moe": {"layer_types": FULL, "mlp_layer_types": SPARSE},
    "glm4_moe_lite": {"mlp_layer_types": SPARSE},
    "jamba": {
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_d_conv": 2,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
    },
    "lfm2_moe": {"layer_types": ["conv", *FULL[1:]], "conv_L_cache": 3},
    "minimax": {"layer_types": ["linear_attention", *FULL[1:]], "block_size": 16},
    "qwen2_moe": {"mlp_only_layers": [0, 2]},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


def made(family: str, folder: Path) -> Any:
    """Return a model as `from_pretrained` loads it, saved with random values in all its tensors."""
    config = transformers.AutoConfig.for_model(family, **{**TINY, **MORE.get(family, {})})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn_like(tensor))
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def blank(model: Any) -> Any:
    torch.manual_seed(4)
    return transformers.AutoModelForCausalLM.from_config(model.config)


def same(one: nn.Module, other: nn.Module) -> None:
    wanted, found = one.state_dict(), other.state_dict()
    assert wanted.keys() == found.keys()
    assert not [n for n, t in wanted.items() if not torch.equal(t, found[n])]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_live_load_is_from_pretrained(family: str, tmp_path: Path) -> None:
    wanted = made(family, tmp_path / "hf")
    model = blank(wanted)
    assert any(n.endswith(".experts.gate_up_proj") for n in model.state_dict())
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.load({"model": model}, source=str(tmp_path / "hf"), weights_only=True)
        same(wanted, model)
        # What it saves has the model's own names.
        ck.save(1, {"model": model})
    again = blank(wanted)
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.load({"model": again})
    same(wanted, again)


def test_a_model_without_its_head(tmp_path: Path) -> None:
    """Its names are the checkpoint's below ``model.``, which is the section of the state here."""
    wanted = made("mixtral", tmp_path / "hf")
    base = blank(wanted).model
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        with pytest.raises(MismatchError, match="0 missing, 1 unexpected"):
            ck.load({"model": base}, source=str(tmp_path / "hf"))
        ck.load({"model": base}, source=str(tmp_path / "hf"), strict=False)
    same(wanted.model, base)


SHIPPED = ["mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"]


def adapted(model: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose states have random values."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("family", SHIPPED)
def test_names_of_a_job_are_those_of_the_live_model(
    family: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into `dcp.load` and a `Checkpointer`, and with an optimizer back into files."""
    monkeypatch.setitem(MORE, "qwen3_moe", {})
    wanted = made(family, tmp_path / "hf")
    hf, folder, root, job, back = (str(tmp_path / n) for n in ("hf", "dcp", "root", "job", "back"))
    for target, said in {
        folder: ("--to", "names.dcp", "--format", "dcp"),
        root: ("--to", "fsdp", "-e", "mesh fsdp = dp:2", "-e", "use names.ckptd"),
    }.items():
        found = cli("reshard", hf, target, *said)
        assert found.code == 0, found.err
        assert "experts are stacked" in found.err
    model = blank(wanted)
    weights = {"model": get_model_state_dict(model)}
    dcp.load(weights, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(weights["model"])
    same(wanted, model)
    model = blank(wanted)
    with ckptd.Checkpointer(root) as ck:
        ck.load({"model": model})
    same(wanted, model)
    # The other way, with moments, and files again.
    optimizer = adapted(model)
    with ckptd.Checkpointer(job) as ck:
        ck.save(1, {"model": model, "optim": optimizer})
    sizes: tuple[str, ...]
    sizes = ("-e", "let kv = 2") if family != "deepseek_v3" else ("-e", "let n = 4")
    if family in ("glm4_moe", "deepseek_v3"):
        sizes += ("-e", "let dense = 1", "-e", "let main = 4")
    live = ("--from", f"live.{family}", "-e", "from: use names.ckptd", "--to", f"hf.{family}")
    found = cli("reshard", job, back, *live, *sizes, "--format", "hf")
    assert found.code == 0, found.err
    model.save_pretrained(tmp_path / "saved")
    values, files = (load_file(Path(f) / "model.safetensors") for f in (back, tmp_path / "saved"))
    assert values.keys() == files.keys()
    assert all(torch.equal(values[n], t) for n, t in files.items())


@pytest.mark.parametrize("to", [("--to", "names.plain"), ("--to", "hf.mixtral")])
def test_names_of_files_stay_those_of_files(tmp_path: Path, cli: Cli, to: tuple[str, ...]) -> None:
    made("mixtral", tmp_path / "hf")
    found = cli("reshard", str(tmp_path / "hf"), str(tmp_path / "to"), *to, "--format", "hf")
    assert found.code == 0, found.err
    values, files = (load_file(tmp_path / n / "model.safetensors") for n in ("to", "hf"))
    assert values.keys() == files.keys()
    assert all(torch.equal(values[n], t) for n, t in files.items())


class Turned(nn.Module):
    """Experts of somebody else: the same names and shapes, and up before gate."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(old.gate_up_proj.detach().flip(1))
        self.down_proj = nn.Parameter(old.down_proj.detach())


def test_stacks_of_other_classes_are_not_guessed(tmp_path: Path) -> None:
    wanted = made("qwen3_moe", tmp_path / "hf")
    model = blank(wanted)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = Turned(layer.mlp.experts)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck, pytest.raises(MismatchError) as caught:
        ck.load({"model": model}, source=str(tmp_path / "hf"), weights_only=True)
    assert "experts.gate_up_proj" in str(caught.value)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    wanted = made("qwen3_moe", tmp_path / "hf")
    model = blank(wanted)
    values = load_file(tmp_path / "hf" / "model.safetensors")
    gone = "model.layers.2.mlp.experts.3.up_proj.weight"
    save_file({n: t for n, t in values.items() if n != gone}, tmp_path / "hf" / "model.safetensors")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for strict in (True, False):
        with (
            ckptd.Checkpointer(str(tmp_path / "root")) as ck,
            pytest.raises(MismatchError) as caught,
        ):
            ck.load({"model": model}, source=str(tmp_path / "hf"), weights_only=True, strict=strict)
        assert caught.value.message == "the tensor of l=2 e=3 is missing"
        assert "model.layers.{l}.mlp.experts.{e}.{gate,up}_proj.weight" in str(caught.value.where)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def load_sharded(folder: str) -> dict[str, torch.Tensor]:
    """Load into a model of FSDP2; return its whole values."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = blank(wanted)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with ckptd.Checkpointer(f"{folder}-root") as ck:
        ck.load({"model": model}, source=folder, weights_only=True)
    whole = model.state_dict()
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in whole.items()}


@pytest.mark.dist
def test_stacks_are_cut_as_the_job_is(tmp_path: Path) -> None:
    wanted = made("glm4_moe", tmp_path / "hf").state_dict()
    for found in run_ranks(2, load_sharded, str(tmp_path / "hf"), deadline_s=240.0):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[n], t) for n, t in wanted.items())


def load_stages(folder: str, first: int) -> dict[str, torch.Tensor]:
    """Load a stage of a pipeline; the first one has `first` layers, dense ones perhaps."""
    whole = blank(transformers.AutoModelForCausalLM.from_pretrained(folder))
    rank, body = torch.distributed.get_rank(), whole.model
    layers = dict(enumerate(body.layers))
    mine = {str(n): layer for n, layer in layers.items() if (n < first) == (rank == 0)}
    body.layers = nn.ModuleDict(mine)
    if rank:
        del body.embed_tokens
    else:
        del body.norm, whole.lm_head
    with ckptd.Checkpointer(f"{folder}-root") as ck:
        ck.load({"model": whole}, source=folder, weights_only=True)
    return dict(whole.state_dict())


@pytest.mark.dist
@pytest.mark.parametrize("first", [1, 2])
def test_stages_take_the_experts_of_their_layers(tmp_path: Path, first: int) -> None:
    wanted = made("deepseek_v3", tmp_path / "hf").state_dict()
    found: dict[str, torch.Tensor] = {}
    for part in run_ranks(2, load_stages, str(tmp_path / "hf"), first, deadline_s=240.0):
        assert part
        found |= part
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], t) for n, t in wanted.items())
