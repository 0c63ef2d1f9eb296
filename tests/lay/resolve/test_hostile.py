"""Programs that are short and would take for ever: looked up once, or refused."""

from __future__ import annotations

import pytest

from ckptd.errors import CkptdError
from ckptd.lay.bind import bind_stored
from ckptd.lay.resolve import drafts as resolve_draft
from ckptd.lay.resolve import is_recipe, resolve
from ckptd.lay.resolve.sources import ProgramSource
from ckptd.lay.syntax import load, parse
from ckptd.lay.syntax.tree import File, Layout, Use


def uses(depth: int, times: int) -> str:
    """Each layout uses the next one several times."""
    text = "space s { A[x] }\n"
    for i in range(depth):
        text += f"layout l{i} of s on none {{ {f'use l{i + 1}; ' * times}}}\n"
    return f"{text}layout l{depth} of s on none {{ a = A[x] }}\n"


def pairs(depth: int) -> str:
    """Each of two layouts uses both of the next two."""
    text = "space s { A[x] }\n"
    for i in range(depth):
        for c in "ab":
            text += f"layout {c}{i} of s on none {{ use a{i + 1}; use b{i + 1} }}\n"
    return text + "".join(f"layout {c}{depth} of s on none {{ {c} = A[x] }}\n" for c in "ab")


@pytest.mark.parametrize("text", [uses(14, 2), uses(14, 30), pairs(14)])
def test_a_layout_is_looked_up_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    real = resolve_draft._drafted

    def counting(*args: object) -> resolve_draft.Drafts:
        nonlocal asked
        asked += 1
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(resolve_draft, "_drafted", counting)
    file = parse(text)
    first = "a0" if "layout a0" in text else "l0"
    assert resolve([file], first).equations
    assert asked <= len(file.items)


def recipes(depth: int, times: int) -> str:
    """Each recipe uses the next one several times; the last one is empty."""
    text = "space s { A[x] }\n"
    for i in range(depth):
        text += f"layout l{i} on none {{ {f'use l{i + 1}; ' * times}}}\n"
    text += f"layout l{depth} on none {{ }}\n"
    return text + "layout x of s on none { a = A[x]; use l0; use l0 }\n"


@pytest.mark.parametrize("text", [recipes(14, 2), recipes(40, 2), recipes(14, 30)])
def test_a_recipe_is_looked_up_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    real = ProgramSource._layout

    def counting(*args: object) -> tuple[Layout, File]:
        nonlocal asked
        asked += 1
        # Else a failure would take for ever.
        assert asked <= len(file.items)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(ProgramSource, "_layout", counting)
    file = parse(text)
    assert [e.text for e in resolve([file], "x").equations] == ["a = A[x]"]
    found = {i.name: i for i in file.items if isinstance(i, Layout)}
    asked = 0

    def find(use: Use) -> Layout:
        nonlocal asked
        asked += 1
        assert asked <= len(file.items)
        return found[use.name]

    assert is_recipe(found["l0"], find)
    assert not is_recipe(found["x"], find)


def multiplied(depth: int, times: int) -> str:
    """Each layout overrides each rule of the next one for some numbers, several times."""
    text = "space s { L{l}.A[x] }\n"
    for i in range(depth):
        rules = "".join(f"  **.{{l}} = A[_] for l={k}..\n" for k in range(times))
        text += f"layout l{i} on none {{\n{rules}  use l{i + 1}\n}}\n"
    return f"{text}layout l{depth} of s on none {{ w.{{l}} = A[x] }}\n"


def many(count: int, rule: str) -> str:
    rules = "".join(f"  {rule.replace('N', str(i))}\n" for i in range(count))
    return f"space s {{ A[x] }}\nlayout l0 of s on none {{\n  a = A[x]\n{rules}}}\n"


def sums(count: int) -> str:
    both = " ".join(f"(p{i}:x|q{i}:x)" for i in range(11)) + " x" * count
    return f"space s {{ A[x] }}\nlayout l0 of s on none {{ a = A[{both}] }}\n"


