"""Phases that PyTorch itself goes through: they are marked without a word from the program."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from ckptd.monitor.ring import RingWriter
from ckptd.monitor.view import Phase

__all__ = ["CheckpointPhase", "CompilePhase"]


class CompilePhase:
    """Marks the phase COMPILE while PyTorch compiles, once its compiler has been imported."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._handler: Any = None
        self._before = Phase.TRAIN

    def install(self) -> None:
        """Register; again after `torch.compiler.reset`, which forgets whoever listened."""
        module = sys.modules.get("torch._dynamo.callback")
        handler = getattr(module, "callback_handler", None)
        if handler is not None and self._started not in handler.start_callbacks:
            self._handler = handler
            handler.register_start_callback(self._started)
            handler.register_end_callback(self._ended)

    def remove(self) -> None:
        """Listen no more; harmless again."""
        handler, self._handler = self._handler, None
        if handler is not None and self._started in handler.start_callbacks:
            handler.remove_start_callback(self._started)
            handler.remove_end_callback(self._ended)

    def _started(self, _: object) -> None:
        if self._handler is not None and self._ring.phase is not Phase.COMPILE:
            self._before, self._ring.phase = self._ring.phase, Phase.COMPILE

    def _ended(self, _: object) -> None:
        if self._handler is not None and self._ring.phase is Phase.COMPILE:
            self._ring.phase = self._before


class CheckpointPhase:
    """Marks the phase CKPT while the main thread saves or loads by `torch.distributed.checkpoint`.

    Every step of a save or load (to plan, to write, to read, to agree) goes through one class, so
    that it makes no difference where a program has its functions from. A save in another thread is
    none of this: the main thread trains meanwhile.
    """

    _STEPS = ("reduce_scatter", "all_reduce", "all_gather")

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._wrapped: Any = None
        self._before: dict[str, Any] = {}

    def install(self) -> None:
        """Wrap that class, once it has been imported."""
        if self._wrapped is not None:
            return
        module = sys.modules.get("torch.distributed.checkpoint.utils")
        wrapped = getattr(module, "_DistWrapper", None)
        if wrapped is not None and all(hasattr(wrapped, name) for name in self._STEPS):
            self._wrapped = wrapped
            for name in self._STEPS:
                self._before[name] = getattr(wrapped, name)
                setattr(wrapped, name, self._marked(self._before[name]))

    def remove(self) -> None:
        """Leave the class as it was found; harmless again."""
        wrapped, self._wrapped = self._wrapped, None
        if wrapped is not None:
            for name, before in self._before.items():
                setattr(wrapped, name, before)

    def _marked(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def marked(*args: Any, **more: Any) -> Any:
            main = threading.current_thread() is threading.main_thread()
            if not main or self._wrapped is None:
                return step(*args, **more)
            before, self._ring.phase = self._ring.phase, Phase.CKPT
            try:
                return step(*args, **more)
            finally:
                self._ring.phase = before

        return marked
