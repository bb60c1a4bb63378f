"""Building blocks: every class that a model configuration can name, except the detection layers.

Checkpoints are pickles that record class paths, child names and attributes, so those are an interface: they equal
stock YOLOv7's. Unpickling skips `__init__`; state that an older file does not have is read through a class attribute
or through `hasattr`.
"""

import torch
from torch import nn

from models import reparam


def same_padding(kernel):
    """Padding (an int or one per axis) that keeps the size of a stride-1 convolution with an odd `kernel`."""
    return kernel // 2 if isinstance(kernel, int) else [size // 2 for size in kernel]


def make_activation(act):
    """True means SiLU, a module is used as it is, anything else means no activation."""
    if act is True:
        return nn.SiLU()
    return act if isinstance(act, nn.Module) else nn.Identity()


class Conv(nn.Module):
    """Convolution without bias, batch norm, activation. Padding defaults to `same_padding(k)`."""

    def __init__(self, c1, c2, k=1, s=1, p=None, g=1, act=True):
        super().__init__()
        padding = p if p is not None else same_padding(k)
        self.conv = nn.Conv2d(c1, c2, k, s, padding, groups=g, bias=False)
        self.bn = nn.BatchNorm2d(c2)
        self.act = make_activation(act)

    def forward(self, x):
        x = self.conv(x)
        if hasattr(self, "bn"):
            x = self.bn(x)
        return self.act(x)

    def fuse(self):
        """Fold the batch norm into the convolution and drop it; a second call does nothing."""
        if hasattr(self, "bn"):
            self.conv = conv_with(self.conv, *reparam.fold_batchnorm(self.conv.weight, self.conv.bias, self.bn))
            del self.bn


class MP(nn.Module):
    """Max pooling that shrinks both axes `k` times."""

    def __init__(self, k=2):
        super().__init__()
        self.m = nn.MaxPool2d(kernel_size=k, stride=k)

    def forward(self, x):
        return self.m(x)


class SP(nn.Module):
    """Max pooling that keeps the size (for stride 1)."""

    def __init__(self, k=3, s=1):
        super().__init__()
        self.m = nn.MaxPool2d(kernel_size=k, stride=s, padding=same_padding(k))

    def forward(self, x):
        return self.m(x)


class ReOrg(nn.Module):
    """Space to depth: [b x c x h x w] to [b x 4c x h/2 x w/2], the row parity changing fastest."""

    def forward(self, x):
        return torch.cat([x[..., row::2, column::2] for column in (0, 1) for row in (0, 1)], 1)


class Concat(nn.Module):
    """Join a list of tensors along one axis, in list order."""

    def __init__(self, dimension=1):
        super().__init__()
        self.d = dimension

    def forward(self, x):
        return torch.cat(x, self.d)


class Chuncat(nn.Module):
    """Halve every input along one axis; all first halves come before all second halves."""

    def __init__(self, dimension=1):
        super().__init__()
        self.d = dimension

    def forward(self, x):
        halves = [torch.chunk(tensor, 2, dim=self.d) for tensor in x]
        return torch.cat([pair[0] for pair in halves] + [pair[1] for pair in halves], self.d)


class Shortcut(nn.Module):
    """Sum of two tensors of one shape."""

    def __init__(self, dimension=0):
        super().__init__()
        self.d = dimension  # unused, but part of the pickled attributes

    def forward(self, x):
        first, second = x
        return first + second