@pytest.mark.parametrize(
    "text",
    [
        *(multiplied(14, 6), many(4000, "bN = alias A"), many(20_000, "bN = A[x]"), sums(3000)),
        *(recipes(100, 1), recipes(1, 5000), recipes(14, 2).replace("{ }", "{ default [_] }")),
    ],
    ids=["multiplied", "aliases", "rules", "sums", "deep recipes", "wide recipes", "recipes"],
)
def test_what_would_take_for_ever_is_refused(text: str) -> None:
    with pytest.raises(CkptdError) as caught:
        resolve([parse(text)], "x" if "layout x" in text else "l0")
    assert caught.value.kind == "lay-rule"


# --- the order of Megatron ----------------------------------------------------------------------

RECORDED = [
    "embedding.word_embeddings.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
]
"""named_parameters() of GPTModel, megatron-core 0.16.1, with layers of Transformer Engine."""
EXPERTS = [
    "embedding.word_embeddings.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.pre_mlp_layernorm.weight",
    "decoder.layers.0.mlp.router.weight",
    "decoder.layers.0.mlp.experts.linear_fc1.weight0",
    "decoder.layers.0.mlp.experts.linear_fc1.weight1",
    "decoder.layers.0.mlp.experts.linear_fc2.weight0",
    "decoder.layers.0.mlp.experts.linear_fc2.weight1",
]
LAST = ["decoder.final_layernorm.weight", "output_layer.weight"]
H, F, V = 8, 12, 128


def shapes_of(names: list[str]) -> dict[str, tuple[int, ...]]:
    by_end = {
        "word_embeddings.weight": (V, H),
        "output_layer.weight": (V, H),
        "linear_proj.weight": (H, H),
        "linear_qkv.weight": (2 * H, H),
        "router.weight": (2, H),
        "linear_fc1.weight": (2 * F, H),
        "linear_fc2.weight": (H, F),
    }
    out: dict[str, tuple[int, ...]] = {}
    for name in names:
        plain = name.rstrip("01")
        out[name] = next((s for end, s in by_end.items() if plain.endswith(end)), (H,))
    return out


@pytest.mark.parametrize(
    ("layout", "layer"), [("megatron.gpt", RECORDED), ("megatron.moe", EXPERTS)]
)
def test_modules_are_in_the_order_of_megatron(layout: str, layer: list[str]) -> None:
    from ckptd.lay.stored import StoredForm

    second = [n.replace("layers.0.", "layers.1.") for n in layer[1:]]
    names = [*layer, *second, *LAST]
    sizes = {"v": V, "kv": 2, "rep": 2}
    bound = bind_stored(resolve([load(layout)], layout), shapes_of(names), sizes)
    form = StoredForm(bound)
    found = [form.rules[r].local_name(at) for r, at in form.packing.on_rank(0)]
    assert found == names


@pytest.mark.plugins
def test_the_order_is_that_of_the_package() -> None:
    """Megatron-core's own model says it, without Transformer Engine."""
    import subprocess
    import sys

    code = """
import os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
import torch
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
parallel_state.initialize_model_parallel(1, 1)
for experts in (None, 2):
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=12, use_cpu_initialization=True, gated_linear_unit=True,
        add_bias_linear=False, num_moe_experts=experts,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(experts), vocab_size=128, max_sequence_length=16,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )
    for name, _ in model.named_parameters():
        print("NAME", experts, name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("NAME")]
    for experts, layer in (("None", RECORDED), ("2", EXPERTS)):
        real = [n for e, n in lines if e == experts and "norm" not in n and not n.endswith("bias")]
        # Without Transformer Engine norms stand apart, and experts are modules of their own.
        real = [n for n in real if "local_experts" not in n]
        second = [n.replace("layers.0.", "layers.1.") for n in layer[1:]]
        names = [*layer, *second, *LAST]
        assert real == [n for n in names if "norm" not in n and "experts" not in n]
