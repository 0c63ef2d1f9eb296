"""Reads DeepSpeed: ZeRO 1, 2, 3, pipelines, experts, universal folders; their file names.

In it: which files are missing; counters of steps; ties; optimizer groups; frozen and tied
parameters.

A rank of ZeRO holds parts of parameters end to end in flat buffers, group by group; the files of
the model say which parameters in which order. Stage 3 cuts each parameter over the ranks; stages 1
and 2 cut the whole buffer. A stage of a pipeline is a model of its own, with files of its own; the
experts of a rank are a group whose buffer only the ranks with the same experts share. Tensors are
the 32-bit weights under the names of parameters, and their states as ``optim.NAME.STATE``, counters
of steps too; groups of the optimizer are values as torch has them, ``optim.param_groups.0.lr``,
whose ``params`` are names.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import Any

from ckptd.base.grids.grid import strides_of
from ckptd.errors import CorruptError, MismatchError, RefusedError
from ckptd.readers.base import (
    MAX_NAMES,
    Foreign,
    ForeignPiece,
    KeptValues,
    Listing,
    damaged,
    missing,
    step_of,
    step_or,
)
from ckptd.readers.pickles import PickledTensor, check_read, counts, named_values, short_text
from ckptd.readers.torchfiles import TensorAt, load_torch, whole_piece
from ckptd.readers.zips import TorchZip
from ckptd.types import Box

_LATEST = ("latest", "latest_universal")
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]+)_)?mp_rank_([0-9]+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")
_LAYER = re.compile(r"layer_([0-9]+)(?:-model_([0-9]+))?-model_states\.pt")
_EXPERT_FILE = re.compile(r"(?:layer_([0-9]+)_)?expert_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt")
_EXPERT = re.compile(r"(?<=\.deepspeed_experts\.)([0-9]+)(?=\.)")
_TIED = "tied_modules."
_SHARED_FIRST = "use_data_before_expert_parallelism"
_UNIVERSAL = "zero/"
_OPTIMIZER = "optimizer_state.pt"
_MOST_GROUPS = 4096
_TELLING = 64
"""Elements that two ranks do not have in common by chance."""
_SKIPPED = ("optimizer_state_dict", "module", "param_shapes", "optimizer", "buffer_names")


class DeepSpeedReader:
    """Reads what ``engine.save_checkpoint`` and ``ds_to_universal.py`` wrote."""

    name = "deepspeed"

    def recognise(self, names: Listing) -> int:
        """Return 100 for the folder of a tag, or the one above it."""
        if any(_MODEL.fullmatch(n) or _OPTIM.fullmatch(n) for n in names.names):
            return 100
        below = (names.inside(f) for f in names.folders if f.startswith("global_step"))
        tagged = any(n in names.names for n in _LATEST)
        return 100 if tagged and any(map(self.recognise, below)) else 0

    def open(self, names: Listing) -> Foreign:
        """Read the pickles of all files."""
        models, optims = _by_rank(names, _MODEL), _by_rank(names, _OPTIM)
        if not models and not optims:
            names = _tagged(names)
            models, optims = _by_rank(names, _MODEL), _by_rank(names, _OPTIM)
        if not models:
            raise missing(names.key("mp_rank_00_model_states.pt"))
        sets = [
            _Model(names, mp, files, optims.get(mp, {})) for mp, files in sorted(models.items())
        ]
        values = KeptValues()
        kept = {k: v for k, v in sets[0].value.items() if k not in _SKIPPED}
        for name, value in named_values(kept, sets[0].key):
            values.add(name, value)
        cut, universal = _is_cut(sets, names), _UNIVERSAL in names.names
        if not universal and (cut or any(one.value.get("ds_autoep_layers") for one in sets)):
            raise RefusedError(
                "DeepSpeed's tensor parallelism and AutoEP are not supported",
                kind="unreadable-format",
                where=names.where,
                found=f"mp ranks {[one.mp for one in sets][:8]}",
                hint="ds_to_universal.py joins the parts, and its folder is read; or ckptd reshard "
                "--from LAYOUT, with a line 'files' in the layout, reads the weights",
            )
        _check_files(sets, names)
        pieces, optimizers = _universal(names, sets, cut) if universal else _all(names, sets)
        if cut:
            values.left_out |= dict.fromkeys(_parts_left(names, sets, {p.name for p in pieces}))
        _add_groups(values, optimizers)
        objects = values.objects()
        step = step_or(objects.get("global_steps"), step_of(names))
        unread = [n for n in names.names if n.startswith("expp_rank_")]
        left_out = list(values.left_out)
        return Foreign(pieces, objects, left_out, unread, step, has_sections=False)


_ALL_RANKS = -1
"""Number of the file of a model that has none of a rank in its name."""


def _by_rank(names: Listing, pattern: re.Pattern[str]) -> dict[int, dict[int, str]]:
    """Return the files of each model whose names match, by rank."""
    out: dict[int, dict[int, str]] = {}
    for name in names.names:
        if match := pattern.fullmatch(name):
            out.setdefault(int(match[2]), {})[int(match[1] or _ALL_RANKS)] = name
    return out


class _Model:
    """A file of the model, one for each stage of a pipeline and each part of tensor parallelism.

    Attributes
    ----------
    files, optim
        The files of ranks that have a part of it, and those of their optimizers; by rank.
    """

    def __init__(
        self, names: Listing, mp: int, files: Mapping[int, str], optim: Mapping[int, str]
    ) -> None:
        self.names = names
        self.mp = mp
        self.files = files
        self.optim = optim
        self.file = next(iter(files.values()))
        self.key = names.key(self.file)
        self.found = load_torch(names, self.file)
        self.value = self.found.value if isinstance(self.found.value, dict) else {}

    @property
    def has_shapes(self) -> bool:
        """Whether it says the shapes of its parameters."""
        return self.value.get("param_shapes") is not None

    @cached_property
    def groups(self) -> list[dict[str, tuple[int, ...]]]:
        """Shapes of parameters by name, group by group; of experts those of the first rank."""
        return _groups(self.value, self.names)


def _is_cut(sets: Sequence[_Model], names: Listing) -> bool:
    """Whether there is tensor parallelism: files of several models have parameters of one name."""
    every = [m for n in names.names if (m := _EXPERT_FILE.fullmatch(n))]
    layers = {m[2] for n in names.names if (m := _LAYER.fullmatch(n)) and m[2]}
    if len(layers) > 1 or any(int(m[3]) for m in every):
        return True
    seen: set[str] = set()
    for one in sets:
        module = one.value.get("module")
        mine = {n for group in one.groups for n in group} if one.has_shapes else set()
        mine |= set(map(str, module)) if isinstance(module, dict) else set()
        if any(not name.startswith(_TIED) for name in mine & seen):
            return True
        seen |= mine
    return False


def _check_files(sets: Sequence[_Model], names: Listing) -> None:
    """Check that files of all stages and of all experts are there, and of one step."""
    for one in sets:
        _check_step(sets[0].value.get("global_steps"), one.value.get("global_steps"), one.key)
    world = sets[0].value.get("mp_world_size")
    found = [one.mp for one in sets]
    if type(world) is int and 0 < world <= MAX_NAMES:
        gone = _first_gone(found)
        if gone < world or len(found) != world:
            raise missing(names.key(f"mp_rank_{min(gone, world):02d}_model_states.pt"))
    experts: dict[int, set[int]] = {}
    for name in names.names:
        if (match := _EXPERT_FILE.fullmatch(name)) and match[1]:
            experts.setdefault(int(match[1]), set()).add(int(match[2]))
    of = sets[0].value.get("num_experts")
    of = of if isinstance(of, list) and len(of) == len(experts) else [0] * len(experts)
    for (layer, there), number in zip(sorted(experts.items()), of, strict=True):
        wanted = number if type(number) is int and 0 < number <= MAX_NAMES else max(there) + 1
        gone = _first_gone(there)
        if gone < wanted:
            raise missing(names.key(f"layer_{layer}_expert_{gone}_mp_rank_00_model_states.pt"))


def _first_gone(numbers: Collection[int]) -> int:
    """Return the least number that is not there, whose files' names may say any."""
    there = set(numbers)
    return next(n for n in range(len(there) + 1) if n not in there)


