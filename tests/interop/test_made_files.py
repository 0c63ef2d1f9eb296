"""Files that transformers, PEFT, Lightning and accelerate write here are read bit by bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.interop.models import build, check
from tests.readers.opening import open_reader

# Frameworks use much of each other that will change.
pytestmark = [pytest.mark.plugins, pytest.mark.filterwarnings("ignore")]

SMALL: Mapping[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForMaskedLM": ("BertConfig", dict(SMALL)),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", dict(GROUPED)),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", dict(SMALL)),
    "Mamba2ForCausalLM": (
        "Mamba2Config",
        {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2}
        | {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1},
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 60, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
    ),
    "ViTForImageClassification": ("ViTConfig", {**SMALL, "image_size": 32, "patch_size": 8}),
}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Read a folder by the library of its format."""
    from safetensors.torch import load_file

    out: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= load_file(path)
    return out


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers(kind: str, tmp_path: Path) -> None:
    import transformers

    config, sizes = MODELS[kind]
    torch.manual_seed(3)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="5KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    check(open_reader(tmp_path), stored(tmp_path))


def test_an_adapter_of_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    target = ["q_proj", "v_proj", "down_proj"]
    lora = LoraConfig(r=3, target_modules=target, init_lora_weights=False)
    adapted = get_peft_model(build("llama"), lora)
    adapted.save_pretrained(tmp_path)
    wanted = get_peft_model_state_dict(adapted)
    assert len(wanted) == 2 * 2 * len(target)
    check(open_reader(tmp_path), wanted)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 9})
            self.inner = Small()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.inner(batch[0]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    data = torch.utils.data.TensorDataset(torch.randn(6, 6))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", enable_model_summary=False, **quiet)
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    reader = open_reader(tmp_path)
    wanted = {f"state_dict.{n}": t for n, t in module.state_dict().items()}
    for number, state in enumerate(trainer.optimizers[0].state.values()):
        wanted |= {f"optimizer_states.0.state.{number}.{n}": t for n, t in state.items()}
    check(reader, wanted)
    assert reader.objects()["global_step"] == 3
    assert reader.objects()["hyper_parameters.width"] == 9


def test_a_state_of_accelerate(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Small()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    model(torch.randn(5, 6)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    # Weights are files of Hugging Face; the optimizer is a file that is named.
    check(open_reader(tmp_path), net.state_dict())
    wanted = {
        f"state.{number}.{n}": t
        for number, state in enumerate(optimizer.optimizer.state.values())
        for n, t in state.items()
    }
    check(open_reader(tmp_path, "optimizer.bin"), wanted)


def test_weights_of_torch_in_shards(tmp_path: Path) -> None:
    """As models were stored before safetensors, and as many of a hub still are."""
    state = dict(build("mixtral").state_dict())
    names = sorted(state)
    weights = {}
    for number in range(3):
        file = f"pytorch_model-{number + 1:05d}-of-00003.bin"
        torch.save({n: state[n] for n in names[number::3]}, tmp_path / file)
        weights |= dict.fromkeys(names[number::3], file)
    index = {"metadata": {"total_size": 1}, "weight_map": weights}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    check(open_reader(tmp_path), state)
