"""What command lines share: one parser, how a mistake is told, and the values that several take.

Nothing heavy is imported here, so that ``--help``, a mistake and the completion of a shell take no
time.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from maxvision.common.console import complain
from maxvision.common.errors import ArgumentError
from maxvision.common.host import use_cores

DEFAULT_MODEL = "efficientnet-lite0"
"""The model that runs where none is named; it knows ImageNet's 1,000 classes."""
MODEL = (
    "a name that --list-models shows, a hub id, a folder or a file, or what maxvision compile wrote"
)
"""What ``--model`` takes."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
SPARSE = ("auto", "always", "never")
"""What runs pruned layers: sparse convolutions where they are faster, always, or never."""

DECODE = ("auto", "cpu", "gpu", "fast")
"""Where JPEGs are decoded; fast is on the CPU, large ones at a fraction of their size."""

ALIASES = {
    **dict.fromkeys(("fp32", "f32", "float", "single", "tf32"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("exact", "pillow", "host"), "cpu"),
    **dict.fromkeys(("cuda", "nvidia", "rocm", "hip", "amd", "nvjpeg"), "gpu"),
    **dict.fromkeys(("h100", "h200", "gh200", "hopper"), "sm_90a"),
    **dict.fromkeys(("b200", "gb200", "blackwell"), "sm_100a"),
    **dict.fromkeys(("a100", "ampere"), "sm_80"),
    **dict.fromkeys(("l4", "l40", "l40s", "ada"), "sm_89"),
    **dict.fromkeys(("mi300", "mi300x", "mi300a"), "gfx942"),
    **dict.fromkeys(("mi350", "mi355x"), "gfx950"),
    **dict.fromkeys(("mi200", "mi250", "mi250x"), "gfx90a"),
    **dict.fromkeys(("avx2", "cpu:avx2"), "cpu:x86-64-v3"),
    **dict.fromkeys(("avx512", "avx-512", "cpu:avx512"), "cpu:x86-64-v4"),
}
"""What others call the values of our options, or the GPUs that targets stand for."""


def meant(word: str, known: Iterable[str]) -> str:
    """Tells which of the known words somebody seems to have meant.

    Args:
        word: What came.
        known: What could have come.

    Returns:
        ``"; did you mean float16?"``, to go on with in a message; nothing if no word is near.
    """
    words = list(known)
    found = _nearest(word, words)
    if not found and ":" in word:  # cuda:1 is gpu:1
        kind, _, number = word.partition(":")
        near = _nearest(kind, words)
        found = f"{near}:{number}" if near == "gpu" and number.isdecimal() else ""
    return f"; did you mean {found}?" if found else ""


def _nearest(word: str, known: Sequence[str]) -> str:
    import difflib

    plain = _plain(word)
    if (alias := ALIASES.get(word.strip().lower(), "")) in known:
        return alias
    same = [each for each in known if _plain(each) == plain]
    begun = [each for each in known if len(plain) > 1 and _plain(each).startswith(plain)]
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.7)
    return next(iter([*same, *(begun[:1] if len(begun) == 1 else []), *close, *begun]), "")


def _plain(word: str) -> str:
    return re.sub(r"[-_ ]", "", word.lower())


def device(text: str) -> str:
    """Takes the name of a device: auto, cpu, gpu or gpu:N."""
    if not re.fullmatch(r"auto|cpu|gpu(:\d{1,4})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"takes auto, cpu, gpu or gpu:N, not {text!r}{meant(text, ('auto', 'cpu', 'gpu'))}"
        )
    return text


def whole(low: int, high: int) -> Callable[[str], int]:
    """Makes what takes a whole number from ``low`` to ``high``."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"\d{1,12}", text, re.ASCII) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(
                f"takes a whole number from {low} to {high}, not {text!r}"
            )
        return int(text)

    return convert


