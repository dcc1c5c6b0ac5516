"""The FLOPs of a training step by the formula that the whole project uses.

Forward and backward, causal: 6 for each parameter of a matrix product and token, and 6 * L * N * H for each
token and token of context. A piece of n tokens attends over n^2 / 2 pairs; per pair and layer the two
products cost 2 * 2 * N * H FLOPs forward and twice that backward, so 12 * N * H * n^2 / 2. Nothing that is
computed again in the backward pass is counted, and neither is padding. Many published figures count attention
in full, twice as much.
"""

from collections.abc import Iterable

from longtrain.config import ModelConfig


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters of all of a token's matrix products: the head in (even tied), the embedding look-up out."""
    attention = 2 * model.embed_dim * model.head_dim * (model.num_heads + model.num_kv_heads)
    mlp = 3 * model.embed_dim * model.mlp_dim
    return model.num_layers * (attention + mlp) + model.embed_dim * model.vocab_size


def parameters(model: ModelConfig) -> int:
    """All parameters: the matrix products', the norms', and the embedding's where it is not the head."""
    norms = (2 * model.num_layers + 1) * model.embed_dim
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.embed_dim
    return matmul_parameters(model) + norms + embedding


def step_flops(model: ModelConfig, piece_lengths: Iterable[int]) -> float:
    """FLOPs of a step, forward and backward, over document pieces of these lengths; padding is none."""
    lengths = [int(length) for length in piece_lengths]  # Python's: squares of long pieces overflow no int32
    return flops_of_sums(model, sum(lengths), sum(length * length for length in lengths))


def flops_of_sums(model: ModelConfig, tokens: float, squared_lengths: float) -> float:
    """The same from sums over the pieces.

    Args:
      tokens: sum of their lengths.
      squared_lengths: sum of the squares of their lengths.
    """
    heads_width = model.num_heads * model.head_dim
    return 6.0 * matmul_parameters(model) * tokens + 6.0 * model.num_layers * heads_width * squared_lengths
