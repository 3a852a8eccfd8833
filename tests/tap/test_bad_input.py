"""What `leadline tap record` says to input it cannot use: one sentence, and nothing written."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leadline.tap.manifest import read_manifest
from leadline.tap.verify import verify_tap

from .conftest import Checkpoints
from .families import VOCAB, random_documents
from .processes import CommandServer
from .scenes import LAYERS, SCENES, build_small_model
from .tapping import command, file_hashes
from .toy import (
    add_tensor,
    build_toy,
    copy_checkpoint,
    delete_shard,
    edit_config,
    edit_index,
    expert_name,
    rename_tensor,
    shard_of,
    truncate_shard,
)

pytestmark = pytest.mark.slow

DOCUMENTS = random_documents((12, 7, 20))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_toy(tmp_path_factory.mktemp("toy"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bad:
    """A way to spoil a checkpoint, the exit code and what the sentence must say."""

    spoil: Callable[[Path], Any]
    says: str
    code: int = 1


def map_to_other_shard(path: Path) -> None:
    name = expert_name(0, 4, "up")
    home = shard_of(path, name).name
    edit_index(
        path,
        lambda where: where.update({name: next(s for s in where.values() if s != home)}),
    )


CHECKPOINTS = {
    "t43 shard cut by 1 KiB": Bad(
        spoil=lambda path: truncate_shard(path, 2),
        says=r"model-00002-of-00003\.safetensors .*\d+ bytes.*\d+",
    ),
    "t45 shard missing": Bad(
        spoil=lambda path: delete_shard(path, 3),
        says=r"model-00003-of-00003\.safetensors, which holds model\.layers\.1.* 27 more tensors",
    ),
    "t46 tensor in another shard": Bad(
        spoil=map_to_other_shard, says=r"experts\.4\.up_proj\.weight .*model-0000\d-of"
    ),
    "t63 expert renamed": Bad(
        spoil=lambda path: rename_tensor(
            path, expert_name(1, 3, "down"), expert_name(1, 3, "lower")
        ),
        says=r"experts\.3\.",
    ),
    "t51 experts under another container": Bad(
        spoil=lambda path: [
            rename_tensor(path, name, name.replace("mlp.experts", "block.pool"))
            for name in [expert_name(1, e, p) for e in range(8) for p in ("gate", "up", "down")]
        ],
        says=r"layers\.1\.",
    ),
    "unsupported architecture": Bad(
        spoil=lambda path: edit_config(path, model_type="t5"),
        says=r"t5 .*supported one: with experts .*\bqwen3_moe\b.* dense .*\bllama\b",
        code=2,
    ),
    "architecture that transformers does not know": Bad(
        spoil=lambda path: edit_config(path, model_type="qwen9_moe"), says="qwen9_moe", code=2
    ),
    "t68 quantised": Bad(
        spoil=lambda path: edit_config(path, quantization_config={"quant_method": "fp8"}),
        says="quanti",
        code=2,
    ),
    "no configuration": Bad(
        spoil=lambda path: (path / "config.json").unlink(), says=r"config\.json", code=2
    ),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoint_that_is_not_whole_is_refused_before_anything_is_written(
    server: CommandServer, toy: Path, tmp_path: Path, case: str
) -> None:
    bad = CHECKPOINTS[case]
    spoiled = copy_checkpoint(toy, tmp_path / "spoiled")
    bad.spoil(spoiled)
    said = server.run(command(spoiled, DOCUMENTS, tmp_path / "tap")).refused(bad.code)
    assert re.search(bad.says, said), said
    assert not (tmp_path / "tap").exists()


def ids(path: Path, rows: Any) -> Path:
    np.save(path, np.array(rows))
    return path


def lines(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


Corpora = dict[str, tuple[Callable[[Path], Path], int, str]]
CORPORA: Corpora = {
    "id beyond the vocabulary": (
        lambda folder: ids(folder / "c.npy", [[1, 2, 3], [4, 5, VOCAB]]),
        1,
        rf"document 2 \(c\.npy\[1\]\) .*id {VOCAB} at position 2, wanted 0 to {VOCAB - 1}",
    ),
    "id below zero": (
        lambda folder: ids(folder / "c.npy", [[1, -100, 3]]),
        1,
        r"document 1 .*id -100 at position 1",
    ),
    "t39 three empty documents": (
        lambda folder: lines(folder / "c.jsonl", "", " ", "\n"),
        1,
        "no token in 3 documents",
    ),
    "t37 longer than the model's positions": (
        lambda folder: ids(folder / "c.npy", np.ones((1, 100_000), dtype=np.int32)),
        1,
        r"document 1 .*100,000 tokens.*512 positions.*--max-document-tokens 512",
    ),
    "no file": (lambda folder: folder / "none.jsonl", 2, r"no corpus at .*none\.jsonl"),
    "no JSON": (
        lambda folder: Path(folder / "c.jsonl").write_text("{") and folder / "c.jsonl",
        1,
        r"c\.jsonl:1 is not JSON",
    ),
}


@pytest.mark.parametrize("case", CORPORA)
def test_corpus_that_cannot_be_used_is_refused_before_a_weight_is_read(
    server: CommandServer, toy: Path, tmp_path: Path, case: str
) -> None:
    make, code, says = CORPORA[case]
    said = server.run(command(toy, make(tmp_path), tmp_path / "tap")).refused(code)
    assert re.search(says, said), said
    assert not (tmp_path / "tap").exists()


FLAGS: dict[str, tuple[dict[str, Any], str]] = {
    "no such schedule": ({"schedule": "flood"}, r"--schedule flood .*wave, step"),
    "no such dtype": ({"dtype": "float16"}, r"--dtype float16 .*bfloat16, float32"),
    "no memory": ({"vram_mib": 0}, r"--vram-mib 0"),
    "no device of that name": ({"device": "cuda:7"}, r"--device cuda:7.*--device cpu"),
    "document longer than the KV pool": (
        {"schedule": "step", "kv_tokens": 19},
        r"document 3 .*20 .*--kv-tokens",
    ),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flag_that_cannot_be_is_refused(
    server: CommandServer, toy: Path, tmp_path: Path, case: str
) -> None:
    flags, says = FLAGS[case]
    said = server.run(command(toy, DOCUMENTS, tmp_path / "tap", **flags)).refused(2)
    assert re.search(says, said), said
    assert not (tmp_path / "tap").exists()


TIGHT: dict[str, dict[str, Any]] = {
    "device": {"vram_mib": 1, "host_pool_mib": 8, "dtype": "float32"},
    "device of a step": {"vram_mib": 1, "host_pool_mib": 8, "schedule": "step"},
    "pool of a step": {"vram_mib": 64, "host_pool_mib": 1, "schedule": "step"},
    "pool with every Gram": {
        "vram_mib": 64,
        "host_pool_mib": 1,
        "targets": "all",
        "gate_up_gram": "expert",
    },
}


@pytest.mark.parametrize("case", TIGHT)
def test_budget_that_does_not_hold_is_refused_with_the_one_that_does(
    server: CommandServer, checkpoints: Checkpoints, tmp_path: Path, case: str
) -> None:
    checkpoint, flags = build_small_model(checkpoints, num_experts=32), TIGHT[case]
    documents = random_documents([64] * 4)
    arguments = command(checkpoint, documents, tmp_path / "tap", **flags)
    said = server.run(arguments).refused(2)
    offered = re.search(r"give (--vram-mib|--host-pool-mib) (\d+) or more", said)
    assert offered, said
    assert len(re.findall(r"[KM]iB", said)) >= 3, f"no sum in: {said}"
    name = offered[1].removeprefix("--").replace("-", "_")
    enough = command(checkpoint, documents, tmp_path / "tap", **{**flags, name: int(offered[2])})
    assert server.run(enough).result["tokens"] == 4 * 64


def mounted(place: Path, *options: str) -> Iterator[Path]:
    """A file system of its own at *place*."""
    place.mkdir()
    arguments = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)]
    if subprocess.run(arguments, capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "size=1536k")


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "ro")


def test_t92_tap_larger_than_the_disk_is_refused_at_the_start(
    server: CommandServer, checkpoints: Checkpoints, small_disk: Path
) -> None:
    scene, checkpoint = SCENES["small corpus"], build_small_model(checkpoints)
    arguments = scene.arguments(checkpoint, small_disk / "tap", targets="all")
    corpus = Path(arguments[arguments.index("--corpus") + 1])
    said = server.run(arguments).refused(1)
    assert re.search(r"free and the tap needs .*\(\d+ bytes\)", said), said
    assert list(small_disk.iterdir()) == [corpus]


def test_t92_disk_that_fills_while_sealing_keeps_the_layers_before(
    server: CommandServer, checkpoints: Checkpoints, tmp_path: Path, small_disk: Path
) -> None:
    scene, checkpoint = SCENES["small corpus"], build_small_model(checkpoints, num_hidden_layers=3)
    whole = scene.arguments(checkpoint, tmp_path / "whole")
    assert server.run(whole).code == 0
    arguments = scene.arguments(checkpoint, small_disk / "tap")
    filler = small_disk / "filler"
    full = ("fill_disk", {"layer": 2, "filler": str(filler)})
    said = server.run(arguments, fault=full).refused(1)
    assert re.search(r"layer_00002.*needs \d+ bytes, \d+ are free", said), said
    assert read_manifest(small_disk / "tap").sealed == {0, 1}
    assert verify_tap(small_disk / "tap", allow_partial=True).problems == ()
    assert not list(small_disk.rglob("*.tmp"))
    filler.unlink()
    assert server.run(arguments).code == 0
    assert file_hashes(small_disk / "tap") == file_hashes(tmp_path / "whole")


def test_read_only_folder_is_refused(
    server: CommandServer, toy: Path, tmp_path: Path, read_only_disk: Path
) -> None:
    corpus = ids(tmp_path / "c.npy", [[1, 2, 3]])
    said = server.run(command(toy, corpus, read_only_disk / "tap")).refused(1)
    assert re.search(r"disk.*[Rr]ead-only file system.*choose a folder you may write to", said)


def test_error_comes_as_json_too(server: CommandServer, toy: Path, tmp_path: Path) -> None:
    ended = server.run(command(toy, tmp_path / "none.npy", tmp_path / "tap"))
    assert json.loads(ended.stdout)["error"]["kind"] == "UsageError"


def test_t64_tensors_that_the_model_does_not_have_are_told(
    server: CommandServer, toy: Path, tmp_path: Path
) -> None:
    more = copy_checkpoint(toy, tmp_path / "more")
    for name in ("mtp.fc.weight", "mtp.norm.weight"):
        add_tensor(more, name, torch.ones(64, dtype=torch.bfloat16))
    plan = ["rig", "plan", str(more), "--tokens", "99", "--device", "cpu", "--no-probe"]
    assert server.run([*plan, "--json"]).result["not_in_model"] == [
        "mtp.fc.weight",
        "mtp.norm.weight",
    ]
    assert "2 tensors, mtp.fc.weight first" in server.run(plan).stdout
    ended = server.run(command(more, DOCUMENTS, tmp_path / "tap"))
    assert ended.result["tensors_not_in_model"] == 2
    assert ended.result["bytes_read"] < ended.result["checkpoint_bytes"]


def test_t23_probe_of_made_up_input_leaves_no_tap(
    server: CommandServer, toy: Path, tmp_path: Path
) -> None:
    """No server in this issue, so no warm-up; the planner's probe is what runs made-up ids."""
    plan = ["rig", "plan", str(toy), "--tokens", "99", "--device", "cpu", "--json"]
    out = tmp_path / "tap"
    assert server.run([*plan, "--probe", "--out", str(out)]).result["predicted_seconds"] > 0
    assert not out.exists()


def test_scenes_have_as_many_layers_as_they_say(checkpoints: Checkpoints) -> None:
    config = json.loads((build_small_model(checkpoints) / "config.json").read_text())
    assert config["num_hidden_layers"] == LAYERS