class _Threads(argparse.Action):
    """Keeps the process to so many cores; leaves nothing in the namespace."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            use_cores(values)
        except ArgumentError as problem:
            raise argparse.ArgumentError(self, str(problem)) from None


SHARED: dict[str, dict[str, Any]] = {
    "revision": {"metavar": "R", "help": "branch, tag or commit of a hub model"},
    "labels": {
        "metavar": "FILE",
        "help": "names for the classes: a text file with one a line, or a .json file with a list or"
        " with id2label (default: the model's own)",
    },
    "device": {
        "default": "auto",
        "type": device,
        "metavar": "D",
        "help": "auto, cpu, gpu or gpu:N (default: auto, a GPU if there is one)",
    },
    "dtype": {
        "default": "auto",
        "choices": DTYPES,
        "help": "precision of the model (default: auto, float32)",
    },
    "tf32": {
        "dest": "tf32",
        "action": "store_false",
        "help": "multiply float32 exactly on a GPU; else NVIDIA's tensor cores round it to TF32",
    },
    "sparse": {
        "default": "auto",
        "choices": SPARSE,
        "help": "what runs a pruned model's layers: sparse convolutions where they were measured"
        " to be faster (auto), always, or never",
    },
    "decode": {
        "default": "auto",
        "choices": DECODE,
        "help": "where JPEGs are decoded: gpu, which needs the extra nvjpeg; cpu; fast, on the CPU,"
        " large ones at a half, a quarter or an eighth of their size, where that is at least twice"
        " what the model reads (default: auto, on the model's GPU if the extra is installed)",
    },
    "threads": {
        "action": _Threads,
        "type": whole(1, 65_536),
        "default": argparse.SUPPRESS,
        "metavar": "N",
        "help": "cores to use, for decoding and for a model on a CPU (default: all that the"
        " process's affinity and its container's quota leave it)",
    },
    "passes": {
        "default": "all",
        "metavar": "P",
        "help": "how the network is rewritten: all, none, -stem,-chain (all but these) or qkv,mlp;"
        " finds the one to blame for an answer",
    },
}
"""The options that several commands have, for ``Parser.add_shared``."""


class Parser(argparse.ArgumentParser):
    """A parser that tells a mistake in a sentence, with what was perhaps meant, and exits with 2.

    Every command has ``--debug``, which ``console.exit_code`` obeys. Options are not abbreviated.

    Attributes:
        called: The command that --help goes behind, where the program's name alone is another.
    """

    called = ""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        if "\n" in settings.get("description", ""):  # it has lines of its own
            settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*arguments, **{**settings, "allow_abbrev": False})
        self._mixed = False
        self.named: Callable[[str], str] = str  # how a mistake names an option
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,  # or a command would undo what stands before its name
            help="show a traceback in place of an error's sentence",
        )

    def add_shared(self, *names: str) -> None:
        """Adds options that several commands have: names of ``SHARED``."""
        for name in names:
            option = "--no-tf32" if name == "tf32" else f"--{name}"
            self.add_argument(option, **SHARED[name])

    def error(self, message: str) -> NoReturn:
        """Says what is wrong and where the options are listed, and exits with 2."""
        told = re.sub(r"^argument ([^:]+): ", lambda of: f"{self.named(of[1])}: ", message)
        complain(told.replace(": takes ", " takes ", 1))
        complain(f"{self.called or self.prog} --help lists what it takes", kind="")
        self.exit(2)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses; what is left over is a mistake here already, where the options are known."""
        namespace, left = super().parse_known_args(args, namespace)
        if left and not self._mixed:
            self._refuse(left)
        return namespace, left

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses options and images in any order, in two steps, of which the first leaves some."""
        self._mixed = True
        args = list(sys.argv[1:] if args is None else args)
        if "--" in args:  # what follows are files; argparse loses the mark in its second step
            at = args.index("--")
            after = [f"./{each}" if each[:1] == "-" != each else each for each in args[at + 1 :]]
            args[at:] = after
        try:
            namespace, left = super().parse_known_intermixed_args(args, namespace)
        finally:
            self._mixed = False
        if left:
            self._refuse(left)
        return namespace, left

    def _refuse(self, left: Sequence[str]) -> NoReturn:
        option = next((word.partition("=")[0] for word in left if word.startswith("-")), "")
        known = [name for name in self._option_string_actions if name.startswith("--")]
        if not option:
            hint = f"; did you mean --model {left[0]}?" if "--model" in known else ""
            self.error(f"unrecognized argument: {left[0]}{hint}")
        hint = meant(option, known)
        if os.path.exists(option):
            hint = f"; for the file of that name write ./{option}"
        elif len(option) == 2:  # as other programs abbreviate it
            of = [name for name in known if name.startswith(f"-{option}")]
            hint = f"; did you mean {of[0]}?" if len(of) == 1 else ""
        self.error(f"there is no option {option}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(
            action, f"{value!r} is none of {', '.join(known)}{meant(str(value), known)}"
        )


def number(low: float, high: float) -> Callable[[str], float]:
    """Makes what takes a number from ``low`` to ``high``."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"takes a number from {low} to {high}, not {text!r}")
        return value

    return convert


def names(text: str) -> list[str]:
    """Takes names with commas between them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def counts(text: str) -> list[int]:
    """Takes whole numbers of at least 1, with commas between them."""
    numbers = [int(part) if re.fullmatch(r"\d{1,6}", part, re.ASCII) else 0 for part in names(text)]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(
            f"takes whole numbers of at least 1, such as 1,16, not {text!r}"
        )
    return numbers
