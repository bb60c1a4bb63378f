"""The operations that a network is planned as: each with its forward and its backward pass over a Tape.

A Value is a map between operations. Whoever makes it writes it to where it is read: into the slices of all
concatenations that it is part of, and packed where a convolution reads it. Backward, the gradient of a Value is a list
of pieces whose sum it is: whoever reads the Value adds one, its maker takes them all and adds them in its kernel.

    Block       convolutions of one input, each with batch norm and activation (convolutions.py); Stem: on images
    HeadOutput  a convolution of the detection layer, with its implicit knowledge folded in (convolutions.py)
    Images      the images as floats
    Norm        batch norm and activation alone
    Sum         of two or three maps, with an activation
    Pool        max pooling
    Upsample    nearest, to twice the size
    Join        a concatenation: nothing, where its inputs were written in place
    Ordinary    any other module, through autograd
"""

from dataclasses import dataclass, field

import torch

from models.fused import kernels, pools, sums

MOST_PIECES = 3  # that a kernel adds


class Value:
    """A map [b x channels x h x w] that one operation makes and others read; `channels` None: known at run time only.

    packed  whether somebody reads it as a tensor of its own
    slices  (Value of the concatenation, first channel in it): where else it is written
    """

    def __init__(self, channels, packed=False):
        self.channels, self.packed, self.slices = channels, packed, []


@dataclass
class Tape:
    """What one pass through a network holds: `values` while they are read, `kept` for the backward pass."""

    dtype: torch.dtype
    weights: dict  # operation -> weight of its convolution in `dtype`
    needed: set  # the Values and operations that get a gradient
    statistics: dict = field(default_factory=dict)  # norm -> what takes the place of the batch's, in evaluation
    values: dict = field(default_factory=dict)
    kept: dict = field(default_factory=dict)
    pieces: dict = field(default_factory=dict)
    gradients: object = None  # ParameterGradients

    def places(self, value, like, size=None):
        """Where `value` is written: maps [b x channels x h x w] for the batch of `like`, of its size or `size`.

        Others read the first. A concatenation gets its memory when the first of its parts is to be written.
        """
        shape = (like.shape[0], value.channels, *(size or like.shape[2:]))
        places = [self._new(shape, like)] if value.packed or not value.slices else []
        for whole, start in value.slices:
            joined = self.values.get(whole)
            if joined is None:
                joined = self.values[whole] = self._new((shape[0], whole.channels, *shape[2:]), like)
            if joined.shape[2:] != shape[2:]:
                raise ValueError(
                    f"maps of {shape[2]} x {shape[3]} and {joined.shape[2]} x {joined.shape[3]} cannot be joined: give "
                    "images whose sides are multiples of the largest stride"
                )
            places.append(joined[:, start : start + value.channels])
        self.values[value] = places[0]
        return places

    def _new(self, shape, like):
        return torch.empty(shape, dtype=self.dtype, device=like.device, memory_format=torch.channels_last)

    def add_piece(self, value, piece):
        if value in self.needed:
            self.pieces.setdefault(value, []).append(piece)

    def take_pieces(self, value, most=MOST_PIECES):
        """At most so many maps whose sum is the gradient of `value`; none if nobody gave it one."""
        pieces = self.pieces.pop(value, [])
        while len(pieces) > most:
            pieces = [pieces[0] + pieces[1], *pieces[2:]]
        return pieces


class PlanOperation:
    """sources, targets: the Values that it reads and makes; modules: those whose parameters it uses."""

    def __init__(self, sources, targets, modules=()):
        self.sources, self.targets, self.modules = list(sources), list(targets), list(modules)

    def parameters(self):
        return [parameter for module in self.modules for parameter in module.parameters()]

    def norms(self):
        """The batch norms whose statistics it moves."""
        return []

    def forward(self, tape):
        raise NotImplementedError

    def backward(self, tape):
        raise NotImplementedError


def spread(places):
    """Copy what stands in the first two of `places`, which a kernel wrote, to the others."""
    for place in places[2:]:
        place.copy_(places[0])


class Images(PlanOperation):
    """The images as other operations read them: floats of the tape's type, channels-last; bytes become 0..1."""

    def __init__(self, source, target):
        super().__init__([source], [target])

    def forward(self, tape):
        images = tape.values[self.sources[0]]
        if images.dtype == torch.uint8:
            images = images.float() / 255
        tape.values[self.targets[0]] = images.to(tape.dtype, memory_format=torch.channels_last)


class Norm(PlanOperation):
    """Batch norm and activation of a Value that no convolution makes."""

    def __init__(self, source, norm, activation, target):
        super().__init__([source], [target], [norm])
        self.norm, self.activation = norm, activation

    def norms(self):
        return [self.norm]

    def forward(self, tape):
        x = tape.values[self.sources[0]]
        places = tape.places(self.targets[0], x)
        saved = kernels.norm_activation(x, self.norm, *self.activation, places[:2], tape.statistics.get(self.norm))
        spread(places)
        if self in tape.needed:
            tape.kept[self] = x, saved

    def backward(self, tape):
        x, saved = tape.kept.pop(self)
        result = torch.empty_like(x, memory_format=torch.channels_last)
        places = tape.gradients.of(self.norm.weight), tape.gradients.of(self.norm.bias)
        pieces = tape.take_pieces(self.targets[0])
        kernels.norm_activation_gradient(pieces, x, saved, *self.activation, result, *places)
        tape.add_piece(self.sources[0], result)


