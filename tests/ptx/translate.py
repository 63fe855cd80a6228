"""Turns a kernel's PTX into Python functions over numpy, one a basic block.

A register is a row of lanes; each instruction becomes a line such as
``copyto(s32[7], s32[3] + s32[4], where=m)``. Sections are those of the PTX ISA 8.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from . import semantics
from .ptx import Instruction, Kernel

TYPES = {"b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64"}
SIZES = {t: int(t[1:]) // 8 for t in "u8 s8 u16 s16 u32 s32 u64 s64 f32 f16 f64".split()} | {
    "bf16": 2
}
NUMPY = {"u": "uint", "s": "int", "f": "float"}
WIDER = {"s32": "s64", "u32": "u64", "u16": "u32", "s16": "s32"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARE |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
FLOAT8 = {"e4m3x2": "float8_e4m3fn", "e5m2x2": "float8_e5m2"}
BINARY = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
IGNORED: tuple[str, ...] = ("griddepcontrol.launch", "fence", "membar", "prefetch", "wgmma.fence")
"""Without an effect here: blocks run one after another, and memory is coherent.

But for fence.proxy.async: the copy engine must not read what threads wrote and did not fence."""
COLLECTIVE: tuple[str, ...] = ("shfl", "mma", "ldmatrix", "movmatrix", "wgmma", "bar", "vote")
COLLECTIVE += ("stmatrix", "setmaxnreg")
STOPS: tuple[str, ...] = ("bar.sync", "barrier.sync", "barrier.cluster.wait", "mbarrier.try_wait")
STOPS += ("wgmma.wait", "setmaxnreg")
SCALARS: dict[str, Any] = {
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
}


class UnknownInstruction(Exception):
    """An instruction that the translation does not have."""


@dataclass
class Block:
    """Instructions without a jump in between."""

    run: Callable[[Any, Any], None]
    collective: bool
    first: int


@cache
def translate(kernel: Kernel) -> list[Block]:
    """Translates a kernel, once.

    Raises:
        UnknownInstruction: If it holds an instruction that is not known.
    """
    return Translator(kernel).blocks()


class Translator:
    """Writes the functions of one kernel."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.index = {name: i for i, name in enumerate(kernel.registers)}
        self.constants: dict[str, Any] = {}
        starts = {0, *kernel.labels.values()}
        for i, instruction in enumerate(kernel.code):
            if instruction.op.startswith(("bra", "ret", "exit", *STOPS)):
                starts.add(i + 1)
        self.starts = sorted(s for s in starts if s < len(kernel.code))
        self.number = {start: i for i, start in enumerate(self.starts)}
        self.end = len(self.starts)

    def blocks(self) -> list[Block]:
        lines, collective = [], []
        for i, start in enumerate(self.starts):
            stop = self.starts[i + 1] if i + 1 < self.end else len(self.kernel.code)
            code = self.kernel.code[start:stop]
            lines.append(f"def b{i}(g, m):")
            body = [f" g.go({i + 1}, m)"]
            for instruction in code:
                body += [" " + line for line in self.line(instruction)]
            text = "\n".join(body)
            for view in ("u16", "s16", "f16", "u32", "s32", "f32", "u64", "s64", "f64", "p"):
                if re.search(rf"\b{view}\[", text):
                    lines.append(f" {view} = g.{view}")
            lines += body
            collective.append(any(c.op.startswith(COLLECTIVE) for c in code))
        scope: dict[str, Any] = dict(vars(semantics)) | self.constants
        exec(compile("\n".join(lines), self.kernel.name, "exec"), scope)
        return [
            Block(scope[f"b{i}"], whole, start)
            for i, (start, whole) in enumerate(zip(self.starts, collective, strict=True))
        ]

    # Operands

    def constant(self, value: Any) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def value(self, arg: str, kind: str) -> str:
        """Gives an expression of an operand read as a type such as u32, or p."""
        if arg in self.index:
            i, size = self.index[arg], self.kernel.registers[arg]
            if kind == "p":
                return f"p[{i}]"
            if kind == "bf16":
                return f"from_bf16(u16[{i}])"
            if size == SIZES[kind]:
                return f"{kind}[{i}]"
            return f"u{8 * size}[{i}].astype(np.{NUMPY[kind[0]]}{kind[1:]})"
        if kind == "p":
            return self.constant(np.bool_(int(arg) != 0))
        if arg.startswith("%"):
            return f"g.special({arg!r}).astype(np.{NUMPY[kind[0]]}{kind[1:]})"
        if arg[:2] in ("0f", "0F"):
            bits = np.uint32(int(arg[2:], 16))
            return self.constant(bits.view(np.float32) if kind == "f32" else bits)
        if arg[:2] in ("0d", "0D"):
            double = np.uint64(int(arg[2:], 16))
            return self.constant(double.view(np.float64) if kind == "f64" else double)
        size = SIZES[kind]
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", arg):
            number = int(arg.rstrip("U"), 0)
        elif arg in self.kernel.shared:
            return f"g.shared_address({self.kernel.shared[arg]}, np.uint{8 * size})"
        elif arg in self.kernel.local:
            number = self.kernel.local[arg]
        elif arg in self.kernel.parameters:
            number = list(self.kernel.parameters).index(arg) << 20
        else:
            raise UnknownInstruction(f"{self.kernel.name}: an operand that is not known: {arg}")
        unsigned = SCALARS[f"u{8 * size}"](number & ((1 << 8 * size) - 1))
        if kind[0] == "s":
            unsigned = unsigned.view(f"int{8 * size}")
        elif kind[0] == "f":
            unsigned = unsigned.view(f"float{8 * size}")
        return self.constant(unsigned)

    def put(self, arg: str, value: str, kind: str) -> str:
        """Writes a value of a type into a register, which may be wider."""
        if arg == "_":
            return f"{value}"
        i, size = self.index[arg], self.kernel.registers[arg]
        if kind == "p":
            return f"copyto(p[{i}], {value}, where=w)"
        if kind == "bf16":
            kind = "u16"
        if size != SIZES[kind]:
            kind = f"{'s' if kind[0] == 's' else 'u'}{8 * size}"
        return f"copyto({kind}[{i}], {value}, where=w, casting='unsafe')"

    def address(self, arg: str, space: str) -> str:
        """Gives an expression of an address in the one space that memory.py has."""
        base, sign, offset = re.fullmatch(r"\[([%\w#$]+?)(?:(\+)(-?\d+))?\]", arg).groups()  # type: ignore[union-attr]
        size = self.kernel.registers.get(base, 8)
        where = f"{self.value(base, f'u{8 * size}')}.astype(np.int64)"
        if sign and int(offset):
            where += f" + {int(offset)}"
        if space.startswith("shared"):
            return f"g.in_shared({where})"
        return f"g.in_local({where})" if space == "local" else where

    # Instructions

    def line(self, i: Instruction) -> list[str]:
        """Translates one instruction."""
        fences = i.op.startswith("fence.proxy.async")
        if i.op.startswith((*IGNORED, "bar.warp")) and not fences:
            return []
        guard = "w = m"
        if i.guard:
            guard = f"w = m & {'~' if i.negated else ''}{self.value(i.guard, 'p')}"
        if fences:
            return [guard, "g.fence_async(w)"]
        try:
            return [guard, *self.semantics(i)]
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise UnknownInstruction(f"{self.kernel.name}: {i.op} {', '.join(i.args)}") from error

    def semantics(self, i: Instruction) -> list[str]:
        parts, a = i.parts, i.args
        base, kind = parts[0], TYPES.get(parts[-1], parts[-1])
        if base in ("prmt", "shf", "lop3", "bfe"):
            kind = "u32"
        v = self.value

        def results(call: str, args: str, kind: str) -> list[str]:
            names = args.strip("{}").split(",")
            puts = [self.put(n, f"r[{j}]", kind) for j, n in enumerate(names)]
            return [f"r = {call}", *puts]

        def registers(args: str, kind: str) -> str:
            return "[" + ", ".join(v(n, kind) for n in args.strip("{}").split(",")) + "]"

        if base == "griddepcontrol":
            return ["g.dependencies(w)"]
        if base == "bra":
            return [f"g.go({self.number.get(self.kernel.labels[a[0]], self.end)}, w)"]
        if base in ("ret", "exit"):
            return [f"g.go({self.end}, w)"]
        if base == "ld":
            return self.load(i)
        if base in ("st", "atom", "red"):
            if parts[:2] == ["st", "async"]:
                return self.asynchronous(i)
            return self.store(i) if base == "st" else self.atomic(i)
        if base in ("bar", "barrier", "mbarrier", "cp", "wgmma", "mapa", "setmaxnreg"):
            return self.asynchronous(i)
        if base == "shfl":
            targets = a[0].split("|")
            d, rest = (a[0], a[1:]) if len(a) == 5 else (a[0], a[2:])
            source = ", ".join(v(x, "u32") for x in rest[:3])
            lines = [f"r = g.shuffle({parts[2]!r}, {source}, w)", self.put(d, "r[0]", "u32")]
            return lines + ([self.put(a[1], "r[1]", "p")] if len(a) == 6 and targets else [])
        if base == "mma":
            kinds = (parts[3], parts[-3])
            c = registers(a[3], "f32")
            return results(
                f"mma({kinds!r}, {registers(a[1], 'u32')}, {registers(a[2], 'u32')}, {c})",
                a[0],
                "f32",
            )
        if base == "ldmatrix":
            count = len(a[0].split(","))
            where = self.address(a[1], "shared")
            return results(f"g.matrices({where}, {count}, {'trans' in parts}, w)", a[0], "u32")
        if base == "stmatrix":
            where, turned = self.address(a[0], "shared"), "trans" in parts
            return [f"g.put_matrices({where}, {registers(a[1], 'u32')}, {turned}, w)"]
        if base == "movmatrix":
            return [self.put(a[0], f"transposed({v(a[1], 'u32')})", "u32")]
        if base == "popc":
            return [self.put(a[0], f"popc({v(a[1], 'u32')})", "u32")]
        if base == "vote":
            if parts[2] != "ballot":
                raise KeyError(i.op)
            return [self.put(a[0], f"g.ballot({v(a[1], 'p')}, w)", "u32")]
        if base == "mov":
            return self.move(i, kind)
        if base == "cvt":
            return self.convert(i)
        if base == "cvta":
            if "param" in parts:
                return [self.put(a[0], f"{v(a[1], 'u64')} + PARAMETERS", "u64")]
            if "to" not in parts and ("local" in parts or "shared" in parts):
                space = "local" if "local" in parts else "shared"
                where = f"g.in_{space}({v(a[1], 'u64')}.astype(np.int64))"
                return [self.put(a[0], where, "u64")]
            if "global" in parts:
                return [self.put(a[0], v(a[1], "u64"), "u64")]
            raise KeyError(base)
        if base == "setp":
            return self.compare(i, kind)
        if base == "selp":
            return [
                self.put(a[0], f"np.where({v(a[3], 'p')}, {v(a[1], kind)}, {v(a[2], kind)})", kind)
            ]
        wide = "mul mad".split().count(base) and "wide" in parts
        to = WIDER[kind] if wide else {"pred": "p", "u16x2": "u32", "s16x2": "u32"}.get(kind, kind)
        return [self.put(a[0], self.arithmetic(i, kind), to)]

    def arithmetic(self, i: Instruction, kind: str) -> str:
        parts, a = i.parts, i.args
        base = parts[0]
        real = kind.startswith("f")
        if kind in ("u16x2", "s16x2") and base in ("max", "min"):
            half = kind[:3]
            x, y = (f"{self.value(n, 'u32')}.view(np.{NUMPY[half[0]]}16)" for n in a[1:3])
            return f"np.{base}imum({x}, {y}).view(np.uint32)"
        if kind == "pred":
            x = self.value(a[1], "p")
            if base == "not":
                return f"~{x}"
            return f"{x} {BINARY[base]} {self.value(a[2], 'p')}"
        x = self.value(a[1], kind)
        if base in ("neg", "abs", "not"):
            return {"neg": f"-{x}", "abs": f"np.abs({x})", "not": f"~{x}"}[base]
        if real and base in semantics.UNARY:
            if "ftz" in parts:
                return f"flushed(UNARY[{base!r}](flushed({x})))"
            return f"UNARY[{base!r}]({x})"
        y = self.value(a[2], "u32" if base in ("shl", "shr") else kind)
        if base in BINARY:
            return f"{x} {BINARY[base]} {y}"
        if base == "mul" and "wide" in parts:
            return f"widened({x}) * widened({y})"
        if base == "mul" and "hi" in parts:
            return f"high({x}, {y})"
        if base == "mul":
            return f"{x} * {y}"
        if base == "mad":
            if "wide" in parts:
                return f"widened({x}) * widened({y}) + {self.value(a[3], WIDER[kind])}"
            return f"{x} * {y} + {self.value(a[3], kind)}"
        if base == "fma":
            return f"fma({x}, {y}, {self.value(a[3], kind)})"
        if base in ("div", "rem"):
            return f"{x} / {y}" if real else f"{base}_integers({x}, {y})"
        if base in ("min", "max"):
            # 9.7.3.11: a NaN loses against a number, unless .NaN.
            name = f"np.f{base}" if real and "NaN" not in parts else f"np.{base}imum"
            text = f"{name}({x}, {y})"
            return f"np.maximum({text}, 0)" if "relu" in parts else text
        if base == "copysign":
            return f"np.copysign({y}, {x})"
        if base in ("shl", "shr"):
            return f"{base}({x}, {y})"
        if base == "prmt":
            z = self.value(a[3], "u32")
            return f"permute({x}, {y}, {z}, {parts[2] if len(parts) > 2 else ''!r})"
        if base == "bfe":
            rest = ", ".join(self.value(n, "u32") for n in a[2:])
            return f"bfe({parts[-1]!r}, {x}, {rest})"
        if base in ("shf", "lop3"):
            rest = ", ".join(self.value(n, "u32") for n in a[3:])
            return f"{base}({', '.join(map(repr, parts[1:-1]))}, {x}, {y}, {rest})"
        raise KeyError(base)

    def compare(self, i: Instruction, kind: str) -> list[str]:
        x, y = self.value(i.args[1], kind), self.value(i.args[2], kind)
        how = i.parts[1]
        if kind.startswith("f") or kind == "bf16":
            nan = f"(np.isnan({x}) | np.isnan({y}))"
            if how in ("nan", "num"):
                return [self.put(i.args[0], nan if how == "nan" else f"~{nan}", "p")]
            unordered = how[-1] == "u" and how[:-1] in COMPARE
            text = f"({x} {COMPARE[how[:-1] if unordered else how]} {y})"
            text += f" | {nan}" if unordered else f" & ~{nan}"
        else:
            text = f"{x} {COMPARE[how]} {y}"
        return [self.put(i.args[0], text, "p")]

    def move(self, i: Instruction, kind: str) -> list[str]:
        to, source = i.args
        if kind == "pred":
            return [self.put(to, self.value(source, "p"), "p")]
        if source.startswith("{"):
            names = source[1:-1].split(",")
            half = f"u{8 * SIZES[kind] // len(names)}"
            values = ", ".join(self.value(n, half) for n in names)
            return [self.put(to, f"packed([{values}], np.uint{kind[1:]})", kind)]
        if to.startswith("{"):
            names = to[1:-1].split(",")
            bits = 8 * SIZES[kind] // len(names)
            lines = [f"x = {self.value(source, kind)}"]
            for j, name in enumerate(names):
                lines.append(self.put(name, f"x >> np.uint{kind[1:]}({j * bits})", f"u{bits}"))
            return lines
        return [self.put(to, self.value(source, kind), kind)]

    def convert(self, i: Instruction) -> list[str]:
        to, source = i.parts[-2], i.parts[-1]
        a = i.args
        if i.parts[1] == "pack":
            both = f"{self.value(a[1], 's32')}, {self.value(a[2], 's32')}"
            packed = f"pack_saturated({i.parts[3]!r}, {both}, {self.value(a[3], 'u32')})"
            return [self.put(a[0], packed, "u32")]
        if to in ("e4m3x2", "e5m2x2"):
            high, low = (f"to_float8({self.value(n, 'f32')}, {FLOAT8[to]!r})" for n in a[1:3])
            return [self.put(a[0], f"packed([{low}, {high}], np.uint16)", "u16")]
        if source in ("e4m3x2", "e5m2x2"):
            table = f"FLOAT8[{FLOAT8[source]!r}].astype(np.float16).view(np.uint16)"
            x = self.value(a[1], "u16")
            numbers = f"{table}[{x} & 255], {table}[{x} >> 8]"
            return [self.put(a[0], f"packed([{numbers}], u32_)", "u32")]
        if to in ("bf16x2", "f16x2"):
            rounded = f"to_{to[:-2]}"
            high, low = (self.value(n, "f32") for n in a[1:3])
            if "relu" in i.parts:
                high, low = f"np.maximum({high}, 0)", f"np.maximum({low}, 0)"
            return [self.put(a[0], f"packed([{rounded}({low}), {rounded}({high})], u32_)", "u32")]
        source, to = TYPES.get(source, source), TYPES.get(to, to)
        x = self.value(a[1], source)
        if to == "bf16" or (to == "f16" and source == "f32"):
            return [self.put(a[0], f"to_{to}({x})", "u16")]
        if to == "tf32":
            return [self.put(a[0], f"to_tf32({x})", "u32")]
        whole = {"rzi": "trunc", "rmi": "floor", "rpi": "ceil", "rni": "rint"}.get(i.parts[1])
        if source[0] == "f" and whole:
            x = f"np.{whole}({x})"
        if to[0] in "us" and source[0] == "f":
            return [self.put(a[0], f"to_integers({x}, '{NUMPY[to[0]]}{to[1:]}')", to)]
        name = "float32" if to == "f32" else f"{NUMPY[to[0]]}{to[1:]}"
        return [self.put(a[0], f"np.asarray({x}).astype(np.{name})", to)]

    def load(self, i: Instruction) -> list[str]:
        parts, a = i.parts, i.args
        kind = TYPES.get(parts[-1], parts[-1])
        names = a[0].strip("{}").split(",")
        space = parts[1] if len(parts) > 2 else ""
        if space.startswith("param"):
            name, _, offset = a[1].strip("[]").partition("+")
            if name in self.index:
                where = f"g.parameter_address({self.address(a[1], space)})"
                return self.loaded(names, kind, f"g.parameters.load({where}")
            number = list(self.kernel.parameters).index(name)
            lines = []
            for j, target in enumerate(names):
                at = int(offset or 0) + j * SIZES[kind]
                word = f"g.parameter({number}, {at}, np.{NUMPY[kind[0]]}{kind[1:]})"
                lines.append(self.put(target, word, kind))
            return lines
        where = self.address(a[1], space if space not in ("volatile", "relaxed") else "")
        return self.loaded(names, kind, f"g.memory.load({where}")

    def loaded(self, names: Sequence[str], kind: str, call: str) -> list[str]:
        """Writes what a call gives for its address, which it ends with, into registers."""
        size = SIZES[kind]
        lines = [f"r = {call}, {size}, {len(names)}, w)"]
        for j, target in enumerate(names):
            value = f"r[{j}]" if kind[0] != "s" else f"r[{j}].view(np.int{8 * size})"
            if kind == "f32":
                value, kind = f"r[{j}]", "u32"
            lines.append(self.put(target, value, kind))
        return lines

    def store(self, i: Instruction) -> list[str]:
        parts, a = i.parts, i.args
        kind = TYPES.get(parts[-1], parts[-1])
        size = SIZES[kind]
        names = a[1].strip("{}").split(",")
        space = parts[1] if len(parts) > 2 else ""
        values = ", ".join(self.value(n, f"u{8 * size}") for n in names)
        return [f"g.memory.store({self.address(a[0], space)}, [{values}], {size}, w)"]

    def atomic(self, i: Instruction) -> list[str]:
        raise KeyError("atomics")

    def asynchronous(self, i: Instruction) -> list[str]:
        parts, a, v = i.parts, i.args, self.value
        if i.op in ("bar.sync", "barrier.sync"):
            count = v(a[1], "u32") if len(a) > 1 else "None"
            return [f"g.barrier({v(a[0], 'u32')}, {count}, w)"]
        if i.op == "bar.arrive":
            return [f"g.barrier({v(a[0], 'u32')}, {v(a[1], 'u32')}, w, waits=False)"]
        if i.op.startswith("barrier.cluster.arrive"):
            return ["g.cluster_arrive(w)"]
        if i.op.startswith("barrier.cluster.wait"):
            return ["g.cluster_barrier(w)"]
        if parts[0] == "mapa":
            return [self.put(a[0], f"mapped({v(a[1], 'u32')}, {v(a[2], 'u32')})", "u32")]
        if parts[0] == "mbarrier":
            if parts[1] == "init":
                return [f"g.mbarrier_init({v(a[0][1:-1], 'u32')}, {v(a[1], 'u32')}, w)"]
            if parts[1] == "arrive":
                bytes = v(a[2], "u32") if "expect_tx" in parts else "None"
                return [f"g.mbarrier_arrive({v(a[1][1:-1], 'u32')}, {bytes}, w)"]
            if parts[1:3] == ["try_wait", "parity"]:
                args = f"{v(a[1][1:-1], 'u32')}, {v(a[2], 'u32')}"
                return [f"g.mbarrier_wait({args}, w)", self.put(a[0], "True", "p")]
        if parts[0] == "wgmma":
            if parts[1] == "mma_async":
                indices = "None"
                if parts[2] == "sp":
                    indices = f"({v(a[3], 'u32')}, {int(a[4])})"
                    a, parts = a[:3] + a[5:], parts[:2] + parts[3:]
                names = a[0].strip("{}").split(",")
                rows = [self.index[n] for n in names]
                keep = v(a[3], "p")
                # Scales, then sides that are transposed: of 16 bits in memory both may be.
                held, halves = a[1].startswith("{"), parts[-1] in ("bf16", "f16")
                turned = (halves and not held and a[-2] == "1", halves and a[-1] == "1")
                sides = a[-2:][held:] if halves else ()
                whole = parts[5] == "s32"  # integers have no scales
                if a[4:] != (() if whole else ("1", "1", *sides)) or "satfinite" in parts:
                    raise ValueError("wgmma: operands that are scaled or transposed")
                shape, kind = parts[4], ".".join(parts[-2:]) if whole else parts[-1]
                left = self.list(a[1].strip("{}"), "u32") if held else v(a[1], "u64")
                args = f"{shape!r}, {kind!r}, {rows!r}, {left}, {v(a[2], 'u64')}"
                return [f"g.wgmma({args}, {keep}, {turned}, {indices}, w)"]
            if parts[1] == "commit_group":
                return ["g.wgmma_commit(w)"]
            if parts[1] == "wait_group":
                return [f"g.wgmma_wait({int(a[0])}, w)"]
        if parts[:2] == ["st", "async"]:
            to, barrier = v(a[0][1:-1], "u32"), v(a[2][1:-1], "u32")
            return [f"g.send({to}, {self.list(a[1].strip('{}'), 'u32')}, {barrier}, w)"]
        if parts[0] == "setmaxnreg":
            return [f"g.set_registers({int(a[0])}, {parts[1] == 'inc'}, w)"]
        if i.op.startswith("cp.async.bulk"):
            if parts[3] == "commit_group":
                return ["g.bulk_commit(w)"]
            if parts[3] == "wait_group":
                return [f"g.bulk_wait({int(a[0])}, w)"]
            if parts[3] == "tensor":
                to_global = parts[5] == "global"
                at = re.fullmatch(r"\[([%\w]+),\{(.*)\}\]", a[0 if to_global else 1])
                assert at is not None
                map_, where = v(at.group(1), "u64"), self.list(at.group(2), "s32")
                if to_global:
                    return [f"g.bulk_store({map_}, {where}, {v(a[1][1:-1], 'u32')}, w)"]
                offsets = self.list(a[3].strip("{}"), "u16") if "im2col" in parts else "[]"
                barrier, to = v(a[2][1:-1], "u32"), v(a[0][1:-1], "u32")
                return [f"g.bulk_load({to}, {map_}, {where}, {barrier}, {offsets}, w)"]
            if parts[3:5] == ["shared::cluster", "global"]:
                to, source, barrier = (
                    v(a[0][1:-1], "u32"),
                    v(a[1][1:-1], "u64"),
                    v(a[3][1:-1], "u32"),
                )
                return [f"g.bulk_bytes({to}, {source}, {v(a[2], 'u32')}, {barrier}, w)"]
        if parts[:2] == ["cp", "async"]:
            if parts[2] == "commit_group":
                return ["g.copies_commit(w)"]
            if parts[2] == "wait_group":
                return [f"g.copies_wait({int(a[0])}, w)"]
            if parts[2] == "wait_all":
                return ["g.copies_commit(w)", "g.copies_wait(0, w)"]
            if parts[2] in ("cg", "ca"):
                size = v(a[3], "u32") if len(a) > 3 else "None"
                to, source = self.address(a[0], "shared"), self.address(a[1], "global")
                return [f"g.copy({to}, {source}, {int(a[2])}, {size}, w)"]
        raise KeyError(i.op)

    def list(self, names: str, kind: str) -> str:
        return "[" + ", ".join(self.value(n, kind) for n in names.split(",")) + "]"
