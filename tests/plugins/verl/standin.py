"""verl's own classes, or where verl is not installed what stands for the two that a plugin meets.

The stand-in asks for the same methods, with the same arguments, as verl 0.9.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

__all__ = ["base_module"]

_BASE = "verl.checkpoint_engine.base"


def base_module() -> Any:
    """Return verl's module with `CheckpointEngine` and its registry, importable from now on."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of verl's imports; errors in tests
            return importlib.import_module(_BASE)
    except ModuleNotFoundError:
        pass
    for name in ("verl", "verl.checkpoint_engine"):
        sys.modules[name] = ModuleType(name)
    module: Any = ModuleType(_BASE)
    module.CheckpointEngine, module.CheckpointEngineRegistry = _Engine, _Registry
    sys.modules[_BASE] = module
    return module


class _Engine(ABC):
    """What verl calls on actors and rollouts."""

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class _Registry:
    """Engines by name."""

    engines: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def register(backend: str) -> Callable[[Any], Any]:
        """Give an engine a name."""

        def keep(engine: Any) -> Any:
            _Registry.engines[backend] = engine
            return engine

        return keep

    @classmethod
    def get(cls, backend: str) -> Any:
        """Return the engine of a name."""
        return cls.engines[backend]

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        """Make the engine of a name."""
        return cls.engines[backend](*args, **kwargs)
