"""Reshards between layouts: values, states, objects, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ckptd.checkpoint.format import codec
from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.checkpoint.load.source import PerRankValues
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.tools.verify import verify
from ckptd.errors import CorruptError, MismatchError, RefusedError, UsageError
from ckptd.reshard.compose import Composed
from ckptd.reshard.plan import ChunkFeed
from ckptd.reshard.prepare import prove_target, rules_of
from ckptd.store import open_store
from tests.checkpoint.load.builder import Array
from tests.cli.roots import make_root
from tests.reshard.llama import (
    HEAD,
    HF,
    HIDDEN,
    KV,
    MEGATRON,
    REP,
    VOCABULARY,
    WIDTH,
    everything,
    groups,
    latest,
    per_rank,
    prepared,
    program,
    resharded,
    save,
    values,
)


def same(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype, name
        assert np.array_equal(found[name], wanted[name]), name


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Array]]:
    folder = tmp_path_factory.mktemp("source")
    data = values()
    objects = [
        ObjectEntry("optim.groups", groups(), kind="groups"),
        ObjectEntry("scheduler", {"last": 3}),
    ]
    with open_store(folder) as store:
        save(store, data, objects=objects)
    return folder, data


@pytest.fixture(scope="module")
def megatron(
    source: tuple[Path, dict[str, Array]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    done = resharded(source[0], folder, program(*MEGATRON), program(*HF))
    assert done.state == "committed"
    assert done.files == 4
    assert done.witness_values > 10_000
    return folder


def test_fused_tensors_are_what_the_rules_say(
    source: tuple[Path, dict[str, Array]], megatron: Path
) -> None:
    data, found = source[1], everything(megatron)
    p = "model.layers.1.self_attn."
    q = data[p + "q_proj.weight"].reshape(KV, REP, HEAD, WIDTH)
    k = data[p + "k_proj.weight"].reshape(KV, 1, HEAD, WIDTH)
    v = data[p + "v_proj.weight"].reshape(KV, 1, HEAD, WIDTH)
    qkv = np.concatenate([q, k, v], axis=1).reshape(-1, WIDTH)
    assert np.array_equal(found["decoder.layers.1.self_attention.linear_qkv.weight"], qkv)
    state = "optim.model.layers.3.mlp.{}.weight.exp_avg"
    fc1 = np.concatenate([data[state.format("gate_proj")], data[state.format("up_proj")]])
    assert np.array_equal(found["optim.decoder.layers.3.mlp.linear_fc1.weight.exp_avg"], fc1)
    padded = found["embedding.word_embeddings.weight"]
    assert padded.shape == (256, WIDTH)
    assert np.array_equal(padded[:VOCABULARY], data["model.embed_tokens.weight"])
    assert not padded[VOCABULARY:].any()
    assert found["optim.decoder.layers.1.self_attention.linear_qkv.weight.step"] == 7


def test_cells_belong_to_the_ranks_of_the_mesh(megatron: Path) -> None:
    with open_store(megatron) as store:
        reader = latest(store)
        assert reader.manifest.world_size == 4
        assert reader.manifest.meshes[0].names == ("pp", "tp")
        tensor = reader.number("decoder.layers.2.mlp.linear_fc1.weight")
        entry = reader.manifest.tensors[tensor]
        owners = reader.filemap.owners[entry.owners].array(entry.base)
        assert owners.tolist() == [2, 3, 2, 3]
        assert [reader.filemap.grid_of(tensor).piece(i).box.shape[0] for i in range(4)] == [
            HIDDEN // 2
        ] * 4


def test_the_way_back_needs_no_program_and_gives_the_same_bits(
    source: tuple[Path, dict[str, Array]], megatron: Path, tmp_path: Path
) -> None:
    resharded(megatron, tmp_path / "hf", program("hf.llama"))
    same(everything(tmp_path / "hf"), source[1])


@pytest.mark.parametrize(
    "recipe", [("fsdp", "mesh fsdp = dp:3"), ("zero1", "mesh zero1 = dp:4"), ("ddp",)]
)
def test_recipes_apply_to_any_checkpoint(
    source: tuple[Path, dict[str, Array]], megatron: Path, tmp_path: Path, recipe: tuple[str, ...]
) -> None:
    resharded(source[0], tmp_path / "a", program(*recipe))
    same(everything(tmp_path / "a"), source[1])
    resharded(megatron, tmp_path / "b", program(*recipe))
    same(everything(tmp_path / "b"), everything(megatron))


def test_states_of_zero_are_cut_over_the_ranks(
    source: tuple[Path, dict[str, Array]], tmp_path: Path
) -> None:
    resharded(source[0], tmp_path, program("zero1", "mesh zero1 = dp:4"))
    with open_store(tmp_path) as store:
        manifest = latest(store).manifest
    sizes = [f.data_bytes for f in manifest.files]
    assert len(sizes) == 4
    assert sizes[0] > 2 * sizes[1] > sizes[2] > 0


def test_the_result_is_a_good_checkpoint_with_its_program(megatron: Path) -> None:
    with open_store(megatron) as store:
        reader = latest(store)
        found = verify(Catalogue(store), reader.commit.name, deep=True)
        assert not found.findings
        assert reader.manifest.lay.startswith("# layout megatron.gpt\n")
        assert reader.manifest.witness is not None
        assert reader.manifest.metadata == {"loss": 2.5}


def test_groups_get_the_new_names(megatron: Path, tmp_path: Path) -> None:
    with open_store(megatron) as store:
        objects = latest(store).objects()
    decayed, plain = objects["optim.groups"]
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in decayed["params"]
    assert "decoder.final_layernorm.weight" in plain["params"]
    assert (decayed["lr"], plain["lr"]) == (0.1, 0.2)
    assert objects["scheduler"] == {"last": 3}
    resharded(megatron, tmp_path / "hf", program(*HF))
    with open_store(tmp_path / "hf") as store:
        assert latest(store).objects()["optim.groups"] == groups()


def test_groups_that_a_fusion_would_join_are_refused(tmp_path: Path) -> None:
    split = groups()
    name = "model.layers.0.self_attn.k_proj.weight"
    split[0]["params"].remove(name)
    split[1]["params"].append(name)
    with open_store(tmp_path / "a") as store:
        save(store, values(), objects=[ObjectEntry("optim.groups", split, kind="groups")])
        with pytest.raises(MismatchError) as caught:
            prepared(store, program(*MEGATRON), program(*HF))
    assert "linear_qkv" in (caught.value.where or "")


def test_steps_of_fused_parameters_must_agree(tmp_path: Path) -> None:
    data = values()
    data["optim.model.layers.2.mlp.up_proj.weight.step"] = np.array(8, dtype=np.float32)
    with open_store(tmp_path / "a") as store:
        save(store, data)
        with pytest.raises(MismatchError) as caught:
            prepared(store, program(*MEGATRON), program(*HF))
    assert "layers.2.mlp.linear_fc1" in (caught.value.where or "")


# --- objects of ranks ---------------------------------------------------------------------------


def with_object(folder: Path, on_change: str, found: list[object]) -> None:
    entry, saved = per_rank("rng", found, on_change)
    with open_store(folder) as store:
        save(store, values(states=False), objects=[entry], extra={"rng": saved})


def ranks_of(folder: Path) -> PerRankValues:
    with open_store(folder) as store:
        found = latest(store).raw_objects()["rng"]
        assert isinstance(found, PerRankValues)
        return found


def test_values_of_ranks_stay_where_the_world_stays(tmp_path: Path) -> None:
    with_object(tmp_path / "a", "error", [10, 11, 12, "long"])
    resharded(tmp_path / "a", tmp_path / "b", program(*MEGATRON), program(*HF))
    assert ranks_of(tmp_path / "b") == {0: 10, 1: 11, 2: 12, 3: "long"}


def test_another_world_is_an_error_unless_the_layout_says_otherwise(tmp_path: Path) -> None:
    with_object(tmp_path / "a", "error", [10, 11, 12, 13])
    fsdp = ("fsdp", "mesh fsdp = dp:2")
    with pytest.raises(MismatchError) as caught:
        resharded(tmp_path / "a", tmp_path / "b", program(*fsdp))
    assert "a per-rank value does not fit another number of ranks" in caught.value.message
    said = program(*fsdp, "obj rng[dp] on-change drop")
    resharded(tmp_path / "a", tmp_path / "b", said)
    assert ranks_of(tmp_path / "b") == {
        r: {"$": "type", "name": "ckptd.Drop", "v": None} for r in (0, 1)
    }


def test_seeds_differ_by_rank_and_equal_streams_stay_equal(tmp_path: Path) -> None:
    fsdp = program("fsdp", "mesh fsdp = dp:6")
    with_object(tmp_path / "a", "reseed", [10, 11, 12, 13])
    resharded(tmp_path / "a", tmp_path / "b", fsdp)
    seeds = [v["v"] for v in ranks_of(tmp_path / "b").values()]
    assert len(set(seeds)) == 6
    with_object(tmp_path / "c", "reseed", [10] * 4)
    resharded(tmp_path / "c", tmp_path / "d", fsdp)
    assert ranks_of(tmp_path / "d") == dict.fromkeys(range(6), 10)


def test_values_to_reduce_go_to_every_rank(tmp_path: Path) -> None:
    with_object(tmp_path / "a", "reduce", [1, 2, 3, 4])
    resharded(tmp_path / "a", tmp_path / "b", program("fsdp", "mesh fsdp = dp:2"))
    found = ranks_of(tmp_path / "b")
    assert found[0] == found[1] == {"$": "type", "name": "ckptd.Reduce", "v": [1, 2, 3, 4]}


def test_values_to_reduce_share_nothing_with_each_other(tmp_path: Path) -> None:
    # What one rank's value held twice was taken for what another's did.
    saved = [codec.encode([one, one], shared=True) for one in ([n] for n in range(4))]
    with_object(tmp_path / "a", "reduce", saved)
    resharded(tmp_path / "a", tmp_path / "b", program("fsdp", "mesh fsdp = dp:2"))
    found = codec.decode(ranks_of(tmp_path / "b")[0]["v"])
    assert found == [[[n], [n]] for n in range(4)]
    assert all(a is b for a, b in found)


# --- values -------------------------------------------------------------------------------------


def cast_rules(dtype: str) -> tuple[str, ...]:
    return (f"default [...] cast({dtype})",)


def test_a_narrowing_cast_needs_leave_and_the_witness_follows_it(
    source: tuple[Path, dict[str, Array]], tmp_path: Path
) -> None:
    bf16 = program("ddp", *cast_rules("bfloat16"))
    with pytest.raises(RefusedError) as caught:
        resharded(source[0], tmp_path / "a", bf16)
    assert "values would change or be dropped" in caught.value.message
    done = resharded(source[0], tmp_path / "a", bf16, allow_lossy=True)
    assert done.witness_values > 10_000
    found = everything(tmp_path / "a")
    for name, wanted in source[1].items():
        if name.startswith("optim."):
            assert np.array_equal(found[name], wanted)
        else:
            assert np.array_equal(found[name], wanted.astype(ml_dtypes.bfloat16))
    widened = program("ddp", *cast_rules("float32"))
    resharded(tmp_path / "a", tmp_path / "b", widened)
    again = everything(tmp_path / "b")["lm_head.weight"]
    assert np.array_equal(again, source[1]["lm_head.weight"].astype(ml_dtypes.bfloat16))
    assert again.dtype == np.float32


def test_a_value_that_overflows_its_type_is_an_error(tmp_path: Path) -> None:
    data = values(states=False)
    data["lm_head.weight"][3, 4] = 1e6
    with open_store(tmp_path / "a") as store:
        save(store, data)
    half = program("ddp", *cast_rules("float16"))
    with pytest.raises(UsageError) as caught:
        resharded(tmp_path / "a", tmp_path / "b", half, allow_lossy=True)
    assert "a value does not fit the type it is cast" in caught.value.message
    assert caught.value.where == "lm_head.weight"


def test_scales_and_shifts_are_done_and_undone(tmp_path: Path) -> None:
    data = values(states=False)
    with open_store(tmp_path / "a") as store:
        save(store, data)
    shifted = program(*HF, "model.norm.weight = nf[h] affine(1, -1)")
    with pytest.raises(RefusedError):
        resharded(tmp_path / "a", tmp_path / "b", shifted, program(*HF))
    resharded(tmp_path / "a", tmp_path / "b", shifted, program(*HF), allow_lossy=True)
    norm = everything(tmp_path / "b")["model.norm.weight"]
    assert np.array_equal(
        norm, (data["model.norm.weight"].astype(np.float64) - 1).astype(np.float32)
    )
    done = resharded(tmp_path / "b", tmp_path / "c", shifted)
    assert done.state == "committed"
    assert np.array_equal(everything(tmp_path / "c")["model.norm.weight"], norm)


# --- what is refused ----------------------------------------------------------------------------


def test_a_planner_that_errs_is_caught_by_the_witness(
    source: tuple[Path, dict[str, Array]], tmp_path: Path
) -> None:
    real = Composed.feed

    def shifted(self: Composed, number: int, piece: int) -> ChunkFeed:
        """Swap two tensors of one shape."""
        names = [link.tensor.name for link in self.links]
        here = "model.layers.0.mlp.gate_proj.weight"
        if names[number] == here:
            number = names.index("model.layers.0.mlp.up_proj.weight")
        return real(self, number, piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Composed, "feed", shifted)
        with pytest.raises(CorruptError) as caught:
            resharded(source[0], tmp_path / "a", program("ddp"))
    assert "values are not at the positions where they were saved" in caught.value.message
    assert "gate_proj" in (caught.value.where or "")
    with open_store(tmp_path / "a") as store:
        assert Catalogue(store).latest() is None


def test_a_target_without_a_rule_for_something_is_refused(
    source: tuple[Path, dict[str, Array]],
) -> None:
    with open_store(source[0]) as store:
        with pytest.raises(MismatchError) as caught:
            prepared(store, program(*HF, "lm_head.weight = drop"), program(*HF))
        assert caught.value.kind == "lay-cover"
        assert "lm_head.weight" in (caught.value.where or "")
        dropped = program(*HF, "lm_head.weight = drop")
        with pytest.raises(RefusedError):
            prepared(store, program(*HF), dropped)
        found = prepared(store, program(*HF), dropped, allow_lossy=True)
        assert "lm_head.weight" in found.assembled.composed.dropped


def test_a_layout_that_does_not_fit_names_the_rule(source: tuple[Path, dict[str, Array]]) -> None:
    with open_store(source[0]) as store:
        with pytest.raises(MismatchError) as caught:
            wide = ("megatron.gpt", "mesh megatron_gpt = pp:1 dp:1 tp:3", *HF[1:])
            prepared(store, program(*wide), program(*HF))
    assert "self_attention.linear_proj" in (caught.value.where or "")


def test_every_chunk_is_proved_and_every_rule_explained(
    source: tuple[Path, dict[str, Array]],
) -> None:
    with open_store(source[0]) as store:
        found = prepared(store, program(*MEGATRON), program(*HF))
        target = found.assembled.target
        proved = prove_target(found.assembled.composed, target, range(target.world))
        assert proved.elements == sum(np.prod(t.shape, dtype=int) for t in target.tensors)
        rules = {r.rule.partition(" ")[0]: r for r in rules_of(found.assembled.composed)}
    fused = rules["decoder.layers.{#l@pp}.self_attention.linear_qkv.weight"]
    assert (fused.tensors, fused.promise, len(fused.sources)) == (12, "exact", 2)
    assert rules["embedding.word_embeddings.weight"].promise == "exact up to fill"


def test_a_recipe_gives_no_further_names(tmp_path: Path) -> None:
    """A layout calls an alias what a source may have; only where it is the target it is made."""
    tie = tmp_path / "tied.lay"
    tie.write_text(
        "space s { E[v h] }\nlayout t of s on none {\n  embed = E[v h]\n  head = E[v h] alias\n}\n"
    )
    cut = program("fsdp", "mesh fsdp = dp:2", 'stored "model.{name}"')
    weight = np.ones((4, 2))
    for number, (tensors, to, wanted) in enumerate(
        (
            ({"embed": weight}, cut, ()),
            ({"embed": weight, "head": weight}, cut, ("model.head",)),
            ({"embed": weight}, program(f"{tie}:t"), ("head",)),
        )
    ):
        with open_store(tmp_path / str(number)) as store:
            save(store, tensors)
            found = prepared(store, to, program(f"{tie}:t")).assembled.target
        (tensor,) = found.tensors
        assert tensor.aliases == wanted


def test_tied_names_and_empty_tensors_stay(tmp_path: Path) -> None:
    make_root(tmp_path / "a", [10])
    resharded(tmp_path / "a", tmp_path / "b", program("fsdp", "mesh fsdp = dp:3"))
    same(everything(tmp_path / "b"), everything(tmp_path / "a"))
    with open_store(tmp_path / "a") as one, open_store(tmp_path / "b") as two:
        left, right = latest(one), latest(two)
        assert left.objects() == right.objects()
        assert left.info("model.embed.weight") == right.info("model.embed.weight")
        assert right.info("model.embed.weight").aliases == ("model.head.weight",)
