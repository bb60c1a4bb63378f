"""Detection layers, the Model that a configuration describes, and the parser that builds it."""

import logging
import math
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from models import reparam
from models.common import MP, SP, SPPCSPC, Chuncat, Concat, Conv, DownC, ImplicitA, ImplicitM, ReOrg, RepConv, Shortcut
from models.config import (
    MAX_CHANNELS,
    MAX_LAYERS,
    MAX_REPEATS,
    MAX_WEIGHTS,
    check_row,
    describe,
    is_count,
    level_anchors,
    read_cfg,
    resolve_argument,
)
from models.detection import DetectionLayer
from models.multihead import MultiHeadDetect, heads_arguments
from models.multihead_attention import MultiHeadDetectAttention
from models.summary import SizeLimit, model_summary, timed
from utils.system.files import shown

logger = logging.getLogger(__name__)

STRIDE_PASS_SIZE = 256  # side of the zero image that measures the strides; a multiple of every stride in use
PAD_VALUE = 0.447  # grey of the border that test-time augmentation adds, near the mean of ImageNet


class Detect(DetectionLayer):
    """Detection layer with one output convolution a level.

    Its maps: one [b x na x ny x nx x no] per level; no = x, y, w, h, objectness, nc classes, all raw.
    """

    def __init__(self, nc=80, anchors=(), ch=()):
        super().__init__(nc, anchors)
        self.no = nc + 5
        self._build(ch)

    def _build(self, ch):
        self.m = self._output_convs(ch)

    def _output_convs(self, ch):
        return nn.ModuleList(nn.Conv2d(channels, self.no * self.na, 1) for channels in ch)

    def _maps(self, x):
        return [self._as_map(self._lead(level, x[level])) for level in range(self.nl)]

    def _lead(self, level, features):
        return self.m[level](features)

    def _boxes(self, maps, decode):
        return decode(maps)

    def output_biases(self):
        return self._biases_of(self.m)

    def _biases_of(self, convs):
        return [(level, conv.bias, slice(5, None), self.nc) for level, conv in enumerate(convs)]

    def folded(self, level):
        """Weight and bias of the plain convolution that equals the lead branch of `level`."""
        return self.m[level].weight, self.m[level].bias


class IDetect(Detect):
    """Detection layer with implicit knowledge (Wang et al. 2021) around the output convolutions."""

    implicit_folded = False

    def _build(self, ch):
        super()._build(ch)
        self._add_implicits(ch)

    def _add_implicits(self, ch):
        self.ia = nn.ModuleList(ImplicitA(channels) for channels in ch)
        self.im = nn.ModuleList(ImplicitM(self.no * self.na) for _ in ch)

    def _lead(self, level, features):
        if self.implicit_folded:
            return self.m[level](features)
        return self.im[level](self.m[level](self.ia[level](features)))

    def folded(self, level):
        conv = self.m[level]
        if self.implicit_folded:
            return conv.weight, conv.bias
        return reparam.fold_implicit(conv.weight, conv.bias, self.ia[level].implicit, self.im[level].implicit)

    def fuse(self):
        """Fold the implicit knowledge into the convolutions; its parameters stay, unused. Harmless when repeated."""
        for level, conv in enumerate(self.m):
            weight, bias = self.folded(level)
            conv.weight.data, conv.bias.data = weight.detach(), bias.detach()
        self.implicit_folded = True


class IAuxDetect(IDetect):
    """IDetect whose second half of the inputs feeds an auxiliary head, used by the training output only.

    Training output: the nl lead maps, then the nl auxiliary maps.
    """

    def _build(self, ch):
        lead, auxiliary = ch[: self.nl], ch[self.nl :]
        self.m = self._output_convs(lead)
        self.m2 = self._output_convs(auxiliary)
        self._add_implicits(lead)

    def _auxiliary(self, x):
        return [self._as_map(conv(features)) for conv, features in zip(self.m2, x[self.nl :], strict=True)]

    def output_biases(self):
        return super().output_biases() + self._biases_of(self.m2)


