"""A config made small enough to be checked in a minute, with all that decides how it is computed left as it is.

Kept: the mesh, the number of heads, strategy, layout, packing, kernel, dtypes, remat. Small: depth, width, vocabulary
and rows, of which every shard holds a few tiles or less; on real devices the head_dim stays, on which kernels depend.
"""

import jax
import numpy as np

from longtrain.config import Config, resolve_mesh, with_overrides

LAYERS, WIDTH, VOCABULARY = 2, 64, 512
ACCUMULATION = 2
"""Micro-batches, where the config has several."""

Batch = dict[str, np.ndarray]


def shrunk(config: Config) -> Config:
    """The small config on the devices that are here, with rows enough for a mesh of `data` alone.

    Raises:
      ConfigError: when the mesh does not fit the devices.
    """
    mesh = resolve_mesh(config, len(jax.devices()))
    simulated = config.mesh.simulate_devices is not None
    local = 32 if simulated else 512
    accumulation = min(config.batch.accumulation, ACCUMULATION)
    devices = mesh.data * mesh.fsdp * mesh.context * mesh.tensor
    sizes = {
        **{f"mesh.{axis}": size for axis, size in mesh.axes.items()},
        "model.num_layers": LAYERS,
        "model.embed_dim": _multiple(WIDTH, mesh.fsdp * mesh.context),
        "model.mlp_dim": _multiple(2 * WIDTH, mesh.tensor),
        "model.vocab_size": _multiple(VOCABULARY, mesh.tensor),
        "model.head_dim": min(config.model.head_dim, 16) if simulated else config.model.head_dim,
        "sequence_length": _multiple(4 * local, mesh.context * local),
        "batch.accumulation": accumulation,
        "batch.sequences": devices * accumulation,
        "memory.loss_chunk": min(config.memory.loss_chunk, local // 2),
        "eval.sequences": devices,
        "data.tokenizer": "bytes",
        "checkpoint.init_from": "null",  # weights of another size
    }
    if config.memory.mlp_chunk is not None:
        sizes["memory.mlp_chunk"] = local // 2
    return with_overrides(config, *(f"{key}={value}" for key, value in sizes.items()))


def _multiple(least: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `least`."""
    return -(-least // of) * of


def batch(config: Config, seed: int = 0) -> Batch:
    """Random rows in document order, as the config packs them: of each key of a batch an array [B, S].

    Documents end anywhere, some after one token; rows end in padding of any length, and one row is padding alone.
    With packing `one` a row is one document.
    """
    random = np.random.default_rng(seed)
    shape = B, S = config.batch.sequences, config.sequence_length
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row in range(B - 1 if B > 1 else B):
        filled = S if row == 0 else S - int(random.integers(0, S // 2))
        ends = [filled]
        if config.data.packing != "one" and row > 0:
            inside = random.integers(1, filled, int(random.integers(1, 6)))
            ends = sorted({*inside.tolist(), int(inside[0]) + 1, filled} - {filled + 1})
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), start=1):
            segments[row, start:end] = number
            positions[row, start:end] = np.arange(end - start)
    real = segments > 0
    tokens, targets = (np.where(real, random.integers(0, config.model.vocab_size, shape), 0) for _ in range(2))
    return {
        "tokens": tokens.astype(np.int32),
        "targets": targets.astype(np.int32),
        "positions": positions,
        "segments": segments,
        "weights": (real & (random.random(shape) < 0.9)).astype(np.float32),
    }
