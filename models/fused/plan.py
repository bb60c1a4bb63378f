"""The translation of a Model into a flat list of operations (operations.py), and what runs it.

translate   layers to operations
merged      convolutions of one input become one
Plan        runs the operations forward, and in reverse order backward
"""

from collections import Counter

import torch
from torch import nn

from models.common import MP, SP, SPPCSPC, Concat, Conv, DownC, ReOrg, RepConv, Shortcut
from models.fused import kernels
from models.fused.convolutions import Block, Branch, HeadOutput, Stem
from models.fused.operations import Images, Join, Norm, Ordinary, PlanOperation, Pool, Sum, Tape, Upsample, Value
from models.fused.weights import ParameterGradients, Weights
from models.multihead import MultiHeadDetect
from models.multihead_attention import MultiHeadDetectAttention
from models.yolo import Detect, IAuxDetect, IDetect

HEADS = (Detect, IDetect, IAuxDetect, MultiHeadDetect, MultiHeadDetectAttention)  # that have operations


class Translator:
    """Turns the layers of `model` into `operations`; `outputs` are the HeadOutputs, nested as the maps of the head."""

    def __init__(self, model):
        self.operations, self.ordinary = [], Counter()
        self.images, self.floats = Value(None), Value(None)
        self._do(Images(self.images, self.floats))
        self.reorganised = set()  # Values that are ReOrg of the images
        self.pyramids = {}  # Value -> (window, Value): the largest max pooling of it so far
        values, x = [], self.floats
        for layer in model.model[:-1]:
            takes_list = isinstance(layer.f, list)
            indices = layer.f if takes_list else [layer.f]
            x = self.module(layer, [x if index == -1 else values[index] for index in indices], takes_list)
            values.append(x)
        head = model.model[-1]
        self.outputs = self._head(head, [values[index] for index in head.f])

    def module(self, module, sources, takes_list=False):
        """The Value that `module` makes of `sources`."""
        translate = {
            nn.Sequential: self._sequence, nn.Identity: self._same, Conv: self._conv, RepConv: self._rep_conv,
            MP: self._max_pool, SP: self._max_pool, nn.MaxPool2d: self._max_pool, SPPCSPC: self._pyramid,
            DownC: self._down, Concat: self._concat, Shortcut: self._shortcut, nn.Upsample: self._upsample,
            ReOrg: self._reorganise,
        }.get(type(module))  # fmt: skip
        value = translate and translate(module, *sources)
        return value or self._ordinary(module, sources, takes_list)

    def _do(self, operation):
        self.operations.append(operation)
        return operation.targets[0] if operation.targets else None

    def _ordinary(self, module, sources, takes_list=False, channels=None):
        self.ordinary[type(module).__name__] += 1
        return self._do(Ordinary(module, sources, Value(channels), takes_list))

    def _same(self, module, source):
        return source

    def _sequence(self, module, source):
        for part in module:
            source = self.module(part, [source])
        return source

    def _conv(self, module, source):
        if not hasattr(module, "bn") or not is_plain(module.bn) or not is_regular(module.conv):
            return None
        return self._block(source, module.conv, module.bn, module.act)

    def _block(self, source, conv, norm, act):
        activation = kind_of(act)
        target = Value(conv.out_channels)
        branches = [Branch(conv, norm, activation or (kernels.IDENTITY, 0.0), target)]
        reorganised = source in self.reorganised
        if (reorganised or source is self.floats) and Stem.fits(conv, reorganised):
            self._do(Stem(self.images, *branches, reorganised))
        else:
            source.packed = True
            self._do(Block(source, branches))
        return target if activation else self._ordinary(act, [target], channels=target.channels)

    def _rep_conv(self, module, source):
        if hasattr(module, "rbr_reparam") or not kind_of(module.act) or source in (self.floats, *self.reorganised):
            return None
        terms = [self._block(source, conv, norm, None) for conv, norm in (module.rbr_dense, module.rbr_1x1)]
        if module.rbr_identity is not None:
            target = Value(module.in_channels)
            terms.append(self._do(Norm(source, module.rbr_identity, (kernels.IDENTITY, 0.0), target)))
        return self._do(Sum(terms, kind_of(module.act), Value(module.out_channels)))

    def _max_pool(self, module, source):
        pool = module if isinstance(module, nn.MaxPool2d) else module.m
        window, stride, padding = pool.kernel_size, pool.stride, pool.padding
        if not isinstance(window, int) or pool.dilation != 1 or pool.ceil_mode or not source.channels:
            return None
        if stride == 1 and window % 2 and padding == window // 2:
            return self._grow_pyramid(source, window)
        if stride == window and padding == 0 and window <= 15:
            return self._do(Pool(source, window, stride, Value(source.channels)))
        return None

    def _grow_pyramid(self, source, window):
        """Max pooling with stride 1. 9x9 is 5x5 twice, so it goes on from a smaller window on the same source."""
        before, start = self.pyramids.get(source, (1, source))
        if before >= window:
            before, start = 1, source
        grown = window - before + 1
        if grown > 15:
            return None
        value = self._do(Pool(start, grown, 1, Value(source.channels)))
        self.pyramids[source] = window, value
        return value

    def _pyramid(self, module, source):
        base = self._chain(source, module.cv1, module.cv3, module.cv4)
        pools = [self.module(pool, [base]) for pool in module.m]
        left = self._chain(self._joined([base, *pools]), module.cv5, module.cv6)
        return self.module(module.cv7, [self._joined([left, self.module(module.cv2, [source])])])

    def _chain(self, value, *modules):
        for module in modules:
            value = self.module(module, [value])
        return value

    def _down(self, module, source):
        strided = self._chain(source, module.cv1, module.cv2)
        return self._joined([strided, self._chain(source, module.mp, module.cv3)])

    def _concat(self, module, *sources):
        return self._joined(sources) if module.d == 1 and all(source.channels for source in sources) else None

    def _joined(self, sources):
        target, start, copied = Value(sum(source.channels for source in sources), packed=True), 0, []
        makers = {value: operation for operation in self.operations for value in operation.targets}
        for number, source in enumerate(sources):
            if isinstance(makers[source], (Join, Ordinary, Images)):
                copied.append(number)
            else:
                source.slices.append((target, start))
            start += source.channels
        return self._do(Join(sources, target, copied))

    def _shortcut(self, module, *sources):
        channels = {source.channels for source in sources}
        if len(channels) != 1 or None in channels:
            return None
        return self._do(Sum(sources, (kernels.IDENTITY, 0.0), Value(*channels)))

    def _upsample(self, module, source):
        doubles = module.mode == "nearest" and module.size is None and module.scale_factor in (2, 2.0, (2.0, 2.0))
        return self._do(Upsample(source, Value(source.channels))) if doubles and source.channels else None

    def _reorganise(self, module, source):
        target = Value(None)
        if source is self.floats:
            self.reorganised.add(target)
        return self._do(Ordinary(module, [source], target))

    def _head(self, head, inputs):
        if type(head) in (MultiHeadDetect, MultiHeadDetectAttention):
            return [
                [self._output(self._attended(head, number, level, inputs[level]), conv, head)
                 for level, conv in enumerate(convs)]
                for number, convs in enumerate(head.heads)
            ]  # fmt: skip
        folds = type(head) is not Detect and not head.implicit_folded
        around = zip(head.ia, head.im, strict=True) if folds else [(None, None)] * head.nl
        outputs = [self._output(x, conv, head, *pair) for x, conv, pair in zip(inputs, head.m, around, strict=False)]
        if type(head) is IAuxDetect:
            auxiliary = zip(inputs[head.nl :], head.m2, strict=True)
            outputs += [self._output(x, conv, head) for x, conv in auxiliary]
        return outputs

    def _attended(self, head, number, level, value):
        if type(head) is MultiHeadDetect:
            return value
        return self._ordinary(head.attentions[number][level], [value], channels=value.channels)

    def _output(self, source, conv, head, added=None, factor=None):
        source.packed = True
        operation = HeadOutput(source, conv, head.na, added, factor)
        self._do(operation)
        return operation


