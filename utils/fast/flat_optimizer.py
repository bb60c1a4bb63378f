"""The optimiser step and the moving average on flat tensors, with all their numbers on the device (--fast-step).

Nothing in it waits for the device, and it is fit for a CUDA graph. torch's own SGD has the learning rate and momentum
on the host, where a captured graph cannot see them change, and waits for the loss scaler's verdict on the gradients in
every step. The optimiser stays the owner of parameters, rates and momentum, so that its state_dict is that of torch.
"""

from itertools import accumulate
from typing import NamedTuple

import torch

from utils.engine.ema import empty_half_copy

ALIGNED = 64  # elements; every tensor starts at a multiple of this in a flat one, as kernels like it


def starts_of(tensors):
    """Where each of `tensors` begins in a flat tensor [n], and the length of that; gaps between them hold zeros."""
    return list(accumulate((-(-tensor.numel() // ALIGNED) * ALIGNED for tensor in tensors), initial=0))


def view_of(flat, start, like):
    """The part of `flat` from `start` on, with the shape and strides of `like`."""
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset() + start)


def flatten(tensors, device):
    """Move the contents of `tensors`, float32, into one flat tensor, and return it; they stay the same objects."""
    starts = starts_of(tensors)
    flat = torch.zeros(starts[-1], device=device)
    for tensor, start in zip(tensors, starts, strict=False):
        place = view_of(flat, start, tensor)
        place.copy_(tensor.detach())
        tensor.data = place
    return flat


class FlatAverage:
    """The floating entries of a `model` and of its moving `average` as flat tensors: parameters, and buffers.

    `first` are the parameters that come first. Averages follow `ema.average_per_tensor` within rounding: whole numbers
    stay.
    """

    def __init__(self, model, average, first=()):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.order = [names.pop(id(parameter)) for parameter in first]
        self.order += names.values()
        self.models, device = (model, average), next(model.parameters()).device
        self.current, self.averages = (
            [flatten(tensors, device) for tensors in self._tensors(module)] for module in self.models
        )
        owners = [owner for module in self.models for owner in module.modules()]
        self.entries = [entries for owner in owners for entries in (owner._parameters, owner._buffers)]
        self.places = self._places()

    def _tensors(self, module):
        """Two lists of tensors: all parameters, and what else is averaged."""
        parameters, saved = dict(module.named_parameters()), module.state_dict()
        buffers = [b for name, b in module.named_buffers() if name in saved and b.is_floating_point()]
        return [parameters[name] for name in self.order], buffers

    def _places(self):
        # By the dicts of the modules: to ask these for all tensors takes milliseconds, in which the device is idle.
        return [tensor.data_ptr() for entries in self.entries for tensor in entries.values() if tensor is not None]

    def is_valid(self):
        """Whether model and average still are where this put them."""
        return self._places() == self.places

    @property
    def weights(self):
        """[n] the parameters of the model."""
        return self.current[0]

    def buffers(self):
        """The buffers of the model and of its average, two flat tensors."""
        return [self.current[1], self.averages[1]]

    def state(self):
        """All flat tensors, by a name for people."""
        names = ("weights", "batch statistics", "average weights", "average statistics")
        return dict(zip(names, (*self.current, *self.averages), strict=True))

    @torch.no_grad()
    def move(self, share):
        """Move each average by `share` [a tensor of one element] towards the current value."""
        for average, current in zip(self.averages, self.current, strict=True):
            average.lerp_(current, share)


class KeptHalfCopy:
    """A copy of a model in half precision, made once; each call gives it the present numbers and attributes.

    It is meant for one model, whose modules stay the same. A copy made anew takes a tenth of a second of Python.
    """

    def __init__(self):
        self.source = self.copy = None

    @torch.no_grad()
    def __call__(self, model):
        """`ema.new_half_copy`, always the same object."""
        if model is not self.source:
            self.source, self.copy = model, empty_half_copy(model)
        for tensors in (torch.nn.Module.parameters, torch.nn.Module.buffers):
            torch._foreach_copy_(list(tensors(self.copy)), list(tensors(model)))
        for name, value in vars(model).items():
            if not name.startswith("_"):  # hyp, names and the like; what begins so belongs to torch
                setattr(self.copy, name, value)
        return self.copy


class Part(NamedTuple):
    """A parameter group by its number: its parameters, their gradients as views, their place in the flat tensors."""

    number: int
    parameters: list
    gradients: list
    place: slice
    weight_decay: float


def trained(optimizer):
    """The parameters of each group that have a gradient."""
    return [[p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]


class FlatSGD:
    """Collects gradients over backward passes and makes Nesterov steps; `optimizer` is a torch.optim.SGD.

    groups   the parameters of each of its groups that are trained
    weights  [n] flat, with these parameters at its beginning

    With an enabled `scaler` a step on gradients that are not finite changes nothing, and the scale follows, as
    `scaler.step` and `scaler.update` would do it: decided on the device.
    """

    def __init__(self, optimizer, scaler, groups, weights):
        self.optimizer, self.scaler = optimizer, scaler
        parameters = [p for group in groups for p in group]
        starts = starts_of(parameters)
        self.weights = weights[: starts[-1]]
        self.gradient, self.momentum = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.overflow = weights.new_zeros(())
        self.standstill = weights.new_tensor([0.0] * len(groups) + [1.0])
        self.parts, first = [], 0
        for number, group in enumerate(groups):
            last = first + len(group)
            views = [view_of(self.gradient, start, p) for p, start in zip(group, starts[first:last], strict=True)]
            decay = optimizer.param_groups[number]["weight_decay"]
            if group:
                self.parts.append(Part(number, group, views, slice(starts[first], starts[last]), decay))
            first = last
        for parameter, start in zip(parameters, starts, strict=False):
            self._take_over_momentum(parameter, view_of(self.momentum, start, parameter))

    def _take_over_momentum(self, parameter, place):
        state = self.optimizer.state[parameter]
        if state.get("momentum_buffer") is not None:
            place.copy_(state["momentum_buffer"])
        state["momentum_buffer"] = place  # zeros are where torch's step begins, too

    @torch.no_grad()
    def collect(self):
        """Add the gradients of a backward pass to those collected before, and take them off the parameters."""
        for part in self.parts:
            new = [_shaped_like(p.grad, view) for p, view in zip(part.parameters, part.gradients, strict=True)]
            torch._foreach_add_(part.gradients, new)
            for parameter in part.parameters:
                parameter.grad = None

    def drop(self):
        """Forget the gradients collected so far."""
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
                self.gradient[part.place].add_(self.weights[part.place], alpha=part.weight_decay)
        if self.scaler.is_enabled():  # a step without gradient, rate and loss of momentum is no step
            overflow = self.overflow > 0
            self.gradient.masked_fill_(overflow, 0.0)
            numbers = torch.where(overflow, self.standstill, numbers)
        momentum = numbers[-1]
        torch.addcmul(self.gradient, self.momentum, momentum, out=self.momentum)
        self.gradient.addcmul_(self.momentum, momentum)
        for part in self.parts:
            self.weights[part.place].addcmul_(self.gradient[part.place], numbers[part.number], value=-1)
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


def _shaped_like(gradient, view):
    """`gradient` with the strides of `view` where only axes of length 1 differ: kernels for many tensors ask for it."""
    if gradient.stride() == view.stride():
        return gradient
    differs = [n for n, a, b in zip(view.shape, gradient.stride(), view.stride(), strict=True) if a != b]
    return gradient.as_strided(view.shape, view.stride()) if max(differs) == 1 else gradient