class Sum(PlanOperation):
    """activation(sum of two or three Values)."""

    def __init__(self, sources, activation, target):
        super().__init__(sources, [target])
        self.activation = activation

    def forward(self, tape):
        terms = [tape.values[source] for source in self.sources]
        places = tape.places(self.targets[0], terms[0])
        sums.add_activation(terms, *self.activation, places[:2])
        spread(places)
        if self in tape.needed and self.activation[0] != kernels.IDENTITY:
            tape.kept[self] = terms

    def backward(self, tape):
        pieces, terms = tape.take_pieces(self.targets[0]), tape.kept.pop(self, None)
        if terms is not None:
            pieces = [sums.add_activation_gradient(pieces, terms, *self.activation)]
        for source in self.sources:
            for piece in pieces:
                tape.add_piece(source, piece)


class Pool(PlanOperation):
    """Max pooling with a `window`: stride 1 and the same size, or windows side by side."""

    def __init__(self, source, window, stride, target):
        super().__init__([source], [target])
        self.window, self.stride = window, stride

    def forward(self, tape):
        x = tape.values[self.sources[0]]
        size = x.shape[2:] if self.stride == 1 else [side // self.window for side in x.shape[2:]]
        places = tape.places(self.targets[0], x, size)
        _, choice = pools.max_pool(x, self.window, self.stride, *places[:2])
        spread(places)
        if self in tape.needed:
            tape.kept[self] = choice, x.shape[2:]

    def backward(self, tape):
        choice, size = tape.kept.pop(self)
        # what has reached the source already is added on the way: that saves its maker from reading two maps
        source, pieces = self.sources[0], tape.take_pieces(self.targets[0])
        more = tape.take_pieces(source, most=2)
        tape.add_piece(source, pools.max_pool_gradient(pieces, choice, self.window, self.stride, size, plus=more))


class Upsample(PlanOperation):
    """Nearest, twice as high and wide."""

    def __init__(self, source, target):
        super().__init__([source], [target])

    def forward(self, tape):
        x = tape.values[self.sources[0]]
        places = tape.places(self.targets[0], x, [2 * side for side in x.shape[2:]])
        pools.upsample(x, *places[:2])
        spread(places)

    def backward(self, tape):
        source, pieces = self.sources[0], tape.take_pieces(self.targets[0])
        tape.add_piece(source, pools.upsample_gradient(pieces, plus=tape.take_pieces(source, most=2)))


class Join(PlanOperation):
    """A concatenation along the channels, which the operations that make its sources write in place.

    `copied` are the numbers of the sources that nobody writes there.
    """

    def __init__(self, sources, target, copied):
        super().__init__(sources, [target])
        self.copied = copied
        self.widths = [source.channels for source in sources]

    def forward(self, tape):
        whole = tape.values.get(self.targets[0])
        if whole is None:  # all are copied
            (whole,) = tape.places(self.targets[0], tape.values[self.sources[0]])
        parts = whole.split(self.widths, 1)
        for number in self.copied:
            parts[number].copy_(tape.values[self.sources[number]])

    def backward(self, tape):
        for piece in tape.take_pieces(self.targets[0]):
            for source, part in zip(self.sources, piece.split(self.widths, 1), strict=True):
                tape.add_piece(source, part)


class Ordinary(PlanOperation):
    """Any other module, run by autograd on copies of its inputs that have no history."""

    def __init__(self, module, sources, target, takes_list=False):
        super().__init__(sources, [target], [module])
        self.module, self.takes_list = module, takes_list

    def forward(self, tape):
        needs = self in tape.needed
        inputs = [tape.values[source].detach() for source in self.sources]
        for x, source in zip(inputs, self.sources, strict=True):
            x.requires_grad_(source in tape.needed)
        device = inputs[0].device.type
        with torch.set_grad_enabled(needs), torch.autocast(device, tape.dtype, enabled=tape.dtype != torch.float32):
            if getattr(self.module, "inplace", False):  # it would change what others read
                y = self.module(inputs[0].clone())
            else:
                y = self.module(inputs if self.takes_list else inputs[0])
        if needs:
            tape.kept[self] = inputs, y
        self._hand_out(tape, y.detach())

    def _hand_out(self, tape, y):
        """`y` as the Value; a concatenation that it is part of copies it."""
        tape.values[self.targets[0]] = y.to(tape.dtype).contiguous(memory_format=torch.channels_last)

    def backward(self, tape):
        inputs, y = tape.kept.pop(self)
        pieces = tape.take_pieces(self.targets[0], most=1)
        sources = [(x, source) for x, source in zip(inputs, self.sources, strict=True) if x.requires_grad]
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        wanted = [x for x, _ in sources] + parameters
        found = torch.autograd.grad(y, wanted, pieces[0].to(y.dtype), allow_unused=True)
        for (_, source), gradient in zip(sources, found, strict=False):
            if gradient is not None:
                tape.add_piece(source, gradient)
        for parameter, gradient in zip(parameters, found[len(sources) :], strict=True):
            if gradient is not None:
                tape.gradients.add(parameter, gradient)
