"""The commands of docs/guide/conversions.md, run as they stand there, on what libraries wrote."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop import matrix
from tests.interop.matrix import Content, Target, bits, compare, read_dcp, read_hf

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "conversions.md"
SOURCES = {source.name: source for source in matrix.sources()}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WEIGHTS = Target("weights", "", lambda _: (), read_hf, has_states=False)
ALL = Target("all", "", lambda _: (), read_dcp)
SIZES = {"let kv = 8": "let kv = 2", "let v = 128256": "let v = 128"}


def sections() -> dict[str, list[list[str]]]:
    """Return the commands of each section of the page, as lists of words."""
    found: dict[str, list[list[str]]] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        lines = re.findall(r"(?m)^    \$ ((?:.*\\\n)*.+)", text)
        found[title] = [shlex.split(line.replace("\\\n", " ")) for line in lines]
    return found


COMMANDS = sections()


class Desk:
    """A folder in which the commands of a section run; their paths are below it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: dict[str, Path] = {}

    def source(self, called: str, name: str) -> Content:
        """Make a source of the table under the name that the page has for it."""
        made = self.folder / f"made-{name}"
        made.mkdir()
        self.sources[called], wanted = SOURCES[name].make(made)
        return wanted

    def run(
        self, title: str, number: int = 0, sizes: Mapping[str, str] = SIZES, *more: str
    ) -> Path:
        """Run a command of the page, of a model of other sizes; return the path that it writes."""
        program, *words = COMMANDS[title][number]
        assert program == "ckptd"
        at = [
            self._path(word) if word.startswith("./") else sizes.get(word, word) for word in words
        ]
        error = matrix.run_command([*at, *more])
        assert not error, error
        return Path(at[2])

    def _path(self, word: str) -> str:
        return str(self.sources.get(word, self.folder / word))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)  # for files that commands name without a path
    return Desk(tmp_path)


def test_eleven_conversions() -> None:
    assert len(COMMANDS) == 11
    assert all(COMMANDS.values())
    threads = re.findall(
        r"\[#(\d+)\]\(https://github.com/[\w.-]+/[\w.-]+/issues/(\d+)\)", PAGE.read_text()
    )
    assert len(threads) >= 17
    assert all(shown == linked for shown, linked in threads)


