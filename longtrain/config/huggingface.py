"""The config.json of a Hugging Face Llama folder and our `model` section, both ways.

It lies beside the presets' reading, for it is one more thing that sets `model` (`checkpoint.init_from: hf:DIR`); the
weights are `longtrain/hf.py`'s.
"""

import json
from pathlib import Path
from typing import Any

from longtrain.config.schema import ModelConfig

PREFIX = "hf:"
"""What `checkpoint.init_from` begins with where it names such a folder."""
FILE = "config.json"

_SIZES = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
}
"""Ours -> theirs, of what each config must have."""
_MUST_BE: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
}
"""What a Llama of ours can be, by their keys; null, or a key that is not there, is the same."""
_SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_length": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
}
"""By their rope_type: ours -> theirs."""
# Said of every kind and changing nothing: yarn's ramp with whole ends, as ours; all of a head rotated.
_WITHOUT_EFFECT = {("truncate", True), ("partial_rotary_factor", 1.0)}


def folder_of(init_from: object) -> Path | None:
    """The folder that a value of `checkpoint.init_from` names, where it is one of Hugging Face."""
    if not isinstance(init_from, str) or not init_from.startswith(PREFIX):
        return None
    return Path(init_from.removeprefix(PREFIX))


def read(folder: Path) -> dict[str, Any]:
    """What the folder's config.json says.

    Raises:
      ValueError: when it cannot be read or is no JSON object.
    """
    path = folder / FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must be a JSON object, is a {type(config).__name__}")
    return config


def model_keys(folder: Path) -> dict[str, Any]:
    """Our `model` section, without dtypes, for the folder's config.json: a Llama's, or a Mistral's that is one.

    Raises:
      ValueError: when it cannot be read, or for all that our model cannot be, by name.
    """
    config = read(folder)
    problems = []
    if config.get("model_type") not in ("llama", "mistral"):
        problems.append(f"model_type = {config.get('model_type')!r}: must be llama or mistral")
    for key, legal in _MUST_BE.items():
        if config.get(key) not in (None, legal):
            problems.append(f"{key} = {config[key]!r}: must be {legal!r}")
    keys: dict[str, Any] = {ours: config.get(theirs) for ours, theirs in _SIZES.items()}
    keys["num_kv_heads"] = config.get("num_key_value_heads") or keys["num_heads"]
    for name, value in keys.items():
        if type(value) is not int or value < 1:
            problems.append(f"{_SIZES.get(name, 'num_key_value_heads')} = {value!r}: must be a whole number >= 1")
    if not problems:
        keys["head_dim"] = config.get("head_dim") or keys["embed_dim"] // keys["num_heads"]
    keys["norm_eps"] = float(config.get("rms_norm_eps", 1e-6))
    keys["tie_embeddings"] = bool(config.get("tie_word_embeddings", False))
    keys["rope"] = _rope(config, problems)
    if problems:
        raise ValueError(f"{folder / FILE}: " + "; ".join(problems))
    return keys


def _rope(config: dict[str, Any], problems: list[str]) -> dict[str, Any] | None:
    # `rope_parameters` holds all of it since transformers 5; before it was `rope_theta` and `rope_scaling`, whose kind
    # was `type` before it was `rope_type`.
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(given.get("rope_theta", config.get("rope_theta", 10_000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _SCALINGS:
        problems.append(f"rope_type = {kind!r}: must be one of {', '.join(_SCALINGS)}")
        return None
    names = _SCALINGS[kind]
    known = {"rope_theta", "rope_type", "type", "original_max_position_embeddings", *names.values()}
    for key, value in given.items():
        if key not in known and value is not None and (key, value) not in _WITHOUT_EFFECT:
            problems.append(f"rope_type {kind} with {key} = {value!r}: unknown here")
    if kind == "default":
        return {"theta": theta, "scaling": None}
    scaling = {ours: given[theirs] for ours, theirs in names.items() if given.get(theirs) is not None}
    if "original_length" in names:
        scaling.setdefault("original_length", config.get("max_position_embeddings"))
    for ours in ("factor", "low_freq_factor", "high_freq_factor"):
        if ours in names and type(scaling.get(ours)) not in (int, float):
            problems.append(f"rope_type {kind} with {ours} = {scaling.get(ours)!r}: must be a number")
    if "original_length" in names and type(scaling["original_length"]) is not int:
        problems.append(f"rope_type {kind} needs a whole number as original_max_position_embeddings")
    return {"theta": theta, "scaling": {"type": kind} | scaling}


def config_json(
    model: ModelConfig, *, vocab_size: int, positions: int, dtype: str, bos: int | None, eos: int | None
) -> str:
    """The text of a config.json for a model of ours.

    Args:
      vocab_size: rows of the exported embedding: at most ours, which may be padded.
      positions: tokens of the rows it was trained on, their `max_position_embeddings`.
      dtype: of the exported weights, float32 or bfloat16.
      bos, eos: ids of the tokenizer's begin and end.
    """
    scaling: dict[str, Any] | None = None
    if model.rope.scaling is not None:
        kind = model.rope.scaling.type
        values = {theirs: getattr(model.rope.scaling, ours) for ours, theirs in _SCALINGS[kind].items()}
        scaling = {"rope_type": kind} | {name: value for name, value in values.items() if value is not None}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        "vocab_size": vocab_size,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": model.rope.theta,
        "rope_scaling": scaling,
        "max_position_embeddings": positions,
        **{key: legal for key, legal in _MUST_BE.items() if key in ("hidden_act", "attention_bias", "mlp_bias")},
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return json.dumps(config, indent=2) + "\n"
