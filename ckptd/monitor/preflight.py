"""Findings of a check before a job: disk, memory, clocks, GPUs, slow nodes and links; thresholds.

In it: which pairs are probed, and again for confirmation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from ckptd.monitor.links import Effect, LinkLimits, effects
from ckptd.monitor.stats import MAD_TO_SIGMA, Array
from ckptd.monitor.verdict import SuspectKind

# --- machines -------------------------------------------------------------------------------------


LEAST_SHM_BYTES = 64 << 20
GOOD_SHM_BYTES = 1 << 30
LEAST_OPEN_FILES = 1024
GOOD_OPEN_FILES = 4096
MOST_SKEW_S = 1.0
SLOW = 1.5
SLOW_Z = 5.0
LEAST_COHORT = 4
"""Nodes below which none is compared with the others."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, as the driver describes it.

    Attributes
    ----------
    name
        Model.
    memory_bytes
        Memory.
    uncorrected
        Uncorrected memory errors since the driver started; 0 where it does not count.
    celsius
        Temperature.
    """

    name: str
    memory_bytes: int
    uncorrected: int = 0
    celsius: float = 0.0


class MachineTest(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a node about itself.

    Attributes
    ----------
    wrong
        Arithmetic that gave another result than it must; empty if none did.
    compute_s
        Least time of one matrix product, in seconds.
    copy_bytes_per_s
        Best rate of a copy in memory, bytes copied per second.
    shm_free_bytes
        Free in ``/dev/shm``; -1 where there is none.
    disk_s
        Time of writing 4 MiB with fsync, in seconds; NaN if it failed.
    disk_error
        Why it failed.
    open_files
        Limit of open files.
    gpus
        Its GPUs.
    gpu_error
        What the driver says instead.
    alone
        Whether no other node on this machine tested itself meanwhile.
    """

    wrong: str
    compute_s: float
    copy_bytes_per_s: float
    shm_free_bytes: int
    disk_s: float
    disk_error: str
    open_files: int
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    alone: bool = True


def machine_findings(
    names: Sequence[str], machines: Mapping[int, MachineTest], skews: Mapping[int, float]
) -> Iterator[PreflightFinding]:
    """Yield what is wrong with nodes by themselves, in the order of nodes.

    Parameters
    ----------
    names
        Of the nodes.
    machines
        By index of the node.
    skews
        How many seconds each clock is ahead, by index.
    """
    middle = float(np.median(list(skews.values()))) if skews else 0.0
    usual_gpus = _usual_gpus(machines)
    for node, machine in sorted(machines.items()):
        name = names[node]
        yield from _alone(name, machine)
        skew = skews.get(node, middle) - middle
        if abs(skew) > MOST_SKEW_S:
            text = f"the clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
            yield _finding("warn", name, "clock", text, skew, 0.0)
        mine = _models(machine)
        if not machine.gpu_error and mine != usual_gpus:
            text = f"{_counted(mine)}; most nodes have {_counted(usual_gpus)}"
            yield _finding("fail", name, "gpu", text, len(machine.gpus), len(usual_gpus))


def _alone(name: str, machine: MachineTest) -> Iterator[PreflightFinding]:
    if machine.wrong:
        yield _finding("fail", name, "arithmetic", f"computes wrongly: {machine.wrong}")
    if machine.disk_error:
        yield _finding("fail", name, "disk", f"cannot write: {machine.disk_error}")
    free = machine.shm_free_bytes
    if free < GOOD_SHM_BYTES:
        status = "fail" if free < LEAST_SHM_BYTES else "warn"
        text = f"{max(free, 0) / 2**20:.0f} MiB free in /dev/shm"
        yield _finding(status, name, "shared-memory", text, free, GOOD_SHM_BYTES)
    if machine.open_files < GOOD_OPEN_FILES:
        status = "fail" if machine.open_files < LEAST_OPEN_FILES else "warn"
        text = f"at most {machine.open_files} open files"
        yield _finding(status, name, "open-files", text, machine.open_files, GOOD_OPEN_FILES)
    if machine.gpu_error:
        yield _finding("fail", name, "gpu", machine.gpu_error)
    for number, gpu in enumerate(machine.gpus):
        if gpu.uncorrected:
            text = f"GPU {number}: {gpu.uncorrected} uncorrected memory errors"
            yield _finding("fail", name, "gpu", text, gpu.uncorrected, 0)


def _models(machine: MachineTest) -> tuple[str, ...]:
    return tuple(sorted(gpu.name for gpu in machine.gpus))


