"""Llama 3 once more, in float64 numpy and one document at a time: what the model is compared with.

Nothing here is longtrain's but the config and the parameters' names. Every operation is analytic in its inputs, so that
derivatives come from a complex step, exact to rounding: f(x + ih v) = f(x) + ih f'(x) v for a tiny h.
"""

import cmath
import math
from typing import Any

import numpy as np

Tree = dict[str, Any]
STEP = 1e-30


def frequencies(rope: Any, head_dim: int) -> list[float]:
    """Radians a position for each pair, by the formulas of the papers, one dim at a time."""
    scaling = rope.scaling
    result = []
    for pair in range(head_dim // 2):
        frequency = rope.theta ** (-2 * pair / head_dim)
        wavelength = 2 * math.pi / frequency
        if scaling is None:
            divisor = 1.0
        elif scaling.type == "linear":
            divisor = scaling.factor
        elif scaling.type == "llama3":
            divisor = llama3_divisor(scaling, wavelength)
        else:
            divisor = yarn_divisor(scaling, rope.theta, pair, head_dim)
        result.append(frequency / divisor)
    return result


def llama3_divisor(scaling: Any, wavelength: float) -> float:
    """Llama 3.1: waves shorter than one bound are kept, longer than another divided, between them interpolated."""
    if wavelength < scaling.original_length / scaling.high_freq_factor:
        return 1.0
    if wavelength > scaling.original_length / scaling.low_freq_factor:
        return scaling.factor
    smooth = scaling.original_length / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def yarn_divisor(scaling: Any, theta: float, pair: int, head_dim: int) -> float:
    """YaRN's NTK-by-parts as its authors' code has it: a ramp over the pairs between two numbers of rotations."""

    def pair_that_turns(rotations: float) -> float:
        return head_dim * math.log(scaling.original_length / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), head_dim - 1)
    if low == high:
        high += 0.001
    ramp = min(max((pair - low) / (high - low), 0), 1)
    return 1 / (ramp / scaling.factor + 1 - ramp)


def amplitude(rope: Any) -> float:
    scaling = rope.scaling
    if scaling is None or scaling.type != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1


def rotated(x_SNH: np.ndarray, config: Any) -> np.ndarray:
    """Pair (x[i], x[i + H/2]) as a complex number, times e^(i position frequency). x itself may be complex."""
    half = config.head_dim // 2
    out = np.empty_like(x_SNH)
    for pair, frequency in enumerate(frequencies(config.rope, config.head_dim)):
        for position in range(len(x_SNH)):
            turn = amplitude(config.rope) * cmath.exp(1j * position * frequency)
            first, second = x_SNH[position, :, pair], x_SNH[position, :, pair + half]
            out[position, :, pair] = first * turn.real - second * turn.imag
            out[position, :, pair + half] = first * turn.imag + second * turn.real
    return out


def normed(x_SD: np.ndarray, weight_D: np.ndarray, epsilon: float) -> np.ndarray:
    return x_SD / np.sqrt((x_SD**2).mean(-1, keepdims=True) + epsilon) * weight_D


def attended(q_SNH: np.ndarray, k_SKH: np.ndarray, v_SKH: np.ndarray) -> np.ndarray:
    """Causal attention in one document, head by head."""
    length, heads, width = q_SNH.shape
    group = heads // k_SKH.shape[1]
    out = np.zeros_like(q_SNH)
    unseen = np.triu(np.ones((length, length), bool), 1)
    for head in range(heads):
        scores = q_SNH[:, head] @ k_SKH[:, head // group].T / math.sqrt(width)
        scores = np.where(unseen, -np.inf, scores - scores.real.max(-1, keepdims=True))
        weights = np.where(unseen, 0, np.exp(np.where(unseen, 0, scores)))
        out[:, head] = weights @ v_SKH[:, head // group] / weights.sum(-1, keepdims=True)
    return out


def document_losses(parameters: Tree, config: Any, tokens_S: np.ndarray, targets_S: np.ndarray) -> np.ndarray:
    """The cross-entropy of each token of one document, [S]."""
    x_SD = parameters["embed_VD"][tokens_S]
    for layer in range(config.num_layers):
        weight = {name: stacked[layer] for name, stacked in parameters["layers"].items()}
        h_SD = normed(x_SD, weight["attention_norm_D"], config.norm_eps)
        q_SNH, k_SKH, v_SKH = (np.tensordot(h_SD, weight[name], 1) for name in ("q_DNH", "k_DKH", "v_DKH"))
        out_SNH = attended(rotated(q_SNH, config), rotated(k_SKH, config), v_SKH)
        x_SD = x_SD + np.tensordot(out_SNH, weight["out_NHD"], 2)
        h_SD = normed(x_SD, weight["mlp_norm_D"], config.norm_eps)
        gate = h_SD @ weight["gate_DF"]
        x_SD = x_SD + (gate / (1 + np.exp(-gate)) * (h_SD @ weight["up_DF"])) @ weight["down_FD"]
    h_SD = normed(x_SD, parameters["final_norm_D"], config.norm_eps)
    logits_SV = h_SD @ (parameters["embed_VD"].T if config.tie_embeddings else parameters["head_DV"])
    logits_SV = logits_SV - logits_SV.real.max(-1, keepdims=True)
    return np.log(np.exp(logits_SV).sum(-1)) - logits_SV[np.arange(len(targets_S)), targets_S]


def losses(parameters: Tree, config: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """The cross-entropy of every token, [B, S]; 0 at padding."""
    result = np.zeros(batch["tokens"].shape, np.result_type(parameters["embed_VD"], parameters["final_norm_D"], 1.0))
    for row, segments_S in enumerate(batch["segments"]):
        for segment in set(segments_S) - {0}:
            here = segments_S == segment
            result[row, here] = document_losses(
                parameters, config, batch["tokens"][row, here], batch["targets"][row, here]
            )
    return result


def loss(parameters: Tree, config: Any, batch: dict[str, np.ndarray]) -> Any:
    """The global sum over the global count."""
    return (losses(parameters, config, batch) * batch["weights"]).sum() / batch["weights"].sum(dtype=np.float64)


def derivative(parameters: Tree, directions: Tree, config: Any, batch: dict[str, np.ndarray]) -> float:
    """Of the loss, along `directions` (a tree like the parameters)."""

    def moved(value: Any, direction: Any) -> Any:
        if isinstance(value, dict):
            return {name: moved(value[name], direction[name]) for name in value}
        return value + 1j * STEP * direction

    return float(loss(moved(parameters, directions), config, batch).imag / STEP)
