"""Real models of transformers and peft, there and back: with --plugins."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from tests.cli.running import Cli

transformers = pytest.importorskip(
    "transformers", reason="needs frameworks: scripts/test --plugins"
)
pytestmark = [pytest.mark.plugins, pytest.mark.usefixtures("writing_thread")]

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}


def model_of(name: str) -> Any:
    t = transformers
    torch.manual_seed(1)
    match name:
        case "llama" | "llama-tied":
            tied = name.endswith("tied")
            config = t.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=tied)
            return t.LlamaForCausalLM(config)
        case "qwen2":
            return t.Qwen2ForCausalLM(t.Qwen2Config(**SMALL, num_key_value_heads=2))
        case "mixtral":
            config = t.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=2)
            return t.MixtralForCausalLM(config)
        case "bert":
            return t.BertForMaskedLM(t.BertConfig(**SMALL))
        case "gpt2":
            config = t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=32)
            return t.GPT2LMHeadModel(config)
        case _:
            sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
            config = t.T5Config(vocab_size=99, num_decoder_layers=3, **sizes)
            return t.T5ForConditionalGeneration(config)


NAMES = ("llama", "llama-tied", "qwen2", "mixtral", "bert", "gpt2", "t5")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {n: v for f in folder.glob("*.safetensors") for n, v in load_file(f).items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def again(model: Any, folder: Path, saved: Path) -> dict[str, torch.Tensor]:
    shutil.copy(saved / "config.json", folder)
    found: dict[str, torch.Tensor] = type(model).from_pretrained(folder).state_dict()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_bit_for_bit(cli: Cli, tmp_path: Path, name: str) -> None:
    model = model_of(name)
    saved, root = tmp_path / "saved", tmp_path / "root"
    model.save_pretrained(saved)
    assert cli("reshard", str(saved), str(root), "--to", "ddp").code == 0
    cli.good("export", str(root), str(tmp_path / "a"))
    to_hf = ("reshard", str(root), str(tmp_path / "b"), "--to", "ddp", "--format", "hf")
    assert cli(*to_hf).code == 0
    for folder in (tmp_path / "a", tmp_path / "b"):
        same(tensors(folder), tensors(saved))
        same(again(model, folder, saved), model.state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_a_job_becomes_a_folder(cli: Cli, tmp_path: Path, name: str) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path / "saved")
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        ck.save(1, {"model": model, "epoch": 3})
    cli.good("export", str(tmp_path / "root"), str(tmp_path / "a"))
    same(tensors(tmp_path / "a"), model.state_dict())
    same(again(model, tmp_path / "a", tmp_path / "saved"), model.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_llama_by_way_of_megatron(cli: Cli, tmp_path: Path) -> None:
    model = model_of("llama")
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    mg = ("--to", "megatron.gpt", "-e", "mesh megatron_gpt = pp:2 dp:1 tp:2", "-e", "let kv = 2")
    sizes = ("-e", "let rep = 2", "-e", "let v = 99")
    there = cli("reshard", str(saved), str(tmp_path / "mg"), "--from", "hf.llama", *mg, *sizes)
    assert there.code == 0, there
    assert cli("reshard", str(tmp_path / "mg"), str(tmp_path / "r"), "--to", "hf.llama").code == 0
    cli.good("export", str(tmp_path / "r"), str(tmp_path / "a"))
    same(tensors(tmp_path / "a"), tensors(saved))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shared", [False, True])
def test_adapters(cli: Cli, tmp_path: Path, shared: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"])
    model = peft.get_peft_model(model_of("llama"), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    if shared:
        for layer in model.base_model.model.model.layers:
            found = layer.self_attn
            found.k_proj.lora_A.default.weight = found.q_proj.lora_A.default.weight
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    cli("reshard", str(saved), str(tmp_path / "root"), "--to", "ddp")
    cli.good("export", str(tmp_path / "root"), str(tmp_path / "a"))
    same(tensors(tmp_path / "a"), tensors(saved))
    shutil.copy(saved / "adapter_config.json", tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").rename(tmp_path / "a" / "adapter_model.safetensors")
    loaded = peft.PeftModel.from_pretrained(model_of("llama"), tmp_path / "a")
    same(loaded.state_dict(), model.state_dict())
    # The whole model of a job, shared adapters under both of their names.
    with ckptd.Checkpointer(str(tmp_path / "job")) as ck:
        ck.save(1, {"model": model})
    to_hf = ("reshard", str(tmp_path / "job"), str(tmp_path / "b"), "--to", "ddp", "--format", "hf")
    assert cli(*to_hf).code == 0
    same(tensors(tmp_path / "b"), {f"model.{n}": v for n, v in model.state_dict().items()})
