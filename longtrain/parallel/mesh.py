"""The device mesh: four named axes, laid over the devices so that the busiest axes get the fastest links.

`tensor` varies fastest over the device order, then `context`, `fsdp` and `data`: neighbours in JAX's device order sit
on the same NVLink domain or ICI ring, and those two axes communicate in every layer of every step.
"""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "context", "tensor")


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lays `shape` (axis -> size, every axis of `AXES`) over `devices` (default: all of the cluster).

    Raises:
      ValueError: when the sizes' product is not the number of devices: none may be left unused.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = tuple(shape[axis] for axis in AXES)
    if math.prod(sizes) != len(devices):
        raise ValueError(f"a mesh of {dict(shape)} has {math.prod(sizes)} places for {len(devices)} devices")
    # On a TPU slice a mesh axis may take a part of one of the torus's: 16 x 2 on 4 x 8 chips, say.
    places = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    # Automatic axes: the sharding of an intermediate array follows from the constraints the model states.
    return Mesh(places, AXES, axis_types=(AxisType.Auto,) * len(AXES))
