"""What a block kernel is asked to do: the facts that decide whether it can, and the settings it runs with."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax

_interpreting = contextvars.ContextVar("interpreting", default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it Pallas kernels are interpreted, on any platform: slow, for tests of their numbers."""
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def interpreting() -> bool:
    """Whether `interpreted` is on."""
    return _interpreting.get()



@dataclasses.dataclass(frozen=True)
class Workload:
    """The facts that decide which kernel can serve; sizes are those of one device."""

    platform: str
    """`cpu`, `gpu` or `tpu`: of the devices that will compute, which need not be of this machine."""
    device_kind: str
    """As jax names it, such as `NVIDIA H200` or `TPU v5`."""
    capability: str | None
    """Compute capability of an NVIDIA GPU, such as `9.0`; None for other devices."""
    dtype: str
    head_dim: int
    q_heads: int
    kv_heads: int
    tokens: int
    """Of a row's shard, or of the stretch that a group of shards exchanges heads for."""
    context: int
    """Such shards or groups of a row."""
    strategy: str
    layout: str
    """`auto` where it is yet to follow the kernel."""
    one_document: bool
    """A promise: each row is one document in order, from position 0, with padding at its end only."""
    interpret: bool
    """Pallas kernels are interpreted: see `interpreted`."""

    @classmethod
    def on(
        cls,
        device: jax.Device,
        *,
        dtype: str,
        head_dim: int,
        q_heads: int,
        kv_heads: int,
        tokens: int,
        context: int,
        tensor: int,
        strategy: str,
        layout: str,
        one_document: bool,
        ulysses_degree: int = 1,
    ) -> "Workload":
        """The share of one device such as `device`, of rows of `tokens` and of heads that are yet to be cut.

        Groups of `ulysses_degree` shards exchange heads for sequence before a kernel is called.
        """
        members, parts = context // ulysses_degree, tensor * ulysses_degree
        return cls(
            platform=device.platform,
            device_kind=device.device_kind,
            capability=getattr(device, "compute_capability", None),
            dtype=dtype,
            head_dim=head_dim,
            q_heads=q_heads // parts,
            kv_heads=max(kv_heads // parts, 1),
            tokens=tokens // members,
            context=members,
            strategy=strategy,
            layout=layout,
            one_document=one_document,
            interpret=interpreting(),
        )

    def has_capability(self, least: tuple[int, int]) -> bool:
        """Whether the device is an NVIDIA GPU of at least this compute capability; other vendors' are names."""
        parts = (self.capability or "").split(".")
        return all(part.isdigit() for part in parts) and tuple(map(int, parts)) >= least


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a kernel is told once, statically.

    scale: multiplies the scores. tile: tokens along a tile's side, as the layout cuts them. block: tokens of the
    stretches that the layout deals, each contiguous in its row. interpret: Pallas kernels are interpreted, see
    `interpreted`.
    """

    scale: float
    tile: int
    block: int
    interpret: bool
