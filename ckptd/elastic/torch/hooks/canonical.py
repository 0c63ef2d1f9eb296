"""`CanonicalGradients`: gradients bitwise equal whatever the number of data-parallel ranks.

All-reduce adds in an order that depends on the number of ranks. Here the micro-batches of a step
are the leaves of one fixed binary tree (`ckptd.elastic.treesum`): each rank adds up the nodes that
lie whole in its run of micro-batches, and the rest of the tree is added by whichever rank owns a
piece of the vector. A rank sends each of its nodes once (one to about ``2 * log2`` of its
micro-batches) and receives the sum once, where an all-reduce sends twice: bitwise equality costs
little more traffic, and the memory of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ckptd.base.grouping import by_key
from ckptd.base.torch.tensors import is_dtensor
from ckptd.checkpoint.data.schedule import share
from ckptd.elastic.treesum import TreeNode, TreeSum, cover
from ckptd.errors import UsageError

GradientSums = dict[torch.dtype | None, torch.Tensor]
"""A node of the tree: the gradients of each dtype as one vector; under None the numbers, then how
many of the micro-batches used each parameter."""


class CanonicalGradients:
    """Sums gradients of micro-batches in an order that no number of ranks changes.

    ::

        canonical = CanonicalGradients(model.parameters(), microbatches=8)
        for index, ids in zip(sampler.indices, loader):
            loss(model(ids)).backward()  # in DistributedDataParallel: under no_sync()
            canonical.add(index, len(ids))
        (samples,) = canonical.reduce()  # every .grad is now the sum over all micro-batches
        optimizer.step()
        optimizer.zero_grad()  # or the next step begins with this one's sum

    Forward and backward must themselves give the same bits for the same micro-batch: a fixed size,
    random streams by `ckptd.elastic.keyed_rng`, deterministic kernels.

    Parameters
    ----------
    parameters
        The same on all ranks, whole on each; sharded ones (FSDP) are refused.
    microbatches
        Of a step, on all ranks together; rank r computes ``share(microbatches, world, r)``.
    group
        The data-parallel ranks; the default group if left out, this process alone without one.

    Raises
    ------
    UsageError
        A parameter is sharded, or there are more ranks than micro-batches.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        microbatches: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._group = group
        self._alone = not (dist.is_available() and dist.is_initialized())
        self._rank = 0 if self._alone else dist.get_rank(group)
        self._world = 1 if self._alone else dist.get_world_size(group)
        self._leaves = microbatches
        found = {_sharding_of(p) for p in self._parameters} - {""}
        if found:
            raise UsageError(
                "gradients of sharded parameters cannot be summed in a fixed order",
                wanted="parameters that are whole on each rank",
                found=", ".join(sorted(found)),
            )
        if self._world > microbatches:
            raise UsageError(
                "some ranks would have no micro-batch",
                wanted=f"at most {microbatches} ranks",
                found=str(self._world),
            )
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._usages: dict[tuple[bool, ...], torch.Tensor] = {}
        self._numbers: int | None = None
        runs = [share(microbatches, self._world, rank) for rank in range(self._world)]
        self._usual_shares = [cover(run, microbatches) for run in runs]
        self._shares = self._usual_shares
        """The nodes that each rank has when all micro-batches of the step are added."""
        self._tree: TreeSum[GradientSums] = TreeSum(microbatches, added)

    def add(self, microbatch: int, *numbers: float | torch.Tensor) -> None:
        """Take the gradients of one micro-batch; every ``.grad`` is None after.

        Parameters
        ----------
        numbers
            What to sum up beside the gradients, such as its tokens and its loss, in float64; as
            many in each call on all ranks of the group. Tensors are of one element.

        Raises
        ------
        UsageError
            The micro-batch was added before or does not exist, or it has more or fewer numbers
            than the one before.
        """
        if self._numbers not in (None, len(numbers)):
            raise UsageError(
                "this micro-batch has a different count of numbers than the one before",
                wanted=f"{self._numbers} numbers beside the gradients",
                found=str(len(numbers)),
            )
        self._numbers = len(numbers)
        self._put(TreeNode(0, microbatch), self._taken(numbers))

    def reduce(self) -> tuple[float, ...]:
        """Set every ``.grad`` to the sum over all micro-batches; call it on every rank.

        A parameter that no rank has used keeps None.

        Returns
        -------
        tuple
            The sums of the numbers, over all micro-batches as well.

        Raises
        ------
        UsageError
            This rank has not added all its micro-batches.
        """
        mine = self._shares[self._rank]
        if set(mine) != set(self._tree.nodes):
            raise UsageError(
                "not all micro-batches of this rank were added",
                wanted=f"micro-batches {_leaves_of(mine)}",
                found=f"{_leaves_of(sorted(self._tree.nodes))}",
            )
        values = self._nodes_in_order(mine)
        for dtype, parameters in self._by_dtype().items():
            size = sum(p.numel() for p in parameters)
            nodes = [value.pop(dtype) for value in values]
            _set_gradients(parameters, self._summed(nodes, size, dtype))
        count = self._numbers or 0
        nodes = [value.pop(None) for value in values]
        totals = self._summed(nodes, count + len(self._parameters), self._wide).tolist()
        for p, uses in zip(self._parameters, totals[count:], strict=True):
            if not uses:
                p.grad = None
        self._shares = self._usual_shares
        return tuple(totals[:count])

    # -- what a rank keeps -----------------------------------------------------------------------

    def _put(self, leaf: TreeNode, value: GradientSums) -> None:
        self._tree.put(leaf, value)

    def _nodes_in_order(self, mine: Sequence[TreeNode]) -> list[GradientSums]:
        """Give the nodes away, to be used up; the tree of the next step is empty."""
        tree, self._tree = self._tree, TreeSum(self._leaves, added)
        return [tree.nodes[node] for node in mine]

    # -- from gradients to a node ------------------------------------------------------------------

    def _by_dtype(self) -> dict[torch.dtype, list[torch.nn.Parameter]]:
        return by_key((p.dtype, p) for p in self._parameters)

    def _taken(self, numbers: Sequence[float | torch.Tensor]) -> GradientSums:
        """Return the gradients as a leaf of the tree, and forget them."""
        sums: GradientSums = {}
        for dtype, parameters in self._by_dtype().items():
            parts = [
                p.grad.reshape(-1) if p.grad is not None else torch.zeros_like(p).reshape(-1)
                for p in parameters
            ]
            sums[dtype] = torch.cat(parts)
        usage = self._usage(tuple(p.grad is not None for p in self._parameters))
        parts = [
            torch.as_tensor(number, dtype=self._wide, device=self._device).detach().reshape(1)
            for number in numbers
        ]
        sums[None] = torch.cat([*parts, usage])
        for p in self._parameters:
            p.grad = None
        return sums

    @property
    def _wide(self) -> torch.dtype:
        return torch.float32 if self._device.type == "mps" else torch.float64  # which it lacks

    def _usage(self, used: tuple[bool, ...]) -> torch.Tensor:
        """Return which parameters have gradients; nearly always the same ones."""
        if used not in self._usages:
            self._usages = {used: torch.tensor(used, dtype=self._wide, device=self._device)}
        return self._usages[used]

    # -- from nodes to the sum -------------------------------------------------------------------

    def _summed(self, nodes: Sequence[torch.Tensor], size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of this and all other ranks' nodes, of one flat vector."""
        if self._world == 1:
            return nodes[0]
        runs = [share(size, self._world, rank) for rank in range(self._world)]
        mine = len(runs[self._rank])
        received = torch.empty(mine * sum(map(len, self._shares)), dtype=dtype, device=self._device)
        parts = [node[run.start : run.stop] for run in runs for node in nodes]
        sent = torch.cat(parts) if parts else received.new_empty(0)
        dist.all_to_all_single(
            received,
            sent,
            [mine * len(nodes_) for nodes_ in self._shares],
            [len(run) * len(nodes) for run in runs],
            group=self._group,
        )
        tree: TreeSum[torch.Tensor] = TreeSum(self._leaves, torch.Tensor.add_)
        count = sum(map(len, self._shares))
        pieces = iter(received.split(mine) if mine else [received] * count)
        for nodes_ in self._shares:
            for node in nodes_:
                tree.put(node, next(pieces))
        return self._gathered(tree.total(), runs)

    def _gathered(self, piece: torch.Tensor, runs: Sequence[range]) -> torch.Tensor:
        """Return the whole vector, of which each rank has a run; runs differ by one at most."""
        longest = len(runs[0])
        padded = piece.new_zeros(longest)
        padded[: piece.numel()] = piece
        whole = piece.new_empty(longest * self._world)
        dist.all_gather_into_tensor(whole, padded, group=self._group)
        rows = whole.view(self._world, longest)
        return torch.cat([rows[rank, : len(run)] for rank, run in enumerate(runs)])


def added(left: GradientSums, right: GradientSums) -> GradientSums:
    """Return the sum of two halves of a node, in the memory of the left one."""
    torch._foreach_add_(list(left.values()), list(right.values()))
    return left


def _set_gradients(parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor) -> None:
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)


def _sharding_of(parameter: torch.nn.Parameter) -> str:
    if is_dtensor(parameter):
        return "DTensor"
    # FSDP1 marks its flat parameters, and what it shows in the place of those within, by this.
    return "FullyShardedDataParallel" if getattr(parameter, "_fsdp_flattened", False) else ""


def _leaves_of(nodes: Iterable[TreeNode]) -> list[list[int]]:
    return [list(node.leaves) for node in nodes]
