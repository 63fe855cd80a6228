"""The kernel that has the sums of a batch norm computes what stands behind them (ops/reduce).

A batch norm in training has one big expression. Its scale and shift, the statistics that are kept
and the factors of its gradient are small ones, of one number a channel: a launch each, which takes
longer to start than to run. So does the slice of the first pixel, from which distances are summed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from maxvision.graphs.elementwise import BETWEEN, MOST_ENDS, MOST_RESULTS, REDUCTIONS
from maxvision.graphs.passes.elementwise import is_cast, is_expression, text
from maxvision.graphs.program import Attribute, Node, Program, Rewrite, free
from maxvision.graphs.shapes import around, broadcast, lies
from maxvision.graphs.types import FLOATS, Size, product

MOST_WORDS = 64
"""Words of an expression that takes in others."""


def finished(program: Program) -> Program:
    """Lets reductions by channel compute the expressions of what they leave, in one launch.

    Beside it these read vectors of as many numbers that are there before the reduction. Where they
    are more than a launch gives, those stay out that are outputs only: nothing waits for them.
    """
    rewrite = Rewrite(program)
    order = {node.output: i for i, node in enumerate(program.nodes)}
    names = set(program.types)
    for node in program.nodes:
        if node.op in REDUCTIONS and not node.at_load:
            ending = _Ending(program, node, order)
            if ending.is_known and (taken := ending.taken(rewrite)) is not None:
                results = ending.results(taken)
                gone = [node, *taken, *ending.reshapes(taken, results)]
                rewrite.replace(gone, *ending.written(taken, results, names), place=node)
    return rewrite.done()


class _Ending:
    """A reduction, and what stands behind it.

    Attributes:
        words: What it leaves, and expressions of that: each in words of its own outputs and of
            vectors, by their names.
    """

    def __init__(self, program: Program, node: Node, order: Mapping[str, int]) -> None:
        self.program = program
        self.node = node
        self.order = order
        self.words = {value: [f"x{value}"] for value in node.outputs}

    @cached_property
    def is_known(self) -> bool:
        """Whether a kernel of ops/reduce reduces this to numbers of several channels."""
        given = [self.program.types[value] for value in self.node.inputs]
        floats = {each.dtype for each in given} - {"bool"}
        return (
            floats <= FLOATS
            and len(floats - {"float32"}) < 2
            and len(floats) > 0
            and lies(given, self.axes) is not None
            and product(self.groups[2]) != 1
        )

    @property
    def axes(self) -> tuple[int, ...]:
        return self.node.attributes["axes"]  # type: ignore[return-value]

    @cached_property
    def whole(self) -> tuple[Size, ...]:
        """The shape of what is reduced."""
        return broadcast(self.node.op, *(self.program.types[v] for v in self.node.inputs))

    @cached_property
    def groups(self) -> tuple[tuple[Size, ...], ...]:
        """The sizes before the axes, of these, and behind them."""
        return around(self.whole, self.axes)

    def taken(self, rewrite: Rewrite) -> list[Node] | None:
        """Finds what the reduction computes; nothing if it stays as it is."""
        found: list[Node] = []
        for each in self.behind():
            if not rewrite.has(each) and self.fits(each):
                self.words[each.output] = self.inlined(each)
                found.append(each)
        while found and not self.has_room(found):
            ends = [each for each in found if self.is_end(each)]
            found.remove((ends or found)[-1])
        return found if found or any(map(self.rows_of, self.node.inputs)) else None

    def behind(self) -> Iterator[Node]:
        """Lists what reads the results, or what was made of them, and then what stands beside."""
        seen = {self.node.output}
        left = [user for value in self.node.outputs for user in self.readers(value)]
        while left:
            node = min(left, key=lambda each: self.order[each.output])
            left = [each for each in left if each is not node]
            if node.output in seen:
                continue
            seen.add(node.output)
            yield node
            if node.output in self.words:
                left += self.readers(node.output)
            else:  # it waits for all that it reads
                sources = (self.program.producers.get(self.root(value)) for value in node.inputs)
                left += [each for each in sources if each and self.is_beside(each)]

    def is_beside(self, node: Node) -> bool:
        """Tells whether a node computes with vectors alone, and nothing reads it until now."""
        readers = self.readers(node.output)
        return (
            self.fits(node)
            and all(self.root(value) not in self.words for value in node.inputs)
            and all(self.order[each.output] > self.order[self.node.output] for each in readers)
        )

    def fits(self, node: Node) -> bool:
        """Tells whether a node is an expression of what is left and of vectors that are there."""
        types = self.program.types
        return (
            (is_expression(node) or is_cast(self.program, node))
            and node.dtype == self.node.dtype
            and all(self.is_vector(value) for value in (*node.inputs, node.output))
            and all(self.is_there(self.root(value)) for value in node.inputs)
            and types[node.output].dtype in FLOATS
            and len(self.inlined(node)) <= MOST_WORDS
        )

    def is_vector(self, value: str) -> bool:
        """Tells whether a value has the numbers of a result, in their order."""
        ones = [
            [size for size in self.program.types[name].shape if size != 1]
            for name in (value, self.node.output)
        ]
        return ones[0] == ones[1] and "float" in self.program.types[value].dtype

    def is_there(self, value: str) -> bool:
        """Tells whether a value is left, made of that, or known before the reduction."""
        source = self.program.producers.get(value)
        return (
            value in self.words
            or source is None
            or source.at_load
            or self.order[source.output] < self.order[self.node.output]
        )

    def inlined(self, node: Node) -> list[str]:
        """Writes an expression down, of what is left and of vectors."""
        words: list[str] = []
        for word in text(node).split(" "):
            if word[:1] == "x":
                value = self.root(node.inputs[int(word[1:])])
                words += self.words.get(value, [f"x{value}"])
            else:
                words.append(word)
        return words

    def root(self, value: str) -> str:
        """Looks at a value through reshapes."""
        source = self.program.producers.get(value)
        while source and source.op == "reshape" and not source.at_load:
            value = source.inputs[0]
            source = self.program.producers.get(value)
        return value

    def readers(self, value: str) -> list[Node]:
        """Lists what reads a value, directly or through reshapes."""
        found: list[Node] = []
        for user in self.program.users.get(value, ()):
            found += self.readers(user.output) if user.op == "reshape" else [user]
        return found

    def is_output(self, value: str) -> bool:
        """Tells whether a value, or a reshape of it, is an output of the program."""
        users = self.program.users.get(value, ())
        return value in self.program.outputs.values() or any(
            self.is_output(user.output) for user in users if user.op == "reshape"
        )

    def is_end(self, node: Node) -> bool:
        """Tells whether nothing in the program reads what a node gives."""
        return not self.readers(node.output)

    def results(self, taken: Iterable[Node]) -> list[str]:
        """Lists what is left or computed that others read."""
        made = {node.output for node in taken}
        return [
            value
            for value in self.words
            if (value in self.node.outputs or value in made)
            and (self.is_output(value) or any(r.output not in made for r in self.readers(value)))
        ]

    def vectors(self, results: Iterable[str]) -> list[str]:
        """Lists the vectors that results are computed with."""
        words = (word[1:] for value in results for word in self.words[value] if word[:1] == "x")
        return [value for value in dict.fromkeys(words) if value not in self.node.outputs]

    def has_room(self, taken: Iterable[Node]) -> bool:
        """Tells whether a launch gives all results."""
        results = self.results(taken)
        return len(results) <= MOST_RESULTS and len(self.vectors(results)) <= MOST_ENDS

    def rows_of(self, value: str) -> str:
        """Names what is reduced whose first row a value is; nothing if it is no such row."""
        sliced = self.program.producers.get(self.root(value))
        if sliced is None or sliced.op != "slice" or sliced.at_load:
            return ""
        axis: int = sliced.attributes["axis"]  # type: ignore[assignment]
        source, types = self.root(sliced.inputs[0]), self.program.types
        before = types[sliced.inputs[0]].shape[:axis]
        fits = (
            source in self.node.inputs
            and types[source].shape == self.whole
            and sliced.attributes["start"] == 0
            and sliced.attributes.get("step", 1) == 1
            and product((*before, *self.groups[0])) == 1
            and product(types[sliced.output].shape) == product(self.groups[2])
        )
        return source if fits else ""

    def reshapes(self, taken: Iterable[Node], results: Collection[str]) -> list[Node]:
        """Lists the reshapes of what is left or computed, and is no result."""
        made = (*self.node.outputs, *(node.output for node in taken))
        left = [value for value in made if value not in results]
        found: list[Node] = []
        while left:
            users = self.program.users.get(left.pop(), ())
            reshapes = [user for user in users if user.op == "reshape"]
            found += reshapes
            left += [each.output for each in reshapes]
        return found

    def written(self, taken: Iterable[Node], results: Sequence[str], names: set[str]) -> list[Node]:
        """Makes one node of the reduction and of what it computes, and reshapes behind it."""
        types = self.program.types
        shape = types[self.node.output].shape
        flat = {
            value: value if types[value].shape == shape else free(names, f"{value}.reduced")
            for value in results
        }
        layers = (*self.node.layers, *(layer for node in taken for layer in node.layers))
        made = replace(self.computing(results), outputs=tuple(flat.values()), layers=layers)
        reshapes = (
            Node("reshape", (name,), (value,), {"shape": types[value].shape})
            for value, name in flat.items()
            if name != value
        )
        return [made, *reshapes]

    def computing(self, results: Sequence[str]) -> Node:
        """Makes the node that gives results: of casts alone, the reduction in another dtype."""
        vectors = self.vectors(results)
        read = [*self.node.inputs, *vectors]
        first = tuple(i for i, value in enumerate(read) if self.rows_of(value))
        dtypes = tuple(self.program.types[value].dtype for value in results)
        places = {value: f"x{i}" for i, value in enumerate((*self.node.outputs, *vectors))}
        texts = [
            " ".join(places[word[1:]] if word[:1] == "x" else word for word in self.words[value])
            for value in results
        ]
        left = [places[value] for value in self.node.outputs]
        if texts == left and len(set(dtypes)) == 1 and not first:
            return self.node.with_attributes(dtype=dtypes[0])
        inputs = tuple(self.rows_of(value) or value for value in read)
        attributes: dict[str, Attribute] = {
            "kind": self.node.op,
            "axes": self.axes,
            "keepdim": self.node.attributes.get("keepdim", False),
            "expression": text(self.node),
            "results": BETWEEN.join(texts),
            "dtypes": dtypes,
            "first": first,
        }
        return replace(self.node, op="reduce_results", inputs=inputs, attributes=attributes)
