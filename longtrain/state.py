"""The training state: everything that a step changes and a checkpoint holds."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longtrain import model
from longtrain.config import Config
from longtrain.guard import NormHistory
from longtrain.model import Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """`step`: updates tried so far, int32. `bad_steps`: how many of the last ones in a row were not finite, int32.
    `norms`: None unless spikes are skipped."""

    step: jax.Array
    bad_steps: jax.Array
    parameters: Params
    optimizer: optax.OptState
    norms: NormHistory | None = None


def initial(config: Config, optimizer: optax.GradientTransformation, seed: jax.typing.ArrayLike) -> State:
    """The state before the first step. Compile it with `shardings` as its output's: then nothing is ever whole."""
    parameters = model.initialise(config.model, seed)
    zero = jnp.zeros((), jnp.int32)
    norms = NormHistory.empty() if config.guard.spike_deviations is not None else None
    return State(zero, zero, parameters, optimizer.init(parameters), norms)


def shardings(state: State, optimizer: optax.GradientTransformation, mesh: Mesh) -> State:
    """The sharding of every leaf of an abstract state: parameters by the table, their moments alike, scalars
    everywhere."""
    everywhere: Any = NamedSharding(mesh, P())  # a state whose leaves are shardings instead of arrays
    parameters = model.shardings(state.parameters, mesh)
    moments = optax.tree_map_params(
        optimizer,
        lambda _, cut: cut,
        state.optimizer,
        parameters,
        transform_non_params=lambda _: everywhere,
    )
    return State(everywhere, everywhere, parameters, moments, jax.tree.map(lambda _: everywhere, state.norms))
