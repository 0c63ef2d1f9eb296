"""`KeptGradients`: keeps a step's gradient sums when a rank is lost, so the step goes on.

In it: how many values are sampled to find a model that was changed; when sums are not usable.

A rank that is lost takes along the micro-batches that it has computed, and no others: those of the
ranks that are left are sums in their memory, of gradients that no collective has written. With
canonical sums any rank may compute a micro-batch, so the next generation hands out the
lost ones alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptd.base.runtime import launched
from ckptd.base.runtime.launched import whole
from ckptd.base.torch.device import has_streams, kind_of
from ckptd.checkpoint.data.schedule import Schedule, share
from ckptd.checkpoint.torch.data.sampler import ElasticSampler
from ckptd.checkpoint.torch.replicas import sampled_bytes
from ckptd.checkpoint.torch.state.rng import RngStreams
from ckptd.elastic.torch.hooks.canonical import CanonicalGradients, GradientSums, added
from ckptd.elastic.treesum import TreeNode, TreeSum
from ckptd.errors import UsageError

_log = logging.getLogger("ckptd.elastic")
_SAMPLED = 32
"""Parameters that are compared, spread over all: an optimizer's step changes each of them."""
_reduced: WeakSet[torch.nn.Module] = WeakSet()
"""Models of which a DDP has reduced gradients."""


@dataclass(slots=True, eq=False)
class _Step:
    """The sums of one step on this rank.

    Attributes
    ----------
    tree
        What was added. Nothing but `CanonicalGradients` writes there, so it is whole at any moment.
    schedule
        What the micro-batches are made of.
    parameters
        Samples of the bytes of the parameters for which the gradients are.
    numbers
        How many come with each micro-batch.
    """

    tree: TreeSum[GradientSums]
    schedule: Schedule
    parameters: torch.Tensor
    numbers: int


class _Pending(NamedTuple):
    """A micro-batch whose gradients a device may still compute."""

    leaf: TreeNode
    sums: GradientSums
    done: torch.Event


