"""Query, key and value of an attention, each from tokens of its own: three products, one launch.

    q[i, t, f] = sum_c x_q[i, t, c] w_q[f, c] + bias_q[f]; k and v alike

`quantized_qkv_linear` multiplies 8 bits, as conv2d/quantized.mojo says.

The products are small at small batches, where a launch costs as much as they do.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..epilogue import Epilogue
from ..gemm.tiles import gemm_group as gemm_group_bf16
from ..gemm.cpu import gemm_group as gemm_group_cpu
from ..gemm.gpu import gemm_bytes_group, gemm_group as gemm_group_gpu
from ..gemm.layer import Layer
from ..geometry import Geometry
from ..operands import BF16, F32, ON_CPU, Operands, Scales, data


@register("qkv_linear")
struct QkvLinear:
    """Multiplies three tensors of tokens by a weight of their own each."""

    @staticmethod
    def execute[
        target: StaticString, tf32: Bool, aligned: Bool
    ](
        q: OutputTensor[rank=3, ...],
        k: OutputTensor[dtype=q.dtype, rank=3, ...],
        v: OutputTensor[dtype=q.dtype, rank=3, ...],
        q_tokens: InputTensor[dtype=q.dtype, rank=3, ...],
        k_tokens: InputTensor[dtype=q.dtype, rank=3, ...],
        v_tokens: InputTensor[dtype=q.dtype, rank=3, ...],
        q_weight: InputTensor[dtype=q.dtype, ...],
        q_bias: InputTensor[dtype=F32, rank=1, ...],
        k_weight: InputTensor[dtype=q.dtype, ...],
        k_bias: InputTensor[dtype=F32, rank=1, ...],
        v_weight: InputTensor[dtype=q.dtype, ...],
        v_bias: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            tf32: Whether a GPU may round float32 to TF32 for the products.
            aligned: As of bmm.

        Args:
            q: Query [N, T, F].
            k: Key [N, S, F].
            v: Value [N, S, F].
            q_tokens: [N, T, C].
            k_tokens: [N, S, C].
            v_tokens: [N, S, C].
            q_weight: [F, C], as graphs/arrange.py lays it out for the device; so are the next two.
            q_bias: [F]; so are the next two.
            k_weight: The key's weight.
            k_bias: The key's bias.
            v_weight: The value's weight.
            v_bias: The value's bias.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if q.size() == 0 or k.size() == 0:
            return
        var c = q_tokens.shape()[2]
        var f = q.shape()[2]
        var keys = Geometry(rows=k.size() // f, depth=c, columns=f)
        var queries = Geometry(rows=q.size() // f, depth=c, columns=f)
        var query = Operands[q.dtype](
            data(q_tokens), data(q_weight), data(q_bias), data(q_tokens), data(q)
        )
        var key = Operands[q.dtype](
            data(k_tokens), data(k_weight), data(k_bias), data(k_tokens), data(k)
        )
        var value = Operands[q.dtype](
            data(v_tokens), data(v_weight), data(v_bias), data(v_tokens), data(v)
        )
        comptime if target == "cpu":
            comptime assert ON_CPU[q.dtype], "qkv_linear: a CPU expects float32 or bfloat16"
            comptime if q.dtype == F32:
                gemm_group_cpu[Epilogue("none"), 3](
                    [queries, keys, keys],
                    [
                        rebind[Operands[F32]](query),
                        rebind[Operands[F32]](key),
                        rebind[Operands[F32]](value),
                    ],
                )
            else:
                gemm_group_bf16[Epilogue("none"), 3](
                    [queries, keys, keys],
                    [
                        rebind[Operands[BF16]](query),
                        rebind[Operands[BF16]](key),
                        rebind[Operands[BF16]](value),
                    ],
                )
        else:
            comptime of_query = Layer(
                q.static_spec, q_tokens.static_spec, q_weight.static_spec, aligned=aligned
            )
            comptime of_key = Layer(k.static_spec, k_tokens.static_spec, k_weight.static_spec)
            gemm_group_gpu[q.dtype, 3, tf32, of_query.with_rows(of_key, 2)](
                [queries, keys, keys], [query, key, value], ctx
            )


@register("quantized_qkv_linear")
struct QuantizedQkvLinear:
    """Multiplies three tensors of tokens of 8 bits by a weight of their own each, on Hopper."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        q: OutputTensor[rank=3, ...],
        k: OutputTensor[dtype=q.dtype, rank=3, ...],
        v: OutputTensor[dtype=q.dtype, rank=3, ...],
        q_tokens: InputTensor[rank=3, ...],
        k_tokens: InputTensor[dtype=q_tokens.dtype, rank=3, ...],
        v_tokens: InputTensor[dtype=q_tokens.dtype, rank=3, ...],
        q_weight: InputTensor[rank=1, ...],
        q_product: InputTensor[dtype=F32, rank=1, ...],
        q_bias: InputTensor[dtype=F32, rank=1, ...],
        k_weight: InputTensor[dtype=q_weight.dtype, rank=1, ...],
        k_product: InputTensor[dtype=F32, rank=1, ...],
        k_bias: InputTensor[dtype=F32, rank=1, ...],
        v_weight: InputTensor[dtype=q_weight.dtype, rank=1, ...],
        v_product: InputTensor[dtype=F32, rank=1, ...],
        v_bias: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "gpu".

        Args:
            q: Query [N, T, F], of floats; so are the next two.
            k: Key [N, S, F].
            v: Value [N, S, F].
            q_tokens: [N, T, C], of uint8 or float8_e4m3fn; so are the next two.
            k_tokens: [N, S, C].
            v_tokens: [N, S, C].
            q_weight: [F, C], flat, of int8 or as the tokens; so are the others.
            q_product: What a sum of each filter is multiplied by [F]; so are the others.
            q_bias: [F]; so are the others.
            k_weight: The key's weight.
            k_product: The key's scales.
            k_bias: The key's bias.
            v_weight: The value's weight.
            v_product: The value's scales.
            v_bias: The value's bias.
            ctx: The device.

        Raises:
            If the launch fails, or the copy engine does not take the sizes.
        """
        comptime assert target == "gpu", "quantized_qkv_linear: a CPU has quantized_conv2d"
        if q.size() == 0 or k.size() == 0:
            return
        comptime Tensors = Operands[q_tokens.dtype, q.dtype, q_weight.dtype]
        var c, f = q_tokens.shape()[2], q.shape()[2]
        var keys = Geometry(rows=k.size() // f, depth=c, columns=f)
        var queries = Geometry(rows=q.size() // f, depth=c, columns=f)
        comptime of_query = Layer(q.static_spec, q_tokens.static_spec, q_weight.static_spec)
        comptime of_key = Layer(k.static_spec, k_tokens.static_spec, k_weight.static_spec)
        comptime layer = of_query.with_rows(of_key, 2)
        gemm_bytes_group[q_tokens.dtype, q_weight.dtype, q.dtype, 3, layer](
            [queries, keys, keys],
            [
                Tensors(data(q_tokens), data(q_weight), data(q_bias), data(q), data(q)),
                Tensors(data(k_tokens), data(k_weight), data(k_bias), data(k), data(k)),
                Tensors(data(v_tokens), data(v_weight), data(v_bias), data(v), data(v)),
            ],
            [Scales(data(q_product)), Scales(data(k_product)), Scales(data(v_product))],
            ctx,
        )
