"""The other side of `bench_attention.py --ringattention`: the `ringattention` package, run by a Python that has it.

`PYTHON scripts/bench_ringattention_package.py LENGTH SHARDS` compiles forward and backward of the package's ring over
so many simulated CPU devices (8 query heads, 2 key/value heads, head_dim 64, batch 1, float32, causal), runs it once
and says `ready`. For every line it is sent it runs it again and answers with the process CPU seconds that took. An
environment of its own, because the package needs an older jax: ringattention 0.1.2 runs with jax 0.4.30.
"""

import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[2]}"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.shard_map import shard_map
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ringattention import ringattention

LENGTH, SHARDS = int(sys.argv[1]), int(sys.argv[2])
N, K, H = 8, 2, 64
CHUNK = 256

mesh = Mesh(np.array(jax.devices()[:SHARDS]), ("context",))
spec = PartitionSpec(None, "context")
options = {
    "causal_block_size": 1,
    "query_chunk_size": CHUNK,
    "key_chunk_size": CHUNK,
    "deterministic": True,
    "dropout_rng": None,
    "attn_pdrop": 0.0,
    "dtype": jnp.float32,
    "policy": jax.checkpoint_policies.nothing_saveable,
    "precision": None,
    "prevent_cse": True,
}


def attend(q, k, v):
    # It knows no groups of query heads.
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    return ringattention(q, k, v, None, None, None, "context", True, options)


sharded = shard_map(attend, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_rep=False)


@jax.jit
def both(q, k, v, d_out):
    out, pullback = jax.vjp(sharded, q, k, v)
    return out, pullback(d_out)


keys = jax.random.split(jax.random.key(0), 4)
arrays = [
    jax.device_put(jax.random.normal(key, (1, LENGTH, heads, H)), NamedSharding(mesh, spec))
    for key, heads in zip(keys, (N, K, K, N), strict=True)
]
jax.block_until_ready(both(*arrays))
print("ready", flush=True)
for _ in sys.stdin:
    start = time.process_time()
    jax.block_until_ready(both(*arrays))
    print(time.process_time() - start, flush=True)
