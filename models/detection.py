"""What all detection layers share: anchors, decoding, and the forms of their output."""

import torch
from torch import nn


class DetectionLayer(nn.Module):
    """Base of the detection layers, anchor-based over `nl` levels with `na` anchors each.

    Training output: the maps of `_maps`, then those of `_auxiliary`. Eval output: (boxes [b x n x 5+nc] with xywh in
    pixels and probabilities, the maps). Flags set on an instance choose other eval outputs, in this order: `end2end`
    the boxes alone; `include_nms` ((xyxy, scores),); `concat` the boxes alone. `export` forces the training output.
    """

    stride = None  # [nl] pixels per cell, set by Model
    export = False
    end2end = False
    include_nms = False
    concat = False

    def __init__(self, nc, anchors):
        super().__init__()
        self.nc = nc
        self.nl = len(anchors)
        self.na = len(anchors[0]) // 2
        # never filled: grids are cheap; stock code expects the list
        self.grid = [torch.zeros(1) for _ in range(self.nl)]
        pixels = torch.tensor(anchors).float().view(self.nl, -1, 2)
        self.register_buffer("anchors", pixels)  # divided by the strides later
        self.register_buffer("anchor_grid", pixels.clone().view(self.nl, 1, -1, 1, 1, 2))

    def forward(self, x):
        maps = self._maps(x)
        return maps + self._auxiliary(x) if self.training or self.export else self.eval_output(maps)

    def eval_output(self, maps, decode=None):
        """The eval output, from what `_maps` returned. `decode` may take the place of `_decode_all`."""
        boxes = self._boxes(maps, decode or self._decode_all)
        if self.end2end:
            return boxes
        if self.include_nms:
            return (corners_and_scores(boxes),)
        return boxes if self.concat else (boxes, maps)

    def _maps(self, x):
        """The raw maps that the boxes are made of, from the inputs of all levels."""
        raise NotImplementedError

    def _auxiliary(self, x):
        """Further maps, for training only."""
        return []

    def _boxes(self, maps, decode):
        """Boxes [b x n x 5+nc] of what `_maps` returned; `decode` makes those of one map per level."""
        raise NotImplementedError

    def level_maps(self, output):
        """One map [b x na x ny x nx x no] per level, from the training output."""
        return output[: self.nl]

    def output_biases(self):
        """(level, bias, columns of classes that it predicts, their number) of every output convolution."""
        raise NotImplementedError

    def _as_map(self, channels):
        """[b x na*no x ny x nx] to [b x na x ny x nx x no]."""
        batch, num_channels, ny, nx = channels.shape
        columns = num_channels // self.na
        return channels.view(batch, self.na, columns, ny, nx).permute(0, 1, 3, 4, 2).contiguous()

    def _decode(self, level, raw):
        """A raw map [b x na x ny x nx x no] as boxes [b x na*ny*nx x no]: xywh in pixels, then probabilities."""
        batch, na, ny, nx, no = raw.shape
        y = raw.sigmoid()
        grid = cell_grid(ny, nx, raw.device)
        xy = (y[..., 0:2] * 2.0 - 0.5 + grid) * self.stride[level]  # float32 also in a half-precision model
        wh = (y[..., 2:4] * 2) ** 2 * self.anchor_grid[level]
        return torch.cat((xy.to(y.dtype), wh.to(y.dtype), y[..., 4:]), -1).view(batch, na * ny * nx, no)

    def _decode_all(self, maps):
        """The boxes of one map per level, one level after the other."""
        return torch.cat([self._decode(level, raw) for level, raw in enumerate(maps)], 1)


def cell_grid(ny, nx, device):
    """Column and row index of every cell, float32 [1 x 1 x ny x nx x 2]."""
    rows = torch.arange(ny, device=device, dtype=torch.float32).view(ny, 1).expand(ny, nx)
    columns = torch.arange(nx, device=device, dtype=torch.float32).view(1, nx).expand(ny, nx)
    return torch.stack((columns, rows), -1).view(1, 1, ny, nx, 2)


def corners_and_scores(boxes):
    """Decoded boxes [b x n x 5+nc, xywh first] as xyxy [b x n x 4] and class times objectness [b x n x nc]."""
    centre, half = boxes[..., 0:2], boxes[..., 2:4] / 2
    return torch.cat((centre - half, centre + half), -1), boxes[..., 5:] * boxes[..., 4:5]
