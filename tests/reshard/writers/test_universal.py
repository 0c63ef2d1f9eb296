"""DeepSpeed's universal folder; tests/interop loads it by DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ckptd.checkpoint.format.manifest import ObjectEntry
from ckptd.errors import UsageError
from ckptd.reshard.execute import Budget
from ckptd.reshard.job import ReshardShare
from ckptd.reshard.writers.folder import FolderJob
from ckptd.reshard.writers.universal import UniversalPlace
from ckptd.store import open_store
from tests.checkpoint.load.builder import Array
from tests.cli.running import Cli
from tests.readers.opening import open_reader
from tests.reshard.llama import groups, prepared, program, save, shapes, values


def write(source: Path, folder: Path, name: str, *rules: str) -> UniversalPlace:
    with open_store(source) as store:
        found = prepared(store, program(name, *rules))
        place = UniversalPlace(found.assembled, found.expected)
        job = FolderJob(found.stock.source, place, folder, identity=found.identity)
        done = job.run(ReshardShare(), Budget.of(64 << 20, store))
        assert done.state == "committed"
    return place


def load(path: Path) -> object:
    found: object = torch.load(path, weights_only=True)
    return found


def array(path: Path) -> Array:
    found = torch.load(path, weights_only=True)
    out: Array = (found["param"] if isinstance(found, dict) else found).numpy()
    return out


def test_weights_states_steps_groups_and_objects(tmp_path: Path) -> None:
    wanted = values()
    objects = [
        ObjectEntry("optim.groups", kind="groups", value=groups()),
        ObjectEntry("seen.samples", value=70),
    ]
    with open_store(tmp_path / "source") as store:
        save(store, wanted, objects=objects)
    write(tmp_path / "source", tmp_path / "out", "ddp")
    out = tmp_path / "out"
    assert (out / "latest_universal").read_text() == "global_step5_universal"
    top = out / "global_step5_universal"
    for name in shapes():
        zero = top / "zero" / name
        assert sorted(p.name for p in zero.iterdir()) == [
            "exp_avg.pt",
            "exp_avg_sq.pt",
            "fp32.pt",
            "step.pt",
        ]
        assert np.array_equal(array(zero / "fp32.pt"), wanted[name])
        for state in ("exp_avg", "exp_avg_sq", "step"):
            assert np.array_equal(array(zero / f"{state}.pt"), wanted[f"optim.{name}.{state}"])
    optimizer = load(top / "zero/optimizer_state.pt")
    assert isinstance(optimizer, dict)
    assert [g["lr"] for g in optimizer["param_groups"]] == [0.1, 0.2]
    # Stage 3 has one counter for all: that of the optimizer, not the step of the checkpoint.
    assert [s["step"] for s in optimizer["optimizer_state_dict"]["state"].values()] == [7, 7]
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        model = load(top / name)
        assert isinstance(model, dict)
        assert (model["global_steps"], model["mp_world_size"], model["seen"]) == (
            5,
            1,
            {"samples": 70},
        )
    reader = open_reader(out)  # by latest_universal
    found = reader.tensors(reader.names)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[n], wanted[n]) for n in wanted)
    assert reader.commit.step == 5
    for number, group in enumerate(groups()):
        for key, value in group.items():
            assert reader.objects()[f"optim.param_groups.{number}.{key}"] == value


def test_master_weights_go_first_and_steps_follow_from_the_job(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    data = {"w": rng.standard_normal((3, 4)).astype(np.float16)}
    data |= {f"optim.w.{s}": rng.standard_normal((3, 4)).astype("f4") for s in ("m", "master")}
    objects = [ObjectEntry("skipped_steps", value=2)]
    with open_store(tmp_path / "source") as store:
        save(store, data, objects=objects, step=9)
    lay = tmp_path / "z.lay"
    lay.write_text(
        "space s { W[a b] follow m, master }\n"
        "layout a of s on none { w = W[a b]; v = W[a b] alias }\n"
        'layout z of s on none { stored states "optim.{name}.{state}" with m=exp_avg, master=fp32\n'
        "  w = W[a b]\n  v = W[a b] alias }\n"
    )
    with open_store(tmp_path / "source") as store:
        found = prepared(store, program(f"{lay}:z"), program(f"{lay}:a"))
        place = UniversalPlace(found.assembled, found.expected)
        job = FolderJob(found.stock.source, place, tmp_path / "out", identity="a")
        job.run(ReshardShare(), Budget.of(64 << 20, store))
    assert place.left_out == ["w"]
    for name in ("w", "v"):  # tied: whichever name DeepSpeed asks for
        zero = tmp_path / "out/global_step9_universal/zero" / name
        assert np.array_equal(array(zero / "fp32.pt"), data["optim.w.master"])
        assert np.array_equal(array(zero / "exp_avg.pt"), data["optim.w.m"])
        assert array(zero / "step.pt") == 7


def test_what_is_not_trained_is_named(tmp_path: Path, cli: Cli) -> None:
    data = {n: np.ones((4, 2), "f4") for n in ("w", "optim.w.exp_avg", "frozen")}
    with open_store(tmp_path / "source") as store:
        save(store, data)
    source, out = str(tmp_path / "source"), tmp_path / "out"
    words = ("reshard", source, str(out), "--to", "ddp", "--format", "universal")
    done = cli(*words, "-e", "use names.plain")
    assert done.code == 0
    assert "frozen parameters" in done.err
    assert ": frozen (1 in all)" in done.err
    # The note says where it is.
    assert np.array_equal(array(next(out.glob("*/zero/frozen/fp32.pt"))), data["frozen"])
    (note,) = cli.json(*words, "--force")["notes"]
    assert note["names"] == ["frozen"]
    with open_store(tmp_path / "weights") as store:
        save(store, {"w": data["w"], "v": data["w"]})
    assert write(tmp_path / "weights", tmp_path / "out2", "ddp").notes == ()


def test_what_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "source") as store:
        save(store, {"a/../../b": np.zeros((4, 2)), "c": np.zeros((4, 2))})
    with pytest.raises(UsageError) as caught:
        write(tmp_path / "source", tmp_path / "out", "ddp")
    assert (caught.value.kind, caught.value.where) == ("bad-key", "a/../../b")
    with pytest.raises(UsageError) as caught:
        write(tmp_path / "source", tmp_path / "out", "fsdp", "mesh fsdp = dp:2")
    assert caught.value.kind in ("lay-rule", "bad-key")
    assert not (tmp_path / "out").exists()
    with open_store(tmp_path / "source2") as store:
        save(store, {"c": np.zeros((4, 2))})
    with pytest.raises(UsageError) as caught:
        write(tmp_path / "source2", tmp_path / "out", "fsdp", "mesh fsdp = dp:2")
    assert caught.value.kind == "lay-rule"
