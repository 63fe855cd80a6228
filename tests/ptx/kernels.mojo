"""Makes the compiler emit the GPU kernels that tests/ptx runs; it is compiled and never executed."""

from max.gpu.host import DeviceContext
from ops.attention.config import Attention
from ops.attention.flash import enqueue_flash
from ops.attention.gpu import attention_gpu
from ops.attention.hopper import PROJECTED, enqueue_hopper, long, short
from ops.attention.linear_hopper import enqueue_attention_linear
from ops.attention.mask import Mask, MaskSizes, MaskTensors
from ops.attention.plain import enqueue_plain
from ops.attention_grad.gpu import attention_grad_gpu
from ops.attention_grad.tensors import AttentionGrad
from ops.concat import VECTORS, ConcatTensors, concat_gpu
from ops.pool import pool_gpu
from ops.pool_grad import pool_grad_gpu
from ops.class_token import class_token_gpu, class_token_layernorm_gpu
from ops.roll import RollSizes, roll_gpu
from ops.row_moments import row_moments_gpu
from ops.conv2d.depthwise import depthwise_kernel, depthwise_run_kernel, enqueue_depthwise
from ops.conv2d_weight_grad.depthwise import weight_grad_depthwise
from ops.conv2d_weight_grad.gpu import weight_grad_portable
from ops.conv2d_weight_grad.hopper import CONFIGS as GRADIENTS
from ops.conv2d_weight_grad.hopper import weight_grad_tile
from ops.conv2d_weight_grad.mma import weight_grad_mma
from ops.conv2d_weight_grad.parts import add_parts
from ops.conv2d_weight_grad.tensors import WeightGrad
from ops.depthwise_input_grad import depthwise_input_grad_gpu
from ops.depthwise_qkv.config import QkvOperands, QkvSizes
from ops.depthwise_qkv.gpu import depthwise_qkv_gpu, qkv_kernel
from ops.depthwise_qkv.hopper import enqueue_tiles
from ops.epilogue import Epilogue
from ops.gemm.chain import ChainTensors, ChainVectors, try_chain
from ops.gemm.gemv import gemv
from ops.gemm.gpu import gemm_portable
from ops.gemm.hopper import Config, hopper_gemm, hopper_shortcut
from ops.gemm.pingpong import pingpong_gemm
from ops.gemm.resident import resident_gemm
from ops.gemm.tuning import CONFIGS, PINGPONG, RESIDENT, TURNED
from ops.gemm.turned import turned_gemm
from ops.hopper.moments import Norm
from ops.foreach import Members, foreach_gpu
from ops.gather_rows import GatherTensors, RowMap, gather_rows_gpu
from ops.geometry import Geometry
from ops.group_norm.config import GroupNormSizes, GroupNormTensors
from ops.group_norm.gpu import group_norm_gpu
from ops.layer_norm_grad.gpu import layer_norm_grad_gpu
from ops.layer_norm_grad.tensors import NormGrad, NormGradSizes
from ops.layernorm import NormSizes, NormTensors, layernorm_gpu
from ops.normalize import normalize_gpu
from ops.operands import F32, I64, Affine, Batch, Data, Operands, Scales
from ops.optimizer import step_gpu
from ops.permute import AXES, Joined, permute_gpu
from ops.pointwise import Broadcast, Sources, pointwise_gpu
from ops.reduce.gpu import reduce_gpu
from ops.reduce.results import Finish, Results
from ops.reduce.values import Terms
from ops.resample import resample_gpu
from ops.scatter_add import ScatterSizes, ScatterTensors, scatter_add_gpu
from ops.rows import softmax_grad_kernel, softmax_kernel
from ops.sparse_conv2d.tiled import enqueue_tiled
from ops.sparse_conv2d.tuning import CONFIGS as TILED
from ops.sparse_conv2d.two_four import TILES, two_four_tile
from ops.sparse_conv2d.blocks import TILES as BLOCKS
from ops.sparse_conv2d.blocks import enqueue_blocks
from ops.squeeze_excite.config import SqueezeSizes, SqueezeTensors
from ops.squeeze_excite.gpu import enqueue_squeeze_excite
from ops.stem.config import Stem, StemOperands, Tiling
from ops.stem.gpu import enqueue_stem
from ops.stem.hopper import stem_maxpool_conv2d_hopper, stem_maxpool_hopper
from ops.token_linear import LARGE, SMALL, enqueue_token_linear
from page_gemm import enqueue_gemm
from parts import enqueue_parts
from std.sys import argv
from std.utils import IndexList
from std.utils.static_tuple import StaticTuple

comptime BF16 = DType.bfloat16
comptime F16 = DType.float16


def gemms(g: Geometry, o: Operands[BF16], ctx: DeviceContext) raises:
    comptime for i in range(len(CONFIGS)):
        comptime config = CONFIGS[i]
        hopper_gemm[Epilogue("none"), config]([g], [o], 1, ctx)
        hopper_gemm[Epilogue("add_relu"), config]([g], [o], 1, ctx)
        hopper_gemm[Epilogue("none"), config]([g, g, g], [o, o, o], 1, ctx)
        hopper_shortcut[Epilogue("relu"), config](g, o, g, o, 1, ctx)
    hopper_gemm[Epilogue("gelu"), CONFIGS[4]]([g], [o], 1, ctx)
    hopper_gemm[Epilogue("gelu"), CONFIGS[5]]([g], [o], 1, ctx)
    hopper_gemm[Epilogue("mul_gelu_grad"), CONFIGS[4]]([g], [o], 1, ctx)


