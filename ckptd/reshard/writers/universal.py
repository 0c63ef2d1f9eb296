"""Writes DeepSpeed's universal folder (``load_universal``); the version that it states.

In it: file names, tag, groups, steps.

Each parameter has a folder with a file for its 32-bit weight and one for each of its states, whole.
What counts for all is in ``zero/optimizer_state.pt`` and in the file of the model, which DeepSpeed
calls another way for stage 3: both names are written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ckptd.base.grids.grid import whole
from ckptd.base.grids.owners import single_owner
from ckptd.checkpoint.format.container import FileMap
from ckptd.errors import UsageError
from ckptd.lay.matching import NameTemplates
from ckptd.reshard.execute import FileDraft
from ckptd.reshard.plan import ChunkFeed
from ckptd.reshard.reports import FolderNote
from ckptd.reshard.target import Assembled
from ckptd.reshard.verify import Expected, ExpectedValues
from ckptd.reshard.writers.folder import ChosenTensors, whole_tensor
from ckptd.reshard.writers.pickling import Global, Made, StorageTensor
from ckptd.reshard.writers.states import nested, objects_of, plain_names, split_groups
from ckptd.reshard.writers.torchzip import TorchFrame, TorchJoints, torch_file
from ckptd.store.base import is_segment

_LATEST = "latest_universal"
_WEIGHT, _STEP = "fp32", "step"
_TAG = re.compile(r"global_step[0-9]+_universal/(.*)", re.DOTALL)
_VERSION = "0.19.8"
"""The DeepSpeed whose form this is; it refuses files without one."""
_UNIVERSAL_VERSION = 0.4
_MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_OPTIMIZER = "optimizer_state.pt"
_UNKNOWN_GROUPS = 64
"""DeepSpeed loads as many groups of its optimizer as it finds settings for: where the source knows
none there are so many empty ones, and the engine's keep their own."""


