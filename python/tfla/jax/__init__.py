"""The operators for JAX: under jit, grad, vmap and shard_map, on CPU and CUDA.

h = tfla.jax.mlstm(q, k, v, i, f)                        # q, k (B,T,H,dqk)  v, h (B,T,H,dhv)  i, f (B,T,H)
h, state = tfla.jax.mlstm_step(q, k, v, i, f, state)     # a token at a time
h = tfla.jax.delta_rule(q, k, v, beta, g)                # the delta rule, on the CPU
y = tfla.jax.ssd(x, dt, A, B, C)                         # the state space dual of Mamba-2
"""

from tfla.jax._delta import delta_rule, delta_rule_step
from tfla.jax._mlstm import State, mlstm, mlstm_step
from tfla.jax._ssd import ssd, ssd_step

__all__ = ["State", "delta_rule", "delta_rule_step", "mlstm", "mlstm_step", "ssd", "ssd_step"]
