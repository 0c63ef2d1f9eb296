"""What a module says of itself comes back as torch's own save and load bring it back."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, spectral_norm

import ckptd
from ckptd.checkpoint.torch.state.flatten import Flattener, flatten
from ckptd.errors import CkptdError, MismatchError, UsageError
from tests.checkpoint.torch.state.oracle import differences, reloaded
from tests.processes import PATIENCE_S

# --- modules that say more than they hold ---------------------------------------------------------


def _any(module: nn.Module) -> Any:
    """Return a module whose hooks can be registered: torch does not say their types."""
    return module


class Counted(nn.Module):
    """Two numbers that are no tensors, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.n: Any = 0


class Override(Counted):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        found[kwargs.get("prefix", "") + "n"] = torch.tensor(self.n)
        return found

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(state_dict)
        self.n = int(given.pop("n"))
        return super().load_state_dict(given, *args, **kwargs)


def post_hook() -> Any:
    module: Any = Counted()

    def say(own: Any, said: Any, prefix: str, meta: Any) -> None:
        said[prefix + "n"] = torch.tensor(own.n)

    def take(own: Any, given: Any, prefix: str, *rest: Any) -> None:
        own.n = int(given.pop(prefix + "n"))

    module.register_state_dict_post_hook(say)
    module.register_load_state_dict_pre_hook(take)
    return module


def pre_hook() -> Any:
    """Bring a number into a buffer as the module is asked, and out of it as it is loaded."""
    module: Any = Counted()
    module.register_buffer("count", torch.zeros(1))
    module.register_state_dict_pre_hook(lambda own, prefix, keep: own.count.fill_(own.n))

    def take(own: Any, keys: Any) -> None:
        own.n = int(own.count)

    module.register_load_state_dict_post_hook(take)
    return module


class NewBuffer(Counted):
    """Puts another tensor into the place of its buffer whenever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        _any(self).register_state_dict_pre_hook(NewBuffer._fill)

    def _fill(self, prefix: str, keep: bool) -> None:
        self.count = torch.tensor([float(self.n)])

    def _load_from_state_dict(self, given: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(given, prefix, *rest)
        self.n = int(self.count)


class Own(Counted):
    """Says and takes by torch's inner methods."""

    def _save_to_state_dict(self, said: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(said, prefix, keep_vars)
        said[prefix + "n"] = self.n  # no tensor

    def _load_from_state_dict(self, given: Any, prefix: str, *rest: Any) -> None:
        self.n = given.pop(prefix + "n")
        super()._load_from_state_dict(given, prefix, *rest)


class Derived(Counted):
    """Has what follows from its weights, and no buffer for it."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = self.lin.weight.detach() * 2
        _any(self).register_load_state_dict_post_hook(Derived._derive)

    def _derive(self, keys: Any = None) -> None:
        self.twice = self.lin.weight.detach() * 2


class Listed(nn.Module):
    """Says a list of tensors, as long as it is now, in a dict: as metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = {"all": [], "name": "x"}

    def _save_to_state_dict(self, said: Any, prefix: str, keep_vars: bool) -> None:
        said[prefix + "seen"] = copy.deepcopy(self.seen)

    def _load_from_state_dict(self, given: Any, prefix: str, *rest: Any) -> None:
        self.seen = given.pop(prefix + "seen")


class Turned(nn.Module):
    """Keeps a matrix turned in files: the same shape, and none of its memory may be mixed."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(*shape))
        _any(self)._register_state_dict_hook(Turned._turn)
        _any(self)._register_load_state_dict_pre_hook(self._turn_back)

    def _turn(self, said: Any, prefix: str, meta: Any) -> None:
        said[prefix + "w"] = said[prefix + "w"].t()

    def _turn_back(self, given: Any, prefix: str, *rest: Any) -> None:
        given[prefix + "w"] = given[prefix + "w"].t()


class TurnedAtLoad(nn.Module):
    """Says its parameter as it is, and turns what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(3, 3))
        _any(self)._register_load_state_dict_pre_hook(self._turn)

    def _turn(self, given: Any, prefix: str, *rest: Any) -> None:
        given[prefix + "w"] = given[prefix + "w"].t()


