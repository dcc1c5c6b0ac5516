"""`convert`: a Hugging Face Llama folder to a checkpoint that training starts from, and a run's step to such a folder.

Both ways go block by block: memory holds no array whole, only the largest block that is on its way.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

import longtrain
from longtrain import hf, model, stored
from longtrain.checkpoint import FOLDER, RunRecord, verified_weights
from longtrain.config import ModelConfig, huggingface
from longtrain.config.schema import DType
from longtrain.data import tokenizers
from longtrain.data.prepared import Prepared
from longtrain.errors import CheckpointError, ConfigError, DataError, Problem
from longtrain.resume import Position

Say = Callable[[str], None]

TOKENIZER = "tokenizer"
"""Folder of a converted run that `data.tokenizer` may name."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def from_hf(folder: Path, to: Path, *, vocab_size: int | None, say: Say) -> None:
    """Makes `to` a run folder whose step 0 has the weights of `folder`, for `checkpoint.init_from`.

    Weights of float16 are kept as float32, others as they are.

    Args:
      vocab_size: rows of embedding and head, padded with zeros, say to a multiple of `mesh.tensor`; None: theirs.

    Raises:
      CheckpointError: when the folder is not a whole Llama that this program can be, or `to` cannot be written.
      ConfigError: when `to` holds a run, or `vocab_size` is less than the folder's.
    """
    keys, theirs = _read_config(folder)
    if vocab_size is not None and vocab_size < keys["vocab_size"]:
        message = f"must be at least the folder's {keys['vocab_size']}"
        raise ConfigError([Problem("--vocab-size", vocab_size, message)], "the command line")
    _check_new(to / FOLDER)
    vocabulary, keys["vocab_size"] = keys["vocab_size"], vocab_size or keys["vocab_size"]
    shapes = hf.shapes_of(model.abstract(_model(folder, keys))[1])
    weights = hf.Weights(folder, shapes, vocabulary)
    param_dtype: DType = "bfloat16" if weights.dtypes == {"BF16"} else "float32"
    config = _model(folder, keys | {"param_dtype": param_dtype})
    fingerprint = None
    if any((folder / name).is_file() for name in (tokenizers.HUGGING_FACE_FILE, tokenizers.SENTENCEPIECE_FILE)):
        fingerprint = tokenizers.load(folder).fingerprint
    record: RunRecord = {
        "position": dataclasses.asdict(Position()),
        "data_plan": None,
        "tokenizer": fingerprint,
        "prepared": None,
        "config": {
            "model": config.model_dump(mode="json"),
            "sequence_length": theirs.get("max_position_embeddings"),
        },
        "longtrain": longtrain.__version__,
    }

    dtype = hf.DTYPES["BF16" if param_dtype == "bfloat16" else "F32"]

    def read(path: hf.Path_, index: hf.Index) -> np.ndarray:
        if path[0] != "layers":
            return weights.part(path, None, index).astype(dtype)
        return weights.part(path, index[0].start, index[1:]).astype(dtype)[None]

    unfinished = to / f"{FOLDER}.unfinished"  # renamed when whole: nothing half done is taken for a checkpoint
    try:
        if unfinished.exists():
            shutil.rmtree(unfinished)
        to.mkdir(parents=True, exist_ok=True)
        stored.write(unfinished.resolve(), shapes, dtype, read, record)
        if fingerprint is not None:
            (to / TOKENIZER).mkdir(exist_ok=True)
            for name in TOKENIZER_FILES:
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, to / TOKENIZER / name)
        os.replace(unfinished, to / FOLDER)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{to}: cannot be written: {error}") from error
    say(f"{folder} is now step 0 in {to}: checkpoint.init_from={to}, with the model of {folder / huggingface.FILE}")
    if fingerprint is not None:
        say(f"its tokenizer: data.tokenizer={to / TOKENIZER}")
    else:
        say(f"{folder} has no tokenizer file: data.tokenizer is yours to know")


