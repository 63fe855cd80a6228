"""What rewrites a program for a device: each pass by its name, in this order.

| pass             | what becomes of what                                                         |
| ---------------- | ---------------------------------------------------------------------------- |
| constants        | ops on weights alone run when the model loads                                |
| written_out      | activations, layer norms and RMS norms written out in smaller ops: one op    |
| bias             | a vector added behind a product: its bias                                    |
| batch_norm       | a convolution and its batch norm: one convolution                            |
| attention        | attention, written out or not, with its masks: one op on tokens [N, T, C]    |
| common           | ops that compute the same of the same values, as of a mask: one              |
| channels_last    | images as [N, H, W, C]; permutes that cancel out go; tokens as they lie      |
| concats          | more values put together than a launch takes, most of which are already: few |
| scale            | a constant by channel behind a product, as LayerScale: into its weights      |
| tokens           | a class token put before others, the norm of the first token: one op each    |
| sparse           | layers that run on their nonzeros; on Hopper groups, and few filters         |
| epilogues        | + residual and an activation behind a product: its epilogue                  |
| squeeze_excite   | a mean of images, two products of it, and the images times that: one op      |
| stem             | pixels, first convolution, and activation, max pool or layer norm: one op    |
| patches          | a convolution of patches that touch: one of their rows, as wider channels    |
| eight_bit        | products of rounded values and weights: of 8-bit integers, stored as such    |
| shortcut         | a residual block's last convolution and its shortcut's: one op               |
| chain            | a block's last 1 x 1 and the next one's first: one op                        |
| stem_chain       | a ResNet's stem and the first block's 1 x 1: one op                          |
| qkv              | the linear layers of query, key and value: one op                            |
| depthwise        | a norm and depthwise convolutions into query, key and value: one op          |
| norms            | layer norms between linear layers, on Hopper: part of these                  |
| mlp              | an MLP of normalised tokens: one op                                          |
| projection       | attention to few keys and the linear layer behind it, on Hopper: one op      |
| means            | a convolution of 1 x 1 and the mean of its small images, on Hopper: one op   |
| rounded          | results of which only 8 bits are read, on Hopper: stored as such             |
| rows             | rows put in another place, as of windows, their norms and sums: one op       |
| align            | axes of linear layers that Hopper's copy engine does not take: padded        |
| casts            | casts, past moves, beside expressions, sums and layer norms: part of them    |
| pointwise        | batch norms that are left and elementwise ops in a row: one expression       |
| reductions       | expressions that are reduced, and on GPUs what follows by channel: one op    |
| concat_pointwise | values put together and an expression of all by channel: one op              |
| foreach          | casts of weights or gradients, and other small ops of one expression: one op |

A program means the same before and after a pass, and runs with any of them left out: that finds
the one to blame for a wrong answer (``--passes``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection

from maxvision.common.errors import ArgumentError
from maxvision.graphs.backend import Backend
from maxvision.graphs.passes import (
    align,
    eight_bit,
    elementwise,
    fold,
    foreach,
    fuse,
    heads,
    layout,
    norms,
    reductions,
    rows,
    written,
)
from maxvision.graphs.program import Program

Pass = Callable[[Program, Backend], Program]


PASSES: dict[str, Pass] = {
    "constants": fold.constants,
    "written_out": written.written_out,
    "bias": fold.bias,
    "batch_norm": fold.batch_norm,
    "attention": heads.attention,
    "common": fold.common,
    "channels_last": layout.channels_last,
    "concats": layout.concats,
    "scale": fold.scale,
    "tokens": fuse.tokens,
    "sparse": fuse.sparse,
    "epilogues": fuse.epilogues,
    "squeeze_excite": fuse.squeeze_excite,
    "stem": fuse.stem,
    "patches": fuse.patches,
    "eight_bit": eight_bit.eight_bit,
    "shortcut": fuse.shortcut,
    "chain": fuse.chain,
    "stem_chain": fuse.stem_chain,
    "qkv": fuse.qkv,
    "depthwise": fuse.depthwise,
    "norms": norms.norms,
    "mlp": fuse.mlp,
    "projection": fuse.projection,
    "means": fuse.means,
    "rounded": eight_bit.rounded,
    "rows": rows.rows,
    "align": align.align,
    "casts": elementwise.casts,
    "pointwise": elementwise.pointwise,
    "reductions": reductions.reductions,
    "concat_pointwise": elementwise.concat_pointwise,
    "foreach": foreach.foreach,
}
"""The passes by name, in their order."""
NARROW = frozenset("tokens squeeze_excite shortcut qkv depthwise rows concat_pointwise".split())
"""Those whose ops a CPU has not in float64; others are a GPU's, or in 8 bits."""


def run(program: Program, backend: Backend, off: Collection[str] = ()) -> Program:
    """Rewrites a program for a device.

    Args:
        program: A plain one.
        backend: What is known of the device.
        off: Passes to leave out.
    """
    if any(each.dtype == "float64" for each in program.inputs.values()):
        off = {*off, *NARROW}
    for name, rewrite in PASSES.items():
        if name not in off:
            program = rewrite(program, backend)
    return program


def parse(text: str) -> frozenset[str]:
    """Reads ``--passes``: ``all``, ``none``, ``-stem,-chain`` (all but these) or ``qkv,mlp``.

    Returns:
        The passes to leave out.

    Raises:
        ArgumentError: If there is no such pass.
    """
    known = list(PASSES)
    named = [part.strip() for part in text.split(",") if part.strip()]
    for name in named:
        bare = name.removeprefix("-")
        if bare not in known and name not in ("all", "none"):
            close = difflib.get_close_matches(bare, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"they are {', '.join(known)}"
            raise ArgumentError(f"--passes: there is no pass {bare!r}; {hint}")
    off = frozenset(name[1:] for name in named if name.startswith("-"))
    on = {name for name in named if not name.startswith("-")} - {"all", "none"}
    if "none" in named or (on and "all" not in named):
        return frozenset(known) - on | off
    return off