def _usual_gpus(machines: Mapping[int, MachineTest]) -> tuple[str, ...]:
    """Return the GPUs of most nodes, by model; of two that are as many, the more."""
    counts = Counter(_models(m) for m in machines.values() if not m.gpu_error)
    if not counts:
        return ()
    return max(counts.items(), key=lambda item: (item[1], len(item[0])))[0]


def _counted(models: Sequence[str]) -> str:
    counts = Counter(models)
    return ", ".join(f"{n} x {model}" for model, n in sorted(counts.items())) or "no GPU"


_FIGURES: dict[str, tuple[Callable[[MachineTest], float], float, str]] = {
    "compute": (lambda m: m.compute_s, 1e3, "ms a matrix product"),
    "memory": (lambda m: 1e9 / max(m.copy_bytes_per_s, 1.0), 1.0, "s to copy a GB"),
    "disk": (lambda m: m.disk_s, 1e3, "ms to write and sync 4 MiB"),
}


def slow_machines(
    names: Sequence[str], machines: Mapping[int, MachineTest]
) -> dict[int, list[PreflightFinding]]:
    """Return the nodes that are slower than the others, with what shows it.

    A figure stands out at 1.5 times the median and 5 robust standard deviations of its logarithm.
    Slow disks are reported and do not fail: the root may lie elsewhere. Fewer than 4 nodes are not
    compared.
    """
    found: dict[int, list[PreflightFinding]] = {}
    if len(machines) < LEAST_COHORT:
        return found
    for what, (figure, scale, unit) in _FIGURES.items():
        values = {node: figure(m) for node, m in machines.items()}
        kept = {n: v for n, v in values.items() if np.isfinite(v) and v > 0}
        if len(kept) < LEAST_COHORT:
            continue
        logs = np.log(np.array(list(kept.values())))
        base = float(np.median(logs))
        spread = float(np.median(np.abs(logs - base))) * MAD_TO_SIGMA
        least = max(float(np.log(SLOW)), SLOW_Z * spread)
        usual = float(np.exp(base)) * scale
        for node, value in kept.items():
            if np.log(value) - base > least:
                text = f"{value * scale:.3g} {unit}, usual here: {usual:.3g}"
                status = "warn" if what == "disk" else "fail"
                finding = _finding(status, names[node], what, text, value * scale, usual)
                found.setdefault(node, []).append(finding)
    return found


def _finding(
    status: str,
    name: str,
    what: str,
    message: str,
    value: float | None = None,
    usual: float | None = None,
) -> PreflightFinding:
    return PreflightFinding(
        status="fail" if status == "fail" else "warn",
        target="node",
        name=name,
        what=what,
        message=message,
        value=None if value is None else float(value),
        usual=None if usual is None else float(usual),
    )


# --- links ----------------------------------------------------------------------------------------


ALL_PAIRS_UP_TO = 128
"""Nodes up to which every pair is probed; of more a ring and some random rounds."""
RANDOM_ROUNDS = 8
CONTROLS = 12
MOST_STRAYS = 64
NODE_RATIO = 1.5
STRAY = 2.0
"""How many times the usual time a link must take to be probed again by itself."""
NOISE_S = {"bandwidth": 2e-4, "latency": 1e-4}
"""Delay of a probe by a node's own scheduler, in seconds: added before times are compared."""
SHARE = 0.75
"""Most links that may stand out at first, as a share: those that seem slow are probed again."""
ECHO_FREE = 4
"""Peers with which a suspected node is probed again."""
Pair = tuple[int, int]


