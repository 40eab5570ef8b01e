"""The residual networks of `train.resnet` without bottlenecks, plainly in PyTorch."""

import importlib
from typing import Any

from benchmarks.torch_step.training import nn, torch
from train.images import CLASSES
from train.resnet.model import EPSILON, MEAN, MOMENTUM, STDDEV, ResNetConfig

functional: Any = importlib.import_module("torch.nn.functional")


class ConvNorm(nn.Module):
    """A 3 x 3 convolution without biases, and a batch norm."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        # PyTorch's momentum is what the newest batch weighs.
        self.norm = nn.BatchNorm2d(outputs, eps=EPSILON, momentum=1 - MOMENTUM)

    def forward(self, x: Any) -> Any:
        """`[B, inputs, H, W]` to `[B, outputs, H / stride, W / stride]`."""
        return self.norm(self.conv(x))


class Block(nn.Module):
    """Two convolutions, added to what comes in."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.added, self.stride = outputs - inputs, stride
        convs = [ConvNorm(inputs, outputs, stride), ConvNorm(outputs, outputs)]
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Any) -> Any:
        """`[B, inputs, H, W]` to `[B, outputs, H / stride, W / stride]`."""
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.added))
        first, second = self.convs
        return functional.relu(shortcut + second(functional.relu(first(x))))


class Model(nn.Module):
    """The whole network, with shortcuts that have no parameters."""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        features = config.channels[0]
        self.stem = ConvNorm(3, features)
        blocks = []
        for stage, (count, channels) in enumerate(zip(config.blocks, config.channels, strict=True)):
            for place in range(count):
                blocks.append(Block(features, channels, 2 if stage and not place else 1))
                features = channels
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(features, CLASSES)

    def forward(self, image: Any, label: Any) -> Any:
        """The mean cross entropy of `label` `[B]`, in nats, of uint8 `[B, 32, 32, 3]`."""
        x = (image / 255 - torch.tensor(MEAN)) / torch.tensor(STDDEV)
        # Left as it lies in memory, channels last, which is also PyTorch's faster order.
        x = functional.relu(self.stem(x.permute(0, 3, 1, 2)))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), label.long())
