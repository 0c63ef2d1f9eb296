"""Optimizers offloaded to the host (torchao's CPUOffloadOptimizer).

torchao's ``CPUOffloadOptimizer`` has a copy of each parameter in page-locked memory, its master,
and an optimizer of torch's for each of them. A step changes masters and state on the host, then
copies the masters to the device on a stream of its own; what is small has an optimizer there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Self

import torch
from torch.optim import Optimizer

HOSTED = "param_d2h_map"
"""Attribute of an optimizer that keeps its masters on the host."""
_VIEW = "_ckptd_hosted"
"""Where a wrapper keeps its view: kept elsewhere, each would keep the other for ever."""


class HostedOptimizer(Optimizer):
    """The optimizers inside a wrapper, as one with the state of all of them.

    Parameters
    ----------
    masters
        The host's copy by parameter of the device.
    optimizers
        Those that step: on masters, and on parameters of the device that have none.

    Attributes
    ----------
    optimizers
        As given.
    """

    def __init__(self, masters: Mapping[Any, Any], optimizers: Iterable[Optimizer]) -> None:
        # Not torch's own: there is nothing to step, and nothing to hook.
        self._look(masters, optimizers)
        self.defaults = self.optimizers[0].defaults

    def _look(self, masters: Mapping[Any, Any], optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self._masters = masters
        self._groups = len(self.param_groups)
        self._owned = {id(master): parameter for parameter, master in masters.items()}
        self.state: Any = _States(self.optimizers)

    @classmethod
    def of(cls, wrapper: object) -> Self | None:
        """Return the view of a wrapper that is one, always the same; None where it is none.

        Groups that were added since it was asked for last are in it.
        """
        known = getattr(wrapper, "__dict__", {})
        masters, by_parameter = known.get(HOSTED), known.get("optim_dict")
        if not isinstance(masters, Mapping) or not isinstance(by_parameter, Mapping):
            return None
        on_device = known.get("d_opt")
        optimizers = [*by_parameter.values(), *([] if on_device is None else [on_device])]
        if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
            return None
        view: Self | None = known.get(_VIEW)
        if view is None:
            known[_VIEW] = view = cls(masters, optimizers)
        elif view._groups != sum(len(optimizer.param_groups) for optimizer in optimizers):
            view._look(masters, optimizers)
        return view

    @property
    def kind(self) -> type[Optimizer]:
        """The class of the optimizers inside."""
        return type(self.optimizers[0])

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, with masters for parameters."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def owned(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter of the device that a parameter of the groups is, or represents."""
        found: torch.Tensor = self._owned.get(id(parameter), parameter)
        return found

    @torch.no_grad()
    def take(self, master: torch.Tensor) -> None:
        """Copy a parameter to its master: else the next step would restore the old values."""
        parameter = self.owned(master)
        if parameter is not master:
            master.copy_(parameter)


class _States(MutableMapping[torch.Tensor, Any]):
    """The state of several optimizers, by parameter of their groups.

    Each optimizer is asked again: a load of its own puts another dictionary into its place.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._of = {
            parameter: optimizer
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        return self._of[parameter].state[parameter]

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Make no entry, as the optimizers' own dictionaries would."""
        return self._of[parameter].state.get(parameter, default)

    def pop(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Take an entry out, if it is there."""
        return self._of[parameter].state.pop(parameter, default)

    def __setitem__(self, parameter: torch.Tensor, entry: Any) -> None:
        self._of[parameter].state[parameter] = entry

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._of[parameter].state[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter, owner in self._of.items() if parameter in owner.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)
