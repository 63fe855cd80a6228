"""Compiles every op for a GPU that is not here: ``python -m tests.ops.compile_target sm_90a``.

At bfloat16, most of them; with ``--all`` all, also at float16, float32, and without TF32.

One process compiles for one architecture, since MAX's virtual device is a setting of the process.
Exits with 1 if a registered op is in no case, or if a kernel's symbol does not name its op, by
which bench profile finds its layer; a failed compilation raises.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from max.driver import Device
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession
from max.graph import DeviceRef, Graph, TensorType

from maxvision.bench.attribution import symbols as symbols_of
from maxvision.graphs import nodes
from maxvision.graphs.parameters import Parameters
from maxvision.graphs.target import Target
from maxvision.runtime import cache
from tests.ops.cases import CASES, ON_HOPPER, Case

# Every op, both layouts of bmm's b, every branch an epilogue has: products of all ops share their
# kernels, and sizes are run-time numbers, so these serve all other cases.
POINTWISE = {
    "pointwise x0 gelu: (3, 33)",
    "pointwise x0 mish: (3, 33)",
    "pointwise x0 sin: (3, 33)",
    "pointwise x0 x1 pow: (3, 7) (3, 7)",
    "pointwise x0 x1 mul x2 add: (9, 40)",
    "pointwise masks",
}
NAMES = {
    "conv2d 3x3",
    "conv2d epilogue add_relu",
    "conv2d epilogue silu",
    "conv2d_chain",
    "conv2d_shortcut",
    "conv2d_shortcut_chain",
    "conv2d computed depthwise 3x3",
    "conv2d_input_grad 3x3",
    "conv2d_input_grad depthwise 3x3",
    "conv2d_weight_grad 3x3",
    "sparse_conv2d 3x3",
    "sparse_conv2d add_relu",
    "attention 64",
    "attention 16",
    "attention 96",
    "attention 6",
    "attention windows",
    "attention causal with a bias",
    "attention_grad 64",
    "attention_grad bias of all heads, causal",
    "bmm context",
    "bmm add",
    "linear gelu",
    "qkv_linear",
    "maxpool 3/2",
    "avgpool 3/2",
    "max_pool2d_grad 3/2",
    "avg_pool2d_grad 3/2",
    "reduce mean (14, 14, 672) (1, 2)",
    "reduce sum of x0 ; x0 x1 x2 sub mul: (1200, 72) (1200, 72) (1,)",
    "reduce mean (4, 33) (2,)",
    "reduce amax (6, 5, 40) (1, 2)",
    "reduce sum and x0 ; x1 x2 mul ; x1 x2 mul x2 mul tanh ; x0 x2 mul:"
    " (30, 40) (30, 40) (1, 40) (1,)",
    "permute (196, 72) (0, 2, 1)",
    "concat 3 (5, 7, 96) (5, 7, 32)",
    "concat x0 x1 mul x2 add relu: (5, 7, 96) (5, 7, 32)",
    "roll (14, 14, 96) (-3, -3) (1, 2)",
    *POINTWISE,
    "foreach x0 x1 sigmoid mul: 1 7 64 33 20003 8",
    "foreach masks",
    "foreach counters",
    "softmax 64",
    "log_softmax 64",
    "softmax_grad 64",
    "layernorm 384",
    "layer_norm_grad 384",
    "gather_rows norm",
    "gather_rows add and norm",
    "gather_rows add",
    "gather_rows copy",
    "scatter_add (6, 40, 136)",
    "rms_norm 384",
    "group_norm (14, 14, 256) 32 relu",
    "layernorm_first",
    "squeeze_excite (14, 14) 240 10 silu sigmoid none",
    "squeeze_excite (7, 9) 256 16 relu sigmoid add_relu",
    "class_token",
    "class_token norm",
    "stem_maxpool 32 x 32",
    "stem_maxpool floats",
    "stem_layernorm 32 x 32",
    "stem_conv2d silu",
    "depthwise_qkv 64",
}
# Ops for NVIDIA's tensor cores: elsewhere the passes leave others in their place.
NVIDIA = {"depthwise_qkv", "stem_maxpool", "stem_layernorm", "stem_conv2d"}
# Ops for Hopper's.
HOPPER = {
    "quantized_conv2d", "quantized_conv2d_chain", "quantized_conv2d_shortcut",
    "quantized_conv2d_shortcut_chain", "quantized_qkv_linear",
    "sparse_conv2d_packed", "squeeze_excite", "token_linear", "row_moments", "linear_moments",
    "normed_linear", "layernorm_mlp", "attention_linear", "stem_maxpool_conv2d",
    "conv2d_mean",
}  # fmt: skip
# The tensor cores' instructions differ from dtype to dtype, and so does how halves are packed; the
# epilogues of products and what shares their launch do not. (In float32 both stems with a pool are
# the same ops.)
FLOAT32 = NAMES - {
    "stem_maxpool floats",
    "conv2d 3x3",
    "conv2d_chain",
    "conv2d_shortcut",
    "conv2d_shortcut_chain",
    "squeeze_excite (14, 14) 240 10 silu sigmoid none",
    "squeeze_excite (7, 9) 256 16 relu sigmoid add_relu",
    "linear gelu",
    "qkv_linear",
}
BFLOAT16 = {
    "packed tiles 3x3", "packed two_four 1x1", "packed blocks 1x1/2", "token_linear gelu",
    "token_linear add", "quantized_conv2d 3x3", "quantized_conv2d of e4m3 3x3",
    "quantized_conv2d_shortcut", "quantized_conv2d_shortcut of e4m3", "quantized_conv2d_chain",
    "quantized_conv2d_chain of e4m3", "quantized_conv2d_shortcut_chain", "stem_maxpool bytes",
    "normed_linear gelu", "layernorm_mlp", "attention_linear", "quantized_linear gelu of e4m3",
    "conv2d_mean add_relu",
    "quantized_qkv_linear of e4m3", "attention to uint8", "attention to e4m3 with a bias",
    "depthwise_qkv 64 of e4m3", "depthwise_qkv 64 of bytes", "stem_maxpool_conv2d",
}  # fmt: skip
# Other branches of ops that are in another case, too, and products, whose many tiles take most of
# the time: by day tests/ptx compiles these kernels and runs them, and tests/test_third_family.py
# compiles a network.
NIGHTLY = {
    "quantized_conv2d 3x3",
    "quantized_conv2d of e4m3 3x3",
    "quantized_conv2d_shortcut",
    "quantized_conv2d_shortcut of e4m3",
    "quantized_conv2d_chain",
    "quantized_conv2d_chain of e4m3",
    "quantized_conv2d_shortcut_chain",
    "quantized_linear gelu of e4m3",
    "quantized_qkv_linear of e4m3",
    "attention_linear",
    "conv2d_mean add_relu",
    "attention to uint8",
    "attention to e4m3 with a bias",
    "depthwise_qkv 64 of e4m3",
    "depthwise_qkv 64 of bytes",
    "conv2d 3x3",
    "conv2d epilogue add_relu",
    "conv2d_chain",
    "conv2d_shortcut",
    "conv2d_shortcut_chain",
    "layernorm_mlp",
    "normed_linear gelu",
    "sparse_conv2d 3x3",
    "sparse_conv2d add_relu",
    "packed tiles 3x3",
    "packed blocks 1x1/2",
    "bmm add",
    "qkv_linear",
    "stem_maxpool floats",
    "stem_maxpool bytes",
    "stem_maxpool_conv2d",
    "conv2d epilogue silu",
    "linear gelu",
    "attention 16",
    "attention 96",
    "attention 6",
    "attention causal with a bias",
    "attention_grad bias of all heads, causal",
    "reduce mean (4, 33) (2,)",
    "reduce amax (6, 5, 40) (1, 2)",
    "packed two_four 1x1",
    "gather_rows norm",
    "gather_rows add",
    "gather_rows copy",
    "squeeze_excite (14, 14) 240 10 silu sigmoid none",
    "token_linear gelu",
    "concat 3 (5, 7, 96) (5, 7, 32)",
    "stem_layernorm 32 x 32",
    "log_softmax 64",
    "softmax_grad 64",
    "rms_norm 384",
    "attention 64",  # its masks are in another case
    *(POINTWISE - {"pointwise x0 gelu: (3, 33)", "pointwise masks"}),
}
FLOAT16 = {
    "conv2d epilogue add_relu",
    "bmm context",
    "attention 64",
    "attention windows",
    "attention_grad 64",
    "stem_maxpool 32 x 32",
    "stem_layernorm 32 x 32",
    "depthwise_qkv 64",
    "normed_linear gelu",
}
# float32 without TF32, where the others have it.
EXACT = {"conv2d 3x3", "bmm add"}
IN_PROGRAMS = {  # what programs call an op
    "attention_bias": "attention",
    "attention_logsumexp": "attention",
    "bmm": "linear",
    "layernorm": "layer_norm",
    "maxpool": "max_pool2d",
    "avgpool": "avg_pool2d",
    "reduce": "mean",
    "reduce_terms": "sum",
    "sparse_conv2d": "conv2d",
    "sparse_conv2d_packed": "conv2d",
}
DTYPES = (DType.bfloat16, DType.float32, DType.float16)


def main(architecture: str, everything: bool) -> int:
    """Compiles for one architecture and says how long it took."""
    with Target.parse(architecture).device() as device:
        return compile_for(architecture, device, everything)


def compile_for(architecture: str, device: Device, everything: bool) -> int:
    """Compiles every op for ``device``, which is of that architecture."""
    hopper = architecture.startswith("sm_90")
    cases = [case for case in CASES if case.name in NAMES]
    if hopper:
        cases += [case for case in ON_HOPPER if case.name in BFLOAT16]
    graph = graph_of(cases, DeviceRef.from_device(device), everything)
    registered = {
        name
        for path in nodes.OPS.rglob("*.mojo")
        for name in re.findall(r'^@register\("(\w+)"\)', path.read_text(), re.MULTILINE)
    }
    if architecture.startswith("gfx"):
        registered -= NVIDIA
    if not hopper:
        registered -= HOPPER
    if missing := registered - ops_of(graph):
        print(f"{architecture}: no case has {', '.join(sorted(missing))}")
        return 1
    if not everything:
        cases = [case for case in cases if case.name not in NIGHTLY]
        graph = graph_of(cases, DeviceRef.from_device(device), everything)
    start = time.perf_counter()
    compiled = InferenceSession(devices=[device]).compile(graph)
    took = time.perf_counter() - start
    if architecture.startswith("sm_") and (unnamed := ops_without_symbols(graph, compiled)):
        print(f"{architecture}: no kernel is named after {', '.join(sorted(unnamed))}")
        return 1
    dtypes = "every dtype" if everything else "bfloat16"
    print(f"{architecture}: {len(ops_of(graph))} ops at {dtypes} compiled in {took:.0f} s")
    return 0


def ops_of(graph: Graph) -> set[str]:
    return set(re.findall(r'symbol = "(\w+)"', str(graph)))


def ops_without_symbols(graph: Graph, compiled: CompiledModel) -> set[str]:
    """Lists the ops for whose nodes the compiled graph has no kernel of a fitting symbol."""
    with tempfile.NamedTemporaryFile(suffix=".mef") as file:
        compiled.export_mef(file.name)
        found = set(re.findall(rb"[a-z]\w+_[0-9a-f]{8}(?!\w)", Path(file.name).read_bytes()))
    symbols = {symbol.decode() for symbol in found}
    unnamed = set()
    for name, line in re.findall(r'symbol = "(\w+)"(.*)', str(graph)):
        given = dict(re.findall(r'(epilogue|format) = "([^"]+)"', line))
        format = given.get("format", "steps" if name.startswith("sparse") else "")
        ways = symbols_of(IN_PROGRAMS.get(name, name), given.get("epilogue", "none"), format)
        if not any(all(any(map(k.fullmatch, symbols)) for k in way) for way in ways):
            unnamed.add(name)
    return unnamed


def precisions(case: Case, everything: bool) -> list[tuple[DType, bool]]:
    """Lists the dtypes at which a case is compiled, and whether its products may be TF32."""
    found = {(DType.bfloat16, False): NAMES | BFLOAT16}
    if everything:
        found |= {
            (DType.float16, False): FLOAT16,
            (DType.float32, True): FLOAT32,
            (DType.float32, False): EXACT,
        }
    return [precision for precision, names in found.items() if case.name in names]


def graph_of(cases: Sequence[Case], device: DeviceRef, everything: bool) -> Graph:
    """Builds one graph of the cases, of an optimizer's step, and of what is done with pixels."""
    instances = [(case, *precision) for case in cases for precision in precisions(case, everything)]
    types = [
        TensorType(DType.uint8 if case.levels else dtype, ["batch", *shape], device=device)
        for case, dtype, _ in instances
        for shape in case.inputs
    ]
    types.append(TensorType(DType.uint8, ["batch", 8, 8, 3], device=device))
    types.append(TensorType(DType.int64, ["tensors", 7], device=device))
    types.append(TensorType(DType.float32, ["tensors", 10], device=device))
    types.append(TensorType(DType.int64, ["pictures", 13], device=device))
    library = cache.library(gpu=device.is_gpu())
    with Graph("cases", input_types=types, custom_extensions=[library]) as graph:
        inputs = iter(value.tensor for value in graph.inputs)
        outputs = []
        for i, (case, dtype, tf32) in enumerate(instances):
            tensors = {f"{i}.{name}": array for name, array in case.data(1)[1].items()}
            w = Parameters(tensors, device, dtype, tf32=tf32).at(str(i))
            outputs.append(case.build(w, *itertools.islice(inputs, len(case.inputs))))
        pixels, places, settings, pictures = inputs
        outputs.append(nodes.resample(pictures, 8))
        three = np.ones(3, np.float32)
        dtypes = DTYPES if everything else DTYPES[:1]
        for i, dtype in enumerate(dtypes, start=len(instances)):
            w = Parameters({f"{i}.mean": three, f"{i}.scale": three}, device, dtype).at(str(i))
            outputs.append(nodes.normalize(pixels, w.vector("mean"), w.vector("scale"), dtype))
            outputs.append(nodes.optimizer_step(places, settings, dtype))
        graph.output(*outputs)
    return graph


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--all" in sys.argv[2:]))