def _check_step(wanted: Any, found: Any, where: str) -> None:
    if wanted != found:
        raise _other_step(wanted, found, where)


def _other_step(wanted: Any, found: Any, where: str) -> MismatchError:
    return MismatchError(
        "the files belong to different steps",
        where=where,
        wanted=short_text(wanted),
        found=short_text(found),
        hint="copy the files of all ranks from one save",
    )


def _all(names: Listing, sets: Sequence[_Model]) -> tuple[list[ForeignPiece], list[_Named]]:
    """Return what all files hold. What stages of a pipeline share counts once."""
    owner: dict[str, int] = {}
    pieces: list[ForeignPiece] = []
    optimizers = []
    for one in sets:
        named, found = _flat(names, one)
        if named is not None:
            optimizers.append(named)
            found += _steps(*named)
        pieces += [p for p in found if owner.setdefault(p.name, one.mp) == one.mp]
    _check_counters([optimizer for optimizer, _ in optimizers])
    files = list(_files(names))
    _check_layers(names, sets, files)
    return pieces + [p for p in files if p.name not in owner], optimizers


def _file_tensors(
    names: Listing,
) -> Iterator[tuple[str, int | None, str, TorchZip, PickledTensor]]:
    """Yield ``(key, expert, name, file, tensor)`` of what files of layers and of experts hold."""
    for file in names.names:
        layer, expert = _LAYER.fullmatch(file), _EXPERT_FILE.fullmatch(file)
        if layer or expert:
            found, key = load_torch(names, file), names.key(file)
            prefix = f"{int(layer[1])}." if layer else ""
            number = int(expert[2]) if expert else None
            for name, value in named_values(found.value, key):
                if isinstance(value, PickledTensor):
                    yield key, number, prefix + name, found, value
                else:
                    check_read(value, f"{key}: {name}")


