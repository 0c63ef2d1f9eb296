"""What ranks hold in common under a layout: tables of sampled digests, by who must agree."""

from __future__ import annotations

from ckptd.engine.holders import Holders, Shared
from ckptd.layout.lay.modifiers import Replicas
from ckptd.layout.lay.ruleform import RuleForm
from ckptd.train.distributed import is_dtensor
from ckptd.train.laid_saving import LaidLeaves, Part
from ckptd.train.replicas import Samples

__all__ = ["replica_tables"]


def replica_tables(
    laid: LaidLeaves, holders: Holders, sample: Samples
) -> dict[tuple[str, Shared], dict[str, str]]:
    """Return digests by name, for each group of ranks that hold the same.

    Ranks at the same coordinates of all axes that cut a tensor hold the same of it. A tensor that
    the layout does not name is the same on all ranks that have it, on whatever stage they are:
    were it not, one would be saved and the others lost. `sample` gives the digests.
    """
    job = laid.job
    tables: dict[tuple[str, Shared], dict[str, str]] = {}
    for name, part in laid.parts.items():
        rule = job.form.rules[part.stored.rule]
        if not _takes_any(rule):
            group = _group(laid, rule.axes | _flat_axes(laid, part))
            shared = holders.tensor(name)
            if not shared.alone:
                tables.setdefault((group, shared), {})[name] = sample(part.leaf.tensor)
    for name, leaf in laid.leaves.tensors.items():
        if is_dtensor(leaf.tensor):
            continue
        if name in laid.followers:
            rule = job.form.rules[laid.followers[name][0]]
            group = _group(laid, rule.axes)
        else:
            group = "plain"
        shared = holders.tensor(name)
        if not shared.alone:
            tables.setdefault((group, shared), {})[name] = sample(leaf.tensor)
    return tables


def _takes_any(rule: RuleForm) -> bool:
    return any(isinstance(m, Replicas) and m.kind == "any" for m in rule.equation.modifiers)


def _flat_axes(laid: LaidLeaves, part: Part) -> frozenset[str]:
    """Return the axis that the part's buffer is cut over, and those that cut what it packs."""
    form = laid.job.form
    stored = part.stored
    flat = form.packing.flat_of(stored.rule, stored.indexes, stored.state)
    if flat is None:
        return frozenset()
    axes = {form.bound.layout.flats[flat].split[0]}
    if form.bound.layout.flats[flat].group.kind != "each":
        # The digest is the whole buffer's, with everything that is in it.
        packed = form.packing.buffers(flat, stored.state, laid.job.rank).tensors
        axes |= {a for rule, _ in packed for a in form.rules[rule].axes}
    return frozenset(axes)


def _group(laid: LaidLeaves, axes: frozenset[str]) -> str:
    """Name the ranks that agree with this one on some axes."""
    at = sorted((a, c) for a, c in laid.job.coordinates.items() if a in axes)
    return "lay:" + ",".join(f"{a}={c}" for a, c in at)
