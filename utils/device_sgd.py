"""The step of torch.optim.SGD with all its numbers on the device: nothing to wait for, and fit for a CUDA graph.

torch's own step has the learning rate and momentum on the host, where a captured graph cannot see them change, and
waits for the loss scaler's verdict on the gradients in every step. Here all are tensors. The optimiser stays the owner
of parameters, rates and momentum buffers, so that its state_dict is that of torch.
"""

from itertools import accumulate
from typing import NamedTuple

import torch

ALIGNED = 64  # elements; every tensor starts at a multiple of this


class Part(NamedTuple):
    """A parameter group by its number: those of its parameters that get gradients, their place in the flat tensors."""

    number: int
    parameters: list
    gradients: list  # views of the flat gradient, shaped like the parameters
    place: slice
    weight_decay: float


class DeviceSGD:
    """Collects gradients over backward passes and makes Nesterov steps; `optimizer` is a torch.optim.SGD.

    Gradients and momentum lie in one flat tensor each. With an enabled `scaler` a step on gradients that are not finite
    changes nothing, and the scale follows, as `scaler.step` and `scaler.update` would do it: decided on the device.
    """

    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler = optimizer, scaler
        self.parts = None  # known after the first backward pass

    @torch.no_grad()
    def collect(self):
        """Add the gradients of a backward pass to those collected before, and take them off the parameters."""
        if self.parts is None:
            self._lay_out()
        for part in self.parts:
            new = [_shaped_like(p.grad, view) for p, view in zip(part.parameters, part.gradients, strict=True)]
            torch._foreach_add_(part.gradients, new)
            for parameter in part.parameters:
                parameter.grad = None

    def drop(self):
        """Forget the gradients collected so far."""
        if self.parts is not None:
            self.gradient.zero_()

    @torch.no_grad()
    def step(self, numbers):
        """One step on the gradients collected, which are then forgotten.

        numbers  [groups + 1] on the device: the learning rate of each group, the momentum
        """
        if self.scaler.is_enabled():
            self._unscale()
        for part in self.parts:
            if part.weight_decay:
                torch._foreach_add_(part.gradients, part.parameters, alpha=part.weight_decay)
        if self.scaler.is_enabled():  # a step without gradient, rate and loss of momentum is no step
            overflow = self.overflow > 0
            self.gradient.masked_fill_(overflow, 0.0)
            numbers = torch.where(overflow, self.standstill, numbers)
        momentum = numbers[-1]
        self.momentum.mul_(momentum).add_(self.gradient)
        self.gradient.addcmul_(self.momentum, momentum)
        for part in self.parts:
            self.gradient[part.place].mul_(numbers[part.number])
            torch._foreach_sub_(part.parameters, part.gradients)
        self.gradient.zero_()
        self.optimizer._opt_called = True  # torch's schedules warn when their optimiser never stepped

    def _unscale(self):
        """Divide the gradients by the loss scale, note in `overflow` whether all are finite, adapt the scale."""
        scaler = self.scaler
        self.overflow.zero_()
        inverse = scaler._scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_([self.gradient], self.overflow, inverse)
        torch._amp_update_scale_(
            scaler._scale, scaler._growth_tracker, self.overflow,
            scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval(),
        )  # fmt: skip

    @torch.no_grad()
    def _lay_out(self):
        """Make the flat tensors for all parameters that have a gradient; take over the momentum that there is."""
        groups = [[p for p in group["params"] if p.grad is not None] for group in self.optimizer.param_groups]
        parameters = [p for group in groups for p in group]
        starts = list(accumulate((-(-p.numel() // ALIGNED) * ALIGNED for p in parameters), initial=0))
        self.gradient = parameters[0].new_zeros(starts[-1])
        self.momentum = torch.zeros_like(self.gradient)  # a storage of its own: checkpoints hold it
        self.overflow = self.gradient.new_zeros(())
        self.standstill = self.gradient.new_tensor([0.0] * len(groups) + [1.0])
        for parameter, start in zip(parameters, starts, strict=False):
            state, buffer = self.optimizer.state[parameter], _view(self.momentum, start, parameter)
            if state.get("momentum_buffer") is not None:
                buffer.copy_(state["momentum_buffer"])
            state["momentum_buffer"] = buffer  # zeros are where torch's step begins, too
        self.parts, first = [], 0
        for number, (options, group) in enumerate(zip(self.optimizer.param_groups, groups, strict=True)):
            last = first + len(group)
            views = [_view(self.gradient, start, p) for p, start in zip(group, starts[first:last], strict=True)]
            place = slice(starts[first], starts[last])
            if group:
                self.parts.append(Part(number, group, views, place, options["weight_decay"]))
            first = last


def _view(flat, start, parameter):
    """The part of `flat` from `start` on, with the shape and strides of `parameter`."""
    return flat[start : start + parameter.numel()].as_strided(
        parameter.shape, parameter.stride(), flat.storage_offset() + start
    )


def _shaped_like(gradient, view):
    """`gradient` with the strides of `view` where only axes of length 1 differ: kernels for many tensors ask for it."""
    if gradient.stride() == view.stride():
        return gradient
    differs = [n for n, a, b in zip(view.shape, gradient.stride(), view.stride(), strict=True) if a != b]
    return gradient.as_strided(view.shape, view.stride()) if max(differs) == 1 else gradient
