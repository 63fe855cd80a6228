"""Attention: registration, checks and the choice of a kernel.

    y[n, t, h D + d] = sum_s p[s] v[n, s, h D + d],
    p = softmax_s(scale * sum_d q[n, t, h D + d] k[n, s, h D + d] + bias[n % P, h T + t, s])

The heads h lie side by side in C = heads * D, as linear layers leave them: nothing is permuted, and
no score goes to memory (Dao et al. 2022, arXiv:2205.14135). On Hopper y may be of 8 bits, for a product
in 8 bits: integers round(y / scale) + zero, or floats y / scale, saturated.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..operands import BF16, F32, ON_CPU, Affine, data
from .bf16 import attention_bf16
from .config import Attention
from .cpu import attention_cpu
from .gpu import attention_gpu
from .mask import Mask, MaskSizes, MaskTensors


@register("attention")
struct MultiHeadAttention:
    """Attends from q[N, T, C] to k[N, S, C] and v[N, S, C], head by head, into y[N, T, C]."""

    @staticmethod
    def execute[
        target: StaticString, depth: Int, causal: Bool
    ](
        y: OutputTensor[rank=3, ...],
        q: InputTensor[rank=3, ...],
        k: InputTensor[dtype=q.dtype, rank=3, ...],
        v: InputTensor[dtype=q.dtype, rank=3, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            depth: Channels of a head.
            causal: Whether a query sees no keys after it.

        Args:
            y: Result [N, T, C], of the dtype of q; on Hopper it may be of 8 bits.
            q: Queries [N, T, C].
            k: Keys [N, S, C].
            v: Values [N, S, C].
            scale: Scale of the scores, then scale and zero point of a result in 8 bits: in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        # Nothing is read as a bias.
        comptime mask = Mask(causal=causal)
        _attend[target, depth, mask](y, q, k, v, scale, MaskTensors(data(q)), ctx)


@register("attention_bias")
struct BiasedAttention:
    """Attends as `attention` does, with numbers added to the scores.

    They are bias[P, heads * T, S], or [P, T, S] for all heads, or [P, 1, S] for all queries too; image
    n has those of n % P. Rows may be longer than S; on a GPU they are of an even length.
    """

    @staticmethod
    def execute[
        target: StaticString, depth: Int, causal: Bool
    ](
        y: OutputTensor[rank=3, ...],
        q: InputTensor[rank=3, ...],
        k: InputTensor[dtype=q.dtype, rank=3, ...],
        v: InputTensor[dtype=q.dtype, rank=3, ...],
        bias: InputTensor[dtype=q.dtype, rank=3, ...],
        scale: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            depth: Channels of a head.
            causal: Whether a query sees no keys after it.

        Args:
            y: Result [N, T, C], of the dtype of q; on Hopper it may be of 8 bits.
            q: Queries [N, T, C].
            k: Keys [N, S, C].
            v: Values [N, S, C].
            bias: Added to the scores.
            scale: Scale of the scores, then scale and zero point of a result in 8 bits: in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime mask = Mask(bias=True, causal=causal)
        var tensors = MaskTensors(data(bias), sizes=bias_sizes[True](bias, q.shape()[1]))
        _attend[target, depth, mask](y, q, k, v, scale, tensors, ctx)


@register("attention_logsumexp")
struct TrainedAttention:
    """Attends as `attention_bias` does, or without a bias, and keeps what `attention_grad` reads."""

    @staticmethod
    def execute[
        target: StaticString, depth: Int, causal: Bool, biased: Bool
    ](
        y: OutputTensor[rank=3, ...],
        logsumexp: OutputTensor[dtype=F32, rank=3, ...],
        q: InputTensor[dtype=y.dtype, rank=3, ...],
        k: InputTensor[dtype=y.dtype, rank=3, ...],
        v: InputTensor[dtype=y.dtype, rank=3, ...],
        bias: InputTensor[dtype=y.dtype, rank=3, ...],
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
            y: Result [N, T, C].
            logsumexp: Logarithms of the sums of exponentials of scores [N, heads, T]; -inf for a
                query that sees no key.
            q: Queries [N, T, C].
            k: Keys [N, S, C].
            v: Values [N, S, C].
            bias: Added to the scores; any tensor if there is none.
            scale: Scale of the scores, then scale and zero point of a result in 8 bits: in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        comptime mask = Mask(bias=biased, causal=causal, logsumexp=True)
        var sizes = bias_sizes[biased](bias, q.shape()[1])
        var tensors = MaskTensors(data(bias), data(logsumexp), sizes=sizes)
        _attend[target, depth, mask](y, q, k, v, scale, tensors, ctx)


def bias_sizes[biased: Bool](bias: InputTensor[rank=3, ...], queries: Int) -> MaskSizes:
    """Says where a bias [P, heads * T, S], [P, T, S] or [P, 1, S] lies.

    Parameters:
        biased: Whether there is one.

    Args:
        bias: It.
        queries: T.

    Returns:
        From one image, head and query to the next.
    """
    comptime if not biased:
        return MaskSizes()
    var rows, row = bias.shape()[1], bias.shape()[2]
    return MaskSizes(
        image=rows * row,
        images=bias.shape()[0],
        head=0 if rows == 1 or rows == queries else queries * row,
        row=0 if rows == 1 else row,
    )


def _attend[
    target: StaticString, depth: Int, mask: Mask
](
    y: OutputTensor[rank=3, ...],
    q: InputTensor[rank=3, ...],
    k: InputTensor[dtype=q.dtype, rank=3, ...],
    v: InputTensor[dtype=q.dtype, rank=3, ...],
    scale: InputTensor[dtype=F32, rank=1, ...],
    tensors: MaskTensors[q.dtype],
    ctx: DeviceContext,
) raises:
    """Chooses the kernel."""
    if y.size() == 0:
        return
    var numbers = data(scale)
    var o = Attention[q.dtype, y.dtype](
        data(q),
        data(k),
        data(v),
        data(y),
        n=q.shape()[0],
        t=q.shape()[1],
        s=k.shape()[1],
        c=q.shape()[2],
        heads=q.shape()[2] // depth,
        scale=numbers[unsafe_offset=0],
        result=Affine(numbers[unsafe_offset=1], numbers[unsafe_offset=2]),
    )
    comptime if target == "cpu":
        comptime assert ON_CPU[q.dtype], "attention: a CPU expects float32 or bfloat16"
        comptime assert y.dtype == q.dtype, "attention: a CPU stores the dtype of q"
        comptime if q.dtype == BF16 and depth % 32 == 0:
            attention_bf16[depth, mask](
                rebind[Attention[BF16]](o), rebind[MaskTensors[BF16]](tensors)
            )
        else:
            attention_cpu[depth, mask](rebind[Attention[q.dtype]](o), tensors)
    else:
        comptime keys = Int(k.static_spec.shape_tuple[1])
        attention_gpu[q.dtype, depth, mask, keys](o, tensors, ctx)