class Cast(nn.Module):
    """Says its half-precision parameter in single precision; torch casts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(3).half())
        _any(self).register_state_dict_post_hook(Cast._cast)

    def _cast(self, said: Any, prefix: str, meta: Any) -> None:
        said[prefix + "w"] = said[prefix + "w"].float()


class Queue(nn.Module):
    """Its buffer has as many rows as the checkpoint."""

    def __init__(self, rows: int = 1) -> None:
        super().__init__()
        self.register_buffer("rows", torch.rand(rows, 2))

    def _load_from_state_dict(self, given: Any, prefix: str, *rest: Any) -> None:
        self.rows = torch.empty_like(given[prefix + "rows"])
        super()._load_from_state_dict(given, prefix, *rest)


class Inside(nn.Module):
    """Says what it holds under the names of the module that it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return self.inner.load_state_dict(state_dict, *args, **kwargs)


class Partial(Counted):
    """Leaves a layer out of what it says, and takes no more than that."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(1, 1)
        nn.init.ones_(self.frozen.weight)
        nn.init.ones_(self.frozen.bias)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return OrderedDict((k, v) for k, v in found.items() if "frozen" not in k)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if any("frozen" in key for key in state_dict):
            raise KeyError("frozen")
        return self.lin.load_state_dict(
            {k.removeprefix("lin."): v for k, v in state_dict.items()}, *args, **kwargs
        )


class Noted(Counted):
    """Writes beside the version what it wants to know as it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        _any(self)._register_state_dict_hook(Noted._note)

    def _note(self, said: Any, prefix: str, meta: Any) -> None:
        meta["n"] = self.n

    def _load_from_state_dict(self, given: Any, prefix: str, meta: Any, *rest: Any) -> None:
        super()._load_from_state_dict(given, prefix, meta, *rest)
        self.n = meta["n"]


class Hears(nn.Module):
    """Has no words of its own, and keeps what is written beside its version."""

    heard: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def _load_from_state_dict(self, given: Any, prefix: str, meta: Any, *rest: Any) -> None:
        self.heard = dict(meta)
        super()._load_from_state_dict(given, prefix, meta, *rest)


def noted_by_parent() -> Any:
    """Write beside the version of one part, and leave out another one's."""
    module: Any = nn.Sequential(Hears(), Hears(), nn.Linear(1, 1))

    def note(own: Any, said: Any, prefix: str, meta: Any) -> None:
        said._metadata[prefix + "0"].update(layout="t", axes=[1, 0])
        del said._metadata[prefix + "1"]

    module.register_state_dict_post_hook(note)
    return module


class NotedApart(nn.Sequential):
    """Writes under a key that is no module's, and says what it holds in the other order."""

    heard: Any = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        said = OrderedDict(reversed(found.items()))
        vars(said)["_metadata"] = {**found._metadata, "of no module": {"q": 1}}
        return said

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.heard = [*state_dict], {k: dict(v) for k, v in state_dict._metadata.items()}
        return super().load_state_dict(state_dict, *args, **kwargs)