def is_plain(norm):
    return type(norm) is nn.BatchNorm2d and norm.affine and norm.track_running_stats and norm.momentum is not None


def is_regular(conv):
    return type(conv) is nn.Conv2d and conv.bias is None and conv.padding_mode == "zeros" and conv.padding != "same"


def kind_of(activation):
    """(kind, slope) for the kernels, or None for an activation that they do not know."""
    if activation is None or type(activation) is nn.Identity:
        return kernels.IDENTITY, 0.0
    if type(activation) is nn.LeakyReLU:
        return kernels.LEAKY_RELU, activation.negative_slope
    if type(activation) is nn.ReLU:
        return kernels.LEAKY_RELU, 0.0
    return (kernels.SILU, 0.0) if type(activation) is nn.SiLU else None


def merged(operations):
    """`operations`, but Blocks that read one Value with one geometry are a single Block, at the place of the first."""
    first, result = {}, []
    for operation in operations:
        if type(operation) is Block and operation.geometry[-1] == 1:
            key = operation.sources[0], operation.geometry, operation.branches[0].conv.kernel_size
            if key in first:
                before = result[first[key]]
                result[first[key]] = Block(before.sources[0], before.branches + operation.branches)
                continue
            first[key] = len(result)
        result.append(operation)
    return result


