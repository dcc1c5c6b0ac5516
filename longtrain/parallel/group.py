"""Collectives among some of the shards of a mesh axis."""

import dataclasses

import jax
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Group:
    """`size` shards of a mesh axis, `stride` apart; a group in which each method is called, inside shard_map.

    The axis falls into such groups, and all of them do the same. Of an axis of 8:

        size 8              0 1 2 3 4 5 6 7
        size 2              0 1 | 2 3 | 4 5 | 6 7
        size 4, stride 2    0 2 4 6 | 1 3 5 7
    """

    axis: str
    size: int
    stride: int = 1

    def index(self) -> jax.Array:
        """This shard's place in its group."""
        return lax.axis_index(self.axis) // self.stride % self.size

    def shift(self, x: jax.Array, way: int = 1) -> jax.Array:
        """From every shard to the one `way` places on, round the group."""
        pairs = [
            (shard, members[(place + way) % self.size])
            for members in self._members()
            for place, shard in enumerate(members)
        ]
        return lax.ppermute(x, self.axis, pairs)

    def all_gather(self, x: jax.Array) -> jax.Array:
        """The group's arrays, in the order of its shards, along a new first dim."""
        return lax.all_gather(x, self.axis, axis_index_groups=self._groups())

    def join(self, x: jax.Array, dim: int) -> jax.Array:
        """The group's arrays, in the order of its shards, one after the other along `dim`."""
        return lax.all_gather(x, self.axis, axis_index_groups=self._groups(), axis=dim, tiled=True)

    def sum_and_part(self, x: jax.Array, dim: int) -> jax.Array:
        """The sum of the group's arrays, of which each shard gets its part along `dim` (a reduce-scatter)."""
        groups = self._groups()
        return lax.psum_scatter(x, self.axis, scatter_dimension=dim, axis_index_groups=groups, tiled=True)

    def exchange(self, x: jax.Array, part: int, join: int) -> jax.Array:
        """Dim `part` is parted over the group, what comes is joined along `join` (an all-to-all)."""
        return lax.all_to_all(x, self.axis, part, join, axis_index_groups=self._groups(), tiled=True)

    def _members(self) -> list[list[int]]:
        """The shards of each group, in its order."""
        shards = np.arange(lax.axis_size(self.axis)).reshape(-1, self.size, self.stride)
        return shards.swapaxes(1, 2).reshape(-1, self.size).tolist()

    def _groups(self) -> list[list[int]] | None:
        """JAX's `axis_index_groups`: None where the group is the whole axis."""
        groups = self._members()
        return None if len(groups) == 1 else groups
