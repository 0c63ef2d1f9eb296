"""Gate: an optimizer's step, ``train()``, ``eval()`` wait until the snapshot is copied.

Tensors of a model and its optimizer do not change between one optimizer step and the next, so they
are copied while the next forward and backward run (lazy copies: DataStates-LLM, HPDC'24). An
optimizer that is about to step waits only while the copying is not done: this thread for what is on
the host, the current stream for what is on a device.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import chain
from types import FunctionType
from typing import Any, Protocol

import torch

from ckptd import events
from ckptd.base.runtime.ownership import OfOneProcess
from ckptd.base.torch.device import is_capturing
from ckptd.checkpoint.save.arena import MOST_SLOTS
from ckptd.checkpoint.torch.state.hosted import HostedOptimizer
from ckptd.checkpoint.torch.state.leaves import TensorLeaf
from ckptd.errors import SaveError
from ckptd.events.bus import phase

_log = logging.getLogger("ckptd")
_HOOKED = "_ckptd_hooked"


class GatedCopies(Protocol):
    """The copies of a snapshot, where a device carries some of them out."""

    def order(self, timeout_s: float) -> bool:
        """Make the current streams wait for the copies; see `Snapshot.order`."""

    def before_captured(self) -> None:
        """Look at what has changed; see `Snapshot.before_captured`."""

    def after_captured(self) -> None:
        """Disregard what was counted since; see `Snapshot.after_captured`."""

    @property
    def stuck(self) -> bool:
        """Whether copies are under way though the copying was given up."""


class Gate(OfOneProcess):
    """Closed while a snapshot is being copied.

    Parameters
    ----------
    timeout_s
        Longest time that a mutation is held back, in seconds. Then the save is given up and
        training goes on: a copy that hangs must not hang the job.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._copy: Future[None] | None = None
        self._hung: Future[None] | None = None
        self._on_device: GatedCopies | None = None
        self._earlier: deque[GatedCopies] = deque(maxlen=MOST_SLOTS)
        self._give_up: Callable[[str], None] | None = None
        self._scope = events.current()
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[_Removable]] = (
            weakref.WeakKeyDictionary()
        )

    inert = frozenset({"wait", "settle", "leave", "release"})

    def _leave_to_parent(self) -> None:
        """Hold nothing back in a child: what its parent copies is not its memory."""
        super()._leave_to_parent()
        self._on_device = None  # hooks that are in its optimizers look at this

    def guard(self, optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[TensorLeaf], bool]:
        """Make the steps of `optimizers` wait here, from now on, and their changes of mode.

        ``train()`` and ``eval()`` of an optimizer rewrite parameters where it has them.

        Returns
        -------
        callable
            Tells of a leaf whether it is mutated by these alone: their state, and the parameters
            in their groups.
        """
        held: set[int] = set()
        hooks: dict[torch.optim.Optimizer, Callable[..., None]] = {}
        for optimizer in optimizers:
            groups = optimizer.param_groups
            parameters: Iterable[torch.Tensor] = (p for g in groups for p in g["params"])
            if isinstance(optimizer, HostedOptimizer):
                # It writes to the device on streams of its own, which no order here holds up.
                hooks.update(dict.fromkeys(optimizer.optimizers, lambda *_: self.settle()))
                parameters = map(optimizer.owned, parameters)
            else:
                hooks[optimizer] = self._before_step
            held.update(map(id, parameters))
        if not all(hasattr(o, "_optimizer_step_pre_hooks") for o in hooks):
            # One that never called torch's __init__ has no hooks: nothing would make it wait.
            return lambda leaf: False
        for optimizer, hook in hooks.items():
            if optimizer not in self._hooks:
                self._hooks[optimizer] = [
                    optimizer.register_step_pre_hook(hook),
                    optimizer.register_step_post_hook(self._after_step),
                    _Modes(optimizer, hook, self._after_step),
                ]
        return lambda leaf: (
            leaf.kind == "optim" or (leaf.kind == "param" and id(leaf.origin) in held)
        )

    def _before_step(self, *_: Any) -> None:
        if (copies := self._on_device) is not None and is_capturing():
            copies.before_captured()
        else:
            self.wait()

    def _after_step(self, *_: Any) -> None:
        if (copies := self._on_device) is not None and is_capturing():
            copies.after_captured()

    def close(
        self,
        copy: Future[None],
        give_up: Callable[[str], None],
        on_device: GatedCopies | None = None,
    ) -> None:
        """Hold mutations back until `copy` is done; `give_up` is called if it is never.

        Parameters
        ----------
        on_device
            Lets the current stream wait in the host's place.
        """
        if self._on_device is not None:
            self._earlier.append(self._on_device)
        self._copy, self._give_up, self._on_device = copy, give_up, on_device
        self._scope = events.current()

    def close_behind(self, copier: Executor) -> None:
        """Hold mutations back until a copier of one thread is through what it was given.

        A call that is left may have given it a copy that nothing waits for yet.
        """
        self.close(copier.submit(lambda: None), lambda _: None)

    def wait(self) -> None:
        """Return when everything may change. Never raises: what failed is in the save's handle.

        What is copied from a device may be changed by what the current stream of that device
        does after this; the host goes on. Inside the capture of a graph this does nothing: what
        is captured changes nothing before a replay, which has a wait of its own before it.
        """
        if self._on_device is not None and is_capturing():
            return  # the wait would be captured, or break the capture
        if self._on_device is None or self._copy is None or self._copy.done():
            self.settle()
            return
        with self._wait_span():
            ordered = self._on_device.order(self._timeout_s)
        if not ordered:
            self._abandon(self._copy)

    def settle(self) -> None:
        """Return when everything is copied. Never raises."""
        copy = self._copy
        if copy is None:
            return
        try:
            with self._wait_span(), phase("ckpt"):
                copy.exception(self._timeout_s)
        except TimeoutError:
            self._abandon(copy)
            return
        if self._on_device is not None:
            self._earlier.append(self._on_device)
        self._copy = self._give_up = self._on_device = None

    def _abandon(self, copy: Future[None]) -> None:
        if self._give_up is not None:
            self._give_up(f"copying the state took longer than {self._timeout_s:.0f} s")
        self._hung = copy
        _log.error("copying the state hangs; that save is given up and training goes on")
        self._copy = self._give_up = self._on_device = None

    def _wait_span(self) -> AbstractContextManager[object]:
        """Measure how long the training loop waits; within a save it is the call that waits."""
        if events.current().save is not None:
            return nullcontext()
        return events.span("gate_wait", save=self._scope.save, tier=self._scope.tier)

    def check(self) -> None:
        """Wait, and raise where a copy hangs: it could still write into what a save would use.

        Raises
        ------
        SaveError
            The previous save still holds the memory.
        """
        self.wait()
        hung = self._hung is not None and not self._hung.done()
        if hung or any(snapshot.stuck for snapshot in self._earlier):
            raise SaveError(
                "the copying of an earlier save still hangs",
                hint="create a new Checkpointer, or restart the job",
            )

    def leave(self, timeout_s: float) -> None:
        """Remove the hooks of the optimizers; wait so long for a copy under way, in seconds."""
        copy, self._copy = self._copy, None
        if copy is not None:
            wait([copy], timeout_s)
        self._unhook()

    def release(self) -> None:
        """Wait until everything is copied, and remove the hooks of the optimizers."""
        self.settle()
        self._unhook()

    def _unhook(self) -> None:
        for hook in chain.from_iterable(self._hooks.values()):
            hook.remove()
        self._hooks.clear()