class Model(nn.Module):
    """The network of a configuration: `cfg` is the path of a YAML file or a dict.

    `ch` input channels (the file's own `ch` wins). `nc` and `anchors` (a number per level) override the file.
    `head_config` (utils.head_config.HeadConfig) tells the heads of a MultiHeadDetect their classes.
    Raises ValueError that names the file or the row if the configuration cannot be built.
    """

    traced = False  # True: forward stops before the detection layer and returns the list of its inputs

    def __init__(self, cfg, ch=3, nc=None, anchors=None, head_config=None):
        super().__init__()
        self.traced = False
        self.yaml = read_cfg(cfg, ch, nc, anchors)
        if head_config is not None:
            self.yaml["head_config"] = head_config.description()  # so that a checkpoint says all about its model
        self.yaml_file = None if isinstance(cfg, dict) else Path(cfg).name
        self.names = [str(i) for i in range(self.yaml["nc"])]
        try:
            self.model, self.save = parse_model(self.yaml, self.yaml["ch"], head_config)
            self._measure_strides()
        except ValueError as error:
            raise ValueError(f"{describe(cfg)}, {error}") from error
        self._initialise_biases()
        self._configure_norms_and_activations()
        try:
            self.info()
        except RuntimeError as error:  # sizes that fit by chance at the one size that measured the strides
            side = int(self.stride.max())
            raise ValueError(f"{describe(cfg)} cannot process an image of {side} x {side} pixels: {error}") from error

    def forward(self, x, augment=False, profile=False):
        """Output of the detection layer for images [b x ch x h x w, 0..1].

        `augment` (eval only) returns the boxes of three scaled or mirrored passes, concatenated, and None.
        `profile` logs the time of every layer.
        """
        if augment:
            return self._forward_augmented(x), None
        return self._forward_layers(x, timed if profile else _plain)

    def _forward_layers(self, x, call):
        """Run the layers in order; `call(layer, input)` runs one of them."""
        outputs = []
        for layer in self.model:
            if layer.f != -1:
                x = _gather(layer.f, x, outputs)
            if self.traced and isinstance(layer, DetectionLayer):
                break
            x = call(layer, x)
            outputs.append(x if layer.i in self.save else None)
        return x

    def _forward_augmented(self, images):
        """Boxes of the image at scales 1, 0.83 (mirrored) and 0.67, all in pixels of `images`."""
        boxes = []
        for scale, mirrored in ((1, False), (0.83, True), (0.67, False)):
            view = images.flip(3) if mirrored else images
            found = self._forward_layers(scale_images(view, scale, int(self.stride.max())), _plain)[0]
            xywh = found[..., :4] / scale
            if mirrored:
                xywh[..., 0] = images.shape[3] - xywh[..., 0]
            boxes.append(torch.cat((xywh, found[..., 4:]), -1))
        return torch.cat(boxes, 1)

    @torch.no_grad()
    def _measure_strides(self):
        """Set the strides from a zero image, divide the anchors by them, and make both ascend alike.

        stock behaviour: the pass runs in training mode, so every batch norm starts with running variance 0.9.
        """
        head = self.model[-1]
        images = torch.zeros(1, self.yaml["ch"], STRIDE_PASS_SIZE, STRIDE_PASS_SIZE)
        maps = self._forward_layers(images, partial(_checked, SizeLimit()))
        head.stride = torch.tensor([STRIDE_PASS_SIZE / level.shape[2] for level in head.level_maps(maps)])
        areas = head.anchor_grid.prod(-1).flatten()
        if (areas[-1] - areas[0]).sign() != (head.stride[-1] - head.stride[0]).sign():
            logger.info("Reversing the order of the anchors to that of the strides")
            head.anchors[:] = head.anchors.flip(0)
            head.anchor_grid[:] = head.anchor_grid.flip(0)
        head.anchors /= head.stride.view(-1, 1, 1)
        self.stride = head.stride

    @torch.no_grad()
    def _initialise_biases(self):
        """Start from about 8 objects in a 640 px image and equally frequent classes (Lin et al. 2017, section 4.1)."""
        head = self.model[-1]
        for level, bias, classes, num_classes in head.output_biases():
            per_anchor = bias.view(head.na, -1)
            per_anchor[:, 4] += math.log(8 / (640 / float(head.stride[level])) ** 2)
            per_anchor[:, classes] += math.log(0.6 / (num_classes - 0.99))

    def _configure_norms_and_activations(self):
        for module in self.modules():
            if type(module) is nn.BatchNorm2d:
                module.eps = 1e-3
                module.momentum = 0.03
            elif type(module) in (nn.Hardswish, nn.LeakyReLU, nn.ReLU, nn.ReLU6):
                module.inplace = True

    @torch.no_grad()
    def fuse(self):
        """Fold batch norms, RepConv branches and implicit knowledge into plain convolutions; returns self."""
        for module in list(self.modules()):
            if type(module) in (Conv, RepConv) or isinstance(module, IDetect):
                module.fuse()
        self.info()
        return self

    def info(self, verbose=False, img_size=640):
        """Log the numbers of layers, parameters and gradients and the GFLOPs at `img_size` (int or [h, w])."""
        summary = model_summary(self, img_size)
        if verbose:
            for name, p in self.named_parameters():
                logger.info("%-50s %-8s %12d  %-22s", name, p.requires_grad, p.numel(), list(p.shape))
        logger.info("Model summary: %s", summary)


