"""The gradients of attention: registration, checks and the choice of a kernel.

    p[t, s] = exp(scale * q[t] k[s] + bias[t, s] - logsumexp[t])      the scores are computed again
    ds[t, s] = p[t, s] * (dy[t] v[s] - delta[t]),  delta[t] = dy[t] y[t]
    dv[s] = sum_t p[t, s] dy[t],  dk[s] = scale * sum_t ds[t, s] q[t],  dq[t] = scale * sum_s ds[t, s] k[s]

head by head, as the backward pass of FlashAttention-2 does (Dao 2023, arXiv:2307.08691, algorithm 2):
neither p nor ds goes to memory. Each sum is taken in one order, without atomics. A query that sees no
key has no gradients, as in torch's scaled_dot_product_attention.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..attention.config import Attention
from ..attention.mask import Mask, MaskTensors
from ..attention.op import bias_sizes
from ..operands import F32, ON_CPU, data
from .cpu import attention_grad_cpu
from .gpu import attention_grad_gpu
from .tensors import AttentionGrad


@register("attention_grad")
struct MultiHeadAttentionGrad:
    """Computes the gradients of `attention_logsumexp` by its q, k and v."""

    @staticmethod
    def execute[
        target: StaticString, depth: Int, causal: Bool, biased: Bool
    ](
        dq: OutputTensor[rank=3, ...],
        dk: OutputTensor[dtype=dq.dtype, rank=3, ...],
        dv: OutputTensor[dtype=dq.dtype, rank=3, ...],
        delta: OutputTensor[dtype=F32, rank=3, ...],
        q: InputTensor[dtype=dq.dtype, rank=3, ...],
        k: InputTensor[dtype=dq.dtype, rank=3, ...],
        v: InputTensor[dtype=dq.dtype, rank=3, ...],
        y: InputTensor[dtype=dq.dtype, rank=3, ...],
        dy: InputTensor[dtype=dq.dtype, rank=3, ...],
        logsumexp: InputTensor[dtype=F32, rank=3, ...],
        bias: InputTensor[dtype=dq.dtype, rank=3, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            depth: Channels of a head.
            causal: Whether a query sees no keys after it.
            biased: Whether there is a bias.

        Args:
            dq: Gradient of the queries [N, T, C].
            dk: Gradient of the keys [N, S, C].
            dv: Gradient of the values [N, S, C].
            delta: Room [N, heads, T] on a GPU.
            q: Queries [N, T, C].
            k: Keys [N, S, C].
            v: Values [N, S, C].
            y: The result of attention [N, T, C].
            dy: Its gradient [N, T, C].
            logsumexp: What `attention_logsumexp` keeps [N, heads, T].
            bias: Added to the scores, as `attention_bias` has it; any tensor if there is none.
            scale: Scale of the scores: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if dk.size() == 0:
            return
        comptime mask = Mask(bias=biased, causal=causal)
        var forward = Attention[dq.dtype](
            data(q),
            data(k),
            data(v),
            data(y),
            n=q.shape()[0],
            t=q.shape()[1],
            s=k.shape()[1],
            c=q.shape()[2],
            heads=q.shape()[2] // depth,
            scale=data(scale)[unsafe_offset=0],
        )
        var o = AttentionGrad[dq.dtype](
            forward, data(dy), data(logsumexp), data(dq), data(dk), data(dv), data(delta)
        )
        var tensors = MaskTensors(data(bias), sizes=bias_sizes[biased](bias, q.shape()[1]))
        comptime if target == "cpu":
            comptime assert ON_CPU[dq.dtype], "attention_grad: a CPU expects float32 or bfloat16"
            attention_grad_cpu[depth, mask](o, tensors)
        else:
            attention_grad_gpu[dq.dtype, depth, mask](o, tensors, ctx)
