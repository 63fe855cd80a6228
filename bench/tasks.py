"""Networks that take no picture, or give more than classes, for ``maxvision bench universe``.

Each function gives a module with random weights, and an example of two.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Tensor, ...]]
TOKENS = 128
NODES, EDGES, KINDS = 64, 256, 32


def _tokens() -> Tensor:
    return torch.randint(2, 30000, (2, TOKENS))


def bert() -> Made:
    """BERT-base (Devlin et al. 2018)."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()), (_tokens(),)


def roberta() -> Made:
    """RoBERTa-base (Liu et al. 2019)."""
    from transformers import RobertaConfig, RobertaModel

    return RobertaModel(RobertaConfig()), (_tokens(),)


def gpt2() -> Made:
    """GPT-2 with 124 M weights, up to its logits (Radford et al. 2019)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config()), (_tokens(),)


def t5_encoder() -> Made:
    """The encoder of T5-small (Raffel et al. 2019)."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config()), (_tokens(),)


def deeplabv3() -> Made:
    """DeepLabV3 on a ResNet-50: a label for each pixel (Chen et al. 2017)."""
    from torchvision.models.segmentation import deeplabv3_resnet50

    return deeplabv3_resnet50(weights=None, weights_backbone=None), (torch.rand(2, 3, 256, 256),)


def fpn() -> Made:
    """A feature pyramid on a ResNet-50: maps of five sizes (Lin et al. 2016)."""
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return (
        resnet_fpn_backbone(backbone_name="resnet50", weights=None),
        (torch.rand(2, 3, 256, 256),),
    )


class Messages(nn.Module):
    """Each node of a graph adds up what the nodes before it send (Gilmer et al. 2017).

    Args:
        kinds: Of nodes.
        width: Numbers of a node.
        rounds: Times that nodes send, each with layers of its own.
        classes: Of graphs.
    """

    def __init__(self, kinds: int, width: int, rounds: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(kinds, width)
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.head = nn.Linear(width, classes)

    def forward(self, kinds: Tensor, edges: Tensor) -> Tensor:
        """Takes the kinds [N, V] of nodes, and edges [N, E, 2] from and to them."""
        x = self.embed(kinds)
        source, sink = (edges[..., i, None].expand(-1, -1, x.shape[-1]) for i in range(2))
        for message, update in zip(self.message, self.update, strict=True):
            sent = torch.cat([x.gather(1, source), x.gather(1, sink)], -1)
            added = torch.zeros_like(x).scatter_add(1, sink, message(sent).relu())
            x = x + update(torch.cat([x, added], -1)).relu()
        return self.head(x.mean(1))


def messages() -> Made:
    """A message-passing network of graphs."""
    return Messages(KINDS, 128, rounds=4, classes=10), (
        torch.randint(0, KINDS, (2, NODES)),
        torch.randint(0, NODES, (2, EDGES, 2)),
    )
