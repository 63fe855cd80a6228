"""Reads PTX as LLVM writes it, and the inline assembly in it (PTX ISA 8.0, chapter 4)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

SIZES = {"pred": 0, "b8": 1, "b16": 2, "b32": 4, "f32": 4, "b64": 8, "f64": 8}


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``@!p op a, b, {c, d}, [e+4]``."""

    op: str
    args: tuple[str, ...]
    guard: str = ""
    negated: bool = False

    @property
    def parts(self) -> list[str]:
        return self.op.split(".")


@dataclass(eq=False)
class Kernel:
    """An entry: its parameters' bytes, registers, variables and code."""

    name: str
    parameters: dict[str, int]
    registers: dict[str, int] = field(default_factory=dict)  # bytes; 0 for a predicate
    shared: dict[str, int] = field(default_factory=dict)  # offsets; the extern one follows them
    shared_bytes: int = 0
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    threads: int = 0  # the most that a block may have, if the kernel says so
    blocks: int = 1  # that share a multiprocessor, at least
    text: str = ""  # the module, if nothing of it was changed


def texts(binary: Path) -> Iterator[str]:
    """Finds the PTX in a program that Mojo has built: one text a kernel."""
    for match in re.finditer(rb"\.version [^\x00]*", binary.read_bytes()):
        text = match.group().decode()
        if ".entry" in text:
            yield text


def parse(module: str) -> Kernel:
    """Reads the one entry of a PTX module.

    Raises:
        ValueError: If a line is not understood.
    """
    text = re.sub(r"//[^\n]*", "", module)
    entry = re.search(r"\.entry\s+(\S+?)\s*\((.*?)\)(.*?)\{(.*)\}", text, re.DOTALL)
    if entry is None:
        raise ValueError("PTX without an entry")
    name, parameters, directives, body = entry.groups()
    sizes = {}
    for kind, variable, count in re.findall(
        r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr(?:\s+\.\w+(?:\s+\d+)?)*\s+)?"
        r"(\w+)(?:\[(\d+)\])?",
        parameters,
    ):
        sizes[variable] = SIZES["b" + kind[1:]] * int(count or 1)
    kernel = Kernel(name, sizes, text=module)
    if bound := re.search(r"\.maxntid\s+(\d+)", directives):
        kernel.threads = int(bound.group(1))
    if least := re.search(r"\.minnctapersm\s+(\d+)", directives):
        kernel.blocks = int(least.group(1))
    externs = re.findall(r"\.extern\s+\.shared[^;]*?(\w+)\[\]", text[: entry.start()])
    _body(kernel, body)
    for variable in externs:
        kernel.shared[variable] = kernel.shared_bytes
    return kernel


def without(kernel: Kernel, pattern: str) -> Kernel:
    """Copies a kernel without some instructions."""
    nothing = Instruction("griddepcontrol.wait", ())
    code = []
    for i in kernel.code:
        if re.match(pattern, i.op):
            i = Instruction("mov.pred", (i.args[0], "1")) if "try_wait" in i.op else nothing
        code.append(i)
    assert code != kernel.code, f"{kernel.name} has no {pattern}"
    return replace(kernel, code=code, text="")


def _body(kernel: Kernel, body: str) -> None:
    # Braces inside give registers and labels a scope: inline assembly repeats their names.
    scopes: list[dict[str, str]] = []
    count = 0
    # The braces of vector operands are never the only thing of a line, and hold registers.
    body = re.sub(r"(?m)^\s*\{(?!%)", " ; #open ; ", body)
    body = re.sub(r"(?m)^\s*\}\s*$", " ; #close ; ", body)
    for part in body.split(";"):
        line = part.strip()
        while match := re.match(r"([$\w]+):\s*", line):
            kernel.labels[_renamed(match.group(1), scopes, count)] = len(kernel.code)
            line = line[match.end() :]
        if line == "#open":
            count += 1
            scopes.append({"": str(count)})
        elif line == "#close":
            scopes.pop()
        elif line.startswith(".reg"):
            _registers(kernel, line, scopes)
        elif line.startswith((".shared", ".local")):
            _variable(kernel, line)
        elif line.startswith("."):
            if not line.startswith((".loc", ".pragma", ".file")):
                raise ValueError(f"{kernel.name}: a directive that is not known: {line}")
        elif line:
            kernel.code.append(_instruction(line, scopes))


def _renamed(name: str, scopes: list[dict[str, str]], count: int) -> str:
    if name.startswith("$") or not scopes:
        return name
    return f"{name}#{scopes[-1]['']}"


def _registers(kernel: Kernel, line: str, scopes: list[dict[str, str]]) -> None:
    match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", line, re.DOTALL)
    if match is None:
        raise ValueError(f"{kernel.name}: registers that are not understood: {line}")
    size = SIZES["b" + match.group(1)[1:] if match.group(1) != "pred" else "pred"]
    for name in match.group(2).split(","):
        name = name.strip()
        if many := re.fullmatch(r"(%\w+)<(\d+)>", name):
            for i in range(int(many.group(2))):
                kernel.registers[f"{many.group(1)}{i}"] = size
        else:
            if scopes:
                scopes[-1][name] = name = f"{name}#{scopes[-1]['']}"
            kernel.registers[name] = size


def _variable(kernel: Kernel, line: str) -> None:
    match = re.fullmatch(
        r"\.(shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([$\w]+)\[(\d+)\]", line
    )
    if match is None:
        raise ValueError(f"{kernel.name}: a variable that is not understood: {line}")
    space, align, kind, name, count = match.groups()
    step = int(align or 1)
    size = SIZES[kind] * int(count)
    if space == "shared":
        kernel.shared[name] = -(-kernel.shared_bytes // step) * step
        kernel.shared_bytes = -(-(kernel.shared[name] + size) // 16) * 16
    else:
        kernel.local[name] = -(-kernel.local_bytes // step) * step
        kernel.local_bytes = -(-(kernel.local[name] + size) // 16) * 16


def _instruction(line: str, scopes: list[dict[str, str]]) -> Instruction:
    guard, negated = "", False
    if match := re.match(r"@(!?)([%\w]+)\s+", line):
        guard, negated = match.group(2), bool(match.group(1))
        line = line[match.end() :]
    op, _, rest = line.replace("\t", " ").replace("\n", " ").partition(" ")
    names = {}
    for scope in scopes:
        names.update({k: v for k, v in scope.items() if k})
    if scopes:
        if op == "bra":
            rest = rest.strip()
            rest = rest if rest.startswith("$") else f"{rest}#{scopes[-1]['']}"
        for old, new in names.items():
            rest = re.sub(rf"(?<![%\w]){old}(?![\w#])", new, rest)
        guard = names.get(guard, guard)
    args = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+", rest)
    return Instruction(op, tuple(re.sub(r"\s+", "", arg) for arg in args), guard, negated)
