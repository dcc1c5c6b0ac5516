"""Weights from a Hugging Face folder into a run and back, as a user does it."""

import json

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import hf_folders
import runs
from runs import Workspace, same_arrays

# Of almost nothing, so that a step leaves the weights as they were.
STILL = ("run.steps=1", "optimizer.warmup_steps=0", "optimizer.learning_rate=1e-30", "optimizer.weight_decay=0")


@pytest.fixture(scope="module")
def llama(workspace: Workspace) -> dict[str, np.ndarray]:
    """A folder `llama`, and a config that leaves the model to it; the tensors."""
    checkpoint = {"every_steps": 1, "init_from": "hf:llama"}
    tree = runs.TREE | {"model": {"compute_dtype": "float32"}, "checkpoint": checkpoint}
    (workspace.folder / "from_hf.yaml").write_text(yaml.safe_dump(tree))
    return hf_folders.write(workspace.folder / "llama", files=2)


def test_a_run_starts_from_a_folder_and_goes_back(workspace: Workspace, llama):
    said = workspace.run("train", "from_hf.yaml", "run.name=direct", "model.rope.theta=1e6", *STILL)
    assert "weights of llama, BF16 there" in said and "NOT COMPARED" in said
    assert "model.rope.theta 500000.0 -> 1000000.0" in said
    workspace.run("convert", "to-hf", "runs/direct", "--to", "out", "--dtype", "bfloat16")
    found = load_file(workspace.folder / "out/model.safetensors")
    assert found.keys() == llama.keys()
    for name in llama:
        assert found[name].tobytes() == llama[name].tobytes(), name
    config = json.loads((workspace.folder / "out/config.json").read_text())
    assert config["max_position_embeddings"] == 64 and config["rope_theta"] == 1e6


@pytest.mark.slow
def test_a_converted_folder_starts_the_same_run(workspace: Workspace, llama):
    workspace.run("convert", "from-hf", "llama", "--to", "converted")
    sizes = "vocab_size: 264, embed_dim: 32, num_layers: 3, num_heads: 4, num_kv_heads: 2, head_dim: 8, mlp_dim: 48"
    model = f"model={{{sizes}, compute_dtype: float32}}"
    workspace.train("by_way", model, "checkpoint.init_from=converted", *STILL)
    workspace.run("train", "from_hf.yaml", "run.name=at_once", *STILL)
    same_arrays(workspace.state("at_once", 1), workspace.state("by_way", 1))


def test_conflicts_are_named_all_at_once(workspace: Workspace, llama):
    said = workspace.run("train", "from_hf.yaml", "model.embed_dim=64", "model.vocab_size=260", "mesh.contxt=1", code=2)
    assert "model.embed_dim = 64: the weights of hf:llama have 32" in said
    assert "model.vocab_size = 260: the weights of hf:llama have 264" in said
    assert "mesh.contxt" in said
    assert "3 problems" in said
    said = workspace.run("train", "from_hf.yaml", "checkpoint.init_from=hf:nowhere", code=2)
    assert "nowhere/config.json: cannot be read" in said and "1 problem" in said


@pytest.mark.slow
def test_exit_codes(workspace: Workspace, llama):
    hf_folders.write(workspace.folder / "damaged", files=2)
    file = workspace.folder / "damaged/model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "cut short" in workspace.run("convert", "from-hf", "damaged", "--to", "x", code=5)
    said = workspace.run("train", "from_hf.yaml", "run.name=damaged", "checkpoint.init_from=hf:damaged", code=5)
    assert "cut short" in said
    said = workspace.run("convert", "from-hf", "llama", "--to", "x", "--vocab-size", "1", code=2)
    assert "--vocab-size = 1" in said
    assert "no such folder" in workspace.run("convert", "to-hf", "runs/nowhere", "--to", "x", code=5)
