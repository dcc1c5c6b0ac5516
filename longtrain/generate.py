"""Text from a model, on the same mesh and through the same attention as training.

Each new token is one forward pass over the whole row, so this serves for looking at what a run has learnt: its cost is
quadratic in the text's length.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longtrain.build import Build, build
from longtrain.checkpoint import Say, folder_of
from longtrain.config import Config
from longtrain.data.everywhere import ensure_everywhere
from longtrain.errors import ConfigError, Problem
from longtrain.model import Params
from longtrain.parallel.sharding import ACTIVATION, spec
from longtrain.resume import load_weights


def next_token_logits(build: Build, parameters: Params, batch: dict[str, jax.Array], place: jax.Array) -> jax.Array:
    """Float32 logits [V] of the token after the one at `place` (in the layout's order) of the first row."""
    model = nnx.merge(build.graph, parameters)
    x_BSD = model.hidden(batch["tokens"], batch["positions"], batch["segments"], build.how)
    return jnp.einsum("d,dv->v", x_BSD[0, place].astype(jnp.float32), model.head().astype(jnp.float32))


def sample(logits_V: np.ndarray, temperature: float, top_p: float, random: np.random.Generator) -> int:
    """A token: the likeliest at temperature 0, else drawn from the smallest set of likeliest ones with mass `top_p`."""
    if temperature == 0:
        return int(logits_V.argmax())
    scaled = (logits_V - logits_V.max()) / temperature
    probabilities = np.exp(scaled) / np.exp(scaled).sum()
    likeliest = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[likeliest]) - probabilities[likeliest]
    kept = likeliest[before < top_p]
    return int(random.choice(kept, p=probabilities[kept] / probabilities[kept].sum()))


def generate(
    build: Build,
    parameters: Params,
    prompt: list[int],
    *,
    tokens: int,
    vocabulary: int,
    stop: int | None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """Yields up to `tokens` new tokens after the prompt, ending early after `stop`.

    Args:
      vocabulary: ids from here on are never drawn: the tokenizer has no text for them.

    Raises:
      ConfigError: when prompt and new tokens together are longer than `sequence_length`.
    """
    length = build.config.sequence_length
    if not prompt or len(prompt) + tokens > length:
        message = f"must hold a prompt of at least one token ({len(prompt)} given) and {tokens} new tokens"
        raise ConfigError([Problem("sequence_length", length, message)])
    order = build.how.deal.order(length)
    place_of = np.argsort(order)
    rows = build.mesh.shape["data"] * build.mesh.shape["fsdp"]  # every shard of the batch needs a row: the same one
    cut = NamedSharding(build.mesh, spec("BS", ACTIVATION))
    step = jax.jit(functools.partial(next_token_logits, build), out_shardings=NamedSharding(build.mesh, P()))
    random = np.random.default_rng(seed)

    def batch_of(row_S: np.ndarray) -> jax.Array:
        rows_BS = np.broadcast_to(row_S.astype(np.int32)[order], (rows, length))
        return jax.make_array_from_callback(rows_BS.shape, cut, lambda index: rows_BS[index])

    positions = batch_of(np.arange(length))
    text = list(prompt)
    for _ in range(tokens):
        row_S = np.zeros(length, np.int32)
        row_S[: len(text)] = text
        batch = {
            "tokens": batch_of(row_S),
            "positions": positions,
            "segments": batch_of(np.arange(length) < len(text)),
        }
        logits_V = np.asarray(step(parameters, batch, jnp.int32(place_of[len(text) - 1])))
        token = sample(logits_V[:vocabulary], temperature, top_p, random)
        yield token
        if token == stop:
            return
        text.append(token)


def generate_from_run(
    config: Config,
    step: int | None,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    say: Say,
) -> Iterator[str]:
    """Yields the text that a run's checkpoint (None: the newest) adds to the prompt, piece by piece.

    Raises:
      CheckpointError, ConfigError: when there is no such checkpoint or it is of another model or tokenizer.
    """
    folder_of(config.run_dir)  # before minutes are spent on data
    built = build(config)
    built.check_permutes()
    prepared = ensure_everywhere(config, say)
    parameters, _ = load_weights(built, prepared, config.run_dir, step=step, say=say)
    tokenizer = prepared.tokenizer()
    start = [tokenizer.bos_id] if config.data.add_bos and tokenizer.bos_id is not None else []
    prompt_tokens = [*start, *tokenizer.encode(prompt)]
    new: list[int] = []
    shown = ""
    for token in generate(
        built,
        parameters,
        prompt_tokens,
        tokens=tokens,
        vocabulary=tokenizer.vocab_size,
        stop=tokenizer.eos_id,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    ):
        new.append(token)
        text = tokenizer.decode(new)
        if not text.endswith("\ufffd"):  # a character's bytes may come one by one
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(new)[len(shown) :]  # a character that never became whole