def eight_bits[
    dtype: DType, out: DType, right: DType = dtype
](
    g: Geometry,
    x: Data[DType.uint8],
    bias: Data[F32],
    ctx: DeviceContext,
) raises:
    var y = x.unsafe_bitcast[Scalar[out]]()
    var o = Operands[dtype, out, right](
        x.unsafe_bitcast[Scalar[dtype]](), x.unsafe_bitcast[Scalar[right]](), bias, y, y
    )
    comptime epilogue = Epilogue("add_relu", scales=True)
    hopper_gemm[epilogue, CONFIGS[4]]([g], [o], 1, ctx, scales={[Scales(bias)]})
    hopper_gemm[epilogue, CONFIGS[5]]([g], [o], 1, ctx, scales={[Scales(bias)]})
    comptime if out != DType.int8:
        comptime narrow = Config(groups=2, columns=128, stages=8, blocks=1, overlap=True, row=64)
        hopper_gemm[epilogue, narrow]([g], [o], 1, ctx, scales={[Scales(bias)]})
    elif dtype == right:
        hopper_gemm[epilogue, CONFIGS[0]]([g], [o], 1, ctx, scales={[Scales(bias)]})
        hopper_gemm[epilogue, CONFIGS[2]]([g], [o], 1, ctx, scales={[Scales(bias)]})
        hopper_gemm[Epilogue("none", scales=True), CONFIGS[4]](
            [g, g, g], [o, o, o], 1, ctx, scales={[Scales(bias), Scales(bias), Scales(bias)]}
        )


def rescaled[
    dtype: DType, right: DType
](g: Geometry, x: Data[DType.uint8], bias: Data[F32], ctx: DeviceContext) raises:
    var y = x.unsafe_bitcast[Scalar[dtype]]()
    var o = Operands[dtype, dtype, right](y, x.unsafe_bitcast[Scalar[right]](), bias, y, y)
    comptime gelu = Epilogue("gelu", scales=True)
    hopper_gemm[gelu, CONFIGS[4]]([g], [o], 1, ctx, scales={[Scales(bias)]})
    hopper_gemm[gelu, CONFIGS[5]]([g], [o], 1, ctx, scales={[Scales(bias)]})
    turned_gemm[gelu, TURNED[1].of_bytes(narrow=False)](g, o, ctx, scales={[Scales(bias)]})
    pingpong_gemm[gelu, PINGPONG[0]]([g], [o], ctx, scales={[Scales(bias)]})
    pingpong_gemm[gelu, PINGPONG[1]]([g], [o], ctx, scales={[Scales(bias)]})
    comptime none = Epilogue("none", scales=True)
    var wide = x.unsafe_bitcast[BFloat16]()
    var p = Operands[dtype, BF16, right](o.x, o.w, bias, wide, wide)
    pingpong_gemm[none, PINGPONG[1]](
        [g, g, g], [p, p, p], ctx, scales={[Scales(bias), Scales(bias), Scales(bias)]}
    )


def quantized(
    g: Geometry, x: Data[DType.uint8], bias: Data[F32], ctx: DeviceContext
) raises:
    var o = Operands[DType.uint8, DType.uint8, DType.int8](
        x, x.unsafe_bitcast[Int8](), bias, x, x
    )
    comptime epilogue = Epilogue("add", scales=True)
    comptime for i in range(len(CONFIGS)):
        comptime config = CONFIGS[i] if i % 2 else CONFIGS[i].halved()
        hopper_gemm[epilogue, config]([g], [o], 1, ctx, scales={[Scales(bias)]})


def shortcuts[
    dtype: DType, right: DType, epilogue: StaticString, configs: List[Config]
](g: Geometry, x: Data[DType.uint8], bias: Data[F32], ctx: DeviceContext) raises:
    var y = x.unsafe_bitcast[Scalar[dtype]]()
    var o = Operands[dtype, dtype, right](y, x.unsafe_bitcast[Scalar[right]](), bias, y, y)
    comptime for i in range(len(configs)):
        hopper_shortcut[Epilogue(epilogue, scales=True), configs[i]](
            g, o, g, o, 1, ctx, scales={[Scales(bias)]}
        )


def turned_bytes[
    dtype: DType, right: DType, epilogues: List[StaticString]
](g: Geometry, x: Data[DType.uint8], bias: Data[F32], ctx: DeviceContext) raises:
    var y = x.unsafe_bitcast[Scalar[dtype]]()
    var o = Operands[dtype, dtype, right](y, x.unsafe_bitcast[Scalar[right]](), bias, y, y)
    comptime for i in range(len(TURNED)):
        comptime config = TURNED[i].of_bytes(narrow=i == 0)
        comptime for j in range(len(epilogues)):
            turned_gemm[Epilogue(epilogues[j], scales=True), config](
                g, o, ctx, scales={[Scales(bias)]}
            )


def byte_chains[
    dtype: DType, right: DType
](n: Int, x: Data[DType.uint8], bias: Data[F32], ctx: DeviceContext) raises:
    var y = x.unsafe_bitcast[Scalar[dtype]]()
    var w = x.unsafe_bitcast[Scalar[right]]()
    var o = ChainTensors[dtype, right](y, w, w, y, y, y, w)
    var vectors = ChainVectors[True](bias, bias, Scales(bias), Scales(bias))
    _ = try_chain[dtype, "conv2d_chain", 64, 128, right](n, n, o, vectors, ctx)
    _ = try_chain[dtype, "conv2d_chain", 64, 64, right, 64](n, n, o, vectors, ctx)
    comptime if right == DType.int8:
        _ = try_chain[dtype, "conv2d_chain", 64, 64, right](n, n, o, vectors, ctx)
        _ = try_chain[dtype, "conv2d_chain", 128, 128, right](n, n, o, vectors, ctx)