def to_hf(run_dir: Path, step: int | None, to: Path, *, dtype: DType | None, vocab_size: int | None, say: Say) -> None:
    """Makes `to` a Hugging Face folder of a run's step (None: its newest).

    Args:
      dtype: of the weights; None: the run's `model.param_dtype`.
      vocab_size: rows of embedding and head that are kept, where the run's are padded; None: all.

    Raises:
      CheckpointError: when there is no such checkpoint, it cannot be read, or `to` cannot be written.
      ConfigError: when `to` is not empty, or `vocab_size` is more than the run's or less than its tokenizer's.
    """
    _check_new(to)
    parameters, record = verified_weights(run_dir, step, say)
    config = _model(run_dir, record["config"]["model"])
    files, tokenizer = _tokenizer(run_dir, record, say)
    least = tokenizer.vocab_size if tokenizer else 1
    rows = vocab_size or config.vocab_size
    if not least <= rows <= config.vocab_size:
        message = f"must be the tokenizer's {least} to the run's {config.vocab_size}"
        raise ConfigError([Problem("--vocab-size", rows, message)], "the command line")
    dtype = dtype or config.param_dtype
    shapes = hf.shapes_of(model.abstract(config.model_copy(update={"vocab_size": rows}))[1])
    unfinished = to.with_name(f"{to.name}.unfinished")
    try:
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        export = hf.Export(unfinished, shapes, dtype)
        for path in shapes:
            for index, block in stored.blocks(parameters, path):
                _put(export, path, index, block, rows)
        text = huggingface.config_json(
            config,
            vocab_size=rows,
            positions=record["config"]["sequence_length"] or 0,
            dtype=dtype,
            bos=tokenizer.bos_id if tokenizer else None,
            eos=tokenizer.eos_id if tokenizer else None,
        )
        (unfinished / huggingface.FILE).write_text(text, encoding="utf-8")
        for name, content in files.items():
            (unfinished / name).write_bytes(content)
        if to.exists():
            to.rmdir()
        os.replace(unfinished, to)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{parameters.parent} cannot be written to {to}: {error}") from error
    say(f"{to}: {dtype} weights of {parameters.parent}, {huggingface.FILE}, {', '.join(files) or 'no tokenizer files'}")


def _put(export: hf.Export, path: hf.Path_, index: hf.Index, block: np.ndarray, rows: int) -> None:
    """Writes a block, less the padding of the vocabulary."""
    if path[0] == "layers":
        for place, layer in enumerate(range(index[0].start, index[0].stop)):
            export.put(path, layer, index[1:], block[place])
        return
    dim = hf.padded_dim(path)
    if dim is not None:
        first = index[dim].start
        kept = max(min(rows, index[dim].stop) - first, 0)
        index = (*index[:dim], slice(first, first + kept), *index[dim + 1 :])
        block = block[:kept] if dim == 0 else block[:, :kept]
    if block.size:
        export.put(path, None, index, block)


def _read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our `model` section for a folder, and its config.json."""
    try:
        return huggingface.model_keys(folder), huggingface.read(folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _model(source: Path, keys: dict[str, Any]) -> ModelConfig:
    try:
        config = ModelConfig.model_validate(keys)
    except ValidationError as error:
        raise CheckpointError(f"{source}: its model is none that can be built: {error}") from error
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        message = f"{config.num_heads} heads, {config.num_kv_heads} key/value heads of width {config.head_dim}"
        raise CheckpointError(f"{source}: its model is none that can be built: {message}")
    return config


def _check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        message = f"{folder} is there and not empty; legal: a folder that is not"
        raise ConfigError([Problem("--to", str(folder), message)], "the command line")


def _tokenizer(run_dir: Path, record: RunRecord, say: Say) -> tuple[dict[str, bytes], tokenizers.Tokenizer | None]:
    """The files of a run's tokenizer and the tokenizer, where they are still there."""
    kept = run_dir / TOKENIZER
    if kept.is_dir():
        return {path.name: path.read_bytes() for path in sorted(kept.iterdir())}, tokenizers.load(kept)
    if record["prepared"] is None:
        return {}, None
    try:
        tokenizer = Prepared(record["prepared"]).tokenizer()
    except (DataError, OSError) as error:
        say(f"NO TOKENIZER FILES are written, and no ids of BOS and EOS: {error}")
        return {}, None
    return dict(tokenizer.files), tokenizer
