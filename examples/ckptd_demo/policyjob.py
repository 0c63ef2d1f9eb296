"""Ranks of the demo's policy: those that train it, and those that sample from it.

`main` is one rank, as a file says. The trainer publishes its
weights after each step; the rollout takes the newest ones, samples from them and writes what it
sampled to a file, of which the trainer learns from the better half.

After each publish the trainer gathers its weights whole by torch's own collectives, cuts them by
hand as the rollout holds them, and computes the logits of a fixed prompt. The rollout computes
those with what it pulled. Both add in the same order, so digests of the logits must be equal.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim import AdamW

import ckptd
from ckptd.crashes import report_crashes
from ckptd.decoding import json_decoder
from ckptd_demo.model import VOCABULARY, Gpt, build, cut_model
from ckptd_demo.processes import environment, wait_until
from ckptd_demo.spec import Cut, GptShape

__all__ = [
    "AT",
    "CHECKPOINTS",
    "END",
    "LAST",
    "SHAPE",
    "STOP",
    "AppliedRow",
    "PolicySpec",
    "PublishedRow",
    "Sampled",
    "applied_file",
    "layout_of",
    "logits",
    "main",
    "published_file",
    "reward_of",
    "rollout_parts",
    "told_to",
]

SHAPE = GptShape(layers=2, heads=4, width=64, seq=24)
TP = 2
AT, CHECKPOINTS, STOP = "at", "checkpoints", "stop"
LAST, END = "last", "end"
_SAMPLES, _SAMPLED = 32, "sampled.json"
_RATE, _SEED = 5e-3, 7
_PATIENCE_S = 1.0
"""The trainer waits so long for samples of a newer version, then it learns from the last again."""
_FIRST_S, _POLL_S = 90.0, 0.02
_HERE = Path(__file__).parent

Part = Mapping[str, Tensor]
"""Tensors of one rank of the rollout, by name."""
Add = Callable[[list[Tensor]], Tensor]
"""Adds what the parts have."""


class PolicySpec(msgspec.Struct, frozen=True):
    """One rank.

    Attributes
    ----------
    place
        The folder where everything is.
    role
        ``trainer`` or ``rollout``.
    life
        Counts the starts of the role.
    rank, world, port
        Of the process group.
    cut
        How the trainer's ranks are arranged.
    steps
        The fewest that it makes in this life.
    to
        URL of a store that weights go through; empty: connections.
    """

    place: str
    role: str
    life: int
    rank: int
    world: int
    port: int
    cut: Cut = Cut(1)
    steps: int = 0
    to: str = ""

    @property
    def folder(self) -> Path:
        """Where everything is."""
        return Path(self.place)


class PublishedRow(msgspec.Struct, frozen=True):
    """A step of the trainer.

    Attributes
    ----------
    step, life, ranks, at
        Which, of which life, on how many ranks, and when it was published, by the clock.
    reward
        Mean of the samples that it learned from; None before there were any.
    skipped
        Why its weights were not published; empty where they were.
    logits
        Digests, by rank of the rollout.
    seconds
        Of the call of `publish`.
    last
        Whether it is the last of this life.
    """

    step: int
    life: int
    ranks: int
    at: float
    reward: float | None
    skipped: str
    logits: tuple[str, ...]
    seconds: float
    last: bool


class AppliedRow(msgspec.Struct, frozen=True):
    """A version that a rank of the rollout took.

    Attributes
    ----------
    step, number, epoch
        The version; see `ckptd.WeightVersion`.
    life, rank, at
        Who took it, and when, by the clock.
    logits
        Digest of its part.
    bytes_needed, bytes_moved, bytes_unchanged, lag_s
        See `ckptd.publish.torch.subscriber.UpdateReport`.
    """

    step: int
    number: int
    epoch: str
    life: int
    rank: int
    at: float
    logits: str
    bytes_needed: int
    bytes_moved: int
    bytes_unchanged: int
    lag_s: float


class Sampled(msgspec.Struct, frozen=True):
    """Last samples of the rollout."""

    step: int
    samples: list[list[int]]


_specs = json_decoder(PolicySpec)
_sampled = json_decoder(Sampled)


def told_to(folder: Path, life: int, what: str) -> Path:
    """Return the file by which the demo has the trainer make its `LAST` step, or `END`."""
    return folder / f"trainer-{life}.{what}"


def published_file(folder: Path) -> Path:
    """Return where the trainer writes its steps."""
    return folder / "published.jsonl"


def applied_file(folder: Path, rank: int) -> Path:
    """Return where a rank of the rollout writes the versions that it took."""
    return folder / f"applied-{rank}.jsonl"


def layout_of(name: str) -> str:
    """Return a layout of the policy as a program."""
    text = (_HERE / "demo.lay").read_text() + (_HERE / "policy.lay").read_text()
    # The trainer of the other part cuts four ranks along an axis of the same name.
    return f"# layout {name}\n" + text.replace("mesh W = dp:4", "mesh F = dp:4").replace(
        "sharded of gpt on W", "sharded of gpt on F"
    )


def reward_of(samples: Tensor) -> Tensor:
    """Return the share of lower-case letters in each sample."""
    return ((samples >= ord("a")) & (samples <= ord("z"))).double().mean(1)


# --- the policy as the rollout computes it --------------------------------------------------------


def rollout_parts(whole: Mapping[str, Tensor]) -> list[Part]:
    """Cut whole tensors, in the trainer's names, as the ranks of the rollout hold them: by hand."""
    hd = SHAPE.width // SHAPE.heads
    parts: list[dict[str, Tensor]] = [{} for _ in range(TP)]

    def put(name: str, tensors: Sequence[Tensor]) -> None:
        for part, tensor in zip(parts, tensors, strict=True):
            part[name] = tensor.contiguous()

    for name in ("token.weight", "head.weight"):
        put(name, whole[name].chunk(TP))
    for name in ("place.weight", "norm.weight", "norm.bias"):
        put(name, [whole[name]] * TP)
    for number in range(SHAPE.layers):
        old, new = f"blocks.{number}.", f"layers.{number}."
        for end in ("weight", "bias"):
            heads = whole[f"{old}attention.qkv.{end}"].unflatten(0, (SHAPE.heads, 3, hd))
            mine = [h.transpose(0, 1).flatten(0, 2) for h in heads.chunk(TP)]
            put(f"{new}qkv.{end}", mine)
            put(f"{new}up.{end}", whole[f"{old}mlp.up.{end}"].chunk(TP))
            put(f"{new}n1.{end}", [whole[f"{old}norm1.{end}"]] * TP)
            put(f"{new}n2.{end}", [whole[f"{old}norm2.{end}"]] * TP)
        put(f"{new}out.weight", whole[f"{old}attention.out.weight"].chunk(TP, 1))
        put(f"{new}down.weight", whole[f"{old}mlp.down.weight"].chunk(TP, 1))
        put(f"{new}out.bias", [whole[f"{old}attention.out.bias"]] * TP)
        put(f"{new}down.bias", [whole[f"{old}mlp.down.bias"]] * TP)
    return list(parts)