def resident(
    g: Geometry, o: Operands[BF16], o16: Operands[F16], o32: Operands[F32], ctx: DeviceContext
) raises:
    comptime for i in range(len(RESIDENT)):
        resident_gemm[Epilogue("none"), RESIDENT[i]]([g], [o], 1, ctx)
        resident_gemm[Epilogue("add_relu"), RESIDENT[i]]([g], [o], 1, ctx)
    resident_gemm[Epilogue("none"), RESIDENT[0]]([g, g, g], [o, o, o], 1, ctx)
    resident_gemm[Epilogue("none"), RESIDENT[3]]([g, g, g], [o, o, o], 1, ctx)
    resident_gemm[Epilogue("gelu"), RESIDENT[0]]([g], [o16], 1, ctx)
    resident_gemm[Epilogue("add_relu", pools=True), RESIDENT[3]]([g], [o], 1, ctx)
    resident_gemm[Epilogue("none", pools=True), RESIDENT[3]]([g], [o16], 1, ctx)
    resident_gemm[Epilogue("add"), RESIDENT[1]]([g], [o32], 1, ctx)
    resident_gemm[Epilogue("relu"), RESIDENT[2]]([g], [o32], 1, ctx)
    gemv[BF16, Epilogue("none")](g, o, ctx)
    gemv[F16, Epilogue("gelu")](g, o16, ctx)


def pingpong(
    g: Geometry, o: Operands[BF16], o16: Operands[F16], o32: Operands[F32], ctx: DeviceContext
) raises:
    pingpong_gemm[Epilogue("gelu"), PINGPONG[0]]([g], [o], ctx)
    pingpong_gemm[Epilogue("relu"), PINGPONG[1]]([g], [o], ctx)
    pingpong_gemm[Epilogue("none"), PINGPONG[1]]([g, g, g], [o, o, o], ctx)
    pingpong_gemm[Epilogue("none"), PINGPONG[1]]([g], [o16], ctx)
    pingpong_gemm[Epilogue("relu"), PINGPONG[0]]([g], [o32], ctx)


def norms[
    dtype: DType
](g: Geometry, o: Operands[dtype], bias: Data[F32], n: Int, ctx: DeviceContext) raises:
    comptime measures = Epilogue("add", measures=True)
    comptime normalizes = Epilogue("gelu", normalizes=True)
    var norm = Norm(bias, n)
    hopper_gemm[measures, CONFIGS[4]]([g], [o], 1, ctx, norm=norm)
    resident_gemm[normalizes, RESIDENT[3]]([g], [o], 1, ctx, norm=norm)
    comptime if dtype == BF16:
        hopper_gemm[measures, CONFIGS[1]]([g], [o], 1, ctx, norm=norm)
        hopper_gemm[measures, CONFIGS[7]]([g], [o], 1, ctx, norm=norm)
        hopper_gemm[normalizes, CONFIGS[1]]([g], [o], 1, ctx, norm=norm)
        hopper_gemm[normalizes, CONFIGS[6]]([g], [o], 1, ctx, norm=norm)
        resident_gemm[measures, RESIDENT[0]]([g], [o], 1, ctx, norm=norm)
        resident_gemm[measures, RESIDENT[2]]([g], [o], 1, ctx, norm=norm)
        resident_gemm[measures, RESIDENT[3]]([g], [o], 1, ctx, norm=norm)
        resident_gemm[normalizes, RESIDENT[0]]([g], [o], 1, ctx, norm=norm)
        resident_gemm[normalizes, RESIDENT[1]]([g], [o], 1, ctx, norm=norm)
        pingpong_gemm[normalizes, PINGPONG[0]]([g], [o], ctx, norm=norm)


def turned(g: Geometry, o: Operands[BF16], ctx: DeviceContext) raises:
    comptime for i in range(len(TURNED)):
        turned_gemm[Epilogue("relu"), TURNED[i]](g, o, ctx)
        turned_gemm[Epilogue("add_relu"), TURNED[i]](g, o, ctx)


def sparse[
    dtype: DType
](g: Geometry, o: Operands[dtype], indices: Data[DType.uint32], ctx: DeviceContext) raises:
    comptime for i in range(len(TILES)):
        comptime config = TILES[i]
        comptime if dtype == BF16:
            two_four_tile[dtype, Epilogue("relu"), config](g, o, indices, ctx)
            two_four_tile[dtype, Epilogue("add_relu"), config](g, o, indices, ctx)
        elif i == 2:
            two_four_tile[dtype, Epilogue("gelu"), config](g, o, indices, ctx)


def blocks(
    g: Geometry,
    o: Operands[BF16],
    o16: Operands[F16],
    o32: Operands[F32],
    lists: Data[DType.int32],
    n: Int,
    ctx: DeviceContext,
) raises:
    comptime for i in range(len(BLOCKS)):
        comptime config = BLOCKS[i]
        enqueue_blocks[BF16, Epilogue("none"), config](g, o, lists, n, n, 1, ctx)
        enqueue_blocks[BF16, Epilogue("add_relu"), config](g, o, lists, n, n, 1, ctx)
        enqueue_blocks[F16, Epilogue("gelu"), config](g, o16, lists, n, n, 1, ctx)
        enqueue_blocks[F32, Epilogue("add"), config](g, o32, lists, n, n, 1, ctx)


def tiled[
    dtype: DType
](
    g: Geometry,
    o: Operands[dtype],
    words: Data[DType.uint32],
    starts: Data[DType.int32],
    ctx: DeviceContext,
) raises:
    comptime for i in range(len(TILED)):
        enqueue_tiled[dtype, Epilogue("add_relu"), TILED[i]](g, o, words, starts, 1, ctx)