class Extra(Own):
    def get_extra_state(self) -> Any:
        return {"extra": self.n + 1, "t": torch.full((2,), float(self.n))}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Mine(nn.Module):
    """Take of what was saved what is more than the live values, and of one part nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.most = nn.Parameter(torch.tensor([0.0, 2.0]))
        self.register_buffer("own", torch.ones(2))

    def _load_from_state_dict(self, given: Any, prefix: str, meta: Any, *rest: Any) -> None:
        given[prefix + "most"] = torch.maximum(given[prefix + "most"], self.most.detach())
        given[prefix + "own"] = self.own
        super()._load_from_state_dict(given, prefix, meta, *rest)


class Nests(nn.Module):
    """Says the state of its part as one value, under a key that is `part`'s own name or another."""

    def __init__(self, key: str, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.part, self.key, self.n = part(), key, 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {self.key: self.part.state_dict(), "n": self.n}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.n = state_dict["n"]
        return self.part.load_state_dict(state_dict[self.key])


class WithoutHead(nn.Module):
    """Keep the live head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
        nn.init.constant_(self.head.weight, 3.0)
        nn.init.constant_(self.head.bias, 3.0)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        given = {k: v for k, v in state_dict.items() if not k.startswith("head.")}
        return super().load_state_dict(given, strict=False)


class Wrapped(Counted):
    """Code of its own under the name of torch's."""


@functools.wraps(nn.Module.state_dict)
def _say(self: Any, *args: Any, **kwargs: Any) -> Any:
    return {**nn.Module.state_dict(self, *args, **kwargs), "n": torch.tensor(self.n)}


@functools.wraps(nn.Module.load_state_dict)
def _take(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
    self.n = int(given["n"])
    given = {k: v for k, v in given.items() if k != "n"}
    return nn.Module.load_state_dict(self, given, *args, **kwargs)


setattr(Wrapped, "state_dict", _say)  # noqa: B010
setattr(Wrapped, "load_state_dict", _take)  # noqa: B010


def halved() -> Any:
    """Take the mean of what was saved and what is live, of two names that are one tensor."""
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    nn.init.constant_(module[0].weight, 1.0)

    def take(own: Any, given: Any, prefix: str, *rest: Any) -> None:
        given[prefix + "0.weight"] = (given[prefix + "0.weight"] + own[0].weight.detach()) / 2
        given[prefix + "1.weight"] = given[prefix + "0.weight"]

    module.register_load_state_dict_pre_hook(take)
    return module


def on_instance() -> Any:
    """Give one instance methods of its own."""
    module: Any = Counted()

    def say(self: Any, said: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, said, prefix, keep_vars)
        said[prefix + "n"] = torch.tensor(self.n)

    def take(self: Any, given: Any, prefix: str, *rest: Any) -> None:
        self.n = int(given.pop(prefix + "n"))
        nn.Module._load_from_state_dict(self, given, prefix, *rest)

    vars(module)["_save_to_state_dict"] = MethodType(say, module)
    vars(module)["_load_from_state_dict"] = MethodType(take, module)
    return module


def shared() -> Any:
    module = post_hook()
    return nn.ModuleDict({"a": module, "b": nn.Sequential(module, nn.BatchNorm1d(2))})


def compiled(make: Callable[[], nn.Module]) -> nn.Module:
    wrapper = torch.compile(make(), backend="eager")
    assert isinstance(wrapper, nn.Module)
    return wrapper


def tied() -> Any:
    """Say a parameter of a child under another name as well."""
    module: Any = Counted()

    def say(own: Any, said: Any, prefix: str, meta: Any) -> None:
        said[prefix + "again"] = said[prefix + "lin.weight"]

    def take(own: Any, given: Any, prefix: str, *rest: Any) -> None:
        own.n = float(given.pop(prefix + "again").sum())

    module.register_state_dict_post_hook(say)
    module.register_load_state_dict_pre_hook(take)
    return module


def odd_names() -> Any:
    return nn.ModuleDict({"a/b%": Own(), "0": Counted()})


MODULES: dict[str, Callable[[], nn.Module]] = {
    "state_dict of its own": Override,
    "post hook": post_hook,
    "pre hook": pre_hook,
    "pre hook with another buffer": NewBuffer,
    "inner methods": Own,
    "derived after a load": Derived,
    "a list in a dict": Listed,
    "nests a state": lambda: Nests("inner", Counted),
    "nests a state, by its name": lambda: Nests("part", Counted),
    "nests a state, of a version": lambda: Nests("part", lambda: nn.Sequential(Scaled())),
    "nests a state, of a version, by another name": lambda: Nests("inner", Scaled),
    "turned": partial(Turned, 3, 3),
    "turned, other shape": partial(Turned, 2, 3),
    "turned as it is loaded": TurnedAtLoad,
    "cast": Cast,
    "resized": Queue,
    "names of what is inside": Inside,
    "metadata": Noted,
    "metadata, wrapped": lambda: nn.Sequential(checkpoint_wrapper(Noted())),
    "metadata of parts": noted_by_parent,
    "metadata of no module": lambda: NotedApart(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    "extra state besides": Extra,
    "methods of an instance": on_instance,
    "shared": shared,
    "two names": tied,
    "in a plain module": lambda: nn.Sequential(nn.Linear(2, 2), post_hook(), Queue(), Derived()),
    "compiled": lambda: compiled(post_hook),
    "compiled inside": lambda: nn.Sequential(compiled(Own), Own()),
    "wrapped": lambda: nn.DataParallel(nn.Sequential(checkpoint_wrapper(Own()), pre_hook())),
    "wrapped and resized": lambda: checkpoint_wrapper(nn.Sequential(checkpoint_wrapper(Queue()))),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), Own()),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(2, 2)), Own()),
    "names to be escaped": odd_names,
    "looks at live values": lambda: nn.Sequential(Mine(), nn.Linear(2, 2)),
    "leaves a part out": WithoutHead,
    "under the name of torch's": Wrapped,
    "looks at live values of two names": halved,
}


