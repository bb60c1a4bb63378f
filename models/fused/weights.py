"""Weights on their way into the operations of a Plan, and gradients on their way out: few kernels for all tensors."""

from itertools import accumulate

import torch

ALIGNED = 64  # elements; in a flat tensor each one starts at a multiple of this: kernels load several numbers at once


class Weights:
    """The weights of the convolutions of Blocks in the type that they are computed in.

    Those of the branches of one Block lie one behind the other, so that together they are one weight.
    """

    def __init__(self, blocks):
        self.blocks, self.kind = blocks, None

    def refreshed(self, dtype):
        """{Block: weight [o x i x kh x kw], channels-last} as the parameters are now; the same tensors each time."""
        weights = [branch.conv.weight.detach() for block in self.blocks for branch in block.branches]
        if not weights:
            return {}
        kind = dtype, weights[0].device, tuple(weight.stride() for weight in weights)
        if kind != self.kind:
            self.kind = kind
            self._lay_out(dtype, weights)
        torch._foreach_copy_(self.copies, weights)
        return self.whole

    def _lay_out(self, dtype, weights):
        sizes = [sum(branch.conv.weight.numel() for branch in block.branches) for block in self.blocks]
        flat = torch.empty(sum(map(_aligned, sizes)), dtype=dtype, device=weights[0].device)
        starts = accumulate(map(_aligned, sizes), initial=0)
        self.whole, parts = {}, []
        for block, start, size in zip(self.blocks, starts, sizes, strict=False):
            inputs, *kernel = block.branches[0].conv.weight.shape[1:]
            whole = flat[start : start + size].view(-1, *kernel, inputs).permute(0, 3, 1, 2)
            self.whole[block] = whole
            parts += whole.split(block.widths)
        self.copies = [laid_out_as(part, weight) for part, weight in zip(parts, weights, strict=True)]


class ParameterGradients:
    """Collects the gradients of `parameters` in a flat float32 tensor, each laid out as its parameter."""

    def __init__(self, parameters):
        self.parameters = parameters
        starts = list(accumulate((_aligned(parameter.numel()) for parameter in parameters), initial=0))
        self.flat = torch.empty(starts[-1], device=parameters[0].device)
        self.starts = {id(parameter): start for parameter, start in zip(parameters, starts, strict=False)}
        self.found, self.waiting = {}, []

    def of(self, parameter):
        """Where the gradient of a `parameter` [c] is to be written."""
        return self.found.setdefault(id(parameter), self._place(parameter))

    def add(self, parameter, gradient):
        """Take a gradient of any type and layout."""
        if parameter.requires_grad:
            self.waiting.append((self.of(parameter), laid_out_as(gradient, parameter)))

    def finished(self):
        """The gradients of all parameters, None for those without one."""
        alike = [pair for pair in self.waiting if pair[0].stride() == pair[1].stride()]
        for place, gradient in self.waiting:
            if place.stride() != gradient.stride():
                place.copy_(gradient)
        for dtype in {gradient.dtype for _, gradient in alike}:
            pairs = [pair for pair in alike if pair[1].dtype == dtype]
            torch._foreach_copy_([place for place, _ in pairs], [gradient for _, gradient in pairs])
        found, self.found, self.waiting = self.found, {}, []  # held by nobody else, autograd takes them without a copy
        return [found.pop(id(parameter), None) if parameter.requires_grad else None for parameter in self.parameters]

    def _place(self, parameter):
        return self.flat.as_strided(parameter.shape, parameter.stride(), self.starts[id(parameter)])


def _aligned(size):
    return -(-size // ALIGNED) * ALIGNED


def laid_out_as(tensor, like):
    """`tensor` with the strides of `like` where only axes of length 1 differ: kernels for many tensors ask for it."""
    axes = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    alike = all(size == 1 or mine == other for size, mine, other in axes)
    return tensor.as_strided(tensor.shape, like.stride()) if alike else tensor
