"""What an exported file computes: the model's maps or boxes, or what non-maximum suppression leaves of them.

Each class is a module from images [b x 3 x h x w, RGB 0..1] to the outputs of the file. `names` are those of its
outputs, and `axes` has a list for each: the name of an axis that may vary, None for one that never does.
"""

import torch
from torch import nn

NMS_OPSET = 11  # the newest version of ONNX's NonMaxSuppression
COUNTED = "detections"  # the axis whose length depends on what an image shows


class ModelOutputs(nn.Module):
    """Base of what a file computes from a model in evaluation mode."""

    domains: dict[str, int] = {}  # of nodes that ONNX does not define, with their version

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.eval()


class RawMaps(ModelOutputs):
    """One map of logits [b x anchors x h/stride x w/stride x 5+nc] per level."""

    def __init__(self, model):
        super().__init__(model)
        levels = range(model.model[-1].nl)
        self.names = ["output", *(f"output_{level}" for level in levels[1:])]
        self.axes = [["batch", None, f"rows_{level}", f"columns_{level}", None] for level in levels]

    def forward(self, images):
        return self.model(images)[1]


class BoxesAndMaps(ModelOutputs):
    """What the model itself returns (TorchScript only): the boxes of `Decoded`, and the list of all maps."""

    def forward(self, images):
        boxes, maps = self.model(images)
        return boxes, as_list(maps)


class Decoded(ModelOutputs):
    """Boxes [b x n x 5+nc]: xywh in pixels, objectness, class probabilities (not multiplied with it)."""

    def __init__(self, model):
        super().__init__(model)
        self.names, self.axes = ["output"], [["batch", "boxes", None]]

    def forward(self, images):
        return self.model(images)[0]

    def candidates(self, images):
        """Boxes [b x n x 4, xywh] and scores [b x n x nc]; of one class the objectness alone counts, as in test.py."""
        rows = self.model(images)[0]
        objectness = rows[..., 4:5]
        return rows[..., :4], rows[..., 5:] * objectness if rows.shape[-1] > 6 else objectness


class OnnxDetections(Decoded):
    """For ONNX Runtime: rows [k x 7: image of the batch, x1, y1, x2, y2, class, score], the best of an image first.

    `limits` are (boxes of an image, IoU, confidence). A box has its best class only. Classes are suppressed `max_wh`
    pixels apart from each other; 0: boxes of different classes suppress each other.
    """

    def __init__(self, model, limits, max_wh):
        super().__init__(model)
        self.limits, self.max_wh = limits, max_wh
        self.axes = [[COUNTED, None]]

    def forward(self, images):
        xywh, scores = self.candidates(images)
        centre, half = xywh[..., :2], xywh[..., 2:] / 2
        boxes_xyxy = torch.cat((centre - half, centre + half), -1)
        best, label = scores.max(-1, keepdim=True)
        label = label.to(best.dtype)
        picked = _non_max_suppression(boxes_xyxy + label * self.max_wh, best.transpose(1, 2), self.limits)
        image, box = picked[:, 0], picked[:, 2]
        rows = torch.cat((boxes_xyxy, label, best), -1)[image, box]
        return torch.cat((image.to(rows.dtype).unsqueeze(1), rows), 1)


class TensorRTDetections(Decoded):
    """For TensorRT: its EfficientNMS node, which no other runtime has.

    num_dets [b x 1], det_boxes [b x k x 4: x1, y1, x2, y2], det_scores [b x k], det_classes [b x k]; k is the limit.
    """

    domains = {"TRT": 1}

    def __init__(self, model, limits):
        super().__init__(model)
        limit, iou_thres, conf_thres = limits
        self.attributes = {
            "background_class": -1,
            "box_coding": 1,  # xywh
            "iou_threshold": iou_thres,
            "max_output_boxes": limit,
            "plugin_version": "1",
            "score_activation": 0,
            "score_threshold": conf_thres,
        }
        self.names = ["num_dets", "det_boxes", "det_scores", "det_classes"]
        self.axes = [["batch", None], ["batch", None, None], ["batch", None], ["batch", None]]

    def forward(self, images):
        boxes, scores = self.candidates(images)
        if not torch.compiler.is_exporting():
            return _EfficientNMS.apply(boxes, scores, self.attributes)
        outputs = _detection_tensors(boxes, self.attributes)
        return torch.onnx.ops.symbolic_multi_out(
            "TRT::EfficientNMS_TRT",
            (boxes, scores),
            self.attributes,
            dtypes=[output.dtype for output in outputs],
            shapes=[output.shape for output in outputs],
            version=1,
        )


def _non_max_suppression(boxes_xyxy, scores, limits):
    """(image, 0, box) [k x 3] of the kept ones of boxes [b x n x 4] with scores [b x 1 x n]; exported, ONNX's node."""
    if not torch.compiler.is_exporting():  # not the dynamo exporter
        return _OnnxNMS.apply(boxes_xyxy, scores, limits)
    given = [torch.tensor([value]) for value in limits]
    shape = [limits[0], 3]  # the number of rows stands for any
    return torch.onnx.ops.symbolic(
        "NonMaxSuppression", (boxes_xyxy, scores, *given), dtype=torch.int64, shape=shape, version=NMS_OPSET
    )


class _OnnxNMS(torch.autograd.Function):
    """ONNX's NonMaxSuppression, and the same computed here."""

    @staticmethod
    def forward(ctx, boxes_xyxy, scores, limits):
        from torchvision.ops import nms

        limit, iou_thres, conf_thres = limits
        picked = []
        for image, (boxes, score) in enumerate(zip(boxes_xyxy, scores[:, 0], strict=True)):
            above = (score > conf_thres).nonzero().flatten()
            kept = above[nms(boxes[above], score[above], iou_thres)[:limit]]
            picked.append(torch.stack((torch.full_like(kept, image), torch.zeros_like(kept), kept), 1))
        return torch.cat(picked)

    @staticmethod
    def symbolic(graph, boxes_xyxy, scores, limits):
        given = [graph.op("Constant", value_t=torch.tensor([value])) for value in limits]
        return graph.op("NonMaxSuppression", boxes_xyxy, scores, *given)


class _EfficientNMS(torch.autograd.Function):
    """TensorRT's node, and zeros of the shapes that it returns."""

    @staticmethod
    def forward(ctx, boxes, scores, attributes):
        return _detection_tensors(boxes, attributes)

    @staticmethod
    def symbolic(graph, boxes, scores, attributes):
        kind = {int: "i", float: "f", str: "s"}  # the exporter's way to tell the type of an attribute
        typed = {f"{name}_{kind[type(value)]}": value for name, value in attributes.items()}
        nodes = graph.op("TRT::EfficientNMS_TRT", boxes, scores, outputs=4, **typed)
        for node, rank, dtype in zip(nodes, (2, 3, 2, 2), (torch.int32, torch.float32, torch.float32, torch.int32),
                                     strict=True):  # fmt: skip
            node.setType(boxes.type().with_dtype(dtype).with_sizes([None] * rank))
        return nodes


def _detection_tensors(boxes, attributes):
    """Zeros in place of num_dets, det_boxes, det_scores, det_classes of the boxes [b x n x 4]."""
    batch_size, limit = boxes.shape[0], attributes["max_output_boxes"]
    return (
        boxes.new_zeros(batch_size, 1, dtype=torch.int32),
        boxes.new_zeros(batch_size, limit, 4),
        boxes.new_zeros(batch_size, limit),
        boxes.new_zeros(batch_size, limit, dtype=torch.int32),
    )


def as_list(value):
    """The tensors of an output, one behind the other, however they are nested."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in as_list(part)]
