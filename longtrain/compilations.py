"""Counts what XLA really compiles, by listening to JAX's own events."""

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """How often the function of this name was compiled since this object was made."""

    def __init__(self, function: str):
        self.count = 0
        self._names = (function, f"jit({function})")
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == _COMPILED and details.get("fun_name") in self._names:
            self.count += 1
