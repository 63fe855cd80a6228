"""An autoregressive language model of the blocks of any level, and what writes texts with it.

It reads letters, and learns one sonnet by heart:

    python -m examples.levels.language --text "Shall I "            # in torch, without a cache
    maxvision convert examples.levels.language:prompt -o lm/prompt
    maxvision convert examples.levels.language:step -o lm/step
    python -m examples.levels.language lm --text "Shall I " --top-p 0.9

Converted it is two programs. ``Prompt`` computes a whole text, and gives the keys and values of its
letters. ``Step`` takes these and one more letter: it computes a letter where the model without a
cache computes all again. The caches are inputs and outputs of a fixed size.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.levels import eager
from examples.levels.modules import Norm, Transformer
from maxvision import Converted
from maxvision.common.errors import UserError

TEXT = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
Nor shall death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee.
"""
"""Shakespeare, sonnet 18."""
LETTERS = sorted(set(TEXT))
LENGTH = 64


class LanguageModel(nn.Module):
    """An autoregressive model of words, as GPT-2 (Radford et al. 2019): what comes next, by logits.

    Args:
        level: The blocks.
        words: How many there are.
        length: The longest text.
        width: Channels of a word.
        heads: Of attention.
        layers: Transformer blocks.
    """

    def __init__(
        self, level: ModuleType, words: int, length: int, width: int = 64, heads: int = 4,
        layers: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        for each in (self.embed, self.place):
            nn.init.normal_(each.weight, std=0.1)
        self.layers = nn.ModuleList(
            [Transformer(level, width, heads, causal=True) for _ in range(layers)]
        )
        self.norm, self.head = Norm(level, width), nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        """Gives logits [N, T, words] of words [N, T]: those at t are of the word after t."""
        x = self.embed(words) + self.place.weight[: words.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# --- with a cache ------------------------------------------------------------------------------


class Prompt(nn.Module):
    """A language model that also gives the keys and values of its words.

    Args:
        model: The model, at level 1.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gives logits, keys and values [N, layers, H, T, D] of words [N, T]."""
        model = self.model
        x = model.embed(words) + model.place.weight[: words.shape[1]]
        caches = []
        for layer in model.layers:
            q, k, v = heads_of(layer, x)
            x = finished(layer, x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
            caches.append((k, v))
        keys, values = (torch.stack(each, 1) for each in zip(*caches, strict=True))
        return model.head(model.norm(x)), keys, values


class Step(nn.Module):
    """A language model that computes one word of each text, with the keys and values before it.

    Args:
        model: The model, at level 1.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("places", torch.arange(model.place.num_embeddings), persistent=False)

    def forward(
        self, word: Tensor, place: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gives logits [N, words], and the caches with this word in them.

        Args:
            word: [N].
            place: Of each in its text [N]; what the caches hold from there on is not read.
            keys: [N, layers, H, T, D]; so are the values.
            values: See ``keys``.
        """
        model = self.model
        x = (model.embed(word) + model.place(place))[:, None]
        here = (self.places == place[:, None])[:, None, :, None]
        seen = (self.places <= place[:, None])[:, None, None]
        caches = []
        for i, layer in enumerate(model.layers):
            q, k, v = heads_of(layer, x)
            k, v = torch.where(here, k, keys[:, i]), torch.where(here, v, values[:, i])
            x = finished(layer, x, F.scaled_dot_product_attention(q, k, v, seen))
            caches.append((k, v))
        keys, values = (torch.stack(each, 1) for each in zip(*caches, strict=True))
        return model.head(model.norm(x))[:, 0], keys, values


def heads_of(layer: Transformer, x: Tensor) -> Any:
    """Gives queries, keys and values [N, H, T, D] of tokens x[N, T, C]."""
    n, t, c = x.shape
    qkv = layer.qkv(layer.norm1(x)).view(n, t, 3, layer.heads, c // layer.heads)
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def finished(layer: Transformer, x: Tensor, seen: Tensor) -> Tensor:
    """Computes a block from where its heads [N, H, T, D] have attended."""
    x = x + layer.out(seen.transpose(1, 2).reshape(x.shape))
    return x + layer.back(F.gelu(layer.hidden(layer.norm2(x))))


# --- writing -----------------------------------------------------------------------------------

Choose = Callable[[np.ndarray], np.ndarray]
"""Chooses a word for each text by logits [N, words]."""


def greedy(logits: np.ndarray) -> np.ndarray:
    """Chooses the most likely words."""
    return logits.argmax(-1)


def sampled(random: np.random.Generator, top_k: int | None = None, top_p: float = 1.0) -> Choose:
    """Draws words by their probabilities.

    Args:
        random: What draws.
        top_k: Draw among the so many most likely (Fan et al. 2018, arXiv:1805.04833).
        top_p: Draw among the fewest that have this probability (Holtzman et al. 2019,
            arXiv:1904.09751).
    """

    def choose(logits: np.ndarray) -> np.ndarray:
        order = np.argsort(-logits, -1, kind="stable")[:, :top_k]
        ordered = np.take_along_axis(logits, order, -1).astype(np.float64)
        shares = np.exp(ordered - ordered[:, :1])
        shares /= shares.sum(-1, keepdims=True)
        before = shares.cumsum(-1) - shares  # of what is more likely
        shares[before >= top_p] = 0
        bounds = shares.cumsum(-1)
        drawn = random.random((len(logits), 1)) * bounds[:, -1:]
        return np.take_along_axis(order, (bounds > drawn).argmax(-1)[:, None], -1)[:, 0]

    return choose


def write(
    model: Callable[[Any], Any], words: np.ndarray, count: int, choose: Choose, length: int = LENGTH
) -> np.ndarray:
    """Goes on with texts without a cache: each word costs the whole text.

    Args:
        model: Gives logits [N, T, words] of words [N, T].
        words: The texts so far [N, T].
        count: How many words to add.
        choose: What they are.
        length: The longest text that the model knows.

    Returns:
        The texts [N, T + count].

    Raises:
        ValueError: If that is longer.
    """
    _check(words, count, length)
    for _ in range(count):
        found = model(torch.from_numpy(words)).detach().numpy()
        words = np.concatenate([words, choose(found[:, -1])[:, None]], 1)
    return words


def write_cached(
    prompt: Callable[..., Any], step: Callable[..., Any], words: np.ndarray, count: int,
    choose: Choose, length: int = LENGTH,
) -> np.ndarray:  # fmt: skip
    """Does what ``write`` does with a cache; ``prompt`` and ``step`` take and give arrays."""
    _check(words, count, length)
    given = words.shape[1]
    whole = np.pad(words, [(0, 0), (0, length - given)])  # what is behind a text changes nothing
    logits, keys, values = prompt(whole)
    last = logits[:, given - 1]
    for place in range(given, given + count):
        word = choose(last)
        words = np.concatenate([words, word[:, None]], 1)
        if place + 1 < given + count:
            last, keys, values = step(word, np.full(len(words), place), keys, values)
    return words


def _check(words: np.ndarray, count: int, length: int) -> None:
    given = words.shape[1]
    if not given:
        raise ValueError("a text has to begin with something")
    if given + count > length:
        raise ValueError(f"{given} words and {count} more are beyond the longest text, {length}")


def on_arrays(module: nn.Module) -> Callable[..., Any]:
    """Makes a module of torch take and give arrays."""

    @torch.no_grad()
    def call(*given: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(each.numpy() for each in module(*map(torch.from_numpy, given)))

    return call


# --- one that has learned something ----------------------------------------------------------


def trained(steps: int = 600) -> LanguageModel:
    """Trains a model on pieces of the sonnet, which takes a quarter of a minute."""
    torch.manual_seed(0)
    model = LanguageModel(eager, len(LETTERS), LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps)
    text = torch.tensor(encoded(TEXT))
    for _ in range(steps):
        pieces = torch.randint(len(text) - LENGTH, (8, 1)) + torch.arange(LENGTH + 1)
        batch = text[pieces]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def encoded(text: str) -> list[int]:
    """Gives the numbers of letters.

    Raises:
        ValueError: If the sonnet does not have one of them.
    """
    if strange := sorted(set(text) - set(LETTERS)):
        raise ValueError(f"the model does not know {strange}; it knows {''.join(LETTERS[1:])!r}")
    return [LETTERS.index(letter) for letter in text]


def decoded(words: np.ndarray) -> str:
    """Gives the letters of numbers."""
    return "".join(LETTERS[word] for word in words)


def prompt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Gives the first program, for ``maxvision convert``."""
    return Prompt(trained()), (torch.zeros(2, LENGTH, dtype=torch.int64),)


def step() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Gives the second program, for ``maxvision convert``."""
    module, given = prompt()
    with torch.no_grad():
        _, keys, values = module(*given)
    place = torch.tensor([LENGTH // 2, LENGTH - 1])
    return Step(module.model), (torch.zeros(2, dtype=torch.int64), place, keys, values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes a text, by the programs in a folder if one is given."""
    parser = argparse.ArgumentParser(description="Goes on with a text.")
    parser.add_argument("folder", nargs="?", type=Path, help="with prompt/ and step/, converted")
    parser.add_argument("--text", default="Shall I ", help="what it begins with")
    parser.add_argument("--count", type=int, default=40, help="letters to add (default: 40)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K most likely")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw among the likeliest of P")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    options = parser.parse_args(arguments)
    choose: Choose = greedy
    if options.top_k or options.top_p:
        random = np.random.default_rng(options.seed)
        choose = sampled(random, options.top_k, options.top_p or 1.0)
    try:
        words = np.array([encoded(options.text)])
        if not options.folder:
            found = write(trained(), words, options.count, choose)
        else:
            programs = (Converted.load(options.folder / part) for part in ("prompt", "step"))
            found = write_cached(*programs, words, options.count, choose)
    except (ValueError, UserError) as error:
        parser.error(str(error))
    print(decoded(found[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