class DownC(nn.Module):
    """Shrink `k` times by a strided convolution and by max pooling, half of the channels each. `n` is unused."""

    def __init__(self, c1, c2, n=1, k=2):
        super().__init__()
        self.cv1 = Conv(c1, c1, 1)
        self.cv2 = Conv(c1, c2 // 2, 3, k)
        self.cv3 = Conv(c1, c2 // 2, 1)
        self.mp = nn.MaxPool2d(kernel_size=k, stride=k)

    def forward(self, x):
        strided = self.cv2(self.cv1(x))
        pooled = self.cv3(self.mp(x))
        return torch.cat((strided, pooled), 1)


class SPPCSPC(nn.Module):
    """Spatial pyramid pooling on one branch of a cross-stage partial block. `n` and `shortcut` are unused."""

    def __init__(self, c1, c2, n=1, shortcut=False, g=1, e=0.5, k=(5, 9, 13)):
        super().__init__()
        hidden = int(2 * c2 * e)
        self.cv1 = Conv(c1, hidden, 1)
        self.cv2 = Conv(c1, hidden, 1)
        self.cv3 = Conv(hidden, hidden, 3)
        self.cv4 = Conv(hidden, hidden, 1)
        self.m = nn.ModuleList(nn.MaxPool2d(kernel_size=size, stride=1, padding=same_padding(size)) for size in k)
        self.cv5 = Conv((len(k) + 1) * hidden, hidden, 1)
        self.cv6 = Conv(hidden, hidden, 3)
        self.cv7 = Conv(2 * hidden, c2, 1)

    def forward(self, x):
        base = self.cv4(self.cv3(self.cv1(x)))
        pyramid = torch.cat([base, *(pool(base) for pool in self.m)], 1)
        return self.cv7(torch.cat((self.cv6(self.cv5(pyramid)), self.cv2(x)), 1))


class RepConv(nn.Module):
    """RepVGG block (Ding et al. 2021): parallel 3x3, 1x1 and identity branches that merge into one 3x3 convolution.

    The identity branch exists only where input and output have one shape. With `deploy` the block starts merged.
    Raises ValueError unless the kernel is 3x3 with padding 1.
    """

    def __init__(self, c1, c2, k=3, s=1, p=None, g=1, act=True, deploy=False):
        super().__init__()
        padding = p if p is not None else same_padding(k)
        if k != 3 or padding != 1:
            raise ValueError(f"RepConv needs kernel 3 and padding 1, not kernel {k} and padding {padding}")
        self.deploy = deploy
        self.groups = g
        self.in_channels = c1
        self.out_channels = c2
        self.act = make_activation(act)
        if deploy:
            self.rbr_reparam = nn.Conv2d(c1, c2, 3, s, 1, groups=g, bias=True)
            return
        self.rbr_identity = nn.BatchNorm2d(c1) if c1 == c2 and s == 1 else None
        self.rbr_dense = nn.Sequential(nn.Conv2d(c1, c2, 3, s, 1, groups=g, bias=False), nn.BatchNorm2d(c2))
        self.rbr_1x1 = nn.Sequential(nn.Conv2d(c1, c2, 1, s, 0, groups=g, bias=False), nn.BatchNorm2d(c2))

    def forward(self, x):
        if hasattr(self, "rbr_reparam"):
            return self.act(self.rbr_reparam(x))
        y = self.rbr_dense(x) + self.rbr_1x1(x)
        if self.rbr_identity is not None:
            y = y + self.rbr_identity(x)
        return self.act(y)

    def fuse(self):
        """Merge the branches into `rbr_reparam` and drop them; a second call does nothing."""
        if hasattr(self, "rbr_reparam"):
            return
        merged = reparam.merge_branches(self.rbr_dense, self.rbr_1x1, self.rbr_identity)
        self.rbr_reparam = conv_with(self.rbr_dense[0], *merged)
        self.rbr_identity = self.rbr_dense = self.rbr_1x1 = None
        self.deploy = True


class Implicit(nn.Module):
    """One learnt number per channel, drawn from Normal(mean, std) (implicit knowledge, Wang et al. 2021)."""

    def __init__(self, channel, mean, std):
        super().__init__()
        self.channel = channel
        self.mean = mean
        self.std = std
        self.implicit = nn.Parameter(torch.empty(1, channel, 1, 1))
        nn.init.normal_(self.implicit, mean=mean, std=std)


class ImplicitA(Implicit):
    """Add the learnt numbers to a map [b x channel x h x w]."""

    def __init__(self, channel, mean=0.0, std=0.02):
        super().__init__(channel, mean, std)

    def forward(self, x):
        return x + self.implicit


class ImplicitM(Implicit):
    """Multiply a map [b x channel x h x w] with the learnt numbers."""

    def __init__(self, channel, mean=1.0, std=0.02):
        super().__init__(channel, mean, std)

    def forward(self, x):
        return x * self.implicit


def conv_with(conv, weight, bias):
    """A frozen copy of the convolution `conv` with other numbers and a bias; same device, dtype and geometry."""
    copy = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation,
                     conv.groups, bias=True, device="meta")  # fmt: skip
    copy.weight = nn.Parameter(weight.detach(), requires_grad=False)
    copy.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return copy.train(conv.training)