def trained(module: nn.Module, seed: int = 7) -> Any:
    """Give everything in a module other values."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=made))
    for inner in module.modules():
        if isinstance(inner, Counted):
            inner.n = seed
        if isinstance(inner, Derived):
            inner._derive()
        if isinstance(inner, Listed):
            inner.seen = {"all": [torch.rand(2, generator=made), torch.ones(3)], "name": "y"}
        if isinstance(inner, Queue):
            inner.rows = torch.rand(3, 2, generator=made)
    return module


@pytest.fixture(scope="module")
def loaded() -> dict[str, nn.Module]:
    """All of these after one save and one load, into fresh ones."""
    with ckptd.Checkpointer("memory://words") as checkpointer:
        handle = checkpointer.save(1, {n: trained(make()) for n, make in MODULES.items()})
        assert handle is not None
        handle.durable(PATIENCE_S)
        fresh = {name: make() for name, make in MODULES.items()}
        checkpointer.load(fresh)
        report = checkpointer.last_load
        assert report is not None
        assert not report.missing
        assert not report.unexpected
    return fresh


@pytest.mark.parametrize("name", MODULES)
def test_what_torch_brings_back_comes_back(loaded: dict[str, nn.Module], name: str) -> None:
    saved, fresh = trained(MODULES[name]()), MODULES[name]()
    assert differences(saved, fresh), "nothing to lose"
    assert not differences(reloaded(saved, fresh), loaded[name])


# --- what is not as it was ------------------------------------------------------------------------


def save(root: Path | str, state: dict[str, Any], step: int = 1) -> None:
    with ckptd.Checkpointer(str(root)) as checkpointer:
        handle = checkpointer.save(step, state)
        assert handle is not None
        handle.durable(PATIENCE_S)


def load(root: Path | str, state: dict[str, Any], **options: Any) -> ckptd.LoadReport:
    with ckptd.Checkpointer(str(root)) as checkpointer:
        checkpointer.load(state, **options)
        assert checkpointer.last_load is not None
        return checkpointer.last_load


def test_what_a_module_does_not_say_is_kept_from_it_and_comes_back_all_the_same() -> None:
    saved = trained(Partial())
    save("memory://partial", {"m": saved})
    fresh: Any = Partial()
    load("memory://partial", {"m": fresh})
    assert not [n for n in differences(saved, fresh) if not n.endswith(".n")]
    assert torch.equal(saved.frozen.weight, fresh.frozen.weight)


def words(flattener: Flattener, state: dict[str, Any]) -> dict[str, Any]:
    return {n: x.tensor.tolist() for n, x in flattener.flatten(state).tensors.items()}


class Copies(Nests):
    """Says other values of its part than this has, under its own names."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"part": {n: p + 1 for n, p in self.part.state_dict().items()}, "n": self.n}


def test_two_values_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        flatten({"m": Copies("part", Counted)})
    assert (caught.value.message, caught.value.where) == (
        "two values of the state have one name",
        "m.part.lin.weight",
    )


def test_an_object_gives_a_module_its_version_again() -> None:
    """So does every state dict inside of a value."""

    class Engine:
        def __init__(self) -> None:
            self.module = Scaled()

        def state_dict(self) -> dict[str, Any]:
            return {"all": [self.module.state_dict()]}

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            self.module.load_state_dict(saved["all"][0])

    saved, fresh = Engine(), Engine()
    trained(saved.module)
    save("memory://versions-of-objects", {"e": saved})
    load("memory://versions-of-objects", {"e": fresh})
    assert torch.equal(fresh.module.scale, saved.module.scale)


