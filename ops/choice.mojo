"""How a kernel is chosen: a family lists its candidates for a problem, and the cheapest is taken.

A candidate is a tile that is compiled, a division of the work, or a row that was measured. Its cost
is what a model estimates for the problem on the device (device.mojo), or how far the row's problem
is from this one; any unit will do. Candidates that cannot compute the problem cost `NEVER`.

    cheapest[TILES](cost)     of tiles that are compiled
    Cheapest(first), offer    of what a loop finds at run time

Two candidates of which a measured bound decides are an `if`.
"""

comptime NEVER = Float64.MAX
"""What a candidate costs that is not to be taken."""


struct Cheapest[Candidate: TrivialRegisterPassable]:
    """The cheapest candidate so far; of those that cost the same the first.

    Parameters:
        Candidate: What is chosen.
    """

    var best: Self.Candidate
    """The candidate."""
    var cost: Float64
    """What it costs."""

    def __init__(out self, first: Self.Candidate, cost: Float64 = NEVER):
        """Begins with a candidate.

        Args:
            first: What is taken unless something else costs less.
            cost: What it costs.
        """
        self.best, self.cost = first, cost

    def offer(mut self, candidate: Self.Candidate, cost: Float64):
        """Takes a candidate if it is cheaper.

        Args:
            candidate: The candidate.
            cost: What it costs.
        """
        if cost < self.cost:
            self.best, self.cost = candidate, cost


def cheapest[
    Tile: TrivialRegisterPassable,
    Cost: def(Tile) -> Float64,
    //,
    tiles: List[Tile],
](cost: Cost) -> Int:
    """Chooses one of the tiles that are compiled.

    Parameters:
        Tile: What describes a tile.
        Cost: A closure that takes one.
        tiles: All of them.

    Args:
        cost: What a tile costs.

    Returns:
        The number of the cheapest; the first if none can be taken.
    """
    var choice = Cheapest(0)
    comptime for i in range(len(tiles)):
        comptime tile = tiles[i]
        choice.offer(i, cost(materialize[tile]()))
    return choice.best
