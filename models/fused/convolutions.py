"""The operations of a plan (operations.py) that hold convolutions: Block, Stem and HeadOutput."""

import torch
from torch.nn import functional

from models.fused import kernels, stem
from models.fused.operations import PlanOperation, spread


class Branch:
    """What follows a convolution of a Block: the batch norm, the activation as (kind, slope), the Value it makes."""

    def __init__(self, conv, norm, activation, target):
        self.conv, self.norm, self.activation, self.target = conv, norm, activation, target

    def forward(self, tape, x):
        """Returns what the gradient needs."""
        places = tape.places(self.target, x)
        saved = kernels.norm_activation(x, self.norm, *self.activation, places[:2], tape.statistics.get(self.norm))
        spread(places)
        return saved

    def backward(self, tape, x, saved, result):
        """Write the gradient of x to `result`."""
        pieces = tape.take_pieces(self.target)
        if not pieces:  # nobody asked for it
            result.zero_()
            return
        places = tape.gradients.of(self.norm.weight), tape.gradients.of(self.norm.bias)
        kernels.norm_activation_gradient(pieces, x, saved, *self.activation, result, *places)


class Block(PlanOperation):
    """Convolutions of one Value with one geometry, as a single one; each followed by a Branch."""

    def __init__(self, source, branches):
        self.branches = branches
        modules = [module for branch in branches for module in (branch.conv, branch.norm)]
        super().__init__([source], [branch.target for branch in branches], modules)
        conv = branches[0].conv
        self.widths = [branch.conv.out_channels for branch in branches]
        self.geometry = conv.stride, conv.padding, conv.dilation, False, (0, 0), conv.groups

    def norms(self):
        return [branch.norm for branch in self.branches]

    def forward(self, tape):
        x, weight = tape.values[self.sources[0]], tape.weights[self]
        y = torch.ops.aten.convolution(x, weight, None, *self.geometry)
        parts = zip(self.branches, y.split(self.widths, 1), strict=True)
        saved = [branch.forward(tape, part) for branch, part in parts]
        if self in tape.needed:
            tape.kept[self] = x, weight, y, saved

    def backward(self, tape):
        x, weight, y, saved = tape.kept.pop(self)
        gradient = torch.empty_like(y)
        parts = zip(self.branches, y.split(self.widths, 1), saved, gradient.split(self.widths, 1), strict=True)
        for branch, part, numbers, result in parts:
            branch.backward(tape, part, numbers, result)
        del y, part, parts
        wanted = self.sources[0] in tape.needed, any(b.conv.weight.requires_grad for b in self.branches), False
        of_x, of_weight, _ = torch.ops.aten.convolution_backward(gradient, x, weight, None, *self.geometry, wanted)
        if wanted[0]:
            tape.add_piece(self.sources[0], of_x)
        if wanted[1]:
            for branch, part in zip(self.branches, of_weight.split(self.widths), strict=True):
                tape.gradients.add(branch.conv.weight, part)


class Stem(PlanOperation):
    """The convolution that reads the images, with what follows it (stem.py); `reorganised`: they go through ReOrg."""

    def __init__(self, source, branch, reorganised):
        super().__init__([source], [branch.target], [branch.conv, branch.norm])
        self.conv, self.norm, self.activation = branch.conv, branch.norm, branch.activation
        self.block = 2 if reorganised else 1

    @staticmethod
    def fits(conv, reorganised):
        strides = ((1, 1),) if reorganised else ((1, 1), (2, 2))
        return (conv.kernel_size == (3, 3) and conv.padding == (1, 1) and conv.dilation == (1, 1) and conv.groups == 1
                and conv.stride in strides and conv.in_channels <= (16 if reorganised else 4)
                and conv.out_channels <= 128)  # fmt: skip

    def norms(self):
        return [self.norm]

    def forward(self, tape):
        images = tape.values[self.sources[0]]
        places = tape.places(self.targets[0], images, stem.output_size(images, self.conv, self.block))
        known = tape.statistics.get(self.norm)
        found = stem.forward(images, self.conv, self.norm, *self.activation, self.block, tape.dtype, places[:2], known)
        spread(places)
        if self in tape.needed:
            tape.kept[self] = found

    def backward(self, tape):
        places = tape.gradients.of(self.norm.weight), tape.gradients.of(self.norm.bias)
        pieces = tape.take_pieces(self.targets[0])
        found = stem.gradient(pieces, tape.kept.pop(self), self.conv, *self.activation, *places)
        tape.gradients.add(self.conv.weight, found)


