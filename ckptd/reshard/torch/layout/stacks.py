"""Stacked experts (mixture of experts) of transformers 5, loaded from single ones; the families.

In it: table of model families and their names of experts, gate and router.

The classes of the experts' modules say which families these are, so that nothing is guessed from
shapes: two stacks of one shape may have gate and up the other way round. What the two layouts that
are made here do not name has the same name in files as in the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckptd.base.grouping import by_key
from ckptd.checkpoint.torch.state.leaves import Leaves
from ckptd.lay.bind import bind_stored
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax import parse
from ckptd.reshard.layouts import LayoutProgram
from ckptd.reshard.torch.layout.binder import JobLayout
from ckptd.reshard.torch.layout.program import Spelling


@dataclass(frozen=True)
class ExpertNames:
    """How a family calls experts.

    Attributes
    ----------
    live, file
        The block above the experts, in the model and in files.
    inner, down
        One expert's matrices in files: gate and up, and the way back.
    others
        What else the two call by different names: in the model, in files, and its dimensions.
    """

    live: str = "mlp"
    file: str = "mlp"
    inner: str = "{gate,up}_proj"
    down: str = "down_proj"
    others: tuple[tuple[str, str, str], ...] = ()


_GATE = ("gate.weight", "gate.weight", "router[e h]")
_QWEN = ExpertNames()
_MIXTRAL = ExpertNames(file="block_sparse_moe", inner="{w1,w3}", down="w2", others=(_GATE,))

FAMILIES: Mapping[str, ExpertNames] = {
    "afmoe": _QWEN,
    "cohere2_moe": _QWEN,
    "deepseek_v2": _QWEN,
    "deepseek_v3": _QWEN,
    "dots1": _QWEN,
    "ernie4_5_moe": ExpertNames(
        others=(
            (
                "gate.moe_statics.e_score_correction_bias",
                "moe_statics.e_score_correction_bias",
                "bias[1 e]",
            ),
        )
    ),
    "exaone_moe": ExpertNames(
        others=(("gate.e_score_correction_bias", "e_score_correction_bias", "bias[e]"),)
    ),
    "flex_olmo": _QWEN,
    "glm4_moe": _QWEN,
    "glm4_moe_lite": _QWEN,
    "hunyuan_v1_moe": _QWEN,
    "jamba": ExpertNames("feed_forward", "feed_forward"),
    "lfm2_moe": ExpertNames("feed_forward", "feed_forward", "{w1,w3}", "w2"),
    "minimax": _MIXTRAL,
    "minimax_m2": ExpertNames(
        file="block_sparse_moe",
        inner="{w1,w3}",
        down="w2",
        others=(_GATE, ("e_score_correction_bias", "e_score_correction_bias", "bias[e]")),
    ),
    "mixtral": _MIXTRAL,
    "olmoe": _QWEN,
    "phimoe": ExpertNames(
        file="block_sparse_moe",
        inner="{w1,w3}",
        down="w2",
        others=(("router.weight", "gate.weight", "router[e h]"),),
    ),
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "qwen3_next": _QWEN,
    "solar_open": _QWEN,
}
"""By the package of transformers that the class of the experts is in."""

_MODELS = "transformers.models."
_INNER, _DOWN = "gate_up_proj", "down_proj"
_LIVE, _FILE = "live", "files"
_PLAIN = re.compile(r"[A-Za-z_0-9.]+")
_NUMBERED = re.compile(r"((?:.*\.)?)([0-9]+)")


@dataclass(frozen=True)
class _Block:
    """A module with experts: their names in its family, and its name in the state and in files."""

    stack: ExpertNames
    live: str
    file: str

    def alike(self) -> tuple[ExpertNames, str, str]:
        """Return the same for the blocks of all layers."""
        found = _NUMBERED.fullmatch(self.live)
        if found is None:
            return self.stack, self.live, self.file
        return self.stack, f"{found[1]}{{l}}", f"{self.file.removesuffix(found[2])}{{l}}"

    @property
    def number(self) -> str:
        """The layer."""
        return self.live.rpartition(".")[2]

    def names(self) -> Iterator[str]:
        """Yield the names in the state that files have otherwise."""
        block = f"{self.live}.{self.stack.live}"
        yield f"{block}.experts.{_INNER}"
        yield f"{block}.experts.{_DOWN}"
        yield from (f"{block}.{live}" for live, _, _ in self.stack.others)


def stacked(
    state: Mapping[str, Any], leaves: Leaves, saved: Collection[str]
) -> tuple[JobLayout, LayoutProgram] | None:
    """Return layouts of a state's stacks of experts, and of a checkpoint's single ones.

    None where no section, or more than one, has a stack of a known family that the checkpoint has
    as single experts.

    Parameters
    ----------
    state, leaves
        Of the job.
    saved
        The names of the checkpoint's tensors.
    """
    found = {s: [*_blocks(s, value, leaves, saved)] for s, value in state.items()}
    found = {section: blocks for section, blocks in found.items() if blocks}
    if len(found) != 1:
        return None
    ((section, blocks),) = found.items()
    spelling = Spelling(f"{section}.{{name}}")
    file = parse(_text(blocks), "experts")
    job = spelling.put_into_program(LayoutProgram(file, _LIVE))
    known = {f"{section}.{name}" for block in blocks for name in block.names()}
    shapes = {
        name: leaf.shape
        for leaf in leaves.tensors.values()
        for name in (leaf.name, *leaf.aliases)
        if name in known
    }
    bound = bind_stored(job.resolve(), shapes)
    return JobLayout(job, StoredForm(bound), spelling, 0), LayoutProgram(file, _FILE)


def _blocks(
    section: str, value: object, leaves: Leaves, saved: Collection[str]
) -> Iterator[_Block]:
    """Yield the blocks of experts of known families that the checkpoint has one by one."""
    names = {id(leaf.origin): name for name, leaf in leaves.tensors.items()}
    for module in value.modules() if isinstance(value, nn.Module) else ():
        stack, stacks = _family(module), module._parameters.get(_INNER)
        if stack is None or stacks is None:
            continue
        name = names.get(id(stacks), "").removeprefix(f"{section}.")
        end = f".{stack.live}.experts.{_INNER}"
        block = name.removesuffix(end)
        for file in (block, f"{section}.{block}"):
            first = f"{file}.{stack.file}.experts.0.{stack.down}.weight"
            if block != name and first in saved and _PLAIN.fullmatch(file):
                yield _Block(stack, block, file)


def _family(module: nn.Module) -> ExpertNames | None:
    """Return how the family of a module calls experts; wrappers make classes of their own."""
    for base in type(module).__mro__:
        if base.__module__.startswith(_MODELS):
            return FAMILIES.get(base.__module__.removeprefix(_MODELS).partition(".")[0])
    return None


def _text(blocks: Iterable[_Block]) -> str:
    """Return a program of two layouts: the state's, and the checkpoint's."""
    groups = by_key((block.alike(), block) for block in blocks)
    space: list[str] = []
    live: list[str] = []
    file: list[str] = []
    for number, ((stack, name, other), found) in enumerate(groups.items()):
        layers = "{l}" in name
        only = ""
        if layers:
            numbers = sorted(int(b.number) for b in found)
            only = f" for l=[{' '.join(map(str, numbers))}]"
            space.append(_axes(f"let l = {numbers[-1] + 1}", number))
        root = f"G{number}.L{{l}}" if layers else f"G{number}"
        ours, theirs = f"{name}.{stack.live}", f"{other}.{stack.file}"
        tensors = [f"{root}.X{{e}}.g[f h]", f"{root}.X{{e}}.u[f h]", f"{root}.X{{e}}.d[h f]"]
        rules = [
            f"{ours}.experts.{_INNER} = {root}.X[e (g:f|u:f) h]",
            f"{ours}.experts.{_DOWN} = {root}.X.d[e h f]",
        ]
        single = f"{theirs}.experts.{{e}}."
        others = [
            f"{single}{stack.inner}.weight = {root}.X{{e}}.{{g,u}}[f h]",
            f"{single}{stack.down}.weight = {root}.X{{e}}.d[h f]",
        ]
        for mine, its, dims in stack.others:
            tensors.append(f"{root}.{dims.replace('1 ', '')}")
            rules.append(f"{ours}.{mine} = {root}.{dims}")
            others.append(f"{theirs}.{its} = {root}.{dims}")
        space += [_axes(f"{t}{only}", number) for t in tensors]
        live += [_axes(r, number) for r in rules]
        file += [_axes(r, number) for r in others]
    bodies = {"space experts": space}
    bodies |= {f"layout {_LIVE} of experts on none": live}
    bodies |= {f"layout {_FILE} of experts on none": file}
    lines = (line for head, body in bodies.items() for line in (f"{head} {{", *body, "}"))
    return "".join(f"{line}\n" for line in lines)


def _axes(text: str, number: int) -> str:
    """Number the axes of a statement: other blocks may have other sizes."""
    if not number:
        return text
    return re.sub(r"(?<![\w.])[lefh](?![\w.:])", rf"\g<0>{number}", text)
