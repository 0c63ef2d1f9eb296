"""A small GPT over bytes, written so that tensor parallelism and FSDP2 can cut it, and the cuts.

Dropout is off: the loss of a step is then a function of weights and samples alone, and runs on
different layouts can be compared step by step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from ckptd_demo.spec import Cut, GptShape

__all__ = ["Gpt", "build", "cut_model"]

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention.

    The rows of `qkv` are ordered head by head, and in a head q, k, v. A tensor-parallel rank, which
    gets consecutive rows, then has whole heads.
    """

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, seq, width)`` to the same shape."""
        batch, seq, _ = x.shape
        # The number of heads is read off the result: with tensor parallelism it is this rank's.
        heads = self.qkv(x).view(batch, seq, -1, 3, self.head_width)
        q, k, v = heads.permute(3, 0, 2, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, -1))
        return projected


class Mlp(nn.Module):
    """Two layers with a GELU between them."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, seq, width)`` to the same shape."""
        y: Tensor = self.down(functional.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, seq, width)`` to the same shape."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Gpt(nn.Module):
    """Decoder-only language model over bytes."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.place = nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, samples: Tensor) -> Tensor:
        """Return the loss, summed over all targets, of samples ``(batch, seq + 1)``.

        A sum, because a mean over this rank's tokens would weigh them by its share of the batch.
        """
        inputs, targets = samples[:, :-1], samples[:, 1:]
        x = self.token(inputs) + self.place(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def build(shape: GptShape, seed: int) -> Gpt:
    """Return the model with initial weights that depend on `shape` and `seed` only.

    Every rank builds the whole model and keeps its part, so that no layout starts from others.
    """
    generator = torch.Generator().manual_seed(seed)
    model = Gpt(shape)
    residual = 0.02 / (2 * shape.layers) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                std = residual if into_residual else 0.02
                parameter.normal_(0.0, std, generator=generator)
    return model


def cut_model(model: Gpt, cut: Cut) -> DeviceMesh:
    """Cut `model` in place and return the mesh of its data-parallel ranks.

    With `tp` above 1, linear layers and the byte embedding are cut over it; norms and the position
    embedding are whole on each tensor-parallel rank, as usual without sequence parallelism.
    """
    if cut.tp > 1:
        mesh = init_device_mesh("cpu", (cut.dp, cut.tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], _tensor_parallel_plan())
        data_mesh = mesh["dp"]
    else:
        data_mesh = init_device_mesh("cpu", (cut.dp,), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    return data_mesh


def _tensor_parallel_plan() -> dict[str, ParallelStyle]:
    return {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
