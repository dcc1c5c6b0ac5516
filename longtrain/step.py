"""The train and eval steps: pure functions of (state, batch).

The loss of a step is one global sum over one global count. The count is known before any gradient is taken, so the
micro-batches of an accumulation just add their share, whatever number of targets each of them has.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from longtrain.data.rowsource import SEQUENCE_KEYS
from longtrain.model import Execution, Llama, Params
from longtrain.optimizer import global_norm
from longtrain.parallel.sharding import constrain
from longtrain.state import State

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


def _micro_batches(batch: Batch, accumulation: int, how: Execution) -> Batch:
    """[B, S] -> [accumulation, B / accumulation, S]; each device cuts the rows it has, none moves."""

    def cut(array_BS: jax.Array) -> jax.Array:
        rows, length = array_BS.shape
        parts = jnp.moveaxis(array_BS.reshape(rows // accumulation, accumulation, length), 1, 0)
        return jax.vmap(lambda part: constrain(part, "BS", how.mesh))(parts)

    return {key: cut(batch[key]) for key in SEQUENCE_KEYS}


def _counts(batch: Batch) -> Metrics:
    """What the batch held, the same on every mesh. Row statistics as `data/loader.py` lays them out."""
    return {
        "valid_tokens": jnp.sum(batch["weights"] > 0, dtype=jnp.int32),
        "padding_tokens": jnp.sum(batch["segments"] == 0, dtype=jnp.int32),
        # A piece of n tokens has positions 0 to n-1, and 1 + 3 + 5 + … (n terms) is n^2.
        "squared_lengths": jnp.sum(jnp.where(batch["segments"] > 0, 2.0 * batch["positions"] + 1.0, 0.0)),
        "row_stats": jnp.sum(batch["row_stats"], axis=(0, 1), dtype=jnp.uint32),
    }


def make_train_step(
    graph: nnx.GraphDef[Llama],
    how: Execution,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    accumulation: int,
    spike_deviations: float | None = None,
) -> Callable[[State, Batch, jax.Array], tuple[State, Metrics]]:
    """A step that updates the state. If the loss, a gradient or the update is not finite, the gradient norm is a spike
    (see `guard.py`), or the batch is all padding, only the step number, the count of bad steps and the history of norms
    move."""

    def share_of_loss(parameters: Params, batch: Batch, total_weight: jax.Array) -> jax.Array:
        losses_BS = nnx.merge(graph, parameters).losses(batch, how)
        return jnp.sum(losses_BS * batch["weights"]) / total_weight

    def train_step(state: State, batch: Batch, stop_votes: jax.Array) -> tuple[State, Metrics]:
        total_weight = jnp.sum(batch["weights"])
        # A batch of padding alone has loss 0 and no gradient; nor must decay and momentum move the weights for it.
        nothing_to_learn = total_weight == 0
        total_weight = jnp.where(nothing_to_learn, 1, total_weight)
        gradient_of = jax.value_and_grad(share_of_loss)
        if accumulation == 1:
            loss, gradients = gradient_of(state.parameters, batch, total_weight)
        else:

            def add(sums: tuple[jax.Array, Params], part: Batch) -> tuple[tuple[jax.Array, Params], None]:
                return jax.tree.map(jnp.add, sums, gradient_of(state.parameters, part, total_weight)), None

            # Summed in float32 whatever the parameters' dtype: in bfloat16 the later parts would be rounded away.
            zeros = jax.tree.map(lambda parameter: jnp.zeros_like(parameter, jnp.float32), state.parameters)
            (loss, sums), _ = jax.lax.scan(add, (jnp.zeros(()), zeros), _micro_batches(batch, accumulation, how))
            gradients = jax.tree.map(lambda total, like: total.astype(like.dtype), sums, state.parameters)

        norm = global_norm(gradients)
        rate = jnp.asarray(schedule(state.step), jnp.float32)
        directions, moments = optimizer.update(gradients, state.optimizer, state.parameters)
        updates = jax.tree.map(lambda direction: -rate * direction, directions)
        # With the update's own norm, no rate or moment can make a parameter infinite that a checkpoint would keep.
        finite = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.isfinite(global_norm(updates))

        spike, norms = jnp.zeros((), bool), state.norms
        if spike_deviations is not None:
            assert state.norms is not None  # the state is made from the same config
            spike, norms = state.norms.judge(norm, spike_deviations)
        take = finite & ~nothing_to_learn & ~spike

        def chosen(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda new, old: jnp.where(take, new, old), new, old)

        after = State(
            step=state.step + 1,
            bad_steps=jnp.where(finite, 0, state.bad_steps + 1),
            parameters=chosen(optax.apply_updates(state.parameters, updates), state.parameters),
            optimizer=chosen(moments, state.optimizer),
            norms=norms,
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "bad_steps": after.bad_steps,
            "spike": spike,
            "stop_votes": jnp.sum(stop_votes),
            **_counts(batch),
        }
        return after, metrics

    return train_step


def make_eval_step(graph: nnx.GraphDef[Llama], how: Execution) -> Callable[[Params, Batch], Metrics]:
    """A step that only sums: the loss over the batch's targets and their weight, to be divided by the caller."""

    def eval_step(parameters: Params, batch: Batch) -> Metrics:
        losses_BS = nnx.merge(graph, parameters).losses(batch, how)
        return {
            "loss_sum": jnp.sum(losses_BS * batch["weights"]),
            "weight_sum": jnp.sum(batch["weights"]),
            **_counts(batch),
        }

    return eval_step
