"""Which node keeps whose snapshots: another one, of another failure domain wherever that can be."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["partners"]


def partners(domains: Mapping[str, str]) -> dict[str, str]:
    """Return for each node the one whose memory keeps its snapshots.

    Every node keeps those of one other as long as no domain has more than half of the nodes;
    the nodes of a larger one are dealt out evenly among the others. Where all are of one domain,
    domains count for nothing. A pure function: every rank computes the same.

    Parameters
    ----------
    domains
        The failure domain (host, rack, power supply) of each node, by its name.

    Returns
    -------
    dict
        Without an entry where there is no other node.
    """
    by_domain: dict[str, list[str]] = {}
    for node in sorted(domains):
        by_domain.setdefault(domains[node], []).append(node)
    groups = sorted(by_domain.values(), key=lambda nodes: (-len(nodes), nodes[0]))
    line = [node for nodes in groups for node in nodes]
    if len(line) < 2:
        return {}
    if len(groups) == 1:
        return {node: line[(i + 1) % len(line)] for i, node in enumerate(line)}
    largest, others = groups[0], line[len(groups[0]) :]
    if len(largest) <= len(others):
        # Domains lie together in the line, none longer than the shift, and the shift is no longer
        # than what lies outside of any: so nobody meets one of its own.
        shift = len(largest)
        return {node: line[(i + shift) % len(line)] for i, node in enumerate(line)}
    found = {node: others[i % len(others)] for i, node in enumerate(largest)}
    return found | {node: largest[i] for i, node in enumerate(others)}