class KeptGradients:
    """Keeps what this rank has computed of a step, for the case that the step loses a rank.

    Made once in a process and given to `ckptd.elastic.session`::

        def train(world, config, kept):
            ...
            if checkpointer.latest() is not None:
                checkpointer.load(state)
            canonical = kept.resume(model, sampler)  # after the load, before batches are taken
            batches = iter(sampler)
            while sampler.step < config.steps:
                for index in sampler.indices:
                    ids = next(batches)
                    with ddp.no_sync(), ckptd.elastic.keyed_rng(seed, sampler.step, index):
                        loss_sum(ddp(data[ids])).backward()
                    canonical.add(index, len(ids))
                (samples,) = canonical.reduce()
                scale_gradients(model.parameters(), int(samples), averaged=False)
                ...


        session(train, config, KeptGradients())

    Parameters
    ----------
    steps
        Of how many steps sums are kept. With two, a step whose save was not safe yet when the rank
        was lost is not computed again either. Each takes the memory of the gradients, once for
        each node that the rank's run of micro-batches makes (see `CanonicalGradients`).

    Attributes
    ----------
    found
        Micro-batches of the next step that ranks had kept at the last `resume`, on all ranks
        together.
    refused
        Whether micro-batches were seen to depend on the rank that computes them: nothing is kept.

    Raises
    ------
    UsageError
        `steps` is below 1.
    """

    def __init__(self, *, steps: int = 2) -> None:
        if steps < 1:
            raise UsageError(
                "steps to keep must be at least 1", wanted="1 or more", found=str(steps)
            )
        self.found = 0
        self.refused = False
        self._most = steps
        self._steps: dict[int, _Step] = {}

    def resume(
        self,
        model: torch.nn.Module,
        sampler: ElasticSampler,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> CanonicalGradients:
        """Agree on what ranks have kept of the next step; call it on every rank, after the load.

        The sampler then gives out the micro-batches that are left of that step. What was kept of
        another step than the one after the loaded state is dropped, as is what was computed with
        other parameters than the loaded ones.

        Parameters
        ----------
        model
            Whole on each rank. Where its forward changes buffers, as that of BatchNorm does, or
            draws random numbers outside of `ckptd.elastic.keyed_rng`, a micro-batch depends on
            which rank computes it: a warning says so, and nothing is kept.
        group
            The data-parallel ranks; the default group if left out. The ranks of the job all call
            `resume`: those of a tensor-parallel group have kept what all of them have.

        Returns
        -------
        CanonicalGradients
            Of the parameters of `model`.

        Raises
        ------
        UsageError
            As of `CanonicalGradients`.
        """
        return _Resumed(self, model, sampler, group)

    # -- of one rank -------------------------------------------------------------------------------

    def step(self, consumed: int) -> _Step | None:
        """Return what this rank has kept of the step after `consumed` samples."""
        return self._steps.get(consumed)

    def others(self, consumed: int) -> list[int]:
        """Return which steps this rank has kept where the wanted one is not among them."""
        return [] if consumed in self._steps else list(self._steps)

    def begin(self, consumed: int, step: _Step) -> None:
        """Keep the sums of a step that begins; those of the oldest go if there are too many."""
        self._steps.pop(consumed, None)
        self._steps[consumed] = step
        while len(self._steps) > self._most:
            del self._steps[next(iter(self._steps))]

    def keep_only(self, consumed: int) -> None:
        """Drop all but one step."""
        self._steps = {at: step for at, step in self._steps.items() if at == consumed}


class _Resumed(CanonicalGradients):
    """The gradients of one generation, whose sums are kept.

    On a device that computes behind the program's back, a micro-batch joins the sums when it is
    seen done and no group has been aborted: a kernel behind an aborted collective runs all the
    same, on what that has left.
    """

    def __init__(
        self,
        kept: KeptGradients,
        model: torch.nn.Module,
        sampler: ElasticSampler,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(
            model.parameters(), microbatches=sampler.schedule.microbatches, group=group
        )
        self._kept = kept
        self._sampler = sampler
        self._has_begun = False
        self._keeps = not kept.refused
        self._pending: _Pending | None = None
        self._extra: frozenset[int] = frozenset()
        self._buffers: torch.Tensor | None = _bytes_of(_saved_buffers(model))
        self._model = model
        _reduced.discard(model)
        if _look_for_reduction not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(_look_for_reduction)
        self._random: RngStreams | None = None
        self._has_looked = False
        self._agree()

    # -- at the begin of a generation --------------------------------------------------------------

    def _agree(self) -> None:
        """Take over what ranks have kept, and deal out what is left of the step."""
        at = self._sampler.consumed
        if (others := self._kept.others(at)) and self._rank == 0:
            _log.info(
                "step %d starts from its first micro-batch: the kept sums are of step %s",
                self._sampler.step + 1,
                ", ".join(str(other // self._sampler.schedule.batch + 1) for other in others),
            )
        mine = self._usable(self._kept.step(at))
        nodes = () if mine is None else tuple(mine.tree.nodes)
        held, numbers = self._held_by_rank(nodes, 0 if mine is None else mine.numbers + 1)
        self._kept.found = found = sum(len(self._real(node)) for of in held for node in of)
        self._kept.keep_only(at)
        if not found:
            self._kept.keep_only(-1)
            return
        tree: TreeSum[GradientSums] = TreeSum(self._leaves, added)
        if mine is not None:
            # Kept whole until this one assignment: an interrupt may come at any moment.
            tree.nodes = {node: mine.tree.nodes[node] for node in held[self._rank]}
            mine.tree = self._tree = tree
            self._has_begun = True
        self._numbers = numbers
        taken = set(chain.from_iterable(self._real(node) for of in held for node in of))
        left = [leaf for leaf in range(self._leaves) if leaf not in taken]
        dealt = [[left[i] for i in share(len(left), self._world, r)] for r in range(self._world)]
        self._shares = [_joined(*both, self._leaves) for both in zip(held, dealt, strict=True)]
        indices = dealt[self._rank]
        if left and not indices:
            # Forward of a wrapped model may be collective. It costs no time: others compute too.
            indices = [left[self._rank % len(left)]]
            self._extra = frozenset(indices)
        self._sampler.assign(indices)
        if self._rank == 0:
            _log.info(
                "step %d resumes: its ranks have kept %d of %d micro-batches",
                self._sampler.step + 1,
                found,
                self._leaves,
            )

    def _usable(self, step: _Step | None) -> _Step | None:
        """Return what this rank has kept if it is of this step of this model."""
        if step is None:
            return None
        if step.schedule != self._sampler.schedule:
            _log.warning(
                "the sums that this rank kept of step %d belong to another schedule of samples: "
                "the step is "
                "computed again",
                self._sampler.step + 1,
            )
            return None
        now = self._sampled_parameters()
        same = step.parameters.device == now.device and torch.equal(step.parameters, now)
        if same and self._fits(step.tree):
            return step
        _log.warning(
            "the sums that this rank kept of step %d were computed with parameters other than the "
            "loaded ones: the step is computed again",
            self._sampler.step + 1,
        )
        return None

    def _fits(self, tree: TreeSum[GradientSums]) -> bool:
        sizes = {
            dtype: sum(p.numel() for p in parameters)
            for dtype, parameters in self._by_dtype().items()
        }
        return all(
            {dtype: t.numel() for dtype, t in sums.items() if dtype is not None} == sizes
            for sums in tree.nodes.values()
        )

    def _held_by_rank(
        self, nodes: Sequence[TreeNode], numbers: int
    ) -> tuple[list[list[TreeNode]], int | None]:
        """Return what each data-parallel rank has kept, each micro-batch once, and the numbers."""
        levels = [0] * self._leaves
        for node in nodes:
            for leaf in self._real(node):
                levels[leaf] = node.level + 1
        rows = self._gathered_rows([self._rank, numbers, self._kept.refused, *levels])
        if any(row[2] for row in rows):
            # Not every rank sees it: one with a single micro-batch a step has nothing to compare.
            self._kept.refused, self._keeps = True, False
            return [[] for _ in range(self._world)], None
        sets: list[set[TreeNode] | None] = [None] * self._world
        for rank, _, _, *levels in rows:
            of = {TreeNode(n - 1, leaf >> (n - 1)) for leaf, n in enumerate(levels) if n}
            known = sets[rank]
            sets[rank] = of if known is None else known & of
        taken: set[int] = set()
        held: list[list[TreeNode]] = []
        for found in sets:
            held.append([])
            for node in sorted(found or (), key=lambda node: node.leaves.start):
                # Ranks of different generations may have computed the same one.
                if taken.isdisjoint(self._real(node)):
                    taken.update(self._real(node))
                    held[-1].append(node)
        # Stages of a pipeline may have other numbers: mostly the last alone has losses.
        peers = [0] if self._alone else dist.get_process_group_ranks(self._group)
        counts = max(rows[peer][1] for peer in peers)
        return held, counts - 1 if counts else None

    def _real(self, node: TreeNode) -> range:
        """Return the micro-batches below a node: a tree has places beyond the last."""
        return range(node.leaves.start, min(node.leaves.stop, self._leaves))

    def _gathered_rows(self, row: list[int]) -> list[list[int]]:
        """Return the rows of all ranks of the job."""
        if self._alone:
            return [row]
        mine = torch.tensor(row, dtype=torch.int64, device=self._device)
        out = mine.new_empty(dist.get_world_size() * len(row))
        dist.all_gather_into_tensor(out, mine)
        return out.view(-1, len(row)).tolist()

    # -- in a step ---------------------------------------------------------------------------------

    def add(self, microbatch: int, *numbers: float | torch.Tensor) -> None:
        """See `CanonicalGradients.add`."""
        if microbatch in self._extra:
            for p in self._parameters:
                p.grad = None
            return
        self._settle()
        if self._keeps:
            self._look_for_what_differs()
        self._add_whole(microbatch, numbers)

    @whole
    def _add_whole(self, microbatch: int, numbers: tuple[float | torch.Tensor, ...]) -> None:
        super().add(microbatch, *numbers)

    def _put(self, leaf: TreeNode, value: GradientSums) -> None:
        if self._keeps and not self._has_begun:
            self._has_begun = True
            step = _Step(
                self._tree,
                self._sampler.schedule,
                self._sampled_parameters(),
                self._numbers or 0,
            )
            self._kept.begin(self._sampler.consumed, step)
        if not self._keeps or not has_streams(self._device):
            super()._put(leaf, value)
            return
        kind = kind_of(self._device)
        done = kind.make_event()
        done.record(kind.current_stream(self._device))
        self._pending = _Pending(leaf, value, done)

    def _settle(self) -> None:
        """Wait for the gradients of the micro-batch before the newest one, and add them up."""
        pending = self._pending
        if pending is None:
            return
        pending.done.synchronize()
        if launched.current is not None:
            launched.current.check()
        self._put_pending(pending)

    @whole
    def _put_pending(self, pending: _Pending) -> None:
        self._pending = None
        super()._put(pending.leaf, pending.sums)

    def reduce(self) -> tuple[float, ...]:
        """See `CanonicalGradients.reduce`."""
        self._settle()
        numbers = super().reduce()
        self._has_begun = False
        self._extra = frozenset()
        self._random = None  # between steps a program may draw what it likes
        return numbers

    def _nodes_in_order(self, mine: Sequence[TreeNode]) -> list[GradientSums]:
        """Give out the nodes and keep them; of a rank alone copies, which become gradients."""
        kept = self._keeps
        nodes = super()._nodes_in_order(mine)
        if kept and self._world == 1:
            return [{key: t.clone() for key, t in sums.items()} for sums in nodes]
        return [dict(sums) for sums in nodes]

    # -- what must not depend on the rank ----------------------------------------------------------

    def _sampled_parameters(self) -> torch.Tensor:
        every = max(1, -(-len(self._parameters) // _SAMPLED))
        return _bytes_of(self._parameters[::every], self._device)

    def _look_for_what_differs(self) -> None:
        """Look what micro-batches leave behind: at buffers and draws once in a generation."""
        buffers, self._buffers = self._buffers, None
        if self._model in _reduced:
            _reduced.discard(self._model)
            self._keep_nothing("DDP has reduced gradients, outside of its no_sync")
        if buffers is not None and not torch.equal(buffers, _bytes_of(_saved_buffers(self._model))):
            self._keep_nothing("forward changes buffers of the model, as that of BatchNorm does")
        if self._has_looked:
            return
        before, self._random = self._random, RngStreams.now()
        if before is not None:
            now, self._has_looked, self._random = self._random, True, None
            if not before.same_as(now):
                self._keep_nothing("random numbers are drawn outside of ckptd.elastic.keyed_rng")

    def _keep_nothing(self, why: str) -> None:
        self._keeps = False
        self._kept.refused = True
        self._kept.keep_only(-1)
        _log.warning(
            "a step that loses a rank is computed again as a whole: %s, so that a micro-batch "
            "depends on which rank computes it (docs/guide/in-process.md)",
            why,
        )


def _look_for_reduction(module: torch.nn.Module, _args: object) -> None:
    """Note where DDP is to reduce the gradients of a forward: others' are in them then.

    A hook that is no method: a model is copied and pickled with its hooks.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    ddp = module if isinstance(module, DistributedDataParallel) else _ddp_in_forward()
    if ddp is not None and ddp.require_backward_grad_sync:
        _reduced.add(module)


def _ddp_in_forward() -> DistributedDataParallel | None:
    # TorchDynamo asks for it by this too.
    found: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return found


def _joined(held: Sequence[TreeNode], dealt: Iterable[int], leaves: int) -> tuple[TreeNode, ...]:
    """Return the nodes of a rank that has some and adds some micro-batches."""
    tree: TreeSum[None] = TreeSum(leaves, lambda _left, _right: None)
    for node in (*held, *(TreeNode(0, leaf) for leaf in dealt)):
        tree.put(node, None)
    return tuple(sorted(tree.nodes, key=lambda node: node.leaves.start))


def _saved_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a model that are state, and no caches."""
    return [
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _bytes_of(tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Return samples of the bytes of tensors, as one vector on a device; waits for nothing."""
    samples = [sampled_bytes(t) for t in tensors]
    device = device or (samples[0].device if samples else torch.device("cpu"))
    return torch.cat([s.to(device) for s in samples]) if samples else torch.empty(0)
