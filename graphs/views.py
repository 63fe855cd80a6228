"""Permutes and reshapes as one thing: how one shape's numbers lie in another.

A chain of them is one view, and costs nothing where it comes back to where it began. Sizes of both
shapes are divided into the same factors; a view lists, for each axis of the result, the factors
that it is made of. Axes of size 1 have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from maxvision.graphs.types import Size, product, split

Factors = tuple[int, ...]


@dataclass(frozen=True)
class View:
    """How the numbers of a source lie in a result.

    Attributes:
        factors: The size of each factor; their order is that in the source.
        source: The factors of each axis of the source, by their places.
        result: Those of each axis of the result.
    """

    factors: tuple[Size, ...]
    source: tuple[Factors, ...]
    result: tuple[Factors, ...]

    @classmethod
    def of(cls, shape: Sequence[Size]) -> View:
        """Makes the view that changes nothing."""
        factors: list[Size] = []
        axes: list[Factors] = []
        for size in shape:
            number, name = split(size)  # a multiple of a batch is taken as images, then parts
            parts = [part for part in (name, number) if part not in ("", 1)]
            axes.append(tuple(range(len(factors), len(factors) + len(parts))))
            factors += parts
        return cls(tuple(factors), tuple(axes), tuple(axes))

    @property
    def shape(self) -> tuple[Size, ...]:
        """The shape of the result."""
        return tuple(self._size(axis) for axis in self.result)

    @property
    def source_shape(self) -> tuple[Size, ...]:
        """The shape of the source."""
        return tuple(self._size(axis) for axis in self.source)

    @property
    def keeps_order(self) -> bool:
        """Whether the numbers lie in one order in both: a reshape, or nothing at all."""
        order = [factor for axis in self.result for factor in axis]
        return order == sorted(order)

    @property
    def is_identity(self) -> bool:
        """Whether nothing changes."""
        return self.keeps_order and self.shape == self.source_shape

    @property
    def axes(self) -> tuple[int, ...] | None:
        """The axis of the source that each axis of the result is; None if some are divided."""
        left = list(range(len(self.source)))
        found: list[int] = []
        for axis in self.result:
            same = next((a for a in left if self.source[a] == axis), None)
            if same is None:
                return None
            left.remove(same)
            found.append(same)
        return None if left else tuple(found)

    def divided(self) -> View:
        """Divides the source as the result is, if that is a reshape; gives itself if it is not."""
        if self.axes is not None:
            return self
        by_place = tuple(sorted(self.result))
        order = [factor for axis in by_place for factor in axis]
        return replace(self, source=by_place) if order == sorted(order) else self

    def inverse(self) -> View:
        """Gives the way back."""
        order = [factor for axis in self.result for factor in axis]
        place = {factor: i for i, factor in enumerate(order)}
        source, result = (
            tuple(tuple(place[factor] for factor in axis) for axis in axes)
            for axes in (self.result, self.source)
        )
        return View(tuple(self.factors[factor] for factor in order), source, result)

    def permuted(self, axes: Sequence[int]) -> View:
        """Permutes the result's axes."""
        return replace(self, result=tuple(self.result[axis] for axis in axes))

    def reshaped(self, shape: Sequence[Size]) -> View | None:
        """Gives the result another shape; None if its axes are not made of common factors."""
        view, result = self, list[Factors]()
        left = [factor for axis in view.result for factor in axis]
        for size in shape:
            axis: list[int] = []
            wanted, named = split(size)
            while named or wanted != 1:
                if not left:
                    return None
                held = view.factors[left[0]]
                if isinstance(held, str):
                    if held != named:
                        return None
                    named = ""
                elif wanted == 1:  # a batch is wanted, and something else comes first
                    return None
                elif held == wanted:
                    wanted = 1
                elif 0 in (held, wanted):  # a tensor without numbers
                    return None
                elif wanted % held == 0:
                    wanted //= held
                elif held % wanted == 0:
                    view = view._split(left[0], wanted)
                    left = [f + (f > left[0]) for f in left]
                    left.insert(1, left[0] + 1)
                    result = [tuple(f + (f > left[0]) for f in each) for each in result]
                    axis = [f + (f > left[0]) for f in axis]
                    wanted = 1
                else:
                    return None
                axis.append(left.pop(0))
            result.append(tuple(axis))
        return None if left else replace(view, result=tuple(result))

    def then(self, other: View) -> View | None:
        """Applies another view to the result; None if their factors do not meet."""
        view = self.reshaped([other.factors[f] for axis in other.source for f in axis])
        if view is None:
            return None
        result: list[Factors] = []
        for axis in other.result:
            result.append(tuple(f for factor in axis for f in view.result[factor]))
        return replace(view, result=tuple(result))

    def steps(self) -> tuple[tuple[Size, ...], Factors, tuple[Size, ...]]:
        """Says how to get there: a shape to take first, how to permute it, and the result's."""
        order = [factor for axis in self.result for factor in axis]
        runs: list[list[int]] = []
        for factor in order:  # neighbours that stay neighbours are one axis
            if runs and runs[-1][-1] + 1 == factor:
                symbolic = isinstance(self.factors[factor], str)
                if not symbolic and not isinstance(self.factors[runs[-1][-1]], str):
                    runs[-1].append(factor)
                    continue
            runs.append([factor])
        ordered = sorted(runs)
        first = tuple(self._size(tuple(run)) for run in ordered)
        return first, tuple(ordered.index(run) for run in runs), self.shape

    def _split(self, factor: int, first: int) -> View:
        """Divides a factor into two, the first of a given size."""
        held = self.factors[factor]
        assert isinstance(held, int)

        def moved(axes: tuple[Factors, ...]) -> tuple[Factors, ...]:
            split = []
            for axis in axes:
                found: list[int] = []
                for f in axis:
                    found += [f, f + 1] if f == factor else [f + (f > factor)]
                split.append(tuple(found))
            return tuple(split)

        factors = (*self.factors[:factor], first, held // first, *self.factors[factor + 1 :])
        return View(factors, moved(self.source), moved(self.result))

    def _size(self, axis: Factors) -> Size:
        return product(self.factors[factor] for factor in axis)