def test_a_hook_that_comes_later_is_noticed() -> None:
    module: Any = Counted()
    state, flattener = {"m": nn.Sequential(nn.Linear(1, 1), module)}, Flattener()
    known = flattener.flatten(state).known
    assert flattener.flatten(state).known is known is not None
    module.register_load_state_dict_pre_hook(lambda own, given, prefix, *rest: None)
    assert flattener.flatten(state).known is known  # it says what it said
    handle = module.register_state_dict_post_hook(
        lambda own, said, prefix, meta: said.__setitem__(prefix + "n", torch.tensor(own.n))
    )
    for module.n in (3, 4):
        assert words(flattener, state)["m.1.n"] == module.n
    handle.remove()
    assert "m.1.n" not in words(flattener, state)
    assert flattener.flatten(state).known is not None


def test_methods_that_come_later_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an instance, and in a class that the module has had all the time."""
    module, other = Counted(), on_instance()
    state, flattener = {"m": module}, Flattener()
    flattener.flatten(state)
    methods = {n: f.__func__ for n, f in vars(other).items() if isinstance(f, MethodType)}
    vars(module).update({n: MethodType(f, module) for n, f in methods.items()})
    assert words(flattener, state)["m.n"] == 0
    for name in methods:
        del vars(module)[name]
    assert flattener.flatten(state).known is not None
    for name, function in methods.items():
        monkeypatch.setattr(Counted, name, function, raising=False)
    module.n = 5
    assert words(flattener, state)["m.n"] == 5


def test_the_same_names_may_say_something_else(tmp_path: Path) -> None:
    """With the same keys, in memory that was there before, and from the second save on."""
    module = pre_hook()
    state = {"m": nn.Sequential(module)}
    with ckptd.Checkpointer(str(tmp_path)) as checkpointer:
        for step in (1, 2, 3):
            module.n = step
            handle = checkpointer.save(step, state)
            assert handle is not None
            handle.durable(PATIENCE_S)
        for step in (3, 1):
            fresh = pre_hook()
            checkpointer.load({"m": nn.Sequential(fresh)}, step)
            assert fresh.n == step


def test_metadata_of_a_part_is_that_of_each_save() -> None:
    said: list[Any] = []
    module, fresh = noted_by_parent(), noted_by_parent()
    module.register_state_dict_post_hook(
        lambda own, found, prefix, meta: found._metadata[prefix + "0"].update(n=len(said))
    )
    with ckptd.Checkpointer("memory://metadata-of-parts") as ck:
        for step in (1, 2, 3):
            said.append(step)
            ck.save(step, {"m": module}).durable()
            ck.load({"m": fresh})
            assert (fresh[0].heard["n"], fresh[1].heard) == (step, {})


# --- versions -------------------------------------------------------------------------------------


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Parameter(torch.rand(2))
        self.child = nn.BatchNorm1d(2)


class Second(nn.Module):
    """Took the place of `First`, under the same name in the model."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Parameter(torch.zeros(2))
        self.child = nn.BatchNorm1d(2)
        self.versions: list[Any] = []

    def _load_from_state_dict(self, given: Any, prefix: str, meta: Any, *rest: Any) -> None:
        self.versions.append(meta.get("version"))
        if meta.get("version", 1) < 2:
            given[prefix + "new"] = given.pop(prefix + "old") * 2
        super()._load_from_state_dict(given, prefix, meta, *rest)


class Third(Second):
    _version = 3


@pytest.mark.parametrize(("before", "after"), [(First, Second), (Second, Second), (Second, Third)])
def test_a_module_converts_what_an_older_one_saved(
    tmp_path: Path, before: type[nn.Module], after: type[Second]
) -> None:
    saved = trained(nn.Sequential(nn.Linear(1, 1), before()))
    state = {"m": saved}
    with ckptd.Checkpointer(str(tmp_path)) as checkpointer:
        for step in (1, 2):  # the second time the form of the state is remembered
            handle = checkpointer.save(step, state)
            assert handle is not None
            handle.durable(PATIENCE_S)
    fresh: Any = nn.Sequential(nn.Linear(1, 1), after())
    report = load(tmp_path, {"m": fresh})
    assert (report.missing, report.unexpected) == ((), ())
    wanted = reloaded(saved, nn.Sequential(nn.Linear(1, 1), after()))
    assert not differences(wanted, fresh)