def _files(names: Listing) -> Iterator[ForeignPiece]:
    """Yield the weights in files of layers and of experts, which are the model's own."""
    seen: dict[str, str] = {}
    for key, expert, name, found, value in _file_tensors(names):
        inside = _EXPERT.search(name)
        if expert is not None and inside and int(inside[1]) != expert:
            raise _other_file(key, f"weights of expert {expert}", name)
        if seen.setdefault(name, key) != key:
            raise _other_file(key, f"no weights of {seen[name]}", name)
        yield whole_piece(name, found, value, key)


def _check_layers(names: Listing, sets: Sequence[_Model], files: Sequence[ForeignPiece]) -> None:
    """Check that files of layers have what torch's optimizers of the stages train.

    Layers without weights have no file, so that gaps in the numbers say nothing. What stages share
    is in the optimizer of each, with the same moments, and in one file at least.
    """
    if not any(map(_LAYER.fullmatch, names.names)) or any(map(_EXPERT_FILE.fullmatch, names.names)):
        return
    there = Counter(p.shape for p in files)
    trained: Counter[tuple[int, ...]] = Counter()
    seen: set[tuple[Any, ...]] = set()
    for one in sets:
        mine = set()
        # Of an optimizer that is not torch's own, states may be flat.
        value = one.value.get("optimizer")
        own = value.get("state") if isinstance(value, dict) else None
        for state in own.values() if isinstance(own, dict) else ():
            moment = state.get("exp_avg") if isinstance(state, dict) else None
            if isinstance(moment, PickledTensor):
                key = (moment.shape, one.found.checksum(moment.storage.key))
                trained[moment.shape] += key not in seen
                mine.add(key)
        seen |= mine
    for shape, number in sorted(trained.items()):
        if number > there[shape]:
            raise CorruptError(
                "files of layers are missing",
                where=names.where,
                wanted=f"{number} tensors of shape {shape}, which the optimizers train",
                found=f"{there[shape]} in all files layer_*",
                hint="copy the files of all layers from one save",
            )


def _other_file(where: str, wanted: str, found: str) -> MismatchError:
    return MismatchError(
        "a file holds the contents of another file",
        where=where,
        wanted=wanted,
        found=short_text(found),
        hint="copy the files of one save under their original names",
    )


def _tagged(names: Listing) -> Listing:
    latest = next(n for n in _LATEST if n in names.names)
    tag = names.read(latest, 4096).decode("utf-8", "replace").strip() + "/"
    if tag not in names.names:
        raise missing(names.key(tag), f"the file {latest!r} names a missing folder")
    return names.inside(tag)


# -- the universal form ----------------------------------------------------------------------------


def _universal(
    names: Listing, sets: Sequence[_Model], cut: bool
) -> tuple[list[ForeignPiece], list[_Named]]:
    """Return what the folders of parameters hold, which are whole.

    With `cut` the files of models have parts, and say nothing of whole ones.
    """
    zero = names.inside(_UNIVERSAL)
    every = [one.groups for one in sets if one.has_shapes]
    shapes = {} if cut else {n: shape for groups in every for g in groups for n, shape in g.items()}
    whole: dict[str, ForeignPiece] = {}
    trained: set[str] = set()
    for folder in zero.folders:
        parameter = zero.inside(folder)
        for file in parameter.ending(".pt"):
            found = load_torch(parameter, file)
            value = found.value.get("param") if isinstance(found.value, dict) else found.value
            if not isinstance(value, PickledTensor):
                check_read(value, parameter.key(file))
                continue
            state, name = file.removesuffix(".pt"), folder.removesuffix("/")
            key, shape = parameter.key(file), shapes.get(name, value.shape)
            if value.shape and value.shape != shape:
                # Stage 3 leaves them flat.
                if value.strides != (1,) or value.shape[0] != math.prod(shape):
                    raise _other_shape(key, shape, value.shape)
                strides = strides_of(shape)
                value = PickledTensor(value.storage, value.offset, shape, strides, value.dtype)
            if state != "fp32":
                trained.add(name)
                name = f"optim.{name}.{state}"
            whole[name] = whole_piece(name, found, value, key)
        if folder.removesuffix("/") not in whole:
            raise missing(parameter.key("fp32.pt"))
    states = {n.rpartition(".")[2] for n in whole if n.startswith("optim.")}
    for name in trained:
        gone = sorted(s for s in states if f"optim.{name}.{s}" not in whole)
        if gone:
            raise missing(zero.key(f"{name}/{gone[0]}.pt"))
    for name in {name for groups in every for group in groups for name in group}:
        if name not in whole:
            raise missing(zero.key(f"{name}/fp32.pt"))
    for name in trained:
        for state in states:
            found_shape, wanted = whole[f"optim.{name}.{state}"].shape, whole[name].shape
            if found_shape and found_shape != wanted:
                raise _other_shape(zero.key(f"{name}/{state}.pt"), wanted, found_shape)
    # A tied weight has a folder of its own at stages 1 and 2, with values of a narrower type.
    for name, aliases in _tied(sets[0].value, trained, names.where).items():
        whole |= {alias: replace(whole[name], name=alias) for alias in aliases if name in whole}
    # What has no folder is where the ranks left it.
    pieces, seen = list(whole.values()), set(whole)
    optimizers: list[_Named] = []
    for one in () if cut else sets:
        rest = [p for p in (*_weights(one, seen), *_frozen(names, one)) if p.name not in seen]
        pieces += rest
        seen |= {p.name for p in rest}
    pieces += [p for p in (() if cut else _files(names)) if p.name not in seen]
    if _OPTIMIZER in zero.names and every:
        alike = zip_longest(*every, fillvalue={})
        held = [list(dict.fromkeys(name for group in one for name in group)) for one in alike]
        key = zero.key(_OPTIMIZER)
        optimizers = [(_Optimizer.of(load_torch(zero, _OPTIMIZER), key), held)]
        pieces += _steps(*optimizers[0])
    return pieces, optimizers