def test_megatron_to_hugging_face_and_to_its_ranks(desk: Desk) -> None:
    wanted = desk.source("./iter_0001000", "megatron")
    folder = desk.run("Megatron's torch_dist to Hugging Face")
    compare(read_hf(folder), wanted, WEIGHTS)
    ranks = desk.run("Hugging Face to Megatron's ranks, of any TP and PP")
    norms = {  # what Transformer Engine calls the norms of Megatron's local layers
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    made = next(desk.folder.glob("made-*/megatron-tp2pp2"))
    words: dict[str, list[Any]] = {}
    for rank, (pp, tp) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        held = np.load(made / f"local_rank{rank}_pp{pp}_tp{tp}.npz")
        file = ranks / f"mp_rank_{tp:02}_{pp:03}" / "model_optim_rng.pt"
        found = bits(torch.load(file, weights_only=True)["model"])
        assert len(found) == len(held.files)
        for name in held.files:
            theirs = name
            for one, other in norms.items():
                theirs = theirs.replace(one, other)
            if "word_embeddings" in name or "output_layer" in name:
                words.setdefault(name, []).append((held[name], found[theirs]))
            else:
                assert found[theirs].tobytes() == held[name].tobytes(), (file, name)
    for parts in words.values():  # the vocabulary is filled up to a multiple of 128 a rank
        ours = np.concatenate([b for _, b in parts])
        whole = np.concatenate([a for a, _ in parts])
        assert (ours[: len(whole)] == whole).all()
        assert not ours[len(whole) :].any()


@pytest.mark.parametrize("source", ["rank-dtensors", "rank-fsdp1"])
def test_files_of_ranks(desk: Desk, source: str) -> None:
    wanted = desk.source("./actor", source)
    found = read_hf(desk.run("Files of ranks with DTensors to Hugging Face"))
    compare(found, wanted, WEIGHTS)
    assert found.weights.keys() == wanted.weights.keys()


def test_deepspeed(desk: Desk) -> None:
    wanted = desk.source("./zero", "zero3")
    universal = desk.run("DeepSpeed on another number of GPUs")
    compare(matrix.read_universal(universal), wanted, ALL)
    title = "ZeRO to Hugging Face, in little memory"
    compare(read_hf(desk.run(title)), wanted, WEIGHTS)
    narrow = Target("narrow", "", lambda _: (), read_hf, has_states=False, lossy=matrix.narrowed)
    compare(read_hf(desk.run(title, 1)), wanted, narrow)


def test_dcp_and_a_part_of_it(desk: Desk) -> None:
    wanted = desk.source("./dcp", "dcp-fsdp2-tp")
    title = "DCP to Hugging Face, and a part of it"
    compare(read_hf(desk.run(title)), wanted, WEIGHTS)
    part = {n.removeprefix("layers.0."): v for n, v in wanted.weights.items() if "layers.0." in n}
    found = read_hf(desk.run(title, 1))
    compare(found, Content(part), WEIGHTS)
    assert found.weights.keys() == part.keys()


def test_megatrons_optimizer(desk: Desk) -> None:
    wanted = desk.source("./iter_0001000", "megatron-adam")
    compare(read_dcp(desk.run("Megatron's distributed optimizer")), wanted, ALL)
    assert wanted.states


@pytest.mark.parametrize("source", ["rank-fsdp1", "dcp-fsdp1"])
def test_fsdp1_to_fsdp2(desk: Desk, source: str) -> None:
    wanted = desk.source("./fsdp1", source)
    compare(read_dcp(desk.run("FSDP1 to FSDP2")), wanted, ALL)


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of each head as torchtitan has them: pairs beside each other."""
    rows, width = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, width)


TITAN = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.layers.": "layers.",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.norm.": "norm.",
    "lm_head.": "output.",
}


def in_titan(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """Return what torchtitan calls a weight of Llama, and its rows as it has them."""
    heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
    for one, other in TITAN.items():
        name = name.replace(one, other)
    return name, interleaved(values, heads) if heads else values


@pytest.mark.plugins
def test_hugging_face_to_dcp(desk: Desk) -> None:
    wanted = desk.source("./Llama", "hf-llama")
    title = "Hugging Face to DCP and torchtitan"
    compare(read_dcp(desk.run(title)), wanted, ALL)
    program = re.search(r"```lay\n(layout titan.*?)```", PAGE.read_text(), re.DOTALL)
    assert program is not None
    (desk.folder / "titan.lay").write_text(program[1])
    folder = desk.run(title, 2)
    titan = dict(in_titan(name, values) for name, values in wanted.weights.items())
    compare(matrix.read_dcp(folder, weight="", state="optim."), Content(titan), ALL)


@pytest.mark.plugins
def test_a_job_with_stacked_experts_becomes_files(desk: Desk) -> None:
    wanted = desk.source("./made", "hf-mixtral")
    root = desk.folder / "root"
    made = (str(desk.sources["./made"]), str(root), "--to", "names.ckptd")
    assert not matrix.run_command(["reshard", *made])
    folder = desk.run("Hugging Face to DCP and torchtitan", 1)
    compare(read_hf(folder), wanted, WEIGHTS)


def test_megatron_fsdp(desk: Desk, foreign: Path) -> None:
    desk.sources["./iter_0001000"] = folder = foreign / "megatron-fsdp"
    wanted = dict(np.load(folder / "expected.npz"))
    sizes = {**SIZES, "let hd = 128": "let hd = 4"}
    values = read_hf(desk.run("Megatron-FSDP to Hugging Face", 0, sizes)).weights
    assert len(values) == 2 * 9 + 3
    for layer in range(2):
        theirs, mine = f"model.module.decoder.layers.{layer}.", f"model.layers.{layer}."
        groups = wanted[f"{theirs}self_attention.linear_qkv.weight"].reshape(2, 4, 4, 8)
        found = {
            "self_attn.q": groups[:, :2],
            "self_attn.k": groups[:, 2],
            "self_attn.v": groups[:, 3],
        }
        found |= {
            name: wanted[f"{theirs}mlp.{inner}"]
            for name, inner in {
                "mlp.gate": "linear_fc1.weight_w",
                "mlp.up": "linear_fc1.weight_v",
                "mlp.down": "linear_fc2.weight",
            }.items()
        }
        for name, values_of in found.items():
            assert values[f"{mine}{name}_proj.weight"].tobytes() == values_of.tobytes(), name


def with_experts(folder: str) -> dict[str, Any]:
    """Train on two ranks with two experts each and save by Megatron; return what each holds."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from tests.plugins.megatron.world import Job

    job = Job(ep=2, sharding="fully_reshardable")
    job.train(1)
    if not dist.get_rank():
        Path(folder).mkdir()
    dist.barrier()
    dist_checkpointing.save(job.state(), folder)
    return {n.removeprefix("module."): p.detach().clone() for n, p in job.model.named_parameters()}


@pytest.mark.plugins
@pytest.mark.dist
def test_experts_on_several_ranks(desk: Desk) -> None:
    from ckptd.testing.ranks import run_ranks

    made = desk.folder / "megatron"
    held = run_ranks(2, with_experts, str(made), deadline_s=280.0, env={"OMP_NUM_THREADS": "1"})
    desk.sources["./iter_0000500"] = made
    sizes = {"let kv = 8": "let kv = 2", "let v = 32000": "let v = 128"}
    # This vocabulary is not filled up, and layers that are not Transformer Engine's call a norm so.
    norm = "decoder.layers.mlp.linear_fc1.layer_norm_weight = L.n2[l h]"
    more = ("-e", "let vpad = 128", "-e", f"from: {norm}")
    folder = desk.run("Experts on several ranks to Hugging Face", 0, sizes, *more)
    found = read_hf(folder).weights
    compared = 0
    for rank, parameters in enumerate(map(bits, held)):
        for name, values in parameters.items():
            expert = re.fullmatch(
                r"decoder\.layers\.(\d)\.mlp\.experts\.local_experts\.(\d)\.linear_fc([12])\.weight",
                name,
            )
            if expert is None:
                continue
            layer, number = int(expert[1]), 2 * rank + int(expert[2])
            theirs = f"model.layers.{layer}.block_sparse_moe.experts.{number}."
            if expert[3] == "1":
                both = [found[f"{theirs}w1.weight"], found[f"{theirs}w3.weight"]]
                assert np.concatenate(both).tobytes() == values.tobytes(), name
            else:
                assert found[f"{theirs}w2.weight"].tobytes() == values.tobytes(), name
            compared += 1
    assert compared == 4 * 4 * 2
    embedding = bits(held[0])["embedding.word_embeddings.weight"]
    assert found["model.embed_tokens.weight"].tobytes() == embedding[:128].tobytes()
