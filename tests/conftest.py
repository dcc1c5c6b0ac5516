"""Before any test imports jax: eight simulated devices, and collectives that wait for slow peers."""

import tiny
from longtrain.parallel.process import prepare_environment

prepare_environment(tiny.config("mesh.data=8", "batch.sequences=8", "mesh.simulate_devices=8"))

pytest_plugins = ["runs"]  # its fixtures