def chains[
    dtype: DType
](n: Int, o: ChainTensors[dtype], vectors: ChainVectors[], ctx: DeviceContext) raises:
    _ = try_chain[dtype, "layernorm_mlp", 64, 64](n, n, o, vectors, ctx)
    _ = try_chain[dtype, "conv2d_chain", 64, 128](n, n, o, vectors, ctx)
    comptime if dtype == BF16:
        _ = try_chain[dtype, "conv2d_chain", 64, 64, s=64](n, n, o, vectors, ctx)
        _ = try_chain[dtype, "layernorm_mlp", 192, 192](n, n, o, vectors, ctx)
        _ = try_chain[dtype, "conv2d_chain", 64, 64](n, n, o, vectors, ctx)
        _ = try_chain[dtype, "conv2d_chain", 128, 128](n, n, o, vectors, ctx)
        _ = try_chain[dtype, "conv2d_chain", 256, 256](n, n, o, vectors, ctx)


def cores[dtype: DType](g: Geometry, o: Operands[dtype], ctx: DeviceContext) raises:
    gemm_portable[dtype, Epilogue("add_relu"), True](g, o, Batch(), ctx)


def depthwise(
    g: Geometry, o: Operands[BF16], o32: Operands[F32], n: Int, ctx: DeviceContext
) raises:
    enqueue_depthwise[BF16, Epilogue("silu")](g, o, ctx)
    comptime adds = Epilogue("add_relu")
    ctx.enqueue_function[depthwise_run_kernel[F32, adds, False, 3, 2, 4]](
        o32, g, grid_dim=n, block_dim=128
    )
    ctx.enqueue_function[depthwise_kernel[F32, adds, False, 4]](o32, g, grid_dim=n, block_dim=256)
    enqueue_depthwise[BF16, Epilogue("silu"), True](g, o, ctx)
    enqueue_depthwise[F32, adds, True](g, o32, ctx)
    weight_grad_depthwise(g, WeightGrad[BF16](o.x, o.x, o.y, o.bias), n, ctx)
    weight_grad_depthwise(g, WeightGrad[F32](o32.x, o32.x, o32.y, o32.bias), n, ctx)
    depthwise_input_grad_gpu(o.y, o.x, o.w, g, ctx)
    depthwise_input_grad_gpu(o32.y, o32.x, o32.w, g, ctx)


def projections[
    out: DType
](o: QkvOperands[BF16], scales: Data[F32], g: QkvSizes, n: Int, ctx: DeviceContext) raises:
    var stored = QkvOperands[BF16, out](
        x=o.x,
        norm=(o.weight, o.norm_bias),
        filters=(o.q_filter, o.k_filter, o.v_filter),
        biases=(o.q_bias, o.k_bias, o.v_bias),
        outputs=(
            o.q.unsafe_bitcast[Scalar[out]](),
            o.k.unsafe_bitcast[Scalar[out]](),
            o.v.unsafe_bitcast[Scalar[out]](),
        ),
        scales=scales,
    )
    enqueue_tiles[BF16, 64](stored, g, n, ctx)
    enqueue_tiles[BF16, 384](stored, g, n, ctx)
    comptime few64 = qkv_kernel[BF16, 3, 8, 1, True, out]
    comptime few384 = qkv_kernel[BF16, 3, 16, 3, True, out]
    ctx.enqueue_function[few64](stored, g, grid_dim=n, block_dim=384)
    ctx.enqueue_function[few384](stored, g, grid_dim=n, block_dim=384)


def gradients(
    g: Geometry, half: Data[BF16], half2: Data[F16], full: Data[F32], n: Int, ctx: DeviceContext
) raises:
    var o = WeightGrad[BF16](half, half, half, full)
    weight_grad_portable(g, o, n, ctx)
    comptime for i in range(len(GRADIENTS)):
        weight_grad_tile[GRADIENTS[i]](g, o, n, ctx)
    var o16 = WeightGrad[F16](half2, half2, half2, full)
    weight_grad_tile[GRADIENTS[0]](g, o16, n, ctx)
    add_parts(o16, n, n, ctx)
    weight_grad_mma(g, o, n, ctx)
    weight_grad_mma(g, WeightGrad[F32](full, full, full, full), n, ctx)


def squeezes(
    half: Data[BF16], half2: Data[F16], full: Data[F32], n: Int, ctx: DeviceContext
) raises:
    var g = SqueezeSizes(images=n, pixels=n, channels=n, hidden=n, shift=n, split=n > 1, kept=n)
    enqueue_squeeze_excite[BF16, Epilogue("silu"), Epilogue("sigmoid"), Epilogue("none")](
        SqueezeTensors[BF16](
            x=half,
            squeeze=half,
            squeeze_bias=full,
            excite=half,
            excite_bias=full,
            residual=half,
            y=half,
        ),
        g,
        n,
        ctx,
    )
    enqueue_squeeze_excite[F16, Epilogue("relu"), Epilogue("hardsigmoid"), Epilogue("add_relu")](
        SqueezeTensors[F16](
            x=half2,
            squeeze=half2,
            squeeze_bias=full,
            excite=half2,
            excite_bias=full,
            residual=half2,
            y=half2,
        ),
        g,
        n,
        ctx,
    )


def pointwise[
    dtype: DType, expression: StaticString, dtypes: List[DType], most: Int
](y: Data[dtype], bytes: Data[DType.uint8], ctx: DeviceContext) raises:
    comptime count = len(dtypes)
    pointwise_gpu[expression, dtypes, most](y, Sources[count](fill=bytes), Broadcast[count](), ctx)


def foreach[
    dtype: DType, expression: StaticString, dtypes: List[DType]
](bytes: Data[DType.uint8], n: Int, ctx: DeviceContext) raises:
    var members = Members[len(dtypes)](bytes)
    members.chunks = Int32(n)
    foreach_gpu[dtype, expression, dtypes](members, ctx)


