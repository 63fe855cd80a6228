"""Attention and the linear layer behind it, a residual, and the moments of the sum: on Hopper, in 16 bits.

    y[n, t, f] = sum_c a[n, t, c] w[f, c] + bias[f] + residual[n, t, f],   a = attention(q, k, v)

One head is a tile of the attention's own kernel (hopper.mojo); several have one of their own
(linear_hopper.mojo). Elsewhere it is two launches, and the attention's result between them has room in
another output, which is not to be read.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..device import Device
from ..epilogue import Epilogue
from ..gemm.gpu import gemm
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..hopper.moments import Norm
from ..operands import F32, Batch, Operands, data
from ..target import IS_HOPPER
from .config import Attention
from .gpu import attention_gpu, splits_keys
from .hopper import PROJECTED, enqueue_hopper
from .linear_hopper import DEPTH, KEYS, enqueue_attention_linear, fills
from .mask import Mask, MaskTensors


@register("attention_linear")
struct AttentionLinear:
    """Attends from q[N, T, C] to k and v[N, S, C], multiplies by w, and measures the rows of the sum."""

    @staticmethod
    def execute[
        target: StaticString, heads: Int
    ](
        y: OutputTensor[rank=3, ...],
        moments: OutputTensor[dtype=F32, ...],
        attended: OutputTensor[dtype=y.dtype, rank=3, ...],
        q: InputTensor[dtype=y.dtype, rank=3, ...],
        k: InputTensor[dtype=y.dtype, rank=3, ...],
        v: InputTensor[dtype=y.dtype, rank=3, ...],
        w: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=F32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=3, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".
            heads: Of 64 channels each: all of C.

        Args:
            y: Result [N, T, C].
            moments: Of its rows [N, T, C / 32, 2].
            attended: Room for the attention's result [N, T, C].
            q: Queries [N, T, C].
            k: Keys [N, S, C].
            v: Values [N, S, C].
            w: [C, C], flat, as graphs/arrange.py lays it out for a GPU.
            bias: [C].
            residual: [N, T, C].
            scale: Scale of the scores: one number in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert (
            target != "cpu" and IS_HOPPER
        ), "attention_linear: only Hopper has it as one op"
        if y.size() == 0:
            return
        comptime C = heads * DEPTH
        var o = Attention[y.dtype](
            data(q),
            data(k),
            data(v),
            data(attended),
            n=q.shape()[0],
            t=q.shape()[1],
            s=k.shape()[1],
            c=C,
            heads=heads,
            scale=data(scale)[unsafe_offset=0],
        )
        var m = y.size() // C
        var norm = Norm(data(moments), C)
        var operands = Operands[y.dtype](
            data(attended), data(w), data(bias), data(residual), data(y)
        )
        comptime if heads == 1:
            if not splits_keys(o, 2, Device(ctx)):
                enqueue_hopper[y.dtype, PROJECTED, Mask()](
                    o, MaskTensors(data(q)), ctx, linear=operands, moments=norm
                )
                return
        else:
            if Int(o.s) <= KEYS and fills(m, Device(ctx)):
                enqueue_attention_linear[heads=heads](o, operands, norm, ctx)
                return
        comptime keys = Int(k.static_spec.shape_tuple[1])
        attention_gpu[y.dtype, DEPTH, Mask(), keys](o, MaskTensors(data(q)), ctx)
        comptime layer = Layer(y.static_spec, q.static_spec, w.static_spec, aligned=True)
        gemm[y.dtype, Epilogue("add", measures=True), True, False, layer](
            Geometry(rows=m, depth=C, columns=C), operands, Batch(), ctx, norm=norm
        )