def logits(parts: Mapping[int, Part], tokens: Tensor, add: Add) -> list[Tensor]:
    """Return the logits of tokens ``(batch, length)``, a part of the vocabulary for each part.

    Parameters
    ----------
    parts
        Those that are here, by rank of the rollout.
    add
        Adds over all parts, here or not.
    """
    first = next(iter(parts.values()))
    words = VOCABULARY // TP
    found = []
    for rank, p in parts.items():
        local = tokens - rank * words
        mine = (local >= 0) & (local < words)
        rows = functional.embedding(local.clamp(0, words - 1), p["token.weight"])
        found.append(rows * mine[..., None])
    x = add(found) + first["place.weight"][: tokens.shape[1]]
    for number in range(SHAPE.layers):
        at = f"layers.{number}."
        y = _norm(first, f"{at}n1", x)
        x = x + add([_attention(p, at, y) for p in parts.values()]) + first[f"{at}out.bias"]
        y = _norm(first, f"{at}n2", x)
        x = x + add([_mlp(p, at, y) for p in parts.values()]) + first[f"{at}down.bias"]
    y = _norm(first, "norm", x)
    return [functional.linear(y, p["head.weight"]) for p in parts.values()]


def _norm(part: Part, name: str, x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], part[f"{name}.weight"], part[f"{name}.bias"])