class UniversalPlace:
    """Parameters and states of a target, a file each.

    A state that the layout calls ``fp32`` is the weight, where there is one.

    Parameters
    ----------
    assembled, expected
        What is written, and what the source's witness wants to see.

    Raises
    ------
    UsageError
        kind ``lay-rule``: the layout cuts a tensor. kind ``bad-key``: a name is none of a folder.
        Two values of the state would have the same name.
    """

    def __init__(self, assembled: Assembled, expected: Mapping[int, Expected]) -> None:
        composed = assembled.composed
        layout = composed.composition.target.bound.layout
        states = composed.composition.target.states
        templates, plain = NameTemplates(layout), plain_names(assembled)
        objects = objects_of(assembled, layout.state_names)
        self._groups, values = split_groups(objects.values)
        self._common = nested(values)
        steps = self._common.get("global_steps")
        self._step = steps if type(steps) is int and steps >= 0 else composed.stock.step
        self._top = f"global_step{self._step}_universal/"
        encoded = {o.tensor for o in assembled.target.objects}
        tables: dict[str, dict[str, int]] = {}
        names: dict[str, tuple[str, ...]] = {}
        left_out = [*objects.left_out]
        for number, tensor in enumerate(assembled.target.tensors):
            if tensor.name in encoded:
                continue
            if number in assembled.apart:
                left_out.append(tensor.name)
                continue
            taken = templates.take(tensor.name)
            name = plain(taken.name if taken else tensor.name)
            file = _WEIGHT
            if taken and taken.scalar:
                file = taken.state
            elif taken and taken.state:
                file = states[taken.state]
            elif taken:
                others = [plain(t.name) for a in tensor.aliases if (t := templates.take(a))]
                names[name] = (name, *others)
            found = tables.setdefault(name, {})
            if file == _WEIGHT and file in found:  # a weight of 32 bits, and what was made of it
                kept = number if taken and taken.state else found[file]
                left_out.append(assembled.target.tensors[found[file] + number - kept].name)
                number = kept
            found[file] = number
        self._tied = {alias: name for name, some in names.items() for alias in some[1:]}
        self._shapes = {
            name: assembled.target.tensors[files[_WEIGHT]].shape
            for name, files in tables.items()
            if _WEIGHT in files and len(files) > 1
        }
        self._counters = {n: files[_STEP] for n, files in tables.items() if _STEP in files}
        self._assembled = assembled
        self._paths: list[str] = []
        chosen = ChosenTensors(assembled, expected)
        self._raw_step = np.float32(self._updates()).tobytes()
        for name, files in tables.items():
            for one in names.get(name, (name,)):
                self._add(chosen, assembled, one, files)
        self.target = chosen.target(len(self._paths))
        self.expected: ExpectedValues = chosen.expected
        self.left_out: Sequence[str] = left_out
        self.simplified = objects.simplified
        self.notes: Sequence[FolderNote] = _untrained(tables, self._shapes)
        self.options = self._top
        self._last = self._small_files()

    def _updates(self) -> int:
        """Return how many times the optimizer has stepped, where no parameter tells."""
        skipped = self._common.get("skipped_steps")
        return max(0, self._step - (skipped if type(skipped) is int else 0))

    def _add(
        self, chosen: ChosenTensors, assembled: Assembled, name: str, files: Mapping[str, int]
    ) -> None:
        """Add the files of a parameter."""
        if not is_segment(name) or name == _OPTIMIZER:
            raise UsageError(
                "a parameter's name cannot be used as a folder name",
                kind="bad-key",
                where=name[:200],
                wanted="letters, digits and ._=+@,%-",
                hint="rename it in the target's layout",
            )
        for file, number in files.items():
            grid = whole_tensor(assembled, number, "a universal folder")
            if not is_segment(f"{file}.pt"):
                raise UsageError(
                    "a state's name cannot be used as a file name", kind="bad-key", where=file
                )
            path = f"{name}/{file}.pt"
            chosen.add(path, number, grid, single_owner(0), len(self._paths))
            self._paths.append(path)
        if len(files) > 1 and _STEP not in files:
            feed = ChunkFeed(literal=lambda: self._raw_step)
            path = f"{name}/{_STEP}.pt"
            base = len(self._paths)
            chosen.add(
                path, -1, whole(()), single_owner(0), base, (), lambda piece: feed, "float32"
            )
            self._paths.append(path)

    def name(self, number: int) -> str:
        """Return the name of a file."""
        return f"{self._top}zero/{self._paths[number]}"

    def draft(self, filemap: FileMap, number: int, key: str) -> FileDraft:
        """Return a file: its tensor below the key ``param``, but for the number of steps."""
        tensor = self.target.tensors[number]
        stored = StorageTensor("0", tensor.dtype, tensor.shape)
        is_step = self._paths[number].endswith(f"/{_STEP}.pt")
        value = stored if is_step else {"param": stored}
        frame = TorchFrame(value, [self.target.sizes[number]])
        return FileDraft(number, key, frame.head, frame.ends[-1], joints=TorchJoints(frame))

    def is_mine(self, name: str, beside: Collection[str]) -> bool:
        """Tell whether a file, or a folder, is of a universal checkpoint."""
        return name == _LATEST or _TAG.fullmatch(name) is not None

    def last(self) -> Sequence[tuple[str, bytes]]:
        """Return what counts for all, and the name of the folder."""
        return self._last

    def _small_files(self) -> Sequence[tuple[str, bytes]]:
        groups: list[dict[str, Any]] = [
            {**group, "params": [number]} for number, group in enumerate(self._groups)
        ] or [{} for _ in range(_UNKNOWN_GROUPS)]
        shapes = self._shapes_by_group()
        states = {
            number: {"step": StorageTensor(str(number), "float32", ())}
            for number in range(len(shapes))
        }
        optimizer = {
            "ds_version": _VERSION,
            "param_groups": groups,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
        }
        model = self._common | {
            "module": {},
            "param_shapes": shapes,
            "shared_params": self._tied,
            "mp_world_size": 1,
            "dp_world_size": 1,
            "global_steps": self._step,
            "skipped_steps": self._common.get("skipped_steps", 0),
            "ds_version": _VERSION,
            "universal_checkpoint_info": {"universal_checkpoint_version": _UNIVERSAL_VERSION},
        }
        raw = torch_file(model)
        steps = [self._steps_of(group) for group in shapes]
        return [
            (f"{self._top}zero/{_OPTIMIZER}", torch_file(optimizer, steps)),
            *((self._top + name, raw) for name in _MODELS),
            (_LATEST, self._top[:-1].encode()),
        ]

    def _shapes_by_group(self) -> list[dict[str, Made]]:
        """Return the shapes of what is trained, a table a group; without groups, one for all."""
        left = {
            name: Made(Global("torch", "Size"), (shape,)) for name, shape in self._shapes.items()
        }
        out: list[dict[str, Made]] = []
        for group in self._groups:
            held = group.get("params")
            names = [n for n in held if n in left] if isinstance(held, list) else []
            out.append({name: left.pop(name) for name in names})
        return [*out, left] if left or not out else out

    def _steps_of(self, names: Iterable[str]) -> bytes:
        """Return how often some parameters were updated: stage 3 takes it for all of them."""
        number = next((self._counters[n] for n in names if n in self._counters), None)
        if number is None:
            return self._raw_step
        stock = self._assembled.composed.stock
        take = self._assembled.target.feeds[number](0).takes[0]
        name = stock.tensors[take.tensor].name
        return np.float32(stock.values([name])[name]).tobytes()


def _untrained(names: Iterable[str], trained: Collection[str]) -> Sequence[FolderNote]:
    """Return a note on what no optimizer has: DeepSpeed loads what one trains."""
    left = tuple(n for n in names if n not in trained) if trained else ()
    if not left:
        return ()
    text = (
        "DeepSpeed does not load frozen parameters from a universal folder; load "
        "zero/NAME/fp32.pt into the model before creating the engine"
    )
    return (FolderNote(text, left),)