def _gather(sources, previous, outputs):
    """The input of a layer: one tensor for an int, a list for a list; -1 is the previous output."""
    if isinstance(sources, int):
        return outputs[sources]
    return [previous if source == -1 else outputs[source] for source in sources]


def _plain(layer, x):
    return layer(x)


def _checked(limit, layer, x):
    """Run a layer; what does not fit, or is too large for `limit`, becomes a ValueError that names the row."""
    try:
        limit.before(layer, x)
        return layer(x)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        shapes = [list(t.shape) for t in (x if isinstance(x, list) else [x])]
        raise ValueError(f"row {layer.i} ({layer.type}) cannot process input of shape {shapes}: {error}") from error


def scale_images(images, ratio, multiple):
    """Images [b x c x h x w] resized by `ratio` and padded right and below to a multiple of `multiple` pixels."""
    if ratio == 1:
        return images
    height, width = images.shape[2:]
    size = int(height * ratio), int(width * ratio)
    resized = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
    below = math.ceil(height * ratio / multiple) * multiple - size[0]
    right = math.ceil(width * ratio / multiple) * multiple - size[1]
    return F.pad(resized, [0, right, 0, below], value=PAD_VALUE)


LAYERS = {
    layer.__name__: layer
    for layer in (
        *(Conv, RepConv, DownC, SPPCSPC, Concat, Chuncat, Shortcut, MP, SP, ReOrg, Detect, IDetect, IAuxDetect),
        *(MultiHeadDetect, MultiHeadDetectAttention),
        *(nn.Conv2d, nn.BatchNorm2d, nn.Upsample, nn.MaxPool2d, nn.AvgPool2d, nn.Identity),
    )
}
MULTI_HEAD_LAYERS = (MultiHeadDetect, MultiHeadDetectAttention)
DETECTION_LAYERS = (Detect, IDetect, IAuxDetect, *MULTI_HEAD_LAYERS)
SIZED_LAYERS = (Conv, nn.Conv2d, RepConv, DownC, SPPCSPC)  # the first argument of the row is the number of channels
REPEATING_LAYERS = (DownC, SPPCSPC)  # receive the repeat count as an argument
LIST_LAYERS = (Concat, Chuncat, Shortcut, *DETECTION_LAYERS)  # process a list of tensors


