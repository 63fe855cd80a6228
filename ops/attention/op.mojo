"""Attention: registration, checks and the choice of a kernel.

    y[n, t, h D + d] = sum_s p[s] v[n, s, h D + d],
    p = softmax_s(scale * sum_d q[n, t, h D + d] k[n, s, h D + d])

The heads h lie side by side in C = heads * D, as linear layers leave them: nothing is permuted, and
no score goes to memory (Dao et al. 2022, arXiv:2205.14135).
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..gpu import attention_gpu
from ..operands import BF16, F32, ON_CPU, data
from .bf16 import attention_bf16
from .config import Attention
from .cpu import attention_cpu


@register("attention")
struct MultiHeadAttention:
    """Attends from q[N, T, C] to k[N, S, C] and v[N, S, C], head by head, into y[N, T, C]."""

    @staticmethod
    def execute[
        target: StaticString, depth: Int
    ](
        y: OutputTensor[rank=3, ...],
        q: InputTensor[dtype=y.dtype, rank=3, ...],
        k: InputTensor[dtype=y.dtype, rank=3, ...],
        v: InputTensor[dtype=y.dtype, rank=3, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            depth: Channels of a head.

        Args:
            y: Result [N, T, C].
            q: Queries [N, T, C].
            k: Keys [N, S, C].
            v: Values [N, S, C].
            scale: Scale of the scores: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if y.size() == 0:
            return
        var o = Attention[y.dtype](
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
        comptime if target == "cpu":
            comptime assert ON_CPU[y.dtype], "attention: a CPU expects float32 or bfloat16"
            comptime if y.dtype == BF16 and depth % 32 == 0:
                attention_bf16[depth](rebind[Attention[BF16]](o))
            else:
                attention_cpu[depth](o)
        else:
            attention_gpu[y.dtype, depth](o, ctx)