def _other_shape(where: str, wanted: Sequence[int], found: Sequence[int]) -> MismatchError:
    return MismatchError(
        "a file and the shapes of parameters disagree", where=where, wanted=wanted, found=found
    )


def _parts_left(names: Listing, sets: Sequence[_Model], seen: Collection[str]) -> Iterator[str]:
    """Yield names of tensors that only the files of models have, which tensor parallelism cuts."""
    for one in sets:
        for name, value in named_values(one.value.get("module") or {}, one.key):
            if isinstance(value, PickledTensor) and name not in seen:
                yield name
        yield from map(str, _table(one.value, "frozen_param_shapes", one.key))
    yield from (name for _, _, name, _, _ in _file_tensors(names) if name not in seen)


# -- the optimizer ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """States and groups of torch's optimizer in a file; a state is that of a group of shapes."""

    key: str
    found: TorchZip
    states: Sequence[Any]
    groups: Sequence[Any]

    @classmethod
    def of(cls, found: TorchZip, key: str) -> _Optimizer:
        """Take it from the file of a rank, or the one of the universal form."""
        top = found.value if isinstance(found.value, dict) else {}
        state = top.get("optimizer_state_dict", top)
        for inner in ("base_optimizer_state", "optimizer_state_dict"):
            if isinstance(state, dict) and inner in state:
                state = state[inner]
        state = state if isinstance(state, dict) else {"state": state}
        states, groups = state.get("state"), state.get("param_groups")
        states = list(states.values()) if isinstance(states, dict) else states
        return cls(
            key,
            found,
            states if isinstance(states, list) else (),
            groups if isinstance(groups, list) else (),
        )


_Named = tuple[_Optimizer, Sequence[Sequence[str]]]
"""An optimizer, and for each of its states the names of the parameters that it is of."""


def _steps(optimizer: _Optimizer, held: Sequence[Sequence[str]]) -> Iterator[ForeignPiece]:
    """Yield the counter of steps of each parameter, which a group of shapes shares."""
    for names, state in zip(held, optimizer.states, strict=False):
        step = state.get("step") if isinstance(state, dict) else None
        if not isinstance(step, PickledTensor) or step.shape:
            continue
        for name in names:
            yield whole_piece(f"optim.{name}.step", optimizer.found, step, optimizer.key)


def _counter(optimizer: _Optimizer) -> PickledTensor | int | float | None:
    """Return the counter of steps of the first state that has one."""
    for state in optimizer.states:
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, PickledTensor):
            alone = step.storage.numel == math.prod(step.shape) == 1
            return step if alone and step.dtype.startswith(("float", "int")) else None
        return step if type(step) in (int, float) else None
    return None


def _mark(optimizer: _Optimizer) -> Any:
    """Return what tells a counter of steps from others, unread; None for unknown."""
    step = _counter(optimizer)
    if not isinstance(step, PickledTensor):
        return step
    crc, _ = optimizer.found.checksum(step.storage.key)
    return f"a counter with the checksum {crc:08x}" if crc else None


def _check_counters(optimizers: Sequence[_Optimizer]) -> None:
    """Check that the optimizers of all stages are of one step."""
    marks = [(mark, o.key) for o in optimizers if (mark := _mark(o)) is not None]
    for mark, key in marks[1:]:
        _check_step(marks[0][0], mark, key)