def reduced[
    kind: StaticString, terms: Terms, finish: Finish
](bytes: Data[DType.uint8], n: Int, ctx: DeviceContext) raises:
    var results = Results[finish](Results[finish].Tensors(fill=bytes))
    var sources = Sources[len(terms.dtypes)](fill=bytes)
    var rows = argv()[0].byte_length()  # it has nothing to do with n
    reduce_gpu[kind, terms](sources, results, n, rows, n, 1, ctx)


def main() raises:
    var ctx = DeviceContext()
    var half = rebind[Data[BF16]](ctx.enqueue_create_buffer[BF16](1).unsafe_ptr())
    var half2 = rebind[Data[F16]](ctx.enqueue_create_buffer[F16](1).unsafe_ptr())
    var full = rebind[Data[F32]](ctx.enqueue_create_buffer[F32](1).unsafe_ptr())
    var bytes = rebind[Data[DType.uint8]](ctx.enqueue_create_buffer[DType.uint8](1).unsafe_ptr())
    var integers = rebind[Data[DType.int64]](ctx.enqueue_create_buffer[DType.int64](7).unsafe_ptr())
    var n = len(argv())  # nothing that the optimiser could know

    var g = Geometry(rows=n * 7, depth=n * 64, columns=n * 64)
    var o = Operands[BF16](half, half, full, half, half)
    gemms(g, o, ctx)
    eight_bits[DType.float8_e4m3fn, BF16](g, bytes, full, ctx)
    eight_bits[DType.float8_e4m3fn, DType.float8_e4m3fn](g, bytes, full, ctx)
    eight_bits[DType.int8, DType.int8](g, bytes, full, ctx)
    rescaled[DType.float8_e4m3fn, DType.float8_e4m3fn](g, bytes, full, ctx)
    rescaled[DType.uint8, DType.int8](g, bytes, full, ctx)
    quantized(g, bytes, full, ctx)
    comptime halves: List[Config] = [CONFIGS[2].halved(), CONFIGS[5].halved(), CONFIGS[6].halved()]
    comptime wholes: List[Config] = [CONFIGS[1], CONFIGS[5], CONFIGS[6]]
    comptime two: List[Config] = [CONFIGS[4], CONFIGS[6].halved()]
    comptime e4m3 = DType.float8_e4m3fn
    shortcuts[DType.uint8, DType.int8, "none", halves](g, bytes, full, ctx)
    shortcuts[DType.uint8, DType.int8, "none", wholes](g, bytes, full, ctx)
    shortcuts[e4m3, e4m3, "relu", two](g, bytes, full, ctx)
    turned_bytes[DType.uint8, DType.int8, ["add", "none"]](g, bytes, full, ctx)
    turned_bytes[e4m3, e4m3, ["relu"]](g, bytes, full, ctx)
    byte_chains[DType.uint8, DType.int8](n, bytes, full, ctx)
    byte_chains[e4m3, e4m3](n, bytes, full, ctx)
    resident(
        g,
        o,
        Operands[F16](half2, half2, full, half2, half2),
        Operands[F32](full, full, full, full, full),
        ctx,
    )
    pingpong(
        g,
        o,
        Operands[F16](half2, half2, full, half2, half2),
        Operands[F32](full, full, full, full, full),
        ctx,
    )
    norms(g, o, full, n, ctx)
    norms(g, Operands[F16](half2, half2, full, half2, half2), full, n, ctx)
    turned(g, o, ctx)
    var words = rebind[Data[DType.uint32]](ctx.enqueue_create_buffer[DType.uint32](1).unsafe_ptr())
    sparse[BF16](g, o, words, ctx)
    var starts = rebind[Data[DType.int32]](ctx.enqueue_create_buffer[DType.int32](1).unsafe_ptr())
    tiled[BF16](g, o, words, starts, ctx)
    sparse[F16](g, Operands[F16](half2, half2, full, half2, half2), words, ctx)
    blocks(
        g,
        o,
        Operands[F16](half2, half2, full, half2, half2),
        Operands[F32](full, full, full, full, full),
        rebind[Data[DType.int32]](ctx.enqueue_create_buffer[DType.int32](1).unsafe_ptr()),
        n,
        ctx,
    )
    tiled[F16](g, Operands[F16](half2, half2, full, half2, half2), words, starts, ctx)
    chains(
        n,
        ChainTensors[BF16](half, half, half, half, half, half, half),
        ChainVectors[](full, full, full),
        ctx,
    )
    chains(
        n,
        ChainTensors[F16](half2, half2, half2, half2, half2, half2, half2),
        ChainVectors[](full, full, full),
        ctx,
    )
    hopper_gemm[Epilogue("add_relu"), CONFIGS[4]](
        [g], [Operands[F16](half2, half2, full, half2, half2)], 1, ctx
    )
    comptime for i in [4, 7]:
        hopper_gemm[Epilogue("add_relu"), CONFIGS[i]](
            [g], [Operands[F32](full, full, full, full, full)], 1, ctx
        )
    comptime for config in [LARGE, SMALL]:
        enqueue_token_linear[BF16, Epilogue("none"), config](n, n, n, n, o, ctx)
        enqueue_token_linear[BF16, Epilogue("add_relu"), config](n, n, n, n, o, ctx)
    enqueue_token_linear[F16, Epilogue("gelu"), SMALL](
        n, n, n, n, Operands[F16](half2, half2, full, half2, half2), ctx
    )
    gradients(g, half, half2, full, n, ctx)
    cores[BF16](g, o, ctx)
    cores[F32](g, Operands[F32](full, full, full, full, full), ctx)
    gemm_portable[F32, Epilogue("none"), False](
        g,
        Operands[F32](full, full, full, full, full),
        Batch(),
        ctx,
    )

    enqueue_parts(n, ctx)
    comptime for dtype in [BF16, F16, F32, DType.float8_e4m3fn, DType.float8_e5m2, DType.int8]:
        comptime out = F32 if dtype == F32 else BF16
        var a = rebind[Data[dtype]](ctx.enqueue_create_buffer[dtype](1).unsafe_ptr())
        var y = rebind[Data[out]](ctx.enqueue_create_buffer[out](1).unsafe_ptr())
        enqueue_gemm[dtype, out, Epilogue("relu")](n, n, n, a, a, full, y, ctx)

    var qkv = QkvOperands[BF16](
        x=half,
        norm=(full, full),
        filters=(half, half, half),
        biases=(full, full, full),
        outputs=(half, half, half),
    )
    comptime for kernel in [1, 3, 5]:
        depthwise_qkv_gpu[BF16, kernel](qkv, QkvSizes(n, n, integers, 1e-5), ctx)
    projections[DType.uint8](qkv, full, QkvSizes(n, n, integers, 1e-5), n, ctx)
    projections[DType.float8_e4m3fn](qkv, full, QkvSizes(n, n, integers, 1e-5), n, ctx)

    var sizes = NormSizes(rows=n, columns=n, stride=n, eps=1e-5)
    layernorm_gpu(NormTensors[BF16](x=half, weight=full, bias=full, y=half), sizes, ctx)
    layernorm_gpu(NormTensors[F32](x=full, weight=full, bias=full, y=full), sizes, ctx)
    layernorm_gpu(NormTensors[F32, BF16](x=full, weight=full, bias=full, y=half), sizes, ctx)
    comptime for out in [DType.uint8, DType.float8_e4m3fn]:
        var y = half.unsafe_bitcast[Scalar[out]]()
        layernorm_gpu(NormTensors[BF16, out](x=half, weight=full, bias=full, y=y), sizes, ctx)
    layernorm_gpu["rms_norm"](
        NormTensors[BF16](x=half, weight=full, bias=full, y=half), sizes, ctx
    )

    var rows = NormGradSizes(rows=n, columns=n, parts=n, eps=1e-5)
    comptime for x in [BF16, F32]:
        comptime for dy in [BF16, F32]:
            comptime if x == F32 or dy == BF16:
                var given = rebind[Data[x]](ctx.enqueue_create_buffer[x](1).unsafe_ptr())
                var other = rebind[Data[dy]](ctx.enqueue_create_buffer[dy](1).unsafe_ptr())
                layer_norm_grad_gpu(
                    NormGrad[x, dy, x](
                        x=given,
                        dy=other,
                        weight=full,
                        dx=given,
                        dweight=full,
                        dbias=full,
                        room=full,
                    ),
                    rows,
                    ctx,
                )

    comptime for adds in [False, True]:
        comptime for norms in [False, True]:
            gather_rows_gpu[adds, norms](
                GatherTensors[BF16](x=half, onto=half, weight=full, bias=full, sum=half, y=half),
                RowMap(integers),
                n,
                n,
                1e-5,
                ctx,
            )

    scatter_add_gpu(
        ScatterTensors[BF16, DType.int64](x=half, index=integers, values=half, y=full),
        ScatterSizes(r=Int64(n), c=Int64(n), e=Int64(n), each=UInt32(n)),
        n,
        ctx,
    )

    var attention = Attention[BF16](half, half, half, half, n=n, t=n, s=n, c=n, heads=n, scale=1)
    var attention2 = Attention[F16](
        half2, half2, half2, half2, n=n, t=n, s=n, c=n, heads=n, scale=1
    )
    var places = MaskSizes(image=n, images=n, head=n, row=n, diagonal=n)
    var mask = MaskTensors[BF16](half, bytes, full, places)
    var mask2 = MaskTensors[F16](half2, sizes=places)
    comptime no = Mask()
    comptime all = Mask(bias=True, causal=True)
    # What a graph knows of the keys is a compile-time value.
    attention_gpu[BF16, 36, no, 67](attention, mask, ctx)
    attention_gpu[BF16, 64, no, 50](attention, mask, ctx)
    attention_gpu[BF16, 64, no, 197](attention, mask, ctx)
    enqueue_flash[BF16, 64, 2, 1, no](attention, mask, ctx)
    enqueue_flash[BF16, 64, 1, 4, no](attention, mask, ctx)
    enqueue_flash[BF16, 32, 2, 1, no](attention, mask, ctx)
    enqueue_flash[BF16, 96, 1, 1, no](attention, mask, ctx)
    enqueue_flash[BF16, 36, 2, 1, no](attention, mask, ctx)
    enqueue_flash[BF16, 80, 1, 1, no](attention, mask, ctx)
    enqueue_flash[BF16, 32, 2, 1, Mask(bias=True)](attention, mask, ctx)
    enqueue_flash[BF16, 64, 1, 4, all](attention, mask, ctx)
    enqueue_flash[BF16, 24, 2, 1, all](attention, mask, ctx)
    comptime for depth in [32, 64, 96, 128]:
        enqueue_hopper[BF16, short(depth), no](attention, mask, ctx)
        enqueue_hopper[BF16, long(depth), no](attention, mask, ctx)
        enqueue_hopper[F16, long(depth), no](attention2, mask2, ctx)
    comptime for depth in [32, 64, 96, 128]:
        comptime every = Mask(bias=True, keys=True, causal=True)
        enqueue_hopper[BF16, long(depth), every](attention, mask, ctx)
    comptime for one in [Mask(bias=True), Mask(keys=True), Mask(causal=True)]:
        enqueue_hopper[BF16, short(64), one](attention, mask, ctx)
        enqueue_hopper[BF16, long(64), one](attention, mask, ctx)
    enqueue_hopper[F16, long(64), Mask(bias=True)](attention2, mask2, ctx)
    var layer = Operands[F16](half2, half2, full, half2, half2)
    var moments = Norm(full, n)
    enqueue_attention_linear[heads=6](attention, o, moments, ctx)
    enqueue_attention_linear[heads=3](attention2, layer, moments, ctx)
    enqueue_hopper[BF16, PROJECTED, no](
        attention, mask, ctx, linear=o, moments=moments
    )
    enqueue_hopper[F16, PROJECTED, no](
        attention2, mask2, ctx, linear=layer, moments=moments
    )
    comptime for i in range(2):
        comptime out = [DType.uint8, DType.float8_e4m3fn][i]
        var y = bytes.unsafe_bitcast[Scalar[out]]()
        var o = Attention[BF16, out](
            half, half, half, y, n=n, t=n, s=n, c=n, heads=n, scale=1, result=Affine(1, 0)
        )
        enqueue_flash[BF16, 64, 2, 1, no](o, mask, ctx)
        enqueue_flash[BF16, 64, 1, 4, all](o, mask, ctx)
        enqueue_flash[BF16, 36, 2, 1, no](o, mask, ctx)
        enqueue_flash[BF16, 80, 1, 1, no](o, mask, ctx)
        comptime for depth in [32, 64, 96]:
            enqueue_hopper[BF16, long(depth), no](o, mask, ctx)
        enqueue_hopper[BF16, short(64), Mask(bias=True)](o, mask, ctx)
    enqueue_plain[BF16, 24, no](attention, mask, ctx)
    enqueue_plain[BF16, 24, all](attention, mask, ctx)
    comptime kept = Mask(bias=True, logsumexp=True)
    enqueue_flash[BF16, 64, 2, 1, kept](attention, mask, ctx)
    enqueue_flash[BF16, 64, 1, 4, kept](attention, mask, ctx)
    enqueue_hopper[BF16, long(64), kept](attention, mask, ctx)
    enqueue_plain[BF16, 24, kept](attention, mask, ctx)
    var grad = AttentionGrad[BF16](attention, half, full, half, half, half, full)
    var grad2 = AttentionGrad[F16](attention2, half2, full, half2, half2, half2, full)
    attention_grad_gpu[BF16, 64, no](grad, mask, ctx)
    attention_grad_gpu[BF16, 36, all](grad, mask, ctx)
    attention_grad_gpu[F16, 96, no](grad2, mask2, ctx)
    var attention3 = Attention[F32](full, full, full, full, n=n, t=n, s=n, c=n, heads=n, scale=1)
    var grad3 = AttentionGrad[F32](attention3, full, full, full, full, full, full)
    var mask3 = MaskTensors[F32](full, full, sizes=places)
    attention_grad_gpu[F32, 20, all](grad3, mask3, ctx)

    var x = IndexList[4](n, n, n, 3)
    comptime pooling = Stem(3, 7, 7, 2, Stem.MAXPOOL)
    comptime norming = Stem(3, 7, 7, 4, Stem.LAYERNORM)
    comptime even = Stem(3, 3, 3, 2, Stem.CONV2D, "silu")
    comptime odd = Stem(3, 3, 3, 1, Stem.CONV2D, "relu")
    var tiling = Tiling(pooling, x, n, n, n, n, 64, 3, n, n)
    enqueue_stem[BF16, DType.uint8, pooling](
        StemOperands[BF16, DType.uint8](bytes, full, full, half, full, full, full, half),
        tiling,
        n,
        0,
        ctx,
    )
    enqueue_stem[BF16, DType.uint8, pooling, DType.uint8](
        StemOperands[BF16, DType.uint8, DType.uint8](
            bytes, full, full, half, full, full, full, bytes
        ),
        tiling,
        n,
        0,
        ctx,
    )
    stem_maxpool_hopper(
        StemOperands[BF16, DType.uint8](bytes, full, full, half, full, full, full, half), x, x, ctx
    )
    stem_maxpool_hopper(
        StemOperands[F16, DType.uint8](bytes, full, full, half2, full, full, full, half2), x, x, ctx
    )
    stem_maxpool_conv2d_hopper(
        StemOperands[BF16, DType.uint8](bytes, full, full, half, full, full, full, half),
        half,
        half,
        x,
        x,
        ctx,
    )
    stem_maxpool_conv2d_hopper(
        StemOperands[F16, DType.uint8](bytes, full, full, half2, full, full, full, half2),
        half2,
        half2,
        x,
        x,
        ctx,
    )
    enqueue_stem[BF16, BF16, norming](
        StemOperands[BF16, BF16](half, full, full, half, full, full, full, half),
        tiling,
        n,
        1e-5,
        ctx,
    )
    enqueue_stem[BF16, DType.uint8, even](
        StemOperands[BF16, DType.uint8](bytes, full, full, half, full, full, full, half),
        tiling,
        n,
        0,
        ctx,
    )
    enqueue_stem[BF16, DType.uint8, odd](
        StemOperands[BF16, DType.uint8](bytes, full, full, half, full, full, full, half),
        tiling,
        n,
        0,
        ctx,
    )
    comptime floats = Stem(3, 3, 3, 1, Stem.CONV2D)
    enqueue_stem[BF16, BF16, floats, DType.uint8](
        StemOperands[BF16, BF16, DType.uint8](half, full, full, half, full, full, full, bytes),
        tiling,
        n,
        0,
        ctx,
    )
    enqueue_stem[BF16, BF16, floats](
        StemOperands[BF16, BF16](half, full, full, half, full, full, full, half),
        tiling,
        n,
        0,
        ctx,
    )

    var axes = Joined(StaticTuple[Int, AXES](fill=n), StaticTuple[Int, AXES](fill=n))
    var bits = rebind[Data[DType.uint16]](half.unsafe_bitcast[UInt16]())
    permute_gpu[DType.uint16](bits, bits, axes, ctx)
    permute_gpu[DType.uint32](words, words, axes, ctx)
    reduced["sum", Terms(BF16), Finish(BF16, 1)](bytes, n, ctx)
    reduced["amax", Terms(F32), Finish(F32, 1)](bytes, n, ctx)
    comptime norm = "x1 x0 0.0 where ; x1 x0 0.0 where x2 x3 sub mul"
    comptime lies = "ori ori ori i"
    comptime gradient = Terms(norm, lies, [BF16, DType.uint8, BF16, F32])
    reduced["sum", gradient, Finish(F32, 2)](bytes, n, ctx)
    comptime apart: StaticString = "x0 x1 sub ; x0 x1 sub x0 x1 sub mul"
    comptime ends: StaticString = (
        "x1 x0 x0 mul sub 0.0 inf clamp 1e-05 add rsqrt x2 mul"
        " ; x3 x0 x4 add x1 x0 x0 mul sub 0.0 inf clamp 1e-05 add rsqrt x2 mul mul sub ; x0 x4 add"
    )
    comptime finish = Finish(ends, [F32, F32, BF16], [F32, F32, BF16])
    reduced["sum", Terms(apart, "ori i", [BF16, BF16]), finish](bytes, n, ctx)
    reduced["sum", Terms("x0 ; x1", "ori ori", [F32, F32]), finish](bytes, n, ctx)
    group_norm_gpu[BF16, Epilogue("relu")](
        GroupNormTensors[BF16](x=half, weight=full, bias=full, y=half, partials=full),
        GroupNormSizes(images=n, pixels=n, channels=n, groups=n, entries=n, eps=1e-5),
        ctx,
    )
    squeezes(half, half2, full, n, ctx)
    ctx.enqueue_function[softmax_kernel[BF16, False]](
        half, half, Int32(n), Int32(n), grid_dim=n, block_dim=128
    )
    ctx.enqueue_function[softmax_kernel[F32, True]](
        full, full, Int32(n), Int32(n), grid_dim=n, block_dim=128
    )
    ctx.enqueue_function[softmax_grad_kernel[BF16]](
        half, half, half, Int32(n), Int32(n), grid_dim=n, block_dim=128
    )

    var window = rebind[Data[DType.int64]](ctx.enqueue_create_buffer[DType.int64](9).unsafe_ptr())
    depthwise(
        Geometry(IndexList[4](n, n, n, n), IndexList[4](n, n, n, n), window),
        o,
        Operands[F32](full, full, full, full, full),
        n,
        ctx,
    )
    pointwise[BF16, "x0 x1 mul x2 add silu", [BF16, BF16, F32], 3](half, bytes, ctx)
    comptime long: StaticString = (
        "x0 x1 mul x2 add 0.0 le 0.0 x3 where x4 mul x0 x5 mul x6 add add"
    )
    pointwise[F16, long, [F16, F32, F32, F16, F32, F32, F32], 3](half2, bytes, ctx)
    pointwise[DType.uint8, "x1 x0 x2 where 0.5 lt", [F32, DType.uint8, F32], 6](bytes, bytes, ctx)
    var eighths = bytes.unsafe_bitcast[Scalar[DType.float8_e4m3fn]]()
    pointwise[DType.float8_e4m3fn, "x0 x1 mul", [BF16, F32], 3](eighths, bytes, ctx)
    pointwise[F32, "x0 x1 mul e4m3", [DType.float8_e4m3fn, F32], 3](full, bytes, ctx)
    foreach[BF16, "x0", [F32]](bytes, n, ctx)
    foreach[F32, "x0 0.9 mul x1 x2 add 0.1 mul add", [F32, BF16, F32]](bytes, n, ctx)
    foreach[DType.uint8, "x0 x1 lt", [F32, F32]](bytes, n, ctx)
    foreach[I64, "x0 1.0 add", [I64]](bytes, n, ctx)
    var parts = ConcatTensors[BF16](half, StaticTuple[Data[F32], VECTORS](fill=full))
    for i in range(8):
        parts.starts[i + 1] = Int64(n * i)
    concat_gpu[BF16, "x0"](parts, n, ctx)
    concat_gpu[BF16, "x0 x1 mul x2 add relu"](parts, n, ctx)
    roll_gpu(half, half, n, RollSizes(n, n, n), ctx)
    class_token_gpu(half, half, half, tokens=n, channels=n, size=n, ctx=ctx)
    class_token_layernorm_gpu(
        NormTensors[BF16](x=half, weight=full, bias=full, y=half),
        half,
        tokens=n,
        rows=n,
        columns=n,
        eps=1e-5,
        ctx=ctx,
    )
    class_token_layernorm_gpu(
        NormTensors[F32](x=full, weight=full, bias=full, y=full),
        full,
        tokens=n,
        rows=n,
        columns=n,
        eps=1e-5,
        ctx=ctx,
    )
    row_moments_gpu(half, full, n, ctx)
    var pool = Geometry(rows=n, depth=n, columns=n)
    comptime for kind in ["max", "mean", "mean_inside"]:
        pool_gpu[kind](half, half, pool, ctx)
    pool_gpu["place"](bytes, half, pool, ctx)
    pool_grad_gpu["max"](half, half, bytes, pool, ctx)
    pool_grad_gpu["mean"](half, half, half, pool, ctx)
    step_gpu[BF16](integers, full, n, ctx)
    step_gpu[F32](integers, full, n, ctx)
    resample_gpu(integers, n, n, ctx)
    normalize_gpu(half, bytes, full, full, n, n, ctx)
    normalize_gpu(half, full, full, full, n, n, ctx)