def test_a_file_of_torch_is_converted(tmp_path: Path) -> None:
    saved = trained(nn.Sequential(First(), Own()))
    torch.save({k: torch.as_tensor(v) for k, v in saved.state_dict().items()}, tmp_path / "a.pt")
    fresh: Any = nn.Sequential(Second(), Own())
    load(tmp_path / "root", {"m": fresh}, source=tmp_path / "a.pt")
    assert torch.equal(fresh[0].new, saved[0].old * 2)
    assert (int(fresh[1].n), fresh[0].versions) == (7, [None])


@pytest.mark.parametrize("how", ["number", "tensor", "alias"])
def test_what_was_not_said_yet_is_gone_again(how: str) -> None:
    """A load of an older step; the word is live, also as another name of what is loaded."""

    class Grows(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.more: dict[str, Any] = {}

        def _save_to_state_dict(self, said: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(said, prefix, keep_vars)
            said.update({prefix + n: v for n, v in self.more.items()})

        def _load_from_state_dict(self, given: Any, prefix: str, *rest: Any) -> None:
            own = (prefix + "weight", prefix + "bias")
            more = [k for k in given if k.startswith(prefix) and k not in own]
            self.more = {k.removeprefix(prefix): given.pop(k) for k in more}
            super()._load_from_state_dict(given, prefix, *rest)

    module, norm = Grows(), nn.BatchNorm1d(2)
    state = {"m": nn.Sequential(module, norm)}
    with ckptd.Checkpointer(f"memory://grows-{how}") as ck:
        ck.save(1, state).durable()
        said = {"number": 3, "tensor": torch.ones(2), "alias": norm.running_mean}[how]
        module.more = {"q": said}
        ck.save(2, state).durable()
        ck.load(state, 1)
        assert not module.more


# --- partly ---------------------------------------------------------------------------------------


def test_what_is_missing_is_said_by_name() -> None:
    save("memory://missing", {"m": trained(Counted())})
    with pytest.raises(UsageError) as caught:
        load("memory://missing", {"m": post_hook()})
    assert (caught.value.message, caught.value.where) == (
        "an object did not take its saved state",
        "m",
    )
    save("memory://unexpected", {"m": trained(post_hook())})
    with pytest.raises(MismatchError, match=r"m\.n: not in the live state"):
        load("memory://unexpected", {"m": Counted()})


def test_a_load_that_is_not_strict_keeps_what_is_missing() -> None:
    save("memory://loose", {"m": trained(Counted())})
    fresh = post_hook()
    fresh.n = 5
    report = load("memory://loose", {"m": fresh}, strict=False)
    assert report.missing == ("m.n",)
    assert fresh.n == 5
    assert torch.equal(fresh.lin.weight, trained(Counted()).lin.weight)


@pytest.mark.parametrize(
    ("options", "number", "weight"),
    [
        ({"only": "m.n"}, 7, False),
        ({"only": "m.lin.*"}, 5, True),
        ({"weights_only": True}, 7, True),
    ],
    ids=str,
)
def test_a_part_is_loaded(
    tmp_path: Path, options: dict[str, Any], number: int, weight: bool
) -> None:
    save(str(tmp_path), {"m": trained(post_hook()), "s": 1})
    fresh = post_hook()
    fresh.n = 5
    load(str(tmp_path), {"m": fresh, "s": 2}, **options)
    assert fresh.n == number
    assert torch.equal(fresh.lin.weight, trained(Counted()).lin.weight) is weight


class Scaled(nn.Module):
    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))

    def _load_from_state_dict(self, given: Any, prefix: str, meta: Any, *rest: Any) -> None:
        if meta.get("version", 1) < 2:
            given[prefix + "scale"] = given[prefix + "scale"] * 100
        super()._load_from_state_dict(given, prefix, meta, *rest)


@pytest.mark.parametrize("options", [{"only": "*.scale"}, {"weights_only": True}], ids=str)
def test_a_part_is_of_the_version_that_was_saved(options: dict[str, Any]) -> None:
    saved = trained(nn.Sequential(Scaled()))
    root = f"memory://version{len(options)}{next(iter(options))}"
    save(root, {"m": saved, "s": 1})
    fresh: Any = nn.Sequential(Scaled())
    load(root, {"m": fresh, "s": 2}, **options)
    assert torch.equal(fresh[0].scale, saved[0].scale)


