"""The demo's result as plain data; the command line shows it, ``--json`` prints it."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "Check",
    "Deed",
    "Elastic",
    "Event",
    "Found",
    "Generation",
    "Kill",
    "LifeReport",
    "Outage",
    "Pace",
    "Policy",
    "PolicyLife",
    "Relaid",
    "Report",
    "Watched",
]


class Check(msgspec.Struct, frozen=True):
    """Something that has to hold."""

    what: str
    ok: bool


class Kill(msgspec.Struct, frozen=True):
    """Effect of the kill, as seen from outside.

    Attributes
    ----------
    step, generation
        Of the interrupted save.
    rank, pid, writer_pid
        The killed rank, its process, and the process that wrote for it, killed with it.
    file
        The rank's data file, relative to the root.
    file_bytes
        Its length at the moment of the kill.
    data_bytes_seen
        Bytes of its data section, from the first one on, that had reached the file by then.
    commit_before, commit_at, commit_after, commit_end
        Whether the commit record existed just before the kill, just after it, when torchrun had
        ended, and when the whole demo had ended with every process of that life. All are False
        when the demo holds; one that was not looked for counts as True.
    """

    step: int
    generation: int
    rank: int
    pid: int
    writer_pid: int
    file: str
    file_bytes: int
    data_bytes_seen: int
    commit_before: bool
    commit_at: bool
    commit_after: bool
    commit_end: bool = True

    @property
    def landed(self) -> bool:
        """Whether the kill fell between the first data byte and the commit."""
        return self.data_bytes_seen > 0 and not self.committed

    @property
    def committed(self) -> bool:
        """Whether the interrupted save was ever seen committed."""
        return self.commit_before or self.commit_at or self.commit_after or self.commit_end


class Relaid(msgspec.Struct, frozen=True):
    """Result of a checkpoint that went to another layout and back.

    Attributes
    ----------
    step
        The checkpoint.
    layout
        Where it went, in words.
    root
        The checkpoint in that layout.
    tensors
        How many of the result are bit for bit those of the original.
    identical
        ``ckptd diff`` finds no tensor and no object that differs.
    """

    step: int
    layout: str
    root: str
    tensors: int
    identical: bool


class Generation(msgspec.Struct, frozen=True):
    """Steps of one generation.

    Attributes
    ----------
    generation, ranks
        Which one, on how many ranks.
    resumed
        Step of the state that it began with.
    first, last
        Steps trained, both included.
    lost
        Steps that were trained before it and had to be trained again.
    first_at, last_at
        When its first and its last step were done, seconds of ``CLOCK_MONOTONIC``.
    """

    generation: int
    ranks: int
    resumed: int
    first: int
    last: int
    lost: int
    first_at: float
    last_at: float


class LifeReport(msgspec.Struct, frozen=True):
    """One life of the job, between restarts.

    Attributes
    ----------
    name, ranks, layout
        Which one, on how many ranks, cut how.
    first_step, last_step
        Steps trained, both included.
    saves
        Steps committed in this life.
    end
        How it ended.
    resumed_from, expected_from
        Step of the state it loaded, and of the newest commit before it began; None at the start of
        training.
    gap, gap_steps
        Largest relative difference of the loss from the uninterrupted run's, over the first
        `gap_steps` steps of this life; None when a step is missing.
    ids_equal
        Every step saw the samples that the uninterrupted run saw at that step.
    state_exact, tensors, nbytes, tensors_by_diff
        Whether the loaded state is bit for bit the saved one: `tensors` tensors of `nbytes` bytes,
        gathered whole, and `tensors_by_diff` in the checkpoint that was written from it at once,
        None if none was; None at the start of training. `differing` names what is not.
    seconds
        From the start of the processes to their end.
    """

    name: str
    ranks: int
    layout: str
    first_step: int
    last_step: int
    saves: list[int]
    end: str
    resumed_from: int | None
    expected_from: int | None
    gap: float | None
    gap_steps: int
    ids_equal: bool
    state_exact: bool | None
    tensors: int
    tensors_by_diff: int | None
    nbytes: int
    differing: list[str]
    seconds: float

    @property
    def resumed_as_expected(self) -> bool:
        """Whether training went on from the newest commit, with the step after it."""
        return self.resumed_from == self.expected_from and self.first_step == (
            (self.expected_from or 0) + 1
        )


class Pace(msgspec.Struct, frozen=True):
    """Cost of a save at every step, by a run that saves in every second block of steps.

    Attributes
    ----------
    ranks, layout
        Of the run.
    saves, complete
        Snapshots that were taken, one a step, and those that were whole on every rank.
    step_s, saving_step_s
        Medians in seconds of a step without a save, and of one with it.
    """

    ranks: int
    layout: str
    saves: int
    complete: int
    step_s: float
    saving_step_s: float

    @property
    def ratio(self) -> float:
        """How many times as long a step with a save takes."""
        return self.saving_step_s / self.step_s


class Found(msgspec.Struct, frozen=True):
    """Fault of a rank of the watched job, and the monitor's diagnosis.

    Attributes
    ----------
    what, rank
        The fault, and the rank.
    wanted, said
        The class of incident that is right, and that of the first incident afterwards.
    suspects, evidence
        The nodes and ranks that it named, and its first reason.
    after_s, floor_s
        Seconds from fault to incident, and how many of them are a time-out that has to pass.
    right
        The class is right and the rank alone is named.
    """

    what: str
    rank: int
    wanted: str
    said: str
    suspects: list[str]
    evidence: str
    after_s: float
    floor_s: float
    right: bool


class Watched(msgspec.Struct, frozen=True):
    """A job under ``ckptd watch``.

    Attributes
    ----------
    ranks, floor_s
        Its size, and the least time of silence in training that counts as a hang.
    url
        Where its page was.
    found
        What was done to it, in order.
    """

    ranks: int
    floor_s: float
    url: str
    found: list[Found]


class Deed(msgspec.Struct, frozen=True):
    """Fault of nodes of the elastic job, and how the job went on.

    Attributes
    ----------
    what
        The fault, and the nodes.
    ranks
        On how many it trained then.
    after_s
        Seconds from the deed to the first step of the next generation.
    right
        It trained on as many ranks as there should be, and without the node at fault.
    """

    what: str
    ranks: int
    after_s: float
    right: bool


class Elastic(msgspec.Struct, frozen=True):
    """A job under ``ckptd run`` whose nodes come and go.

    Attributes
    ----------
    nodes, ranks, steps
        Nodes at first, ranks that it was made for, and its last step.
    url
        Where its page was.
    deeds
        What was done to it, in order.
    lives
        Its generations: what each trained, and how many steps had to be trained again.
    recoveries
        As ``ckptd ctl status`` tells them: what each took, by its parts.
    gap, tolerance
        Largest relative difference of a loss from the uninterrupted run's, and what is allowed.
    violations
        What must never be and was.
    """

    nodes: int
    ranks: int
    steps: int
    url: str
    deeds: list[Deed]
    lives: list[Generation]
    recoveries: list[dict[str, Any]]
    gap: float
    tolerance: float
    violations: list[str]


class PolicyLife(msgspec.Struct, frozen=True):
    """One life of the policy's trainer.

    Attributes
    ----------
    layout, ranks
        How it was cut.
    first, last
        Steps of the first and the last weights that it published.
    published
        Versions, those left out that were skipped.
    first_reward, last_reward
        Mean reward of the samples of its first and last step.
    publish_s
        Longest call of `publish` but the first, in seconds.
    """

    layout: str
    ranks: int
    first: int
    last: int
    published: int
    first_reward: float
    last_reward: float
    publish_s: float


class Outage(msgspec.Struct, frozen=True):
    """A rank of the rollout was killed, and the rollout started again.

    Attributes
    ----------
    rank
        Which was killed.
    gone_s
        Until the rollout had weights again, in seconds.
    steps
        That the trainer made meanwhile.
    version, newest
        Step of the weights that it came back with, and of the newest at the kill.
    """

    rank: int
    gone_s: float
    steps: int
    version: int
    newest: int


class Policy(msgspec.Struct, frozen=True):
    """The policy that was trained and sampled from.

    Attributes
    ----------
    lives
        Of the trainer.
    versions
        That the rollout took.
    applied, equal
        How often a rank took one, and how often its logits were the trainer's, bit for bit.
    together
        Whether both ranks took the same versions; by life of the rollout.
    outage
        The rank that was killed.
    bytes_needed, bytes_moved, bytes_unchanged
        Over all that was taken.
    lag_s, most_lag_s
        From publish to use: the median, and the longest.
    to
        URL of the store that weights went through; empty: connections.
    """

    lives: list[PolicyLife]
    versions: int
    applied: int
    equal: int
    together: list[bool]
    outage: Outage
    bytes_needed: int
    bytes_moved: int
    bytes_unchanged: int
    lag_s: float
    most_lag_s: float
    to: str = ""


class Report(msgspec.Struct, frozen=True):
    """The result of the demo. What belongs to a part that was not wanted is null.

    Attributes
    ----------
    ok
        All `checks` hold.
    checkpoints
        The root that the job saved to.
    plot
        The picture of the losses; None when it could not be drawn, and `plot_note` says why.
    parameters
        Of the model.
    text
        Digest of the text trained on.
    reference
        The uninterrupted run: its ranks, layout and seconds.
    relaid
        The checkpoint that was resharded and brought back.
    pace
        What a save at every step costs.
    watched
        The job that was watched; None where it could not be, and `watch_note` says why.
    elastic, elastic_plot
        The job whose nodes came and went, and its picture; None where there was none, and
        `elastic_note` says why.
    policy, policy_plot
        The policy that was published to a rollout, and its picture.
    """

    ok: bool
    folder: str
    checkpoints: str
    plot: str | None
    plot_note: str
    seconds: float
    parameters: int
    text: str
    reference: LifeReport | None
    lives: list[LifeReport]
    kill: Kill | None
    relaid: Relaid | None
    pace: Pace | None
    watched: Watched | None
    watch_note: str
    elastic: Elastic | None
    elastic_note: str
    elastic_plot: str | None
    checks: list[Check]
    next: list[str]
    policy: Policy | None = None
    policy_plot: str | None = None


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line that the demo prints: something happened, the result, or an error."""

    say: str = ""
    seconds: float = 0.0
    report: Report | None = None
    error: dict[str, str | None] | None = None
    notes: list[str] = []