def _check_reached(model: _Model, r: _Rank) -> None:
    """Check that the engine has reached the optimizer's step; it counts what it skips too.

    A new optimizer may be behind. Old versions of stage 3 counted once for each sub group.
    """
    taken, skipped = model.value.get("global_steps"), model.value.get("skipped_steps", 0)
    if r.stage == 3 or type(taken) is not int or type(skipped) is not int:
        return
    step = _counter(r.optimizer)
    if isinstance(step, PickledTensor):
        step = r.found.number(step, r.key)
    if step is not None and step > taken - skipped:
        raise _other_step(f"at most {taken - skipped}, as {model.key} says", step, r.key)


def _add_groups(values: KeptValues, optimizers: Sequence[_Named]) -> None:
    """Add the settings of each group as torch's state has them, and names of its parameters.

    Stages of a pipeline have the same groups, each with parameters of its own.
    """
    for number, group in enumerate(optimizers[0][0].groups if optimizers else ()):
        params: set[str] = set()
        for one, names in optimizers:
            mine = one.groups[number] if number < len(one.groups) else None
            held = mine.get("params") if isinstance(mine, dict) else None
            if not isinstance(held, list) or not all(
                type(i) is int and 0 <= i < len(names) for i in held
            ):
                values.left_out[f"optim.param_groups.{number}"] = None
                break
            params |= {name for i in held for name in names[i]}
        else:
            for key, value in {**group, "params": sorted(params)}.items():
                values.add(f"optim.param_groups.{number}.{key}", value)


# -- flat buffers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rank:
    """The optimizer's file of a rank.

    Attributes
    ----------
    world
        Number of ranks.
    counts
        How many of them share a group's buffer.
    buffers
        By state (empty: the weights), one a group.
    pads
        What follows each parameter in its buffer, one table a group; or nothing.
    mapping
        Where each parameter begins in the rank's share, and how many elements of it are there, as
        the rank says; one table a group, or nothing.
    fillers
        How many elements fill the rank's share up, one number a group, or nothing.
    optimizer
        The one of torch in it.
    """

    rank: int
    key: str
    found: TorchZip
    stage: int
    world: int
    counts: Sequence[int]
    buffers: Mapping[str, Sequence[PickledTensor]]
    pads: Sequence[Sequence[int]]
    mapping: Sequence[Mapping[str, tuple[int, int]]]
    fillers: Sequence[int]
    optimizer: _Optimizer


def _flat(names: Listing, model: _Model) -> tuple[_Named | None, list[ForeignPiece]]:
    """Return what one model and its ranks hold."""
    if not model.optim:
        return None, list(_weights(model, ()))
    groups = model.groups
    ranks = [_rank(names, rank, file) for rank, file in sorted(model.optim.items())]
    counter = _mark(ranks[0].optimizer)
    for r in ranks:
        if r.world != len(ranks) or r.rank >= r.world or r.stage != ranks[0].stage:
            raise CorruptError(
                "files of ranks are missing, or of another number of ranks",
                where=names.where,
                wanted=f"{r.world} ranks, as {r.key} says",
                found=f"{len(ranks)} files",
            )
        _check_step(counter, _mark(r.optimizer), r.key)
        _check_name(r)
    _check_copies(ranks)
    _check_reached(model, ranks[0])
    trained = {name for group in groups for name in group}
    tied = _tied(model.value, trained, names.where)
    pieces = list(_weights(model, trained | {one for more in tied.values() for one in more}))
    pieces += _frozen(names, model)
    whole: list[dict[str, None]] = [{} for _ in groups]
    parts = _each(groups, ranks) if ranks[0].stage == 3 else _whole(model, ranks)
    for r, number, state, name, shape, buffer, low, high, first in parts:
        whole[number][name] = None
        stored = PickledTensor(
            buffer.storage, buffer.offset + first, (high - low,), (1,), buffer.dtype
        )
        at = TensorAt(r.found, stored, f"{r.key}: {name}")
        box, dtype = Box.whole(shape), buffer.dtype
        for one in (name, *tied.get(name, ())) if not state else (name,):
            full = f"optim.{one}.{state}" if state else one
            pieces.append(ForeignPiece(full, dtype, shape, box, r.key, at, (low, high)))
    return (ranks[0].optimizer, [list(g) for g in whole]), pieces


def _check_name(r: _Rank) -> None:
    """Check that a file still has its number: torch writes its first name into it.

    What the ranks of stage 3 hold differs in nothing else.
    """
    saved = _OPTIM.fullmatch(f"{r.found.first_name}.pt")
    if saved and int(saved[1]) != r.rank:
        raise _other_file(r.key, f"the file of rank {r.rank}", f"{r.found.first_name}.pt")