class HeadOutput(PlanOperation):
    """A 1x1 convolution of the detection layer, as a product of matrices.

    Its output [b x na x ny x nx x no] is a view of a channels-last map whose pixels lie a multiple of ALIGNED apart:
    tensor cores are several times slower on others. `added`, `factor`: the implicit knowledge around it, or None.
    """

    ALIGNED = 8

    def __init__(self, source, conv, num_anchors, added=None, factor=None):
        super().__init__([source], [], [module for module in (conv, added, factor) if module is not None])
        self.conv, self.num_anchors = conv, num_anchors
        self.added, self.factor = added, factor
        self.width = conv.out_channels
        self.step = -(-self.width // self.ALIGNED) * self.ALIGNED

    def forward(self, tape):
        x = tape.values[self.sources[0]].permute(0, 2, 3, 1)
        weight, bias = self._folded(tape.dtype)
        y = torch.addmm(bias, x.flatten(0, 2), weight.t())
        if self in tape.needed:
            tape.kept[self] = x, weight
        return self._as_maps(y.view(*x.shape[:3], self.step))

    def backward(self, tape, gradient):
        """`gradient` [b x na x ny x nx x no] is copied if it is laid out in another way than the output."""
        x, weight = tape.kept.pop(self)
        rows = self._as_rows(gradient, tape.dtype)
        if self.sources[0] in tape.needed:
            of_x = torch.mm(rows, weight).view(x.shape)
            tape.add_piece(self.sources[0], of_x.permute(0, 3, 1, 2))
        if any(parameter.requires_grad for parameter in self.parameters()):
            of_weight, of_bias = torch.mm(rows.t(), x.flatten(0, 2)), rows.sum(0, dtype=torch.float32)
            self._hand_on(tape.gradients, of_weight[: self.width], of_bias[: self.width])

    def _as_maps(self, rows):
        """[b x ny x nx x step] as [b x na x ny x nx x no]."""
        maps = rows[..., : self.width].unflatten(3, (self.num_anchors, -1))
        return maps.permute(0, 3, 1, 2, 4)

    def _as_rows(self, maps, dtype):
        """The way back: [b x na x ny x nx x no] as [pixels x step], whose last columns are zeros."""
        batch, _, height, width, _ = maps.shape
        size = batch * height * width, self.step
        wanted = (height * width * self.step, maps.shape[4], width * self.step, self.step, 1)
        end = (maps.storage_offset() + size[0] * size[1]) * maps.element_size()
        if maps.dtype != dtype or maps.stride() != wanted or maps.untyped_storage().nbytes() < end:
            rows = torch.empty((batch, height, width, self.step), dtype=dtype, device=maps.device)
            maps = self._as_maps(rows).copy_(maps)
        rows = maps.as_strided(size, (self.step, 1))
        rows[:, self.width :] = 0  # between the pixels of the maps, so nobody's
        return rows

    def _folded(self, dtype):
        """Weight [step x c] and bias [step], as reparam.fold_implicit computes them and filled up with zeros."""
        weight, bias = self.conv.weight.detach().flatten(1), self.conv.bias.detach()
        if self.added is not None:
            bias = torch.addmv(bias, weight, self.added.implicit.detach().flatten())
        if self.factor is not None:
            factor = self.factor.implicit.detach().flatten()
            weight, bias = weight * factor[:, None], bias * factor
        filled = torch.zeros((self.step, weight.shape[1]), dtype=dtype, device=weight.device)
        filled[: self.width] = weight
        return filled, functional.pad(bias, (0, self.step - self.width)).to(dtype)

    def _hand_on(self, gradients, of_weight, of_bias):
        """The gradients of the parameters from those of the folded weight and bias."""
        weight, bias, of_weight = self.conv.weight.detach().flatten(1), self.conv.bias.detach(), of_weight.float()
        if self.added is not None:
            added = self.added.implicit.detach().flatten()
            bias = torch.addmv(bias, weight, added)
        if self.factor is not None:
            factor = self.factor.implicit.detach().flatten()
            of_factor = (of_weight * weight).sum(1).addcmul_(of_bias, bias)
            gradients.add(self.factor.implicit, of_factor.view_as(self.factor.implicit))
            of_weight, of_bias = of_weight * factor[:, None], of_bias * factor
        if self.added is not None:
            gradients.add(self.added.implicit, torch.mv(weight.t(), of_bias).view_as(self.added.implicit))
            of_weight = torch.addr(of_weight, of_bias, added)
        gradients.add(self.conv.weight, of_weight.view_as(self.conv.weight))
        gradients.add(self.conv.bias, of_bias)
