"""Gradients that are bitwise equal whatever the number of data-parallel ranks.

All-reduce adds in an order that depends on the number of ranks. Here the micro-batches of a step
are the leaves of one fixed binary tree (`ckptd.elastic.treesum`): each rank adds up the nodes that
lie whole in its run of micro-batches, and the rest of the tree is added by whoever owns a piece of
the vector. A rank sends each of its nodes once (one to about ``2 * log2`` of its micro-batches) and
receives the sum once, where an all-reduce sends twice: bitwise equality costs little more traffic,
and the memory of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ckptd.elastic.schedule import share
from ckptd.elastic.treesum import TreeNode, TreeSum, cover
from ckptd.errors import UsageError
from ckptd.train.state.tensors import is_dtensor

__all__ = ["CanonicalGradients"]

_Flat = dict[torch.dtype, torch.Tensor]


class CanonicalGradients:
    """Sums gradients of micro-batches in an order that no number of ranks changes.

    ::

        canonical = CanonicalGradients(model.parameters(), microbatches=8)
        for index, ids in zip(sampler.indices, loader):
            loss(model(ids)).backward()  # in DistributedDataParallel: under no_sync()
            canonical.add(index)
        canonical.reduce()  # every .grad is now the sum over all micro-batches of all ranks
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
        kind ``bad-argument``: a parameter is sharded, or there are more ranks than micro-batches.
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
        if any(is_dtensor(p) for p in self._parameters):
            raise UsageError(
                "gradients of sharded parameters cannot be summed in a fixed order",
                kind="bad-argument",
                wanted="parameters that are whole on each rank",
                found="DTensor",
            )
        if self._world > microbatches:
            raise UsageError(
                "some ranks would have no micro-batch",
                kind="bad-argument",
                wanted=f"at most {microbatches} ranks",
                found=str(self._world),
            )
        self._tree: TreeSum[_Flat] = TreeSum(microbatches, _added)
        self._used = torch.zeros(len(self._parameters), dtype=torch.uint8)

    def add(self, microbatch: int) -> None:
        """Take the gradients of one micro-batch; every ``.grad`` is None after.

        Raises
        ------
        UsageError
            kind ``bad-argument``: it was added before, or there is no such micro-batch.
        """
        flat: _Flat = {}
        for dtype, parameters in self._by_dtype().items():
            parts = [
                p.grad.reshape(-1) if p.grad is not None else torch.zeros_like(p).reshape(-1)
                for p in parameters
            ]
            flat[dtype] = torch.cat(parts)
        self._tree.put(TreeNode(0, microbatch), flat)
        for place, p in enumerate(self._parameters):
            if p.grad is not None:
                self._used[place] = 1
                p.grad = None

    def reduce(self) -> None:
        """Set every ``.grad`` to the sum over all micro-batches; call it on every rank.

        A parameter that no rank has used keeps None.

        Raises
        ------
        UsageError
            kind ``bad-argument``: this rank has not added all its micro-batches.
        """
        mine = cover(share(self._leaves, self._world, self._rank), self._leaves)
        if set(mine) != set(self._tree.nodes):
            raise UsageError(
                "not all micro-batches of this rank were added",
                kind="bad-argument",
                wanted=f"micro-batches {share(self._leaves, self._world, self._rank)}",
                found=f"{[list(node.leaves) for node in sorted(self._tree.nodes)]}",
            )
        values = [self._tree.nodes[node] for node in mine]
        self._tree = TreeSum(self._leaves, _added)
        for dtype, parameters in self._by_dtype().items():
            self._set(parameters, self._summed([value.pop(dtype) for value in values]))
        self._forget_unused()

    def _by_dtype(self) -> dict[torch.dtype, list[torch.nn.Parameter]]:
        out: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for p in self._parameters:
            out.setdefault(p.dtype, []).append(p)
        return out

    def _summed(self, nodes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of this and all other ranks' nodes, of one flat vector."""
        if self._alone or self._world == 1:
            return nodes[0]
        size = nodes[0].numel()
        runs = [share(size, self._world, rank) for rank in range(self._world)]
        per_rank = [
            cover(share(self._leaves, self._world, r), self._leaves) for r in range(self._world)
        ]
        mine = len(runs[self._rank])
        sent = torch.cat([node[run.start : run.stop] for run in runs for node in nodes])
        received = sent.new_empty(mine * sum(map(len, per_rank)))
        dist.all_to_all_single(
            received,
            sent,
            [mine * len(nodes_) for nodes_ in per_rank],
            [len(run) * len(nodes) for run in runs],
            group=self._group,
        )
        tree: TreeSum[torch.Tensor] = TreeSum(self._leaves, torch.Tensor.add_)
        pieces = iter(received.split(mine) if mine else [received] * sum(map(len, per_rank)))
        for nodes_ in per_rank:
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

    def _set(self, parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor) -> None:
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)

    def _forget_unused(self) -> None:
        used, self._used = self._used, torch.zeros_like(self._used)
        if not self._alone:
            used = used.to(self._parameters[0].device) if self._parameters else used
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        for p, was_used in zip(self._parameters, used.tolist(), strict=True):
            if not was_used:
                p.grad = None


def _added(left: _Flat, right: _Flat) -> _Flat:
    sums: list[Any] = list(left.values())
    torch._foreach_add_(sums, list(right.values()))
    return left