def _attention(part: Part, at: str, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    qkv = functional.linear(x, part[f"{at}qkv.weight"], part[f"{at}qkv.bias"])
    hd = SHAPE.width // SHAPE.heads
    q, k, v = qkv.view(batch, length, 3, -1, hd).permute(2, 0, 3, 1, 4).unbind(0)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return functional.linear(y.transpose(1, 2).reshape(batch, length, -1), part[f"{at}out.weight"])


def _mlp(part: Part, at: str, x: Tensor) -> Tensor:
    y = functional.gelu(functional.linear(x, part[f"{at}up.weight"], part[f"{at}up.bias"]))
    return functional.linear(y, part[f"{at}down.weight"])


def _digests(parts: Mapping[int, Part], add: Add) -> tuple[str, ...]:
    prompt = torch.arange(4 * SHAPE.seq).remainder(VOCABULARY).view(4, SHAPE.seq)
    with torch.no_grad():
        found = logits(parts, prompt, add)
    return tuple(hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in found)


def _empty_part() -> dict[str, Tensor]:
    """Return the tensors of a rank of the rollout, without values."""
    whole = {n: t.detach() for n, t in Gpt(SHAPE).named_parameters()}
    return {n: torch.zeros_like(t) for n, t in rollout_parts(whole)[0].items()}


# --- a rank that samples --------------------------------------------------------------------------


def roll_out(spec: PolicySpec) -> None:
    """Take the newest version, sample from it, again and again until the demo ends."""
    part = _empty_part()
    rows = applied_file(spec.folder, spec.rank)
    draws = torch.Generator().manual_seed(_SEED + spec.life)
    at = spec.to or spec.folder / AT
    with ckptd.Subscriber(
        layout_of("rollout"), {"model": part}, at, group=distributed.group.WORLD
    ) as subscriber:
        while not _stopped(spec):
            report = subscriber.update(wait_s=0.2)
            if report is not None:
                (digest,) = _digests({spec.rank: part}, _summed)
                version = report.version
                row = AppliedRow(
                    *version,
                    spec.life,
                    spec.rank,
                    time.time(),
                    digest,
                    report.bytes_needed,
                    report.bytes_received + report.bytes_mapped,
                    report.bytes_unchanged,
                    report.lag_s,
                )
                _append(rows, row)
            if subscriber.version is not None:
                samples = _sample({spec.rank: part}, draws)
                if spec.rank == 0:
                    _put(spec.folder, Sampled(subscriber.version.step, samples.tolist()))


def _summed(found: list[Tensor]) -> Tensor:
    (mine,) = found
    distributed.all_reduce(mine)
    return mine


def _sample(parts: Mapping[int, Part], draws: torch.Generator) -> Tensor:
    """Return samples of the policy; both ranks draw the same."""
    tokens = torch.randint(VOCABULARY, (_SAMPLES, 1), generator=draws)
    with torch.no_grad():
        while tokens.shape[1] <= SHAPE.seq:
            (mine,) = logits(parts, tokens[:, -SHAPE.seq :], _summed)
            halves = [torch.empty_like(mine[:, -1]) for _ in range(TP)]
            distributed.all_gather(halves, mine[:, -1].contiguous())
            chances = torch.cat(halves, 1).softmax(-1)
            tokens = torch.cat([tokens, chances.multinomial(1, generator=draws)], 1)
    return tokens


def _stopped(spec: PolicySpec) -> bool:
    """Whether the demo is at its end; the same on both ranks."""
    flag = torch.tensor(int((spec.folder / STOP).exists()))
    distributed.broadcast(flag, 0)
    return bool(flag)


def _put(folder: Path, sampled: Sampled) -> None:
    new = folder / f"{_SAMPLED}.new"
    new.write_bytes(msgspec.json.encode(sampled))
    new.replace(folder / _SAMPLED)


# --- a rank that trains ---------------------------------------------------------------------------


def train(spec: PolicySpec) -> None:
    """Learn from the better half of what was sampled, and publish after each step."""
    model = build(SHAPE, _SEED)
    data = cut_model(model, spec.cut)
    optimizer = AdamW(model.parameters(), _RATE, foreach=False)
    state: dict[str, Any] = {"model": model, "optim": optimizer, "step": 0}
    layout = layout_of("four" if spec.cut.tp > 1 else "three")
    with (
        ckptd.Checkpointer(str(spec.folder / CHECKPOINTS)) as checkpointer,
        ckptd.Publisher(
            layout, None if spec.to else spec.folder / AT, to=spec.to or None, linger_s=0.0
        ) as publisher,
    ):
        if checkpointer.latest() is not None:
            checkpointer.load(state)
        _publish(spec, publisher, state, None, last=False)
        known, begun, last = -1, state["step"], False
        while not last:
            sampled, stop = _newest(spec, known)
            last = stop and state["step"] + 1 - begun >= spec.steps
            known = sampled.step
            samples = torch.tensor(sampled.samples)
            rewards = reward_of(samples)
            best = samples[rewards.argsort(descending=True)[: _SAMPLES // 2]]
            share = best.tensor_split(data.size())[data.get_local_rank()]
            loss = model(share) / best[:, 1:].numel()
            (loss * data.size()).backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            _publish(spec, publisher, state, float(rewards.mean()), last=last)
        checkpointer.save(state["step"], state).durable(timeout=60.0)
        _wait_for(spec, END)


def _publish(
    spec: PolicySpec,
    publisher: ckptd.Publisher,
    state: Mapping[str, Any],
    reward: float | None,
    *,
    last: bool,
) -> None:
    step, model = state["step"], state["model"]
    begun = time.monotonic()
    wait_s = 30.0 if spec.to and last else 0.0  # of the store, for the version before
    publication = publisher.publish(step, {"model": model, "optim": state["optim"]}, wait_s=wait_s)
    seconds = time.monotonic() - begun
    at = time.time()
    whole = {n: _whole(t) for n, t in model.named_parameters()}
    digests: tuple[str, ...] = ()
    if spec.rank == 0:
        digests = _digests(dict(enumerate(rollout_parts(whole))), _added)
        row = PublishedRow(
            step, spec.life, spec.world, at, reward, publication.skipped, digests, seconds, last
        )
        _append(published_file(spec.folder), row)


def _added(found: list[Tensor]) -> Tensor:
    one, two = found
    return one + two


def _whole(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _newest(spec: PolicySpec, known: int) -> tuple[Sampled, bool]:
    """Return samples of a newer version than the last ones, or after a while the last again.

    And whether this life is to end; the same on all ranks.
    """
    found: list[Any] = [None, False]
    if spec.rank == 0:
        begun = time.monotonic()
        while True:
            path = spec.folder / _SAMPLED
            found[0] = _sampled.decode(path.read_bytes()) if path.exists() else None
            waited = time.monotonic() - begun
            if found[0] is not None and (found[0].step > known or waited > _PATIENCE_S):
                break
            if waited > _FIRST_S:
                break
            time.sleep(_POLL_S)
        found[1] = told_to(spec.folder, spec.life, LAST).exists()
    distributed.broadcast_object_list(found, 0)
    sampled, stop = found
    if sampled is None:
        raise ckptd.DeadlineError("nothing was sampled", wanted=f"within {_FIRST_S:g} s")
    return sampled, stop


def _wait_for(spec: PolicySpec, what: str) -> None:
    """Return when the demo says so: what was published is then used.

    Raises
    ------
    ckptd.DeadlineError
        It does not say so in time.
    """
    file = told_to(spec.folder, spec.life, what)
    if wait_until(lambda: file.exists() or None, _FIRST_S) is None:
        raise ckptd.DeadlineError(
            "the demo did not go on", where=str(file), wanted=f"{_FIRST_S:g} s"
        )


def _append(path: Path, row: msgspec.Struct) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(row) + b"\n")


def main(path: str, log: str) -> NoReturn:
    """Be one rank, as a file says, in a session of its own; write to a log."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    for number in (1, 2):
        os.dup2(out, number)
    report_crashes()
    spec = _specs.decode(Path(path).read_bytes())
    os.environ.update(environment())
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{spec.port}",
        rank=spec.rank,
        world_size=spec.world,
        timeout=timedelta(seconds=60),
    )
    (train if spec.role == "trainer" else roll_out)(spec)
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a return, as in `ckptd_demo.trainer`.
    os._exit(0)
