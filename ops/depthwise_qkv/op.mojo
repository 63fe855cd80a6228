"""Registration and checks of depthwise_qkv; graphs/nodes.py chooses between it and separate ops."""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext
from std.sys import size_of

from ..operands import F32, ON_CPU, data
from ..target import IS_HOPPER
from .config import QkvOperands, QkvSizes
from .cpu import depthwise_qkv_cpu
from .gpu import depthwise_qkv_gpu


@register("depthwise_qkv")
struct DepthwiseQkv:
    """Normalises tokens and convolves them into query, key and value."""

    @staticmethod
    def execute[
        target: StaticString, kernel: Int
    ](
        q: OutputTensor[rank=3, ...],
        k: OutputTensor[dtype=q.dtype, rank=3, ...],
        v: OutputTensor[dtype=q.dtype, rank=3, ...],
        x: InputTensor[rank=3, ...],
        weight: InputTensor[dtype=F32, rank=1, ...],
        norm_bias: InputTensor[dtype=F32, rank=1, ...],
        q_filter: InputTensor[dtype=x.dtype, rank=1, ...],
        q_bias: InputTensor[dtype=F32, rank=1, ...],
        k_filter: InputTensor[dtype=x.dtype, rank=1, ...],
        k_bias: InputTensor[dtype=F32, rank=1, ...],
        v_filter: InputTensor[dtype=x.dtype, rank=1, ...],
        v_bias: InputTensor[dtype=F32, rank=1, ...],
        eps: InputTensor[dtype=F32, rank=1, ...],
        window: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            kernel: Taps of a side of the window.

        Args:
            q: Query [N, T, C], in x's dtype; on Hopper it may have 8 bits. So do the next two.
            k: Key [N, T', C].
            v: Value [N, T', C].
            x: Tokens [N, T, C].
            weight: The norm's [C].
            norm_bias: The norm's [C].
            q_filter: [R, S, C], flat; so are the next two.
            q_bias: [C]; so are the next two.
            k_filter: The key's filter.
            k_bias: The key's bias.
            v_filter: The value's filter.
            v_bias: The value's bias.
            eps: Added to the variance, and of results in 8 bits scale and zero of the query, the key
                and the value: seven numbers in host memory.
            window: The seven numbers of config.mojo, in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime assert q.dtype == x.dtype or (
            target != "cpu" and IS_HOPPER and size_of[q.dtype]() == 1
        ), "depthwise_qkv: query, key and value have x's dtype, or on Hopper 8 bits"
        if x.size() == 0:
            return
        var numbers = data(eps)
        var operands = QkvOperands[x.dtype, q.dtype](
            x=data(x),
            norm=(data(weight), data(norm_bias)),
            filters=(data(q_filter), data(k_filter), data(v_filter)),
            biases=(data(q_bias), data(k_bias), data(v_bias)),
            outputs=(data(q), data(k), data(v)),
            scales=numbers.unsafe_offset(1),
        )
        var sizes = QkvSizes(x.shape()[0], x.shape()[2], data(window), numbers[unsafe_offset=0])
        comptime if target == "cpu":
            comptime assert ON_CPU[x.dtype], "depthwise_qkv: a CPU expects float32 or bfloat16"
            depthwise_qkv_cpu[kernel](rebind[QkvOperands[x.dtype]](operands), sizes)
        else:
            comptime channels = Int(x.static_spec.shape_tuple[2])
            depthwise_qkv_gpu[x.dtype, kernel, channels](operands, sizes, ctx)