def needed_only(operations):
    """`operations` without those that have no parameters and whose results nobody reads."""
    read, result = set(), []
    for operation in reversed(operations):
        if operation.modules or not operation.targets or read.intersection(operation.targets):
            result.append(operation)
            read.update(operation.sources)
    return result[::-1]


class Plan:
    """The operations of `model`."""

    def __init__(self, model):
        translator = Translator(model)
        self.operations: list[PlanOperation] = merged(needed_only(translator.operations))
        self.images, self.outputs, self.ordinary = translator.images, translator.outputs, translator.ordinary
        self.heads = [operation for operation in self.operations if isinstance(operation, HeadOutput)]
        self.norms = [norm for operation in self.operations for norm in operation.norms()]
        self.weights = Weights([operation for operation in self.operations if type(operation) is Block])
        self.parameters = list(model.parameters())
        self.last_reads = self._last_reads()

    def _last_reads(self):
        """For each operation the Values that no later one reads."""
        reader = {}
        for number, operation in enumerate(self.operations):
            reader.update(dict.fromkeys([*operation.targets, *operation.sources], number))
        done = [[] for _ in self.operations]
        for value, number in reader.items():
            done[number].append(value)
        return done

    def _needed(self):
        """The Values and operations that get a gradient."""
        needed = set()
        for operation in self.operations:
            trains = any(parameter.requires_grad for parameter in operation.parameters())
            if trains or needed.intersection(operation.sources):
                needed.update(operation.targets, [operation])
        return needed

    @torch.no_grad()
    def forward(self, images, dtype):
        """(the maps of all HeadOutputs in a row, the Tape for `backward`)."""
        torch._foreach_add_([norm.num_batches_tracked for norm in self.norms], 1)
        tape = Tape(dtype, self.weights.refreshed(dtype), self._needed())
        return self._maps(images, tape), tape

    @torch.no_grad()
    def evaluate(self, images, dtype):
        """The maps of all HeadOutputs in a row, by the running statistics of the norms."""
        statistics = dict(zip(self.norms, kernels.running_statistics(self.norms), strict=True)) if self.norms else {}
        return self._maps(images, Tape(dtype, self.weights.refreshed(dtype), set(), statistics))

    def _maps(self, images, tape):
        tape.values[self.images] = images
        maps = {}
        with torch.autocast(images.device.type, enabled=False):
            for operation, done in zip(self.operations, self.last_reads, strict=True):
                maps[operation] = operation.forward(tape)
                for value in done:
                    del tape.values[value]
        return [maps[operation] for operation in self.heads]

    @torch.no_grad()
    def backward(self, tape, gradients):
        """The gradients of `parameters`, None without one, from those of the maps (or None)."""
        if not tape.kept:
            raise RuntimeError("the backward pass frees what it has read: it can be run once")
        of_maps = dict(zip(self.heads, gradients, strict=True))
        tape.gradients = ParameterGradients(self.parameters)
        with torch.autocast(self.parameters[0].device.type, enabled=False):
            for operation in reversed(self.operations):
                if operation not in tape.needed:
                    continue
                if operation in of_maps:
                    if of_maps[operation] is not None:
                        operation.backward(tape, of_maps.pop(operation))
                elif any(value in tape.pieces for value in operation.targets):
                    operation.backward(tape)
                tape.kept.pop(operation, None)
        return tape.gradients.finished()
