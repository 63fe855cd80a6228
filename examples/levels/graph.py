"""A graph network of the blocks of any level.

It also runs as a converted model: ``maxvision convert examples.levels.graph:example -o graph``.
"""

from types import ModuleType

import torch
from torch import Tensor, nn

from examples.levels import eager
from examples.levels.modules import MLP, Norm


class GraphNetwork(nn.Module):
    """A classifier of graphs by messages along their edges (Gilmer et al. 2017, arXiv:1704.01212).

    Args:
        level: The blocks.
        features: Of a node.
        classes: Of graphs.
        width: Channels of a node.
        rounds: Times that messages are sent.
    """

    def __init__(
        self, level: ModuleType, features: int, classes: int, width: int = 64, rounds: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.message = nn.ModuleList([MLP(level, 2 * width, width, width) for _ in range(rounds)])
        self.update = nn.ModuleList([MLP(level, 2 * width, width, width) for _ in range(rounds)])
        self.norm = nn.ModuleList([Norm(level, width) for _ in range(rounds)])
        self.head = nn.Linear(width, classes)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Gives logits [N, classes] of nodes [N, V, features] and edges [N, E, 2], from and to."""
        x = self.embed(nodes)
        source = edges[:, :, 0, None].expand(-1, -1, x.shape[-1])
        sink = edges[:, :, 1, None].expand(-1, -1, x.shape[-1])
        for message, update, norm in zip(self.message, self.update, self.norm):  # noqa: B905 - TorchScript's has no strict
            sent = message(torch.cat([x.gather(1, source), x.gather(1, sink)], -1))
            added = torch.zeros_like(x).scatter_add(1, sink, sent)
            x = norm(x + update(torch.cat([x, added], -1)))
        return self.head(x.mean(1))  # pooling: a graph is the mean of its nodes


def example() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Gives a network with random weights, and two graphs, for ``maxvision convert``."""
    torch.manual_seed(0)
    graphs = torch.randn(2, 16, 5), torch.randint(16, (2, 40, 2))
    return GraphNetwork(eager, features=5, classes=3).eval(), graphs
