"""Hugging Face folders in and out: bit by bit, read and written by their own library; and what is wrong with one."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import hf_folders
from longtrain import convert, hf, model, stored
from longtrain.config import ModelConfig, huggingface
from longtrain.errors import CheckpointError, ConfigError
from longtrain.parallel.mesh import make_mesh

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def there_and_back(folder: Path, tmp_path: Path, **options) -> dict[str, np.ndarray]:
    said: list[str] = []
    convert.from_hf(folder, tmp_path / "run", vocab_size=None, say=said.append)
    convert.to_hf(
        tmp_path / "run", None, tmp_path / "back", **{"dtype": None, "vocab_size": None} | options, say=said.append
    )
    found: dict[str, np.ndarray] = {}
    for file in sorted((tmp_path / "back").glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and one[name].shape == other[name].shape, name
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_there_and_back_is_the_same_to_the_bit(tmp_path, monkeypatch, dtype, tied):
    monkeypatch.setattr(stored, "BLOCK_BYTES", 1000)  # several blocks of each matrix
    config = hf_folders.CONFIG | {"tie_word_embeddings": tied, "rope_scaling": LLAMA3}
    tensors = hf_folders.write(tmp_path / "hf", config, hf_folders.weights(config, dtype), files=3)
    same_bits(there_and_back(tmp_path / "hf", tmp_path), tensors)
    written = json.loads((tmp_path / "back/config.json").read_text())
    told = {key: value for key, value in config.items() if key != "torch_dtype"}
    assert {key: written[key] for key in told} == told
    assert written["torch_dtype"] == np.dtype(dtype).name


def test_the_dtype_may_be_another(tmp_path):
    tensors = hf_folders.write(tmp_path / "hf")
    wider = {name: array.astype(np.float32) for name, array in tensors.items()}
    same_bits(there_and_back(tmp_path / "hf", tmp_path, dtype="float32"), wider)


def test_files_of_the_usual_sizes_with_an_index(tmp_path):
    config = ModelConfig.model_validate(keys(hf_folders.CONFIG, tmp_path))
    shapes = hf.shapes_of(model.abstract(config)[1])
    export = hf.Export(tmp_path, shapes, "float32", file_bytes=40_000)
    export.put(("layers", "q_DNH"), 1, (slice(4, 8), slice(1, 2), slice(None)), np.ones((4, 1, 8)))
    index = json.loads((tmp_path / hf.INDEX).read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 42_000 for file in files)
    found = {name: (file.name, array) for file in files for name, array in load_file(file).items()}
    assert {name: file for name, (file, _) in found.items()} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(array.nbytes for _, array in found.values())
    expected = np.zeros((32, 32), np.float32)
    expected[8:16, 4:8] = 1  # head 1, inputs 4 to 7
    np.testing.assert_array_equal(found["model.layers.1.self_attn.q_proj.weight"][1], expected)


def test_parameters_arrive_sharded_and_padded(tmp_path):
    """As they would be read whole, for other shardings, in another dtype and with more vocabulary than the folder's."""
    tensors = hf_folders.write(tmp_path)
    config = ModelConfig.model_validate(keys(hf_folders.CONFIG, tmp_path) | {"vocab_size": 272})
    _, abstract = model.abstract(config)
    mesh = make_mesh({"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, jax.devices()[:8])
    cuts = model.shardings(abstract, mesh)
    asked = jax.tree.map(lambda leaf, cut: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=cut), abstract, cuts)
    found = hf.Weights(tmp_path, hf.shapes_of(abstract), 264).parameters(asked)
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == cuts
    theirs = {name: array.astype(np.float32) for name, array in tensors.items()}
    embed = np.asarray(found["embed_VD"])
    np.testing.assert_array_equal(embed[:264], theirs["model.embed_tokens.weight"])
    assert not embed[264:].any() and not np.asarray(found["head_DV"])[:, 264:].any()
    np.testing.assert_array_equal(np.asarray(found["head_DV"])[:, :264], theirs["lm_head.weight"].T)
    for layer in range(3):
        of = f"model.layers.{layer}"
        query = theirs[f"{of}.self_attn.q_proj.weight"].reshape(4, 8, 32)  # heads, width, inputs
        np.testing.assert_array_equal(np.asarray(found["layers"]["q_DNH"])[layer], query.transpose(2, 0, 1))
        out = theirs[f"{of}.self_attn.o_proj.weight"].reshape(32, 4, 8)  # outputs, heads, width
        np.testing.assert_array_equal(np.asarray(found["layers"]["out_NHD"])[layer], out.transpose(1, 2, 0))


def test_padding_is_undone(tmp_path):
    tensors = hf_folders.write(tmp_path / "hf")
    convert.from_hf(tmp_path / "hf", tmp_path / "run", vocab_size=272, say=print)
    for rows, name in ((264, "cut"), (None, "whole")):
        convert.to_hf(tmp_path / "run", 0, tmp_path / name, dtype=None, vocab_size=rows, say=print)
    same_bits(load_file(tmp_path / "cut/model.safetensors"), tensors)
    whole = load_file(tmp_path / "whole/model.safetensors")
    assert whole["lm_head.weight"].shape == (272, 32) and not whole["lm_head.weight"][264:].any()
    with pytest.raises(ConfigError, match="--vocab-size = 273"):
        convert.to_hf(tmp_path / "run", 0, tmp_path / "more", dtype=None, vocab_size=273, say=print)
    with pytest.raises(ConfigError, match="--vocab-size = 100.* 264"):
        convert.from_hf(tmp_path / "hf", tmp_path / "less", vocab_size=100, say=print)


def keys(config: dict, folder: Path) -> dict:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return huggingface.model_keys(folder)


def test_both_spellings_and_places_of_rope(tmp_path):
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 64}
    old = {key: value for key, value in LLAMA3.items() if key != "rope_type"} | {"type": "llama3"}
    base = {key: value for key, value in hf_folders.CONFIG.items() if key != "rope_theta"}
    for spelled in (
        {"rope_theta": 7.0, "rope_scaling": LLAMA3},
        {"rope_theta": 7.0, "rope_scaling": old},
        {"rope_parameters": LLAMA3 | {"rope_theta": 7.0}},
    ):
        assert keys(base | spelled, tmp_path)["rope"] == {"theta": 7.0, "scaling": scaling}
    assert keys(base, tmp_path)["rope"] == {"theta": 10_000.0, "scaling": None}


