"""The optimizer and its learning-rate schedule, from optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from longtrain.config import OptimizerConfig


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of each update (the first is number 0).

    A linear warm-up from `learning_rate / warmup_steps`, then down to `min_ratio * learning_rate` at the last of
    `steps`: along a cosine, a line, or (`wsd`) a line over the last `decay_fraction` of the run; `constant` stays.
    """
    peak, floor = config.learning_rate, config.min_ratio * config.learning_rate
    rest = max(steps - config.warmup_steps - 1, 1)
    if config.decay == "cosine":
        decay = optax.cosine_decay_schedule(peak, rest, alpha=config.min_ratio)
    elif config.decay == "linear":
        decay = optax.linear_schedule(peak, floor, rest)
    elif config.decay == "wsd":
        falling = min(max(round(config.decay_fraction * steps), 1), rest)
        decay = optax.linear_schedule(peak, floor, falling, transition_begin=rest - falling)
    else:
        decay = optax.constant_schedule(peak)
    if not config.warmup_steps:
        return decay
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, config.warmup_steps - 1 or 1)
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def _decays(path: tuple[jax.tree_util.DictKey, ...], _: Any) -> bool:
    """Weight decay spares the norms' weights, as is usual."""
    return "norm" not in path[-1].key


def make(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping by the global norm (where asked for), the optimizer's direction, decoupled weight decay.

    The learning rate is not in here: the step multiplies by `schedule(step)`, so that there is one step counter.
    """

    def decay_mask(parameters: Any) -> Any:
        return jax.tree_util.tree_map_with_path(_decays, parameters)

    direction = {
        "adamw": lambda: optax.scale_by_adam(config.beta1, config.beta2, config.eps),
        "lion": lambda: optax.scale_by_lion(config.beta1, config.beta2),
        "sgd": optax.identity,
    }[config.name]()
    clip = optax.identity() if config.clip_norm is None else _clipped(config.clip_norm)
    return optax.chain(clip, direction, optax.add_decayed_weights(config.weight_decay, decay_mask))


def _clipped(limit: float) -> optax.GradientTransformation:
    """Scales all gradients by one factor where their global norm is beyond `limit`.

    optax's own sums squares in the gradients' dtype: in bfloat16 it misses the limit by several parts in a thousand.
    """

    def scale(gradients: Any, _: Any) -> Any:
        factor = jnp.minimum(1, limit / global_norm(gradients))
        return jax.tree.map(lambda gradient: (gradient * factor).astype(gradient.dtype), gradients)

    return optax.stateless(scale)


def global_norm(gradients: Any) -> jax.Array:
    """The l2 norm over all elements of all gradients, in float32."""
    squares = (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients))
    return jnp.sqrt(sum(squares, jnp.float32(0)))
