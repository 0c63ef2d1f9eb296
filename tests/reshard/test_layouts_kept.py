"""The program that a checkpoint keeps: closed, and compared with one that is given for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptd.errors import CkptdError, MismatchError
from ckptd.lay.bind import bind_sizes, bind_stored
from ckptd.lay.resolve import Bound, resolve
from ckptd.lay.stored import StoredForm
from ckptd.lay.syntax import load, parse
from ckptd.lay.syntax.tree import Reshard
from ckptd.reshard.elements import find
from ckptd.reshard.layouts import LayoutComparison, compare, read_text
from ckptd.store import open_store
from tests.lay.agreement.mutations import mutants
from tests.lay.agreement.test_mutations import PROGRAMS, SIZES
from tests.reshard.llama import (
    HF,
    MEGATRON,
    VOCABULARY,
    WIDTH,
    everything,
    latest,
    prepared,
    program,
    resharded,
    save,
    values,
)

QKV = "decoder.layers.{#l@pp}.self_attention.linear_qkv.weight"
SWAPPED = f"{QKV} = L{{l}}[(kv@tp (k:1|q:rep|v:1) hd) h]"
BARE = program("hf.llama")


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    with open_store(folder / "source") as store:
        save(store, values())
    resharded(folder / "source", folder / "megatron", program(*MEGATRON), program(*HF))
    return folder / "megatron"


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["let v = 5", " let v = 5", "let\tv = 5"])
def test_a_size_is_one_however_it_is_spaced(rule: str) -> None:
    text = "let v = 4\nspace m {\n  E[v h]\n}\nlayout a of m on none {\n  e.weight = E[v h]\n}\n"
    kept = read_text(f"# layout a\n{text}", "the kept program")
    assert kept.with_sizes([rule, "let h = (two half)"]).text == kept.with_rules(["let v = 5"]).text


def test_the_kept_program_says_every_size(megatron: Path) -> None:
    with open_store(megatron) as store:
        kept = latest(store).manifest.lay
    lets = [line for line in kept.splitlines() if line.startswith("let ")]
    found = dict(line.removeprefix("let ").split(" = ") for line in lets)
    # What the user said of sizes is there once, and the number of layers is said by names.
    assert len(found) == len(lets)
    # (`hd` is two halves in the space, which says itself that there are two.)
    assert found == {"v": "250", "h": "16", "kv": "4", "rep": "2", "half": "4", "f": "24"}


def test_the_way_back_from_a_padded_layout_needs_no_size(megatron: Path, tmp_path: Path) -> None:
    resharded(megatron, tmp_path / "back", BARE)
    found, wanted = everything(tmp_path / "back"), values()
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[n], v) for n, v in wanted.items())


def test_a_recipe_takes_the_sizes_along(megatron: Path, tmp_path: Path) -> None:
    resharded(megatron, tmp_path / "hf", BARE)
    resharded(tmp_path / "hf", tmp_path / "two", program("fsdp", "mesh fsdp = dp:2"))
    again = program("megatron.gpt", "mesh megatron_gpt = pp:1 dp:1 tp:2")
    # The kept program of files of FSDP is that of the names they have, with its sizes.
    with open_store(tmp_path / "two") as store:
        assert "let kv = 4\n" in latest(store).manifest.lay
        assert prepared(store, again).read_with.kept == "same"


def test_a_size_of_the_user_goes_before_the_kept_one_and_that_is_said(megatron: Path) -> None:
    with open_store(megatron) as store:
        kept = prepared(store, BARE).source
        rules = [f"let v = {VOCABULARY + 2}"]
        found = prepared(store, BARE, kept.with_rules(rules), rules=rules)
    sizes = {t.name: t.shape for t in found.assembled.target.tensors}
    assert sizes["model.embed_tokens.weight"] == (VOCABULARY + 2, WIDTH)
    assert found.read_with.kept == "same"
    assert found.read_with.sizes == ("let v = 252 in place of the kept let v = 250",)


def test_a_size_that_shapes_contradict_is_refused(megatron: Path) -> None:
    with open_store(megatron) as store:
        kept = prepared(store, BARE).source
        with pytest.raises(MismatchError) as caught:
            prepared(store, BARE, kept.with_rules(["let kv = 8"]), rules=["let kv = 8"])
    assert caught.value.kind == "lay-fit"


# --- two programs for one checkpoint ------------------------------------------------------------


def test_queries_and_keys_exchanged_are_refused(megatron: Path) -> None:
    wrong = program(*MEGATRON, SWAPPED)
    with open_store(megatron) as store:
        with pytest.raises(MismatchError) as caught:
            prepared(store, BARE, wrong)
        error = caught.value
        assert error.kind == "lay-fit"
        assert str(error.where) == "decoder.layers.0.self_attention.linear_qkv.weight[0, 0]"
        assert str(error.wanted).startswith("L{l}.q at h=0 half=0 kv=0 l=0 rep=0 two=0, by ")
        assert str(error.found).startswith("L{l}.k at h=0 half=0 kv=0 l=0 two=0, by ")
        assert "(k:1|q:rep|v:1)" in str(error.found)
        insisted = prepared(store, BARE, wrong, allow_layout=True)
        assert insisted.read_with.kept == "differs"
        with pytest.raises(MismatchError):
            kept = prepared(store, BARE).source
            prepared(store, BARE, kept.with_rules([SWAPPED]), rules=[SWAPPED])


def test_padding_that_one_program_takes_for_a_vocabulary_is_refused(megatron: Path) -> None:
    plain = program(*MEGATRON[:-1], "embedding.word_embeddings.weight = E[v@tp h] on pp=0")
    with open_store(megatron) as store, pytest.raises(MismatchError) as caught:
        prepared(store, BARE, plain)
    assert caught.value.kind == "lay-fit"
    assert str(caught.value.wanted).startswith("padding, by ")


def test_a_program_that_is_written_otherwise_and_means_the_same_agrees(megatron: Path) -> None:
    other = program(
        "megatron.gpt",
        *(f"let {n}" for n in ("kv = 4", "v = 250")),
        "decoder.layers.{l}.self_attention.linear_qkv.weight = "
        "L{l}[(kv (q:rep|k:1|v:1) (two half)) h]",
        "decoder.final_layernorm.weight = drop",
    )
    with open_store(megatron) as store:
        found = prepared(store, BARE, other, allow_lossy=True).read_with
    assert found.kept == "agrees"
    assert found.compared == found.tensors > 50


def test_other_logical_tensors_are_not_compared(megatron: Path, tmp_path: Path) -> None:
    with open_store(megatron) as store:
        shapes = {t.name: t.shape for t in latest(store).manifest.tensors if t.shape}
    params = {n: s for n, s in shapes.items() if not n.startswith("optim.")}
    tensors = "\n".join(
        f"  T{i}[{' '.join(f'd{i}_{d}' for d in range(len(s)))}]"
        for i, s in enumerate(params.values())
    )
    rules = "\n".join(
        f"  {n} = T{i}[{' '.join(f'd{i}_{d}' for d in range(len(s)))}]"
        for i, (n, s) in enumerate(params.items())
    )
    lay = tmp_path / "own.lay"
    lay.write_text(
        f"space own {{\n{tensors}\n  follow m=exp_avg, s=exp_avg_sq\n  scalar step(param)\n}}\n"
        f"layout own of own on none {{\n{rules}\n}}\n"
    )
    with open_store(megatron) as store:
        found = prepared(store, program(str(lay)), program(str(lay))).read_with
    assert (found.kept, found.compared) == ("unlike", 0)
    assert found.tensors > 50


def test_a_kept_program_that_nobody_understands_is_no_obstacle(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        save(store, values(), lay="layout of nothing")
        found = prepared(store, program(*HF), program(*HF)).read_with
    assert found.kept == "unreadable"
    assert found.note


# --- the few cells that are looked at stand for all ---------------------------------------------


def bound(text: str, layout: str, sizes: dict[str, int]) -> Bound:
    found = resolve([parse(text)], layout)
    return bind_sizes(found, {n: s for n, s in sizes.items() if n not in found.sizes})


def cells(form: StoredForm) -> dict[str, dict[int, object]]:
    """Return what every cell of every parameter is."""
    out: dict[str, dict[int, object]] = {}
    for name, (number, indexes, state) in form.by_name.items():
        rule = form.rules[number]
        if state or any(indexes[1:]) or sum(indexes) > 1:
            continue
        at = np.arange(int(np.prod(rule.shape)), dtype=np.int64)
        numbers = dict(zip(rule.indexes, indexes, strict=True))
        mine = out[name] = {}
        for found in find(rule.equation, numbers, at, form.scope):
            axes = sorted(found.axes)
            rows = np.stack([found.axes[a] for a in axes], axis=1).tolist()
            for which, row in zip(found.which.tolist(), rows, strict=True):
                mine[which] = (found.family, *zip(axes, row, strict=True))
    return out


def pairs() -> Iterator[tuple[str, Bound, Bound]]:
    """Yield programs and what becomes of them by a single mistake, where that fits all shapes."""
    for path in PROGRAMS:
        if path.name[:2] not in ("01", "03", "05", "06"):
            continue
        text = path.read_text()
        file = parse(text, path.name)
        (layout,) = [i.source for i in file.items if isinstance(i, Reshard)]
        kept = bound(text, layout, SIZES[path.name[:2]])
        names = {t.name: t.shape for t in StoredForm(kept).tensors()}
        changes = list(mutants(file, layout))
        for mutant in changes[:: 1 + len(changes) // 40]:
            try:
                other = bind_stored(resolve([mutant.file], layout), names, kept.sizes)
                assert StoredForm(other).by_name
            except CkptdError:
                continue
            yield f"{path.name} {layout} {mutant}", kept, other


def test_comparing_finds_what_looking_at_all_cells_finds() -> None:
    outcomes = {True: 0, False: 0}
    for what, kept, other in pairs():
        forms = StoredForm(kept), StoredForm(other)
        a, b = (cells(f) for f in forms)
        same = all(a[n] == b[n] for n in a.keys() & b.keys())
        found = compare(kept, other, forms[1].by_name, "")
        assert (found.difference is None) == same, what
        outcomes[same] += 1
    assert min(outcomes.values()) > 5, outcomes


def test_layers_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptd.reshard import layouts as module

    asked = []
    monkeypatch.setattr(module, "find", lambda *args: asked.append(1) or find(*args))
    sizes = {"v": 8, "h": 4, "kv": 2, "rep": 2, "hd": 2, "f": 6}

    def looked(layers: int) -> LayoutComparison:
        asked.clear()
        found = bind_sizes(resolve([load("hf.llama")], "hf.llama"), {**sizes, "l": layers})
        return compare(found, found, StoredForm(found).by_name, "")

    few = (looked(2).compared, len(asked))
    many = (looked(40).compared, len(asked))
    assert many[0] > 10 * few[0]
    assert many[1] == few[1]
