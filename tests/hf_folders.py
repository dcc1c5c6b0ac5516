"""Small Hugging Face Llama folders of random weights, made with the safetensors library and no code of ours."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def weights(config: dict[str, Any], dtype: Any = ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Random tensors, by the names and shapes that transformers gives them."""
    embed, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], embed), "model.norm.weight": (embed,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], embed)
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}"
        shapes |= {
            f"{of}.self_attn.q_proj.weight": (heads * head, embed),
            f"{of}.self_attn.k_proj.weight": (kv_heads * head, embed),
            f"{of}.self_attn.v_proj.weight": (kv_heads * head, embed),
            f"{of}.self_attn.o_proj.weight": (embed, heads * head),
            f"{of}.mlp.gate_proj.weight": (mlp, embed),
            f"{of}.mlp.up_proj.weight": (mlp, embed),
            f"{of}.mlp.down_proj.weight": (embed, mlp),
            f"{of}.input_layernorm.weight": (embed,),
            f"{of}.post_attention_layernorm.weight": (embed,),
        }
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write(
    folder: Path, config: dict[str, Any] = CONFIG, tensors: dict[str, np.ndarray] | None = None, files: int = 1
) -> dict[str, np.ndarray]:
    """A folder of these tensors (None: random ones), dealt over as many files; the tensors."""
    tensors = weights(config) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    weight_map = {tensor: names[place % files] for place, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors
