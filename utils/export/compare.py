"""Run an exported file in its runtime, on images, beside the PyTorch module that it was made of."""

import logging
from itertools import islice

import cv2
import numpy as np
import torch

from utils.config.data_yaml import load_data_yaml
from utils.data.images.reading import read_image
from utils.data.labels.image_list import find_images
from utils.data.stream import LoadImages
from utils.data.transforms import letterbox
from utils.export.outputs import OnnxDetections, TensorRTDetections, as_list
from utils.export.writers import quiet
from utils.ops.boxes import box_iou
from utils.system.files import folded, printable

logger = logging.getLogger(__name__)

MAX_IMAGES = 8
TOLERANCE = 1e-3  # of the largest number of an output, or of 1; rounding makes a hundredth of it
LOST = "without counterpart"
MAX_LOST = 0.02  # share of such detections: those near a threshold, where rounding decides
NEAR = 0.99  # IoU of a detection and its counterpart


def images_to_compare(source="", data=""):
    """(images [h x w x 3, BGR], what they are) from `source` (file, folder, pattern), a data yaml, or drawn here.

    Raises ValueError when there are none.
    """
    if source:
        images = list(islice((original for _, _, original, _ in LoadImages(source)), MAX_IMAGES))
        if not images:
            raise ValueError(f"--source {source}: none of its images can be read")
        return images, source
    if data:
        files = find_images(load_data_yaml(data, needed=("val",)).val)[0]
        images = list(islice(_readable(files), MAX_IMAGES))
        if not images:
            raise ValueError(f"--data {printable(data)}: none of its val images can be read")
        return images, f"the first val images of {data}"
    return [drawn_image()], "a drawn image (--source or --data: yours)"


def _readable(files):
    for file in files:
        try:
            yield read_image(file)
        except ValueError as error:
            logger.warning("skipped: %s", error)


def drawn_image(height=480, width=640):
    """Smooth colours with filled shapes in front [height x width x 3, uint8]; the same at every call."""
    rng = np.random.default_rng(0)
    image = cv2.resize(rng.integers(40, 200, (4, 5, 3), dtype=np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
    for _ in range(12):
        colour = rng.integers(0, 256, 3).tolist()
        x, y, w, h = (rng.random(4) * (width, height, width / 3, height / 3)).astype(int).tolist()
        cv2.rectangle(image, (x, y), (x + w, y + h), colour, -1)
        cv2.circle(image, (width - x, y), h // 2, colour[::-1], -1)
    return image


def batches(images, shape):
    """The images, letterboxed, in float32 batches of `shape` (b, 3, h, w); the last one begins again with the first."""
    batch_size, _, height, width = shape
    planes = [letterbox(image, (height, width), auto=False)[0][..., ::-1].transpose(2, 0, 1) for image in images]
    for start in range(0, len(planes), batch_size):
        chosen = [planes[(start + i) % len(planes)] for i in range(batch_size)]
        yield torch.from_numpy(np.stack(chosen).astype(np.float32) / 255)


def check_torchscript(path, module, images, shapes):
    """Compare a TorchScript file with the `module` that was traced, as `check_onnx` does."""
    with quiet():
        run = torch.jit.load(str(path))
    _check(f"TorchScript (torch {torch.__version__})", module, run, module, images, shapes, _compare_values)


def check_onnx(path, outputs, images, shapes):
    """Compare an ONNX file with the module `outputs` on `images`, in batches of each of `shapes` (b, 3, h, w).

    Logs the largest differences. Raises ValueError when one is more than rounding. Of a file for TensorRT the node is
    checked, and what ONNX Runtime computes up to there is compared.
    """
    import onnxruntime

    content, reference, compare, runtime = str(path), outputs, _compare_values, "ONNX Runtime"
    if isinstance(outputs, TensorRTDetections):
        content, reference = _without_node(path, outputs), lambda batch: torch.cat(outputs.candidates(batch), -1)
        runtime = "EfficientNMS_TRT as it has to be; up to there, ONNX Runtime"
    elif isinstance(outputs, OnnxDetections):
        compare = _compare_detections
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(batch):
        values = [torch.from_numpy(value) for value in session.run(None, {"images": batch.cpu().numpy()})]
        return torch.cat(values, -1) if reference is not outputs else values

    _check(f"{runtime} {onnxruntime.__version__}", outputs, run, reference, images, shapes, compare)


def _check(runtime, module, run, reference, images, shapes, compare):
    device = next(module.parameters()).device
    for shape in shapes:
        worst = largest_differences(run, reference, (batch.to(device) for batch in batches(images, shape)), compare)
        place = f"{runtime} at {'x'.join(map(str, shape))}"
        if wrong := beyond_rounding(worst):
            hint = "; nearly equal scores, as of an untrained model, do that" if LOST in wrong else ""
            raise ValueError(f"{place} differs from PyTorch in {' and '.join(wrong)}: {describe(worst)}{hint}")
        said = f"{place}, largest differences: {describe(worst)}"
        logger.info("%s", folded(f"  {said}"))
        if worst.get(LOST) == [0, 0]:
            logger.warning("%s: neither finds anything in these images, so no box was compared; --source: others, "
                           "--conf-thres: a lower limit", place)  # fmt: skip


@torch.no_grad()
def largest_differences(run, reference, inputs, compare=None):
    """{part of the outputs: (largest difference, largest value)} of two functions of a batch, over all `inputs`."""
    found = {}
    for batch in inputs:
        outputs = ([tensor.cpu() for tensor in as_list(function(batch))] for function in (run, reference))
        for name, pair in (compare or _compare_values)(*outputs).items():
            found.setdefault(name, []).append(pair)
    return {name: torch.tensor(pairs).amax(0).tolist() for name, pairs in found.items()}  # NaN stays NaN


def beyond_rounding(worst):
    """The parts whose difference is more than rounding."""
    return [name for name, (value, largest) in worst.items() if not value <= _allowed(name, largest)]


def describe(worst):
    return ", ".join(f"{name}: {value:.2g} (values up to {largest:.4g})" for name, (value, largest) in worst.items())


def _allowed(name, largest):
    return 1 + MAX_LOST * largest if name == LOST else TOLERANCE * max(largest, 1.0)


def _compare_values(found, reference):
    """{part: (largest difference, largest value)} of two lists of outputs; pixels and probabilities are apart."""
    pairs = {}
    for i, (mine, theirs) in enumerate(zip(found, reference, strict=True)):
        if mine.shape != theirs.shape:
            raise ValueError(f"output {i} has the shape {list(mine.shape)}, not {list(theirs.shape)}")
        parts = {"boxes": slice(0, 4), "scores": slice(4, None)} if theirs.ndim == 3 else {f"map {i}": slice(None)}
        for part, columns in parts.items():
            mine_part, their_part = mine[..., columns], theirs[..., columns]
            pairs[part] = (mine_part - their_part).abs().max(), their_part.abs().max()
    return pairs


def _compare_detections(found, reference):
    """The same of detections [k x 7], each beside its counterpart; of those without one the number, and that of all."""
    mine, theirs = found[0], reference[0]
    same = (mine[:, None, [0, 5]] == theirs[None, :, [0, 5]]).all(-1)  # image and class
    row, counterpart = (box_iou(mine[:, 1:5], theirs[:, 1:5]) * same >= NEAR).nonzero(as_tuple=True)
    lost = len(mine) + len(theirs) - len(row.unique()) - len(counterpart.unique())
    pairs = {LOST: (torch.tensor(float(lost)), torch.tensor(float(len(theirs))))}
    if len(row):
        difference = (mine[row] - theirs[counterpart]).abs()
        pairs["boxes"] = difference[:, 1:5].max(), theirs[:, 1:5].abs().max()
        pairs["scores"] = difference[:, 6].max(), theirs[:, 6].max()
    return pairs


def _without_node(path, outputs):
    """The ONNX file at `path`, as bytes, without TensorRT's node at its end; ValueError unless that node is right."""
    import onnx

    proto = onnx.load(str(path))
    node = proto.graph.node[-1]
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    wanted = {name: value.encode() if isinstance(value, str) else value for name, value in outputs.attributes.items()}
    wanted = {name: float(np.float32(v)) if isinstance(v, float) else v for name, v in wanted.items()}
    versions = {entry.domain: entry.version for entry in proto.opset_import}
    if (node.op_type, node.domain, list(node.output)) != ("EfficientNMS_TRT", "TRT", outputs.names):
        raise ValueError(f"the last node is {node.domain} {node.op_type}, not EfficientNMS_TRT of the domain TRT")
    if attributes != wanted or versions.get("TRT") != 1:
        found = f"{attributes} in version {versions.get('TRT')}"
        raise ValueError(f"EfficientNMS_TRT has {found}, not {wanted} in version 1")
    boxes, scores = node.input
    del proto.graph.output[:], proto.graph.node[-1]
    proto.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in (boxes, scores)
    )
    return proto.SerializeToString()
