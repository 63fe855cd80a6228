"""Every rule of bridge/onnx_ops.py: a small file means the same as in ONNX's reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

onnx = pytest.importorskip("onnx", reason="ONNX files are read by the package onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from maxvision.bridge import onnx_file, onnx_ops  # noqa: E402
from maxvision.bridge.importer import Traced  # noqa: E402
from tests.graphs.interpret import interpret  # noqa: E402

IMAGE, LINE, TOKENS, ROWS = (6, 9, 8), (6, 11), (5, 8), (8,)
"""Shapes behind the batch."""
RUN = 3
"""The batch that is run."""


@dataclass(frozen=True)
class Case:
    """A graph, and what it is given.

    Attributes:
        name: Of the case.
        nodes: The operator, its inputs, and its attributes, one after the other; each gives ``y``,
            ``y2``, ... and reads ``x`` and what was given before, or arrays.
        shape: Of the input x behind the batch.
        opset: The version of the operators.
        fixed: Whether it is for single images too; so is ``open`` for any batch.
        open: See ``fixed``.
        wanted: What it computes, in torch, where ONNX's reference is wrong or has a gap.
        positive: Whether x is above 0.
        outputs: How many the last node gives.
        dtype: Of x.
    """

    name: str
    nodes: Sequence[tuple[str, Sequence[Any], dict[str, Any]]]
    shape: tuple[int, ...] = IMAGE
    opset: int = 17
    fixed: bool = True
    open: bool = True
    wanted: Callable[[torch.Tensor], torch.Tensor] | None = None
    positive: bool = False
    outputs: int = 1
    dtype: str = "float32"

    def file(self, batch: Any) -> Any:
        """Makes the file, whose batch is a name or a number."""
        held, nodes = [], []
        for number, (op, inputs, attributes) in enumerate(self.nodes):
            names = []
            for place, each in enumerate(inputs):
                if isinstance(each, str):
                    names.append(each)
                    continue
                label = {1: "weight", 2: "bias"}.get(place, f"input{place}")
                names.append(f"layer{number}.{label}")
                held.append(numpy_helper.from_array(np.asarray(each), names[-1]))
            last = number == len(self.nodes) - 1
            stem = "y" if last else f"y{number}"
            count = self.outputs if last else 1
            gives = [stem, *(f"{stem}.{i}" for i in range(1, count))]
            nodes.append(helper.make_node(op, names, gives, **attributes))
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        x = helper.make_tensor_value_info("x", kind, [batch, *self.shape])
        ends = [onnx.ValueInfoProto(name=name) for name in nodes[-1].output]
        graph = helper.make_graph(nodes, self.name, [x], ends, held)
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10
        )

    def input(self, batch: int) -> np.ndarray:
        random = np.random.default_rng(len(self.name))
        x = random.standard_normal((batch, *self.shape))
        return (np.abs(x) + 0.1 if self.positive else x).astype(self.dtype)


CASES: list[Case] = []


def one(op: str, *inputs: Any, name: str = "", **more: Any) -> None:
    """Adds a case of one operator; ``x`` comes first."""
    ours = ("shape", "opset", "fixed", "open", "wanted", "positive", "outputs", "dtype")
    settings = {key: more.pop(key) for key in ours if key in more}
    told = name or f"{op} {more}" if more else name or op
    CASES.append(Case(told, [(op, ["x", *inputs], more)], **settings))


def several(name: str, *nodes: tuple[str, Sequence[Any], dict[str, Any]], **more: Any) -> None:
    CASES.append(Case(name, nodes, **more))


_random = np.random.default_rng(0)


def w(*shape: int) -> np.ndarray:
    return _random.standard_normal(shape).astype(np.float32)


def i(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def f(number: float) -> np.ndarray:
    return np.array(number, np.float32)


# elementwise
for _op in "Relu Sigmoid HardSwish Tanh Erf Softplus Exp Neg Abs Reciprocal Sin Cos Floor".split():
    one(_op)
for _op in ("Log", "Sqrt"):
    one(_op, positive=True)
one("Mish", opset=18)
one("Gelu", opset=20)
one("Gelu", opset=20, approximate="tanh")
one("Swish", opset=24)
one("Swish", opset=24, alpha=1.5)
one("LeakyRelu", alpha=0.2)
one("Elu", alpha=0.7)
one("PRelu", w(6, 1, 1))
one("HardSigmoid")
one("HardSigmoid", alpha=1 / 6, beta=0.5)
one("HardSigmoid", alpha=0.3, beta=0.4)
one("Clip", f(-0.5), f(0.5))
one("Clip", "", f(0.3), name="Clip above")
one("Clip", f(0.1), name="Clip below")
for _op in ("Add", "Sub", "Mul", "Div", "Equal", "Less", "LessOrEqual", "Greater"):
    one(_op, w(6, 1, 1))
    one(_op, np.array([[0.5]], np.float32), name=f"{_op} a number")
several("GreaterOrEqual", ("GreaterOrEqual", [w(8), "x"], {}))
several("a number on the left", ("Sub", [f(2.0), "x"], {}), ("Div", [f(3.0), "y0"], {}))
several("a number under", ("Less", [f(0.2), "x"], {}))
one("Pow", f(2.0))
one("Pow", f(0.5), name="Pow root", positive=True)
one("Max", w(8), f(0.1))
one("Min", w(8), w(6, 1, 1))
one("Sum", w(8), w(6, 1, 1))
one("Mean", w(6, 9, 8), w(6, 9, 8))
several("Where", ("Greater", ["x", f(0.0)], {}), ("Where", ["y0", "x", w(8)], {}))
several(
    "logic", ("Greater", ["x", f(0.0)], {}), ("Less", ["x", f(1.0)], {}),
    ("And", ["y0", "y1"], {}), ("Not", ["y2"], {}), ("Or", ["y3", "y0"], {}),
    ("Cast", ["y4"], {"to": TensorProto.FLOAT}),
)  # fmt: skip
one("Identity")
one("Dropout")
one("Cast", to=TensorProto.FLOAT16, name="Cast to floats")
several(
    "Cast to numbers", ("Greater", ["x", f(0.0)], {}), ("Cast", ["y0"], {"to": TensorProto.FLOAT})
)
one("CastLike", w(1))
# layers
one("Conv", w(4, 6, 3, 3), w(4), pads=[1, 1, 1, 1])
one("Conv", w(4, 6, 3, 2), pads=[0, 1, 2, 0], strides=[2, 1])
one("Conv", w(6, 3, 3, 3), group=2, dilations=[2, 1], pads=[2, 1, 2, 1])
for _mode in ("SAME_UPPER", "SAME_LOWER", "VALID"):
    one("Conv", w(4, 6, 3, 2), auto_pad=_mode, strides=[2, 2])
one("Conv", w(4, 6, 3), w(4), shape=LINE, pads=[1, 2], strides=[2], name="Conv of lines")
one("ConvTranspose", w(6, 4, 3, 3), w(4), strides=[2, 2], pads=[1, 1, 1, 1])
_turned, _other = w(6, 2, 3, 2), w(6, 4, 3, 3)
one("ConvTranspose", _turned, strides=[2, 1], group=2, output_padding=[1, 0],
    wanted=lambda x: F.conv_transpose2d(
        x, torch.tensor(_turned).double(), None, (2, 1), 0, (1, 0), 2
    ))  # fmt: skip
one("ConvTranspose", _other, strides=[2, 2], output_shape=[18, 16],
    wanted=lambda x: F.conv_transpose2d(
        x, torch.tensor(_other).double(), None, 2
    )[:, :, 1:, 1:])  # fmt: skip
one("ConvTranspose", w(6, 4, 3, 3), strides=[2, 2], pads=[0, 1, 2, 0], dilations=[2, 1])
one("ConvTranspose", w(6, 4, 3, 3), strides=[2, 2], auto_pad="SAME_UPPER")
one("ConvTranspose", w(6, 4, 3), shape=LINE, strides=[2], name="ConvTranspose of lines")
one("Gemm", w(5, 8), w(5), shape=ROWS, transB=1)
one("Gemm", w(8, 5), w(1, 5), shape=ROWS, alpha=0.5, beta=2.0)
one("Gemm", w(8, 5), f(2.0), shape=ROWS)
one("Gemm", w(8, 5), shape=ROWS, name="Gemm without a bias")
one("MatMul", w(8, 5), shape=TOKENS)
one("MatMul", w(8), shape=TOKENS, name="MatMul of a vector")
one("MatMul", w(6, 8, 4), name="MatMul of several")
several("MatMul on the left", ("MatMul", [w(3, 5), "x"], {}), shape=TOKENS)
several(
    "MatMul of two", ("Transpose", ["x"], {"perm": [0, 2, 1]}), ("MatMul", ["x", "y0"], {}),
    shape=TOKENS,
)  # fmt: skip
one("Einsum", w(8, 3), equation="ntc,cd->ntd", shape=TOKENS)
several("Einsum of heads", ("Einsum", ["x", "x"], {"equation": "nhtc,nhsc->nhts"}))
several("Einsum turned", ("Einsum", ["x", w(6, 8, 3)], {"equation": "nhtc,hcd->nthd"}), fixed=False)
one("BatchNormalization", w(6), w(6), w(6), np.abs(w(6)) + 0.5, epsilon=1e-3)
one("BatchNormalization", w(6), w(6), w(6), np.abs(w(6)) + 0.5, shape=LINE, name="of lines")
one("InstanceNormalization", w(6), w(6))
one("LayerNormalization", w(8), w(8))
one("LayerNormalization", w(9, 8), w(9, 8), axis=-2, epsilon=1e-3)
one("LayerNormalization", w(8), name="LayerNormalization without a bias")
one("GroupNormalization", w(2), w(2), num_groups=2, opset=18)
one("GroupNormalization", w(6), w(6), num_groups=3, opset=21)
one("RMSNormalization", w(8), opset=23)
one("Softmax")
one("Softmax", axis=1)
one("LogSoftmax", axis=1)
one("LpNormalization", axis=1)
one("LpNormalization", axis=-1, p=1, wanted=lambda x: F.normalize(x, p=1, dim=-1))
_sequence = (5, 1, 8)  # behind the batch: the batch is the second axis of LSTM's x
for _way, _count in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
    _given = (w(_count, 12, 8), w(_count, 12, 3), w(_count, 24))
    several(
        f"LSTM {_way}", ("Transpose", ["x"], {"perm": [1, 0, 2]}),
        ("LSTM", ["y0", *_given], {"hidden_size": 3, "direction": _way}),
        shape=TOKENS, outputs=3,
    )  # fmt: skip
# 8-bit integers
_U8, _S8 = np.uint8, np.int8
for _zero in (_U8(0), _U8(100), _U8(255), _S8(0), _S8(-128), _S8(77), np.uint16(30000)):
    several(
        f"levels around {_zero.dtype} {_zero}", ("QuantizeLinear", ["x", f(0.01), _zero], {}),
        ("DequantizeLinear", ["y0", f(0.01), _zero], {}), opset=21,
    )  # fmt: skip
several(
    "levels without a zero point", ("QuantizeLinear", ["x", f(0.01)], {}),
    ("DequantizeLinear", ["y0", f(0.01)], {}), opset=13,
)  # fmt: skip
several(
    "moved integers", ("QuantizeLinear", ["x", f(0.02), _S8(-9)], {}),
    ("MaxPool", ["y0"], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 2]}),
    ("Transpose", ["y1"], {"perm": [0, 2, 1, 3]}), ("Shape", ["y2"], {}),
    ("Reshape", ["y2", "y3"], {}), ("DequantizeLinear", ["y4", f(0.02), _S8(-9)], {}), opset=19,
)  # fmt: skip
for _op, _shape, _axis, _given in (
    ("Conv", (4, 6, 3, 3), 0, IMAGE), ("Conv", (6, 1, 3, 3), 0, IMAGE),
    ("Conv", (4, 6, 3), 0, LINE), ("MatMul", (8, 5), 1, TOKENS), ("Gemm", (5, 8), 0, ROWS),
    ("Gemm", (8, 5), 1, ROWS), ("ConvTranspose", (6, 4, 3, 3), 1, IMAGE),
):  # fmt: skip
    _count = _shape[_axis]
    _scales = np.abs(w(_count)) * np.float32(0.01) + np.float32(0.001)
    _more = {"transB": int(_axis == 0)} if _op == "Gemm" else {}
    _more = {"group": 6} if _shape[1] == 1 else _more
    several(
        f"{_op} {_shape} of integers", ("QuantizeLinear", ["x", f(0.02), _U8(99)], {}),
        ("DequantizeLinear", ["y0", f(0.02), _U8(99)], {}),
        ("DequantizeLinear", [_random.integers(-128, 128, _shape).astype(_S8), _scales,
                              np.zeros(_count, _S8)], {"axis": _axis}),
        ("DequantizeLinear", [_random.integers(-9999, 9999, _count).astype(np.int32),
                              _scales * np.float32(0.02)], {"axis": 0}),
        (_op, ["y1", "y2", "y3"] if _op != "MatMul" else ["y1", "y2"], _more),
        ("QuantizeLinear", ["y4", f(0.5), _S8(5)], {}),
        ("DequantizeLinear", ["y5", f(0.5), _S8(5)], {}), opset=13, shape=_given,
    )  # fmt: skip
# windows
one("MaxPool", kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 0])
one("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[0, 1, 1, 0])
one("MaxPool", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
one("MaxPool", kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1, pads=[0, 0, 1, 1])
one("MaxPool", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")
one("MaxPool", kernel_shape=[2, 2], dilations=[2, 2])
one("MaxPool", kernel_shape=[3], strides=[2], shape=LINE)
one("AveragePool", kernel_shape=[3, 2], strides=[2, 2])
one("AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
one("AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1)
one("AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[0, 1, 1, 0])
one("AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[0, 1, 1, 0], count_include_pad=1)
one("AveragePool", kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1, opset=19)
one("AveragePool", kernel_shape=[2, 2], dilations=[2, 2], opset=19)
one("AveragePool", kernel_shape=[3], shape=LINE)
one("GlobalAveragePool")
one("GlobalAveragePool", shape=LINE, name="GlobalAveragePool of lines")
one("GlobalMaxPool")
for _op in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare"):
    one(_op, axes=[2, 3], opset=13)
    one(_op, i(-1), keepdims=0, opset=18)
one("ReduceSum", i(1, 2))
one("ReduceSum", i(), noop_with_empty_axes=1)
one("CumSum", np.array(2))
_SIZES = {"up": (18, 16), "down": (5, 4), "odd": (13, 11)}
for _mode in ("nearest", "linear", "cubic"):
    for _name, _size in _SIZES.items():
        for _place in ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"):
            one(
                "Resize", "", "", i(*_size), axes=[2, 3], opset=18, mode=_mode,
                coordinate_transformation_mode=_place, name=f"Resize {_mode} {_name} {_place}",
            )  # fmt: skip
one("Resize", "", "", i(1, 6, 5, 7), name="Resize all sizes", open=False)
several(
    "Resize by a shape", ("Shape", ["x"], {"end": 2}), ("Concat", ["y0", i(5, 7)], {"axis": 0}),
    ("Resize", ["x", "", "", "y1"], {"mode": "linear"}),
)  # fmt: skip
for _rounding in ("round_prefer_ceil", "floor", "ceil"):
    one("Resize", "", f([1, 1, 1.7, 0.6]), nearest_mode=_rounding, name=f"Resize {_rounding}")
one("Resize", "", f([1, 1, 2, 2]), name="Resize twice", coordinate_transformation_mode="asymmetric",
    nearest_mode="floor")  # fmt: skip
one("Resize", "", f([1, 1, 1.5, 2.5]), name="Resize cubic outside", mode="cubic",
    exclude_outside=1, cubic_coeff_a=-0.5)  # fmt: skip
one("Resize", "", f([0.6, 0.5]), mode="linear", antialias=1, axes=[2, 3], opset=18)
one("Resize", "", f([0.6, 0.5]), mode="cubic", antialias=1, axes=[2, 3], opset=18)
# movement
one("Reshape", i(0, 3, -1), name="Reshape 0 -1")
one("Reshape", i(-1, 6, 72), name="Reshape the batch")
one("Flatten")
one("Flatten", axis=2)
one("Transpose", perm=[0, 3, 1, 2])
one("Squeeze", i(1), shape=(1, 5))
one("Unsqueeze", i(1, -1))
one("Expand", i(1, 6, 9, 8), shape=(6, 1, 8))
one("Tile", i(1, 2, 1, 3))
several("Concat", ("Concat", ["x", w(1, 2, 9, 8)], {"axis": 1}), open=False)
one("Split", i(2, 4), axis=1, outputs=2)
one("Split", axis=1, outputs=3, opset=13)
one("Split", axis=3, outputs=3, num_outputs=3, opset=18)
one("Slice", i(1), i(-1), i(2))
one("Slice", i(-1, 0), i(-100, 2**62), i(3, 2), i(-1, 2), name="Slice backwards")
one("Slice", i(0, 1), i(2**62, 5), name="Slice of all images")
one("Gather", np.array(2), axis=1)
one("Gather", i(0, -1, 2), axis=2)
several(
    "Gather of a table", ("Gather", [w(9, 4), "x"], {}), shape=(5,), dtype="int64", positive=True
)
one("Pad", i(0, 0, 1, 2, 0, 0, 0, 3))
one("Pad", i(1, 2), f(1.5), i(3), opset=18)
one("Pad", i(0, 0, -1, 2, 0, 0, 1, -3), name="Pad and cut",
    wanted=lambda x: F.pad(x, (2, -3, -1, 1)))  # fmt: skip
for _mode in ("reflect", "edge"):
    one("Pad", i(0, 0, 1, 2, 0, 0, 0, 3), mode=_mode)
one("Pad", i(0, 0, 1, 2, 0, 0, 0, 3), mode="wrap", opset=19)
one("DepthToSpace", blocksize=2, shape=(8, 3, 4))
one("DepthToSpace", blocksize=2, shape=(8, 3, 4), mode="CRD")
one("SpaceToDepth", blocksize=2, shape=(3, 4, 6))
# shapes that are computed, and constants
several(
    "a shape in the making", ("Shape", ["x"], {}), ("Gather", ["y0", i(0)], {}),
    ("Concat", ["y1", i(-1)], {"axis": 0}), ("Reshape", ["x", "y2"], {}),
)  # fmt: skip
several(
    "a class token", ("Shape", ["x"], {"end": 1}), ("Concat", ["y0", i(1, 8)], {"axis": 0}),
    ("Expand", [w(1, 1, 8), "y1"], {}), ("Concat", ["y2", "x"], {"axis": 1}), shape=TOKENS,
)  # fmt: skip
several(
    "zeros like", ("Shape", ["x"], {}),
    ("ConstantOfShape", ["y0"], {"value": numpy_helper.from_array(np.ones(1, np.float32))}),
    ("Add", ["x", "y1"], {}),
)  # fmt: skip
several(
    "positions", ("Range", [np.array(0), np.array(8), np.array(1)], {}),
    ("Cast", ["y0"], {"to": TensorProto.FLOAT}), ("Mul", ["y1", f(0.5)], {}),
    ("Add", ["x", "y2"], {}),
)  # fmt: skip
several(
    "heads", ("Reshape", ["x", i(0, 5, 2, 4)], {}), ("Transpose", ["y0"], {"perm": [2, 0, 1, 3]}),
    ("Reshape", ["y1", i(2, -1, 4)], {}), ("Softmax", ["y2"], {}), shape=TOKENS, fixed=False,
)  # fmt: skip


def traced(case: Case, folder: Path, batch: Any) -> tuple[Traced, Any]:
    """Reads the file of a case; returns it too."""
    file = case.file(batch)
    path = folder / "case.onnx"
    onnx.save(file, path)
    found = onnx_file.read(path).trace()
    assert not found.missing, "\n".join(map(str, found.missing))
    assert found.program is not None
    return found, file


@pytest.mark.parametrize("batch", ["n", 1], ids=["any batch", "one image"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_means_the_same(case: Case, batch: Any, tmp_path: Path) -> None:
    if batch == 1 and not case.fixed:
        pytest.skip("it is for a dynamic batch")
    if batch == "n" and not case.open:
        pytest.skip("it is for single images")
    found, file = traced(case, tmp_path, batch)
    assert found.program is not None
    x = case.input(RUN)
    reference = onnx_file.evaluator(file)
    if case.wanted:
        wanted = [case.wanted(torch.tensor(x).double()).numpy()]
    elif batch == 1:
        images = [reference.run(None, {"x": x[k : k + 1]}) for k in range(RUN)]
        swapped = case.name.startswith("LSTM")
        wanted = [
            np.concatenate(each, (2 if k == 0 else 1) if swapped else 0)
            for k, each in enumerate(zip(*images, strict=True))
        ]
    else:
        wanted = reference.run(None, {"x": x})
    made = interpret(found.program, [x], found.tensors)
    assert len(found.outputs) == case.outputs
    for name, want in zip(found.outputs, wanted, strict=True):
        assert made[name].shape == want.shape
        scale = 1e-5 * max(1.0, float(np.abs(want).max()))
        tolerance = 2e-3 if case.name == "Cast to floats" else 1e-5
        np.testing.assert_allclose(made[name], want, tolerance, scale)


def test_every_rule_has_a_case() -> None:
    met = {op for case in CASES for op, _, _ in case.nodes}
    assert set(onnx_ops.RULES) <= met, set(onnx_ops.RULES) - met
