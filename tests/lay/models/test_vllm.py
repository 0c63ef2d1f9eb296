"""Shipped layouts and what vLLM's own loaders make of a checkpoint: names, shapes, each element.

``vllm.json`` was recorded from vLLM by ``make_vllm.py``. Every element of its checkpoints has
its number as value, and digests are of these.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckptd.lay.bind import bind_sizes, bind_stored
from ckptd.lay.resolve import resolve
from ckptd.lay.syntax import parse
from ckptd_vllm.layouts import rollout_layout
from tests.lay.agreement.brute import Brute, Numbering

MODELS: dict[str, Any] = json.loads(Path(__file__).with_name("vllm.json").read_text())["models"]


@pytest.mark.parametrize("case", MODELS)
def test_each_rank_holds_what_the_loader_puts_there(case: str) -> None:
    """Names as well: no tensor of the rank is without a rule, and no rule without a tensor."""
    found_config, shapes = MODELS[case]["config"], MODELS[case]["shapes"]
    kind, world = found_config["model_type"], len(MODELS[case]["ranks"])
    config = SimpleNamespace(**found_config)
    program = rollout_layout(f"vllm.{kind}", config, world, experts=MODELS[case]["experts"])
    given = {n: tuple(s) for n, s in shapes.items()}
    held_by_ranks = resolve([parse(program, "t.lay")], "ranks")
    lets = "".join(f"{line}\n" for line in program.splitlines() if line.startswith("let "))
    stored = bind_stored(resolve([parse(lets, "t.lay")], f"hf.{kind}"), given)
    held = bind_sizes(held_by_ranks, stored.sizes)
    numbering = Numbering.of(stored, held)
    whole = {
        n: c for n, (s, c) in Brute(stored, numbering).stored().items() if n in shapes and not s
    }
    values = np.full(numbering.total, np.nan, np.float32)
    at = 0
    for name in sorted(shapes):
        cells = whole[name]
        values[cells] = np.arange(at, at + cells.size, dtype=np.float32).reshape(cells.shape)
        at += cells.size
    for rank, wanted in enumerate(MODELS[case]["ranks"]):
        local = Brute(held, numbering).local(rank)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        found = {n: c for n, (s, c) in local.items() if not s and n not in tied}
        assert {n: list(c.shape) for n, c in found.items()} == {
            n: s for n, (s, _) in wanted.items()
        }
        for name, cells in found.items():
            data = np.where(cells < 0, np.float32(0), values[cells])
            digest = hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()[:16]
            assert digest == wanted[name][1], name