@pytest.mark.parametrize(
    "change, names",
    [
        ({"model_type": "qwen2"}, "model_type = 'qwen2'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor = None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale = 0.7"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate = False"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_key_value_heads": 3}, "4 heads, 3 key/value heads"),
    ],
)
def test_what_our_model_cannot_be_is_refused_by_name(tmp_path, change, names):
    hf_folders.write(tmp_path / "hf", tensors={})
    (tmp_path / "hf/config.json").write_text(json.dumps(hf_folders.CONFIG | change))
    with pytest.raises(CheckpointError, match=names):
        convert.from_hf(tmp_path / "hf", tmp_path / "run", vocab_size=None, say=print)
    assert not (tmp_path / "run").exists()


def missing_file(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut_short(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def cut_in_the_header(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def no_index(folder: Path) -> None:
    (folder / hf.INDEX).unlink()


def broken_index(folder: Path) -> None:
    (folder / hf.INDEX).write_text("{}")


def no_weights(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), folder / hf.INDEX):
        file.unlink()


@pytest.mark.parametrize(
    "damage, says",
    [
        (missing_file, "missing: model-00002-of-00002.safetensors"),
        (cut_short, "model-00001-of-00002.safetensors: .*cut short"),
        (cut_in_the_header, "model-00001-of-00002.safetensors: .*cut short"),
        (no_index, "model.safetensors.index.json is not there"),
        (broken_index, "no index of safetensors"),
        (no_weights, "no safetensors file"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, damage, says):
    hf_folders.write(tmp_path / "hf", files=2)
    damage(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=says):
        convert.from_hf(tmp_path / "hf", tmp_path / "run", vocab_size=None, say=print)
    assert not (tmp_path / "run").exists()


def test_tensors_that_are_not_the_configs_are_named(tmp_path):
    tensors = hf_folders.weights(hf_folders.CONFIG)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((48, 32), np.int8)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)  # of old exports: no harm
    hf_folders.write(tmp_path / "hf", tensors=tensors)
    with pytest.raises(CheckpointError) as raised:
        convert.from_hf(tmp_path / "hf", tmp_path / "run", vocab_size=None, say=print)
    for says in (
        "model.norm.weight is missing",
        "q_proj.bias is none of a Llama's",
        "lm_head.weight is [263, 32], the config makes it [264, 32]",
        "up_proj.weight has dtype I8",
    ):
        assert says in str(raised.value)
    assert "inv_freq" not in str(raised.value)


def test_nothing_is_overwritten(tmp_path):
    hf_folders.write(tmp_path / "hf")
    convert.from_hf(tmp_path / "hf", tmp_path / "run", vocab_size=None, say=print)
    with pytest.raises(ConfigError, match="--to"):
        convert.from_hf(tmp_path / "hf", tmp_path / "run", vocab_size=None, say=print)
    with pytest.raises(ConfigError, match="--to"):
        convert.to_hf(tmp_path / "run", None, tmp_path / "hf", dtype=None, vocab_size=None, say=print)
