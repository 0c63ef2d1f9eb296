"""What a reshard would do, before it does it; and the proof that it writes everything once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ckptd.format.digest import BLOCK_BYTES
from ckptd.layout.lay.promise import PROMISES
from ckptd.layout.lay.proving import prove
from ckptd.layout.lay.syntax import show
from ckptd.load.plan import BlockLine, Runs
from ckptd.reshard.compose import Composed, TensorLink
from ckptd.reshard.execute import Budget, Executor
from ckptd.reshard.moves import RoundPlan
from ckptd.reshard.prepare import Prepared
from ckptd.reshard.reports import Costs, Proved, RuleReport
from ckptd.reshard.target import Target

__all__ = ["costs_of", "prove_target", "rules_of"]


def rules_of(composed: Composed) -> list[RuleReport]:
    """Return what each rule of the target gets, in its layout's order."""
    by_rule: dict[int, list[TensorLink]] = {}
    for link in composed.links:
        by_rule.setdefault(link.key[0], []).append(link)
    out = []
    for number in sorted(by_rule):
        links = by_rule[number]
        equation = composed.composition.target.rules[number].equation
        rules = composed.composition.source.rules
        sources = dict.fromkeys(key[0] for link in links for key in link.sources)
        texts = [rules[s].equation.text or show(rules[s].equation.name) for s in sources]
        size = sum(_numel(link) * link.dtype.itemsize for link in links)
        out.append(
            RuleReport(
                rule=equation.text or show(equation.name),
                at=f"{equation.at.file}:{equation.at.line}",
                tensors=len(links),
                bytes=size,
                sources=tuple(dict.fromkeys(texts)),
                promise=max((link.promise for link in links), key=PROMISES.index),
            )
        )
    return out


def _numel(link: TensorLink) -> int:
    size = 1
    for n in link.tensor.shape:
        size *= n
    return size


def costs_of(prepared: Prepared, target: Target, files: Sequence[int], budget: Budget) -> Costs:
    """Plan all rounds of a share and count; reads nothing but headers."""
    source = prepared.stock.source
    executor = Executor(source, target, budget, {})
    line = BlockLine([f.data_bytes for f in source.files])
    reads = _Reads(line, budget.cache)
    needed = rounds = copies = staged = before = 0
    touched: set[int] = set()
    for plan in executor.rounds(files):
        size = sum(s.hi - s.lo for s in plan.stretches)
        staged, before = max(staged, size + before), size
        needed += plan.bytes_needed
        rounds += 1
        copies += sum(len(moves) for moves, _ in plan.turns)
        touched.update(f for _, runs in plan.turns for f in line.files_of(runs))
        reads.add(plan)
    windows = budget.readers * (budget.window_blocks * BLOCK_BYTES + 15)
    return Costs(
        files=len(files),
        bytes_written=sum(target.sizes[f] for f in files),
        bytes_needed=needed,
        bytes_read=reads.total,
        read_amplification=reads.total / needed if needed else 1.0,
        peak_bytes=staged + windows + reads.most_kept,
        rounds=rounds,
        copies=copies,
        source_files=len(touched),
    )


class _Reads:
    """Counts what is read, as `ckptd.reshard.reading` reads it."""

    def __init__(self, line: BlockLine, cache: int) -> None:
        self._line = line
        self._most = cache // BLOCK_BYTES
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.total = self.most_kept = 0

    def add(self, plan: RoundPlan) -> None:
        """Count one round."""
        for _, runs in plan.turns:
            if not len(runs):
                continue
            known = np.array(sorted(self._kept), dtype=np.int64)
            at = np.searchsorted(runs[:, 0], known, side="right") - 1
            inside = known[(at >= 0) & (known < runs[np.maximum(at, 0), 1])]
            self.total += self._line.byte_count(runs) - sum(map(self._size, inside.tolist()))
            self._keep(runs)

    def _size(self, position: int) -> int:
        start, end = self._line.byte_range(self._line.file_at(position), position, position + 1)
        return end - start

    def _keep(self, runs: Runs) -> None:
        for lo, hi in runs.tolist():
            for position in dict.fromkeys((lo, hi - 1)):
                if position not in self._kept:
                    self._kept[position] = None
                    if len(self._kept) > self._most:
                        self._kept.popitem(last=False)
        self.most_kept = max(self.most_kept, len(self._kept) * BLOCK_BYTES)


def prove_target(composed: Composed, target: Target, files: Sequence[int]) -> Proved:
    """Prove chunk by chunk that each element of a share is written exactly once.

    That the files hold each element of each tensor once needs no proof: a grid and an owner map
    say it.

    Raises
    ------
    UsageError
        An element is written twice, or never.
    """
    chunks = elements = copies = 0
    known: set[object] = set()
    for file in files:
        for chunk in target.filemap.chunks(file):
            chunks += 1
            elements += chunk.piece.numel
            number = chunk.tensor if target.links is None else target.links.get(chunk.tensor)
            if number is None or number >= len(composed.links) or not chunk.piece.numel:
                continue
            link = composed.links[number]
            plan = composed.composition.piece(link.key, chunk.piece.index)
            # Layers and states have the same blocks: one proof does for all of them.
            shape = (plan.numel, tuple(c.blocks for c in plan.copies), plan.fills)
            copies += sum(len(c.blocks) for c in plan.copies)
            if shape not in known:
                prove(plan)
                known.add(shape)
    return Proved(chunks=chunks, elements=elements, copies=copies)