@pytest.mark.parametrize("name", ["turned", "turned, other shape", "turned as it is loaded", ""])
@pytest.mark.parametrize("options", [{"only": "m.1.*"}, {"strict": False}], ids=str)
def test_a_part_leaves_what_is_beside_it(name: str, options: dict[str, Any]) -> None:
    """It went through code that takes what a file has, and not what lies in memory."""
    root = f"memory://beside{name}{next(iter(options))}"
    make = MODULES[name] if name else Scaled
    parts = [make(), nn.Linear(2, 2), nn.BatchNorm1d(2)]
    saved: Any = trained(
        nn.Sequential(*(parts if "only" in options else [nn.Identity(), *parts[1:]]))
    )
    save(root, {"m": saved, "s": 1})
    torch.manual_seed(1)
    fresh: Any = nn.Sequential(make(), nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = copy.deepcopy(fresh[0])
    load(root, {"m": fresh, "s": 2}, **options)
    assert torch.equal(fresh[1].weight, saved[1].weight)
    assert not differences(before, fresh[0])


def test_an_optimizer_looks_at_what_the_module_made_of_it() -> None:
    class Anchored(torch.optim.SGD):
        anchor: torch.Tensor

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.anchor = self.param_groups[0]["params"][0].detach().clone()

    saved, fresh = trained(TurnedAtLoad()), TurnedAtLoad()
    save("memory://anchor", {"m": saved, "o": Anchored(saved.parameters())})
    optimizer = Anchored(fresh.parameters())
    load("memory://anchor", {"o": optimizer, "m": fresh})
    assert torch.equal(optimizer.anchor, next(reloaded(saved, TurnedAtLoad()).parameters()))


def test_what_follows_from_weights_follows_from_a_part_of_them() -> None:
    save("memory://follows", {"m": trained(Derived())})
    fresh: Any = Derived()
    load("memory://follows", {"m": fresh}, only="*.weight")
    assert torch.equal(fresh.twice, trained(Derived()).lin.weight * 2)


def test_modules_on_the_meta_device() -> None:
    save("memory://meta", {"m": trained(nn.Sequential(post_hook(), Derived()))})
    with torch.device("meta"):
        fresh: Any = nn.Sequential(Own(), Derived())
    fresh[0] = post_hook().to("meta")
    load("memory://meta", {"m": fresh})
    assert fresh[0].n == 7
    assert torch.equal(fresh[1].twice, fresh[1].lin.weight * 2)
    assert torch.equal(fresh[0].lin.weight, trained(nn.Sequential(post_hook()))[0].lin.weight)


# --- refused --------------------------------------------------------------------------------------


class Raises(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("not now")


class Pairs(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return list(super().state_dict(*args, **kwargs).items())


class Unsavable(Own):
    def _save_to_state_dict(self, said: Any, prefix: str, keep_vars: bool) -> None:
        said[prefix + "n"] = object()


class Reserved(Own):
    """Says a value under the name that its part's note would have."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def _save_to_state_dict(self, said: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(said, prefix, keep_vars)
        said[prefix + "lin._own_state"] = self.value


@pytest.mark.parametrize(
    ("module", "words", "where"),
    [
        (Raises(1, 1), "own state_dict() failed", "m"),
        (Pairs(1, 1), "must be a dict with strings as keys", "m"),
        (
            nn.Sequential(Override()),
            "does not accept what its state_dict",
            "m.0",
        ),  # torch does not take it, either
        (nn.Sequential(Unsavable()), "a value of this type cannot be saved", "m.0.n"),
        (nn.Sequential(Reserved(3)), "does not accept what its state_dict", "m.0"),
        (nn.Sequential(Reserved(torch.ones(1))), "does not accept what its state_dict", "m.0"),
    ],
    ids=["raises", "no dict", "taken by none", "no value", "a note", "a note, of a tensor"],
)
def test_what_cannot_come_back_is_refused_by_name(module: Any, words: str, where: str) -> None:
    with pytest.raises(CkptdError) as caught:
        flatten({"m": module})
    assert words in caught.value.message
    assert caught.value.where == where


def test_torch_does_not_take_what_is_refused() -> None:
    module = nn.Sequential(Override())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        reloaded(module, nn.Sequential(Override()))
