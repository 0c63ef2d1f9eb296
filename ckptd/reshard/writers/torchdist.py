"""Writes Megatron-core's torch_dist: DCP folder, common state, ``metadata.json``, extra states.

Tensors have the names of the target's layout; ``megatron.dist`` has those of Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ckptd.reshard.target import Assembled
from ckptd.reshard.verify import Expected
from ckptd.reshard.writers.dcp import COMMON, MARK, DcpPlace
from ckptd.reshard.writers.states import KeyPath, StateObjects, nested, objects_of, plain_names
from ckptd.reshard.writers.torchzip import torch_file

_ABOUT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_DEFAULTS = {"checkpoint_version": 3.0}
"""Below 2, Megatron would put queries, keys and values in another order."""
_STATES = "optimizer.state."
_OPTIMIZER = "fully_reshardable"
_STACKED = re.compile(r"(?:.*\.)?layers\.(?![0-9])")
_NO_EXTRA = re.compile(r".*\.(?:experts|router)\b.*")


class TorchDistPlace(DcpPlace):
    """All of a target: tensors as DCP has them, objects in the common state.

    Parameters
    ----------
    assembled, expected
        What is written, and what the source's witness wants to see.

    Raises
    ------
    UsageError
        Two values of the state would have the same name.
    """

    def __init__(self, assembled: Assembled, expected: Mapping[int, Expected]) -> None:
        layout = assembled.composed.composition.target.bound.layout
        found = objects_of(assembled, layout.state_names)
        extra = dict(_extra_states(assembled))
        objects = StateObjects(extra, found.left_out, found.simplified)
        super().__init__(assembled, expected, objects, keys=False)
        common: dict[str, Any] = {
            **_DEFAULTS,
            "iteration": assembled.composed.stock.step,
            **nested(found.values),
        }
        states = any(link.key[2] for link in assembled.composed.links)
        if states and _STATES in layout.state_names:
            kind = {"distrib_optim_sharding_type": _OPTIMIZER}
            common.setdefault("content_metadata", kind)
        self._common = torch_file(common)

    def is_mine(self, name: str, beside: Collection[str]) -> bool:
        """Tell whether a file is of such a folder."""
        return name in (MARK, COMMON) or super().is_mine(name, beside)

    def last(self) -> Sequence[tuple[str, bytes]]:
        """Return the common state and what says that it is Megatron's, before the metadata."""
        *files, metadata = super().last()
        about = msgspec.json.encode(_ABOUT)
        return [*files, (COMMON, self._common), (MARK, about), metadata]


def _extra_states(assembled: Assembled) -> Iterator[tuple[KeyPath, Any]]:
    """Yield an empty extra state of each module, which Megatron asks for even where there is none.

    Those of layers that are stacked are one a layer.
    """
    modules: dict[str, int] = {}
    plain = plain_names(assembled)
    for link in assembled.composed.links:
        name = plain(link.tensor.name)
        module = name.rpartition(".")[0]
        if link.key[2] or not module or _NO_EXTRA.fullmatch(name):
            continue
        modules[module] = link.tensor.shape[0] if _STACKED.match(name) else 1
        if module.endswith(".self_attention.linear_proj"):
            modules[module.replace(".linear_proj", ".core_attention")] = modules[module]
    for module, count in modules.items():
        for number in range(count):
            yield (f"{module}._extra_state/shard_{number}_{count}",), [None]