def _check_copies(ranks: Sequence[_Rank]) -> None:
    """Check that no two ranks hold the same, by the checksums of their buffers.

    Where weights and moments are all alike, they may be zeros, which ranks have in common.
    """
    seen: dict[Any, str] = {}
    for r in ranks:
        groups = list(zip(*r.buffers.values(), strict=True))
        sums = [[r.found.checksum(b.storage.key) for b in group] for group in groups]
        known = all(crc for group in sums for crc, _ in group)
        telling = any(
            len(group) > 2 and len(set(some)) == len(some) and group[0].shape[0] >= _TELLING
            for group, some in zip(groups, sums, strict=True)
        )
        if known and telling:
            first = seen.setdefault(str(sums), r.key)
            if first != r.key:
                raise _other_file(r.key, f"the file of rank {r.rank}", f"a copy of {first}")


_Groups = Sequence[Mapping[str, tuple[int, ...]]]
_Part = tuple["_Rank", int, str, str, tuple[int, ...], PickledTensor, int, int, int]
"""Rank, group, state, name, shape, buffer, range of the elements, where it begins there."""


def _each(groups: _Groups, ranks: Sequence[_Rank]) -> Iterator[_Part]:
    """Stage 3: each rank has the same share of each parameter, rounded up.

    A group is one buffer, or several; each ends with a parameter, the last one with the group.
    """
    for r in ranks:
        for state, buffers in r.buffers.items():
            left, at, room = iter([b for b in buffers if b.shape[0]]), 0, 0
            for number, group in enumerate(groups):
                for name, shape in group.items():
                    n = math.prod(shape)
                    share = -(-n // r.world)
                    if share and at == room:
                        following = next(left, None)
                        if following is None:
                            raise _short(r, name)
                        buffer, at, room = following, 0, following.shape[0]
                    if at + share > room:
                        raise _short(r, name, f"{share} elements", f"{room - at} are left")
                    low, high = min(r.rank * share, n), min((r.rank + 1) * share, n)
                    if low < high:
                        yield r, number, state, name, shape, buffer, low, high, at
                    at += share
                if at != room:
                    raise _short(r, f"group {number}", f"{at} elements", f"{room}")
            if more := sum(b.shape[0] for b in left):
                raise _short(r, "all groups", "no elements after the last one", f"{more}")


def _whole(model: _Model, ranks: Sequence[_Rank]) -> Iterator[_Part]:
    """Stages 1 and 2: parameters of a group end to end, cut evenly over the ranks that share it.

    The last rank's weights are saved without what pads the buffer.
    """
    for r in ranks:
        for buffers in r.buffers.values():
            if len(model.groups) != len(buffers):
                raise _short(r, f"{len(buffers)} buffers for {len(model.groups)} groups")
    for number, group in enumerate(model.groups):
        size = max(r.buffers[""][number].shape[0] for r in ranks)
        orders = list(_orders(group, ranks, number))
        line = _Line(group, number)
        fits = [all(_agrees(*s, line, size) for s in o) for o in orders]
        if not any(fits):
            raise _short(ranks[0], f"group {number}: param_slice_mappings say otherwise")
        places = [[(index, shift) for _, index, shift in o] for o in orders]
        open_to_both = all(fits) and places[0] != places[-1]
        order = orders[_shared_first(model)] if open_to_both else orders[fits.index(True)]
        _check_used(group, number, order, size)
        for r, index, shift in order:
            for local, shape, low, high, at in line.held(r, index, size):
                name = _shifted(local, shift)
                for state, buffers in r.buffers.items():
                    if at + high - low > buffers[number].shape[0]:
                        raise _short(r, name)
                    yield r, number, state, name, shape, buffers[number], low, high, at


def _shared_first(model: _Model) -> bool:
    """Whether neighbours have the same experts, as the configuration says."""
    config = model.value.get("ds_config")
    found = config.get(_SHARED_FIRST, False) if isinstance(config, dict) else None
    if type(found) is not bool:
        raise RefusedError(
            "the files do not record which rank has which experts",
            kind="unreadable-format",
            where=model.key,
            wanted=f"param_slice_mappings of the ranks, or ds_config with {_SHARED_FIRST}",
            hint="a save by a DeepSpeed that writes them; or ckptd reshard --from LAYOUT, with a "
            "line 'files' in the layout, reads the weights in the files of layers and experts",
        )
    return found


def _check_used(
    group: Mapping[str, tuple[int, ...]], number: int, order: Sequence[_Sharer], size: int
) -> None:
    """Check that the shapes use up the buffers, but for what fills them up to the ranks.

    Ranks write that filler, or leave it out. They say how much it is; those that do not, and old
    ones whose filler is more than the share of a rank, have less of it than two elements a rank.
    """
    for shift in sorted({s for _, _, s in order}):
        ranks = [r for r, _, s in order if s == shift]
        sizes = [r.buffers[""][number].shape[0] for r in ranks]
        wanted = sum(map(math.prod, group.values()))
        wanted += sum(ranks[0].pads[number]) if ranks[0].pads else 0
        spare = sum(sizes) - wanted
        said = sum(r.fillers[number] for r in ranks) if ranks[0].fillers else None
        if said is None or said > size:
            good = 0 <= spare < 2 * len(ranks)
        else:
            good = spare == 0 or (spare == said and min(sizes) == max(sizes))
        if not good:
            raise _short(ranks[0], f"group {number}", f"{wanted} elements", f"{sum(sizes)}")


def _shifted(name: str, by: int) -> str:
    """Return a local name with the number that its expert has among all."""
    return _EXPERT.sub(lambda m: str(int(m[1]) + by), name)


_Sharer = tuple["_Rank", int, int]
"""A rank, which share of a group's buffer it has, and what to add to the numbers of experts."""


def _orders(
    group: Mapping[str, tuple[int, ...]], ranks: Sequence[_Rank], number: int
) -> Iterator[list[_Sharer]]:
    """Yield which rank may have which share of a group's buffer; of experts there are two ways.

    Experts have local numbers in names: of four on two ranks, both have 0 and 1. Neighbours have
    different experts by default; with ``use_data_before_expert_parallelism`` they share them.
    """
    local = {int(m[1]) for name in group if (m := _EXPERT.search(name))}
    if not local:
        yield [(r, i, 0) for i, r in enumerate(ranks)]
        return
    shares = ranks[0].counts[number] if number < len(ranks[0].counts) else 0
    if not shares or len(ranks) % shares or local != set(range(len(local))):
        raise _short(ranks[0], f"{sorted(local)[:8]} are the experts of {len(ranks)} ranks")
    apart = len(ranks) // shares
    yield [(r, i // apart, i % apart * len(local)) for i, r in enumerate(ranks)]
    yield [(r, i % shares, i // shares * len(local)) for i, r in enumerate(ranks)]


class _Line:
    """The parameters of a group, end to end in its buffer."""

    def __init__(self, group: Mapping[str, tuple[int, ...]], number: int) -> None:
        self.number = number
        self._parameters = [(name, shape, math.prod(shape)) for name, shape in group.items()]
        self._starts: dict[tuple[int, ...] | None, list[int]] = {}

    def _begins(self, r: _Rank) -> list[int]:
        """Return where each parameter begins, and where the last one ends, as a rank pads them."""
        said = tuple(r.pads[self.number]) if r.pads else None
        if said not in self._starts:
            pads = (0,) * len(self._parameters) if said is None else said
            if len(pads) != len(self._parameters):
                found = f"{len(pads)} paddings for {len(self._parameters)} parameters"
                raise _short(r, f"group {self.number}: {found}")
            sizes = (n + pad for (_, _, n), pad in zip(self._parameters, pads, strict=True))
            self._starts[said] = list(accumulate(sizes, initial=0))
        return self._starts[said]

    def held(
        self, r: _Rank, index: int, size: int
    ) -> Iterator[tuple[str, tuple[int, ...], int, int, int]]:
        """Yield ``(name, shape, range of its elements, where it begins in the share)``."""
        begin, end, starts = index * size, (index + 1) * size, self._begins(r)
        for number in range(bisect_right(starts, begin) - 1, len(self._parameters)):
            (name, shape, n), at = self._parameters[number], starts[number]
            if at >= end:
                return
            low, high = max(at, begin), min(at + n, end)
            if high > low:
                yield name, shape, low - at, high - at, low - begin


def _agrees(r: _Rank, index: int, shift: int, line: _Line, size: int) -> bool:
    """Whether a rank says that its share holds what follows from the shapes, if it says so."""
    if not r.mapping:
        return True
    held = line.held(r, index, size)
    return r.mapping[line.number] == {name: (at, high - low) for name, _, low, high, at in held}


def _short(r: _Rank, name: str, wanted: str = "", found: str = "") -> CorruptError:
    return CorruptError(
        "the buffers of a rank and the shapes of parameters disagree",
        where=f"{r.key}: {name}"[:200],
        wanted=wanted or None,
        found=found or None,
    )


def _groups(value: Any, names: Listing) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of parameters by name, group by group."""
    try:
        shapes = value["param_shapes"]
        groups = [dict(g) for g in (shapes if isinstance(shapes, list) else [shapes])]
        out = [{k: counts(v) for k, v in g.items()} for g in groups]
        if not all(type(k) is str for g in out for k in g):
            raise ValueError("a parameter without a name")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = "a model's file lacks the shapes of its parameters"
        raise damaged(what, names.where, error) from None
    return out


def _address(value: Any) -> tuple[int, int]:
    start, numel = counts((value.fields["start"], value.fields["numel"]))
    return start, numel


def _rank(names: Listing, rank: int, file: str) -> _Rank:
    found, key = load_torch(names, file), names.key(file)
    try:
        state = found.value["optimizer_state_dict"]
        stage = state["zero_stage"]
        stage = int(stage if type(stage) is int else stage.args[0])
        count = state["partition_count"]
        shares = counts([count] if type(count) is int else count, _MOST_GROUPS)
        if stage == 3:
            weights = state["fp32_flat_groups"]
            base = state["optimizer_state_dict"]["state"]
        else:
            weights = state["single_partition_of_fp32_groups"]
            base = state["base_optimizer_state"]
            base = base["state"] if isinstance(base, dict) else base
        states = base.values() if isinstance(base, dict) else base
        buffers: dict[str, list[Any]] = {"": list(weights)}
        for group in list(states)[:_MOST_GROUPS]:
            for name, buffer in group.items():
                if isinstance(buffer, PickledTensor) and len(buffer.shape) == 1:
                    buffers.setdefault(str(name), []).append(buffer)
        every = [b for some in buffers.values() for b in some]
        if not all(isinstance(b, PickledTensor) and b.strides == (1,) for b in every):
            raise ValueError("a buffer that is not flat")
        if any(len(some) != len(weights) for some in buffers.values()):
            raise ValueError("states and weights have different numbers of buffers")
        pads = [counts(p, MAX_NAMES) for p in state.get("param_alignment_paddings") or ()]
        mapping = [
            {str(k): _address(v) for k, v in table.items()}
            for table in state.get("param_slice_mappings") or ()
        ]
        fillers = counts(state.get("group_paddings") or (), _MOST_GROUPS) if stage < 3 else ()
        if not {len(pads), len(mapping), len(fillers)} <= {0, len(weights)} and stage < 3:
            raise ValueError("paddings and weights have different numbers of groups")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise damaged("invalid optimizer file of a rank of ZeRO", key, error) from None
    own = _Optimizer.of(found, key)
    return _Rank(rank, key, found, stage, max(shares), shares, buffers, pads, mapping, fillers, own)


def _weights(model: _Model, trained: Collection[str]) -> Iterator[ForeignPiece]:
    """Yield what only the model's file holds: buffers, weights that are not trained.

    Those that are trained are there too at stages 1 and 2, under all of their names, and of a
    narrower type.
    """
    key = model.key
    for name, value in named_values(model.value.get("module") or {}, key):
        check_read(value, f"{key}: {name}")
        if isinstance(value, PickledTensor) and name not in trained and value.shape != (0,):
            yield whole_piece(name, model.found, value, key)


def _frozen(names: Listing, model: _Model) -> Iterator[ForeignPiece]:
    """Yield the shares of frozen parameters, which stage 3 cuts as well."""
    files = {rank: file for rank, file in model.files.items() if rank != _ALL_RANKS}
    for rank, file in sorted(files.items()):
        found = model.found if file == model.file else load_torch(names, file)
        key = names.key(file)
        if isinstance(found.value, dict):
            _check_step(model.value.get("global_steps"), found.value.get("global_steps"), key)
        fragments = _table(found.value, "frozen_param_fragments", key)
        frozen = _table(found.value, "frozen_param_shapes", key)
        shapes = _groups({"param_shapes": frozen}, names)[0]
        for name, shape in shapes.items():
            part, n = fragments.get(name), math.prod(shape)
            share = -(-n // len(files))
            low, high = min(rank * share, n), min((rank + 1) * share, n)
            flat = isinstance(part, PickledTensor) and part.strides == (1,)
            if not isinstance(part, PickledTensor) or not flat or part.shape != (share,):
                raise MismatchError(
                    "a rank's share of a frozen parameter is missing", where=f"{key}: {name}"
                )
            part = PickledTensor(part.storage, part.offset, (high - low,), (1,), part.dtype)
            at, box = TensorAt(found, part, f"{key}: {name}"), Box.whole(shape)
            yield ForeignPiece(name, part.dtype, shape, box, key, at, (low, high))


def _tied(value: Any, trained: Collection[str], where: str) -> dict[str, list[str]]:
    """Return the further names of parameters that modules share."""
    out: dict[str, list[str]] = {}
    shared = value.get("shared_params") or {}
    pairs = list(shared.items()) if isinstance(shared, dict) else shared
    for pair in pairs if isinstance(pairs, list) else (pairs,):
        if not isinstance(pair, list | tuple) or [type(n) for n in pair] != [str, str]:
            raise _no_table("shared_params", where)
        alias, name = pair
        if name in trained and alias not in trained:
            out.setdefault(name, []).append(alias)
    return out


def _table(value: Any, name: str, where: str) -> Mapping[Any, Any]:
    """Return a table of a model's file; empty where there is none."""
    found = value.get(name) if isinstance(value, dict) else value
    if not isinstance(found, dict | None):
        raise _no_table(name, where)
    return found or {}


def _no_table(name: str, where: str) -> CorruptError:
    return CorruptError(
        "a value of a model's file is not a dict of names", where=f"{where}: {name}"
    )
