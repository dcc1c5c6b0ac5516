"""Dense attention in float64 numpy, with gradients: what every kernel and strategy is compared with."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Answer:
    """The output and the gradients of sum(out * d_out), and for each the magnitude that an error is measured
    by: the same sums with every term taken absolutely.
    """

    values: dict[str, np.ndarray]
    magnitudes: dict[str, np.ndarray]


def attention(q_BSNH, k_BSKH, v_BSKH, d_out_BSNH, *, positions_BS, segments_BS, scale=None) -> Answer:
    """`out`, `dq`, `dk`, `dv` by the contract's mask rule; padding in the inputs may hold anything."""
    positions, segments = np.asarray(positions_BS), np.asarray(segments_BS)
    real = (segments != 0)[:, :, None, None]
    q, k, v, d_out = (np.where(real, np.asarray(x, np.float64), 0) for x in (q_BSNH, k_BSKH, v_BSKH, d_out_BSNH))
    B, S, N, H = q.shape
    K = k.shape[2]
    scale = H**-0.5 if scale is None else scale
    q, d_out = (x.reshape(B, S, K, N // K, H) for x in (q, d_out))

    same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)
    seen = (same & (positions[:, :, None] >= positions[:, None, :]))[:, None, None]
    scores = np.where(seen, np.einsum("bikgh,bjkh->bkgij", q, k) * scale, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(peak), peak, 0))
    total = weights.sum(axis=-1, keepdims=True)
    weights /= np.where(total == 0, 1, total)

    out = np.einsum("bkgij,bjkh->bikgh", weights, v)
    d_weights = np.einsum("bikgh,bjkh->bkgij", d_out, v)
    delta = np.einsum("bikgh,bikgh->bkgi", out, d_out)[..., None]
    d_scores = weights * (d_weights - delta) * scale
    values = {
        "out": out.reshape(B, S, N, H),
        "dq": np.einsum("bkgij,bjkh->bikgh", d_scores, k).reshape(B, S, N, H),
        "dk": np.einsum("bkgij,bikgh->bjkh", d_scores, q),
        "dv": np.einsum("bkgij,bikgh->bjkh", weights, d_out),
    }
    d_size = weights * (np.einsum("bikgh,bjkh->bkgij", abs(d_out), abs(v)) + abs(delta)) * scale
    magnitudes = {
        "out": np.einsum("bkgij,bjkh->bikgh", weights, abs(v)).reshape(B, S, N, H),
        "dq": np.einsum("bkgij,bjkh->bikgh", d_size, abs(k)).reshape(B, S, N, H),
        "dk": np.einsum("bkgij,bikgh->bjkh", d_size, abs(q)),
        "dv": np.einsum("bkgij,bikgh->bjkh", weights, abs(d_out)),
    }
    return Answer(values, magnitudes)