class _Removable(Protocol):
    def remove(self) -> None:
        """Call the hook no more."""


class _Modes:
    """Hooks of ``train()`` and ``eval()`` of one optimizer, for which torch has none.

    Its class calls them, as it does those of steps: a copy of an optimizer takes none with it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[..., None],
        after: Callable[..., None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._before, self._after = before, after
        for name in ("train", "eval"):
            owner = next((k for k in type(optimizer).__mro__ if name in vars(k)), object)
            method = vars(owner).get(name)
            # An optimizer may be a module as well, whose modes are another thing.
            own = issubclass(owner, torch.optim.Optimizer) and not hasattr(method, _HOOKED)
            if own and isinstance(method, FunctionType):
                setattr(owner, name, self._hooked(method))
        _modes.setdefault(optimizer, []).append(self)

    @staticmethod
    def _hooked(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def hooked(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            hooks = [*_modes.get(optimizer, ())]
            for hook in hooks:
                hook._before(optimizer)
            try:
                return method(optimizer, *args, **kwargs)
            finally:
                for hook in hooks:
                    hook._after(optimizer)

        setattr(hooked, _HOOKED, True)
        return hooked

    def remove(self) -> None:
        """Call the hooks no more."""
        if (optimizer := self._optimizer()) is not None and self in _modes.get(optimizer, ()):
            _modes[optimizer].remove(self)


_modes: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[_Modes]] = weakref.WeakKeyDictionary()