def parse_model(cfg, ch, head_config=None):
    """Layers (nn.Sequential) and savelist of a configuration dict for images with `ch` channels.

    `head_config` is for a layer with several heads, and only for that.

    The savelist names, sorted and with repetitions, the layers whose output a later layer needs. Raises ValueError that
    names the row.
    """
    rows = cfg["backbone"] + cfg["head"]
    layers, widths, save, num_layers = [], [], [], 0
    for i, row in enumerate(rows):
        try:
            sources, number, name, args = check_row(row)
            kind = find_layer(name)
            if issubclass(kind, DetectionLayer) != (i == len(rows) - 1):
                raise ValueError("the last row, and no other, must be a detection layer")
            inputs = [_source_width(i, source, widths, ch) for source in sources]
            layer, width = _build_layer(kind, number, args, inputs, cfg, head_config)
            num_layers += len(layer) if isinstance(layer, nn.Sequential) else 1
            if num_layers > MAX_LAYERS or sum(built.np for built in layers) > MAX_WEIGHTS:
                raise ValueError(f"more than {MAX_LAYERS} layers or {MAX_WEIGHTS} weights up to here")
            if isinstance(row[0], list) != (kind in LIST_LAYERS):
                raise ValueError(f"from of {name} must be {'a list' if kind in LIST_LAYERS else 'one index'}")
        except (ValueError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
            raise ValueError(f"row {i} {shown(row)}: {error}") from error
        layer.i, layer.f, layer.type = i, row[0], f"{kind.__module__}.{kind.__qualname__}"
        layer.np = sum(p.numel() for p in layer.parameters())
        logger.debug("%4d %22s %3d %10d  %-14s %s", i, row[0], number, layer.np, name, ", ".join(map(str, args)))
        layers.append(layer)
        widths.append(width)
        save += [source % i for source in sources if source != -1]
    return nn.Sequential(*layers), sorted(save)


def find_layer(name):
    """The class that a row calls `name`, with or without the prefix nn. or torch.nn.; ValueError if unknown."""
    kind = LAYERS.get(name.removeprefix("torch.").removeprefix("nn."))
    if kind is None:
        raise ValueError(f"unknown module {shown(name)}; known are {', '.join(sorted(LAYERS))}")
    return kind


def _source_width(i, source, widths, ch):
    """Number of channels that layer `i` gets from `source`, an absolute index or a negative offset."""
    if i == 0 and source == -1:
        return ch
    index = i + source if source < 0 else source
    if not 0 <= index < i:
        raise ValueError(f"from {source} is not an earlier layer")
    return widths[index]


def _build_layer(kind, number, args, inputs, cfg, head_config=None):
    """The layer of a row, built for the widths `inputs`, and its own width."""
    args = [resolve_argument(arg, {"nc": cfg["nc"], "anchors": cfg["anchors"]}) for arg in args]
    repeats = max(round(number * cfg["depth_multiple"]), 1) if number > 1 else number
    if repeats > MAX_REPEATS:
        raise ValueError(f"more than {MAX_REPEATS} repetitions")
    width = _output_width(kind, args, inputs, cfg["width_multiple"])
    if kind in SIZED_LAYERS:
        args = [inputs[0], width, *args[1:]]
    if kind in REPEATING_LAYERS:
        args.insert(2, repeats)
        repeats = 1
    if kind is nn.BatchNorm2d:
        args = [inputs[0]]
    if kind in DETECTION_LAYERS:
        args = _detection_arguments(kind, args, inputs, cfg["nc"])
        args += heads_arguments(kind in MULTI_HEAD_LAYERS, cfg, head_config)
        _check_head_size(args, inputs)
    else:
        _check_weights(kind, args, repeats)
    if repeats == 1:
        return kind(*args), width
    if inputs != [width]:
        raise ValueError(f"{repeats} repetitions need one input of the output's {width} channels, not {inputs}")
    return nn.Sequential(*(kind(*args) for _ in range(repeats))), width


def _check_weights(kind, args, repeats):
    """Raise ValueError when a layer would have more weights than any model, before there is memory for them."""
    with torch.device("meta"):
        weights = repeats * sum(parameter.numel() for parameter in kind(*args).parameters())
    if weights > MAX_WEIGHTS:
        raise ValueError(f"{weights} weights are more than {MAX_WEIGHTS}")


def _check_head_size(args, inputs):
    """The same for the detection layer with `args` (nc, anchors, input widths, and of several heads their number)."""
    nc, anchors = args[:2]
    num_heads = args[-1] if len(args) > 3 else 1
    outputs = num_heads * (nc + 5) * max(len(level) for level in anchors) // 2
    if num_heads * len(inputs) > MAX_LAYERS or outputs * sum(inputs) > MAX_WEIGHTS or num_heads * nc > MAX_WEIGHTS // 8:
        raise ValueError(f"more than {MAX_LAYERS} output layers or {MAX_WEIGHTS} weights")


def _output_width(kind, args, inputs, width_multiple):
    """Number of channels that a layer puts out."""
    if kind in SIZED_LAYERS:
        if not args or not is_count(args[0]):
            raise ValueError("the first argument must be the number of output channels")
        if args[0] * width_multiple > MAX_CHANNELS:
            raise ValueError(f"more than {MAX_CHANNELS} output channels")
        return math.ceil(args[0] * width_multiple / 8) * 8
    if kind in (Concat, Chuncat):
        return sum(inputs)
    if kind is Shortcut and (len(inputs) != 2 or inputs[0] != inputs[1]):
        raise ValueError(f"Shortcut adds two inputs of equally many channels, not {inputs}")
    return 4 * inputs[0] if kind is ReOrg else inputs[0]


def _detection_arguments(kind, args, inputs, nc):
    """(nc, anchors, input widths) of a detection layer; an auxiliary head takes two inputs per level."""
    if len(args) != 2 or not is_count(args[0]):
        raise ValueError("a detection layer takes the arguments [nc, anchors], where nc is the number of classes")
    if args[0] != nc:
        raise ValueError(f"the detection layer is made for {args[0]} classes and the model for {nc}: write nc there")
    num_levels = len(inputs)
    if kind is IAuxDetect:
        if num_levels % 2:
            raise ValueError("IAuxDetect takes the lead inputs of all levels, then as many auxiliary ones")
        num_levels //= 2
    return [args[0], level_anchors(args[1], num_levels), inputs]
