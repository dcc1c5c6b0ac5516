"""Which links a mesh axis lies on, and how fast collectives over it are.

Devices are numbered with `tensor` fastest, then `context`, `fsdp`, `data`; the devices of a domain (a node, an NVLink
domain, a TPU slice) are neighbours in that order. An axis whose devices all lie in one domain has the fast links;
another crosses the network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from longtrain.config import MeshConfig
from longtrain.plan.assumptions import Assumptions

FASTEST_FIRST = ("tensor", "context", "fsdp", "data")


@dataclass(frozen=True)
class Link:
    """What the devices along some neighbouring axes of the mesh have between them.

    Attributes:
      size: devices along the axes. inside: how many of them lie in one domain.
      collective: bytes/s that a device sends and receives in all-gathers, reduce-scatters and all-reduces.
      exchange: the same where every device sends to every other (all-to-all).
      shift: the same where every device sends to the next one, as a ring does: its slowest hop sets the pace.
      latency: seconds that a collective takes beside its bytes.
    """

    size: int
    inside: int
    collective: float
    exchange: float
    shift: float
    latency: float

    @property
    def fast(self) -> bool:
        return self.inside == self.size

    def gather(self, whole: float) -> float:
        """Seconds of an all-gather to `whole` bytes, or of a reduce-scatter from them."""
        return 0.0 if self.size == 1 else self.sent(whole) / self.collective + self.latency

    def reduce(self, whole: float) -> float:
        """Seconds of an all-reduce of `whole` bytes."""
        return 2 * self.gather(whole)

    def all_to_all(self, held: float) -> float:
        """Seconds of an all-to-all where each device holds `held` bytes."""
        return 0.0 if self.size == 1 else self.sent(held) / self.exchange + self.latency

    def hop(self, bytes_sent: float) -> float:
        """Seconds of one shift of a ring."""
        return 0.0 if self.size == 1 else bytes_sent / self.shift + self.latency

    def sent(self, whole: float) -> float:
        """Bytes that a device sends of `whole` in an all-gather, a reduce-scatter or an all-to-all."""
        return whole * (self.size - 1) / self.size


def link(mesh: MeshConfig, axes: Sequence[str], assumed: Assumptions) -> Link:
    """The link of neighbouring axes of the mesh, e.g. ("context", "fsdp")."""
    first = min(FASTEST_FIRST.index(axis) for axis in axes)
    stride = prod(mesh.axes[axis] for axis in FASTEST_FIRST[:first])
    return between(stride, prod(mesh.axes[axis] for axis in axes), assumed)


def between(stride: int, size: int, assumed: Assumptions, ways: int = 1) -> Link:
    """The link of `size` devices, one `stride` after the other. `ways`: directions that a ring goes round in."""
    device, domain = assumed.device, assumed.domain
    inside = size if stride * size <= domain else max(domain // stride, 1)
    network = device.network_bandwidth * assumed["network_efficiency"]
    neighbour = device.neighbour_bandwidth * assumed["link_efficiency"]
    # Round a torus a collective runs both ways; a switch's single link already carries everything.
    both_ways = neighbour * min(device.links, 2)
    if inside == size:
        shift = neighbour * min(device.links, ways)
        return Link(size, inside, both_ways, both_ways, shift, assumed["collective_latency"])
    # A collective crosses to the next domain over the adapters of all its devices there, a ring over one.
    return Link(size, inside, min(both_ways, inside * network), network, network, assumed["collective_latency"])
