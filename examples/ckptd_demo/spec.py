"""Order to one run of the trainer, and the files of its reports."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = [
    "Cut",
    "GptShape",
    "ProcessRow",
    "RunFiles",
    "RunSpec",
    "SnapshotRow",
    "StateRow",
    "StepRow",
]


class GptShape(msgspec.Struct, frozen=True):
    """Sizes of a model.

    Attributes
    ----------
    layers, heads, width
        Blocks, attention heads of a block, and the size of a token's vector.
    seq
        Tokens of a sample.
    """

    layers: int = 4
    heads: int = 4
    width: int = 160
    seq: int = 128

    @property
    def parameters(self) -> int:
        """How many numbers a model of this shape has."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (2 * 256 + self.seq + 2) * self.width


class Cut(msgspec.Struct, frozen=True):
    """How the ranks are arranged: `dp` groups that see different samples, of `tp` ranks each."""

    dp: int
    tp: int = 1

    @property
    def ranks(self) -> int:
        """Number of rank processes."""
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"FSDP2 {self.dp} x TP {self.tp}" if self.tp > 1 else f"FSDP2 {self.dp}"


class RunSpec(msgspec.Struct, frozen=True):
    """One life of the training job.

    Attributes
    ----------
    folder
        Where the run reports; see `RunFiles`.
    cut
        Layout of this life.
    until
        Last step of this life.
    steps
        Last step of the whole job: the learning rate falls towards it.
    batch
        Samples of a step over all ranks; `cut.dp` divides it.
    root
        Where checkpoints go; None trains without any.
    every
        Steps from one checkpoint to the next.
    snapshots
        A snapshot in memory at every step besides.
    pace
        Save only in every second block of so many steps, for comparison; 0 saves in all.
    check_root
        Where what was loaded is saved again at once, for comparison.
    throttle
        Bytes per second that each rank writes at most; None is as fast as it goes.
    timeout_s
        Longest wait for another rank, and for a save.
    """

    folder: str
    cut: Cut
    until: int
    steps: int
    shape: GptShape = GptShape()
    batch: int = 12
    seed: int = 1
    learning_rate: float = 1e-3
    warmup: int = 10
    root: str | None = None
    every: int = 10
    snapshots: bool = False
    pace: int = 0
    check_root: str | None = None
    throttle: float | None = None
    timeout_s: float = 120.0

    @property
    def files(self) -> RunFiles:
        """The files it reports in."""
        return RunFiles(Path(self.folder))


class RunFiles:
    """JSON lines that a run writes in its folder; a killed run leaves whole lines.

    Attributes
    ----------
    spec
        The run's `RunSpec`.
    steps
        Of rank 0, a line a step: step, loss (mean over all tokens of the step), ids of the samples.
    states
        Of rank 0, a line for each state that was saved or loaded: digests of the whole tensors.
    processes
        Of every rank: its process and the one that writes for it.
    snapshots
        Of rank 0, a line when it is over: how many saves there were, and how many are complete.
    logs
        Folder of torchrun's and the ranks' output.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = folder / "spec.json"
        self.steps = folder / "steps.jsonl"
        self.states = folder / "states.jsonl"
        self.processes = folder / "processes.jsonl"
        self.snapshots = folder / "snapshots.jsonl"
        self.logs = folder / "logs"


class StepRow(msgspec.Struct, frozen=True):
    """A line of `RunFiles.steps`; `seconds` is since the run's first step began."""

    step: int
    loss: float
    ids: tuple[int, ...]
    learning_rate: float
    seconds: float


class StateRow(msgspec.Struct, frozen=True):
    """A line of `RunFiles.states`.

    Attributes
    ----------
    event
        ``saved`` or ``loaded``.
    nbytes
        Bytes of all tensors, each counted whole.
    tensors
        Digest of each whole tensor by name.
    plain
        Digest of everything else: schedule, hyperparameters, position.
    """

    event: str
    step: int
    nbytes: int
    tensors: dict[str, str]
    plain: str


class ProcessRow(msgspec.Struct, frozen=True):
    """A line of `RunFiles.processes`; the newest line of a rank counts."""

    rank: int
    pid: int
    writer_pid: int | None


class SnapshotRow(msgspec.Struct, frozen=True):
    """A line of `RunFiles.snapshots`: saves that went to memory, and those whole on all ranks."""

    saves: int
    complete: int