class PairProbe(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one node with another.

    Attributes
    ----------
    source, to
        Indices of the node that asked and of the one that answered.
    latency_s
        Least time of a small message and its answer, in seconds; infinite if nothing came.
    out_s, in_s
        Least time of a probe's bytes from `source` to `to`, and back.
    error
        Why nothing came; empty otherwise.
    """

    source: int
    to: int
    latency_s: float
    out_s: float
    in_s: float
    error: str = ""

    @property
    def cut(self) -> bool:
        """Whether the two could not reach each other."""
        return not np.isfinite(self.latency_s)


class PreflightFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, or worth knowing.

    Attributes
    ----------
    status
        ``fail``: do not start the job like this. ``warn``: it will run.
    target
        ``node``, ``sender`` (all that it sends), ``receiver``, ``link`` or ``cluster``.
    name
        Of a node, or ``a>b`` of a link.
    what
        The check: ``absent``, ``extra``, ``lost``, ``reach``, ``bandwidth``, ``latency``,
        ``arithmetic``, ``compute``, ``memory``, ``shared-memory``, ``disk``, ``clock``,
        ``open-files``, ``gpu``.
    message
        One sentence with the figures.
    value, usual
        What was measured and what the others show, in the unit of the message; null where there
        is no figure.
    """

    status: Literal["fail", "warn"]
    target: str
    name: str
    what: str
    message: str
    value: float | None = None
    usual: float | None = None


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs to probe again, one after another while the rest is quiet.

    Attributes
    ----------
    effect
        What is to be confirmed.
    pairs
        Pairs that show it, if it is there.
    """

    effect: Effect
    pairs: tuple[Pair, ...]


# -- which node probes which -----------------------------------------------------------------------


def rounds(nodes: int, seed: int) -> Iterator[list[Pair]]:
    """Yield rounds of pairs: in each one a node is in one pair at most.

    Up to `ALL_PAIRS_UP_TO` nodes every pair comes once, by the circle method of tournaments. Of
    more come the ring of neighbours and 8 random rounds, so that a node has about 10 peers.

    Parameters
    ----------
    nodes
        Nodes.
    seed
        Draws the order of rounds, and which.
    """
    draw = random.Random(seed)
    circle = nodes + nodes % 2  # with an odd count, one node pauses in each round
    order = list(range(circle - 1))
    draw.shuffle(order)
    if nodes > ALL_PAIRS_UP_TO:
        yield from _ring(nodes)
        order = order[:RANDOM_ROUNDS]
    places = list(range(nodes))
    draw.shuffle(places)
    for number in order:
        pairs = _tournament(circle, number)
        kept = [(places[a], places[b]) for a, b in pairs if a < nodes and b < nodes]
        # Which node asks and which answers is drawn, so that no node only ever asks.
        yield [pair if draw.random() < 0.5 else pair[::-1] for pair in kept]


def _tournament(circle: int, number: int) -> Iterator[Pair]:
    last = circle - 1
    if last > 0:
        yield last, number
    for k in range(1, circle // 2):
        yield (number + k) % last, (number - k) % last


def _ring(nodes: int) -> Iterator[list[Pair]]:
    neighbours = [(k, (k + 1) % nodes) for k in range(nodes)]
    if nodes % 2:  # the last pair shares a node with the first
        yield [neighbours.pop()]
    yield neighbours[0::2]
    yield neighbours[1::2]


# -- what the probes say ---------------------------------------------------------------------------


def islands(nodes: Iterable[int], probes: Iterable[PairProbe]) -> list[list[int]]:
    """Return the sets of nodes that reach each other, over others if need be; the largest first.

    Of two that are as large, the one with the lower node comes first. Probes of other nodes, which
    may have been lost since, say nothing.
    """
    parent = {node: node for node in nodes}

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    for probe in probes:
        if not probe.cut and {probe.source, probe.to} <= parent.keys():
            low, high = sorted((root(probe.source), root(probe.to)))
            parent[high] = low
    found: dict[int, list[int]] = {}
    for node in sorted(parent):
        found.setdefault(root(node), []).append(node)
    return sorted(found.values(), key=lambda island: (-len(island), island))


def unreached(
    island: Iterable[int], probes: Iterable[PairProbe]
) -> tuple[dict[int, tuple[int, int]], list[PairProbe]]:
    """Return the nodes of an island that do not reach most others, and single pairs that are cut.

    Parameters
    ----------
    island
        Nodes that reach each other over others; see `islands`.
    probes
        All probes.

    Returns
    -------
    tuple
        By node how many peers it does not reach, and of how many; and the cut pairs that no such
        node explains.
    """
    inside = set(island)
    left = [p for p in probes if {p.source, p.to} <= inside]
    nodes: dict[int, tuple[int, int]] = {}
    while True:
        asked = Counter(node for p in left for node in (p.source, p.to))
        cut = Counter(node for p in left if p.cut for node in (p.source, p.to))
        # The worst first: the others may be cut from that one only.
        worst = max(cut, key=lambda node: (cut[node] / asked[node], cut[node]), default=None)
        if worst is None or cut[worst] < 2 or 2 * cut[worst] <= asked[worst]:
            return nodes, [p for p in left if p.cut]
        nodes[worst] = (cut[worst], asked[worst])
        left = [p for p in left if worst not in (p.source, p.to)]


def rates(probes: Iterable[PairProbe], size: int) -> dict[int, float]:
    """Return the bytes per second of each node's best link, in its slower direction.

    The best one: a slow peer says nothing of a node.
    """
    found: dict[int, float] = {}
    for probe in probes:
        slower_s = max(probe.out_s, probe.in_s)
        for node in (probe.source, probe.to) if slower_s > 0 else ():
            found[node] = max(found.get(node, 0.0), size / slower_s)
    return found


def link_effects(nodes: int, probes: Sequence[PairProbe]) -> dict[str, list[Effect]]:
    """Return what makes links slow: of ``bandwidth`` and of ``latency``, the largest first.

    Pairs that did not reach each other are left out: `islands` returns them.
    """
    found = {}
    for what in ("bandwidth", "latency"):
        edges = _edges(what, probes)
        limits = LinkLimits(share=SHARE, noise_s=NOISE_S[what])
        largest = effects(*edges, nodes, limits) if len(edges[0]) else []
        found[what] = [e for e in largest if what == "bandwidth" or _once(e)]
    return found


def stray_links(
    probes: Sequence[PairProbe], explained: Mapping[str, Sequence[Effect]]
) -> dict[str, list[Effect]]:
    """Return single links that are slow and that no confirmed effect explains, slowest first.

    A row that seems a little slow takes its slowest link with it; when probing again shows the row
    to be well, that link is still to be asked about. At most 64 of each figure.
    """
    found: dict[str, list[Effect]] = {}
    for what in ("bandwidth", "latency"):
        source, to, seconds = _edges(what, probes)
        for effect in explained.get(what, ()):
            rest = ~_touched(effect, source, to)
            source, to, seconds = source[rest], to[rest], seconds[rest]
        if not len(seconds):
            continue
        # Slow links only ever lengthen delays: the faster half alone says what is usual.
        seconds = seconds + NOISE_S[what]
        ratio = seconds / np.quantile(seconds, 0.3)
        slow = [k for k in np.argsort(-ratio, kind="stable")[:MOST_STRAYS] if ratio[k] > STRAY]
        links = [
            Effect(SuspectKind.LINK, int(source[k]), int(to[k]), float(ratio[k]), 1) for k in slow
        ]
        found[what] = [e for e in links if what == "bandwidth" or _once(e)]
    return found


def _edges(what: str, probes: Sequence[PairProbe]) -> tuple[Array, Array, Array]:
    """Return sources, receivers and seconds of the probes that came, both ways."""
    good = [p for p in probes if not p.cut]
    source = np.array([p.source for p in good] + [p.to for p in good], np.int64)
    to = np.array([p.to for p in good] + [p.source for p in good], np.int64)
    if what == "latency":
        return source, to, np.array([p.latency_s for p in good] * 2)
    return source, to, np.array([p.out_s for p in good] + [p.in_s for p in good])


def _touched(effect: Effect, source: Array, to: Array) -> Array:
    sends, receives = source == effect.source, to == effect.to
    both: Array = sends & receives if effect.target is SuspectKind.LINK else sends | receives
    return both


def _once(effect: Effect) -> bool:
    """Return whether this is the one of both ways of a link that counts for a round trip."""
    return effect.target is not SuspectKind.LINK or effect.source < effect.to


def confirmations(
    found: Mapping[str, Sequence[Effect]], nodes: Sequence[int], seed: int
) -> tuple[list[Confirmation], list[Pair]]:
    """Return the pairs to probe again for each effect, and pairs without a suspect to compare.

    Parameters
    ----------
    found
        By name of the figure, as of `link_effects`.
    nodes
        Nodes that can be reached.
    seed
        Draws the peers.
    """
    draw = random.Random(seed)
    named = [e for list_ in found.values() for e in list_]
    sick = {n for e in named if e.target is not SuspectKind.LINK for n in (e.source, e.to)}
    links = {frozenset((e.source, e.to)) for e in named if e.target is SuspectKind.LINK}
    good = [n for n in nodes if n not in sick]
    asked = []
    for effect in named:
        if effect.target is SuspectKind.LINK:
            pairs: tuple[Pair, ...] = ((effect.source, effect.to),)
        else:
            node = max(effect.source, effect.to)
            peers = [n for n in good if frozenset((n, node)) not in links]
            chosen = draw.sample(peers, min(ECHO_FREE, len(peers)))
            pairs = tuple((node, peer) for peer in chosen)
        asked.append(Confirmation(effect=effect, pairs=pairs))
    controls: set[Pair] = set()
    for _ in range(4 * CONTROLS):  # few nodes have fewer pairs than are wanted
        if len(good) < 2 or len(controls) == CONTROLS:
            break
        a, b = sorted(draw.sample(good, 2))
        if frozenset((a, b)) not in links:
            controls.add((a, b))
    return asked, sorted(controls)


def confirm(
    what: str, asked: Confirmation, again: Mapping[Pair, PairProbe], controls: Sequence[Pair]
) -> tuple[bool, float, float]:
    """Return whether probes in a quiet cluster show an effect too, its seconds and the usual ones.

    It is there if it exceeds what pairs without a suspect show, by 1.5 times (a single link: by
    twice) and 5 robust standard deviations; of a node, if all its pairs do. An effect that cannot
    be compared counts as there.
    """
    target = asked.effect.target
    mine = _seconds(what, target, [again[p] for p in asked.pairs if p in again])
    usual = _seconds(what, SuspectKind.NODE, [again[p] for p in controls if p in again])
    if not len(mine) or not len(usual):
        return True, float("nan"), float("nan")
    # Least, not median: a busy moment only ever lengthens a probe.
    noise, least, base = NOISE_S[what], float(mine.min()), float(np.median(usual))
    spread = float(np.median(np.abs(usual - base))) * MAD_TO_SIGMA
    ratio = STRAY if target is SuspectKind.LINK else NODE_RATIO
    there = least + noise > max(ratio * (base + noise), base + noise + 5.0 * spread)
    return there, float(np.median(mine)), base


def _seconds(what: str, target: SuspectKind, probes: Sequence[PairProbe]) -> Array:
    if what == "latency":
        return np.array([p.latency_s for p in probes])
    out, back = [p.out_s for p in probes], [p.in_s for p in probes]
    # The pairs of a confirmation are asked by the suspect, or by the sender of a link.
    if target in (SuspectKind.SENDER, SuspectKind.LINK):
        return np.array(out)
    return np.array(back if target is SuspectKind.RECEIVER else out + back)


def absent_findings(
    came: Sequence[tuple[str, int]], nodes: int, names: Sequence[str], text: str
) -> list[PreflightFinding]:
    """Return the nodes that did not come, and those that were not expected.

    Parameters
    ----------
    came
        Name and rank of each node that came; -1 where it has none.
    nodes
        How many were expected.
    names
        Their names; empty where only their number is known.
    text
        What to say of each that is missing.
    """
    if names:
        here = {name for name, _ in came}
        missing = [failure("node", name, "absent", text) for name in names if name not in here]
        extra = sorted(here - set(names))
        return missing + [failure("node", n, "extra", "came and was not expected") for n in extra]
    if len(came) >= nodes:
        return []
    if any(rank < 0 for _, rank in came):
        return [failure("cluster", f"{nodes - len(came)} of {nodes} nodes", "absent", text)]
    ranks = set(range(nodes)) - {rank for _, rank in came}
    return [failure("node", f"rank {rank}", "absent", text) for rank in sorted(ranks)]


def failure(target: str, name: str, what: str, message: str) -> PreflightFinding:
    """Return a finding that makes the check fail."""
    return PreflightFinding(status="fail", target=target, name=name, what=what, message=message)


def better(first: PairProbe | None, second: PairProbe) -> PairProbe:
    """Return the lesser times of two probes of a pair."""
    if first is None:
        return second
    return PairProbe(
        source=second.source,
        to=second.to,
        latency_s=min(first.latency_s, second.latency_s),
        out_s=min(first.out_s, second.out_s),
        in_s=min(first.in_s, second.in_s),
        error=second.error if first.cut else "",
    )


def link_findings(
    names: Sequence[str],
    what: str,
    effect: Effect,
    figures: tuple[float, float],
    probe_bytes: int,
) -> PreflightFinding:
    """Return the finding of a confirmed effect.

    Parameters
    ----------
    names
        Of the nodes.
    what
        ``bandwidth`` or ``latency``.
    effect
        As of `link_effects`.
    figures
        Its seconds and the usual ones, as of `confirm`; NaN where there are none.
    probe_bytes
        Bytes of a probe.
    """
    value, usual = figures
    if effect.target is SuspectKind.LINK:
        name = f"{names[effect.source]}>{names[effect.to]}"
    else:
        name = names[max(effect.source, effect.to)]
    if np.isnan(value):
        text = f"{what} {effect.ratio:.1f} times worse than usual, by {effect.edges} probes"
        return PreflightFinding(
            status="fail", target=effect.target, name=name, what=what, message=text
        )
    if what == "latency":
        value, usual, unit = value * 1e6, usual * 1e6, "us"
    else:
        value, usual, unit = probe_bytes / value / 2**20, probe_bytes / usual / 2**20, "MiB/s"
    text = f"{value:.4g} {unit}, usual here: {usual:.4g}"
    return PreflightFinding(
        status="fail",
        target=effect.target,
        name=name,
        what=what,
        message=text,
        value=value,
        usual=usual,
    )
