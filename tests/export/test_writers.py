"""The files themselves: names, shapes, versions, metadata, and that other runtimes read them."""

import ast
import json

import cv2
import pytest
import torch

from models.yolo import Model
from tests.tiny_model import CFG, tiny_model
from utils.export.compare import check_onnx, drawn_image
from utils.export.outputs import Decoded, OnnxDetections, RawMaps, TensorRTDetections
from utils.export.writers import metadata, quiet, write_onnx, write_torchscript

onnx = pytest.importorskip("onnx", reason="needs requirements-export.txt")
pytest.importorskip("onnxruntime", reason="needs requirements-export.txt")

IMAGES = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
ALL = ("batch", "height", "width")
LIMITS = (20, 0.5, 0.0005)  # an untrained model is sure of nothing


@pytest.fixture(scope="module")
def model():
    return ready(tiny_model())


@pytest.fixture(scope="module")
def one_level():
    """The newer exporter needs seconds for each level."""
    return ready(Model(CFG | {"anchors": CFG["anchors"][2:], "head": [[[4], 1, "IDetect", ["nc", "anchors"]]]}))


def ready(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for conv in model.model[-1].m:  # other scores in other places
            conv.weight.mul_(20)
    model.names = ["red", "it's green"]
    return model.eval().fuse().requires_grad_(False)


def write(outputs, path, **options):
    """Write an ONNX file; returns it as the onnx package reads it."""
    write_onnx(outputs, IMAGES, path, {"task": "detect"}, **({"opset": 12} | options))
    return onnx.load(str(path))


def shapes(values):
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


def test_the_plain_file(model, tmp_path):
    proto = write(RawMaps(model), tmp_path / "a.onnx")
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 12)] and proto.ir_version == 7
    assert shapes(proto.graph.input) == {"images": [1, 3, 64, 96]}
    levels = {"output": [1, 2, 8, 12, 7], "output_1": [1, 2, 4, 6, 7], "output_2": [1, 2, 2, 3, 7]}
    assert shapes(proto.graph.output) == levels
    assert {entry.key: entry.value for entry in proto.metadata_props} == {"task": "detect"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"], "the weights are in it"


@pytest.mark.parametrize("outputs", [RawMaps, Decoded])
def test_opencv_reads_it(model, outputs, tmp_path):
    write(outputs(model), tmp_path / "a.onnx")
    net = cv2.dnn.readNetFromONNX(str(tmp_path / "a.onnx"))
    net.setInput(IMAGES.numpy())
    found = net.forward(net.getUnconnectedOutLayersNames())
    expected = outputs(model)(IMAGES)
    for mine, theirs in zip(found, expected if isinstance(expected, list) else [expected], strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=1e-4, atol=1e-3)


def decoded(model):
    return Decoded(model)


def onnx_detections(model):
    return OnnxDetections(model, LIMITS, 640)


def tensorrt_detections(model):
    return TensorRTDetections(model, LIMITS)


ROWS = ["batch", 20]
TENSORRT = {"num_dets": ["batch", 1], "det_boxes": [*ROWS, 4], "det_scores": ROWS, "det_classes": ROWS}


@pytest.mark.parametrize(("make", "free", "shape", "dynamo"), [
    (decoded, (), {"output": [1, 252, 7]}, False),
    (decoded, ("batch",), {"output": ["batch", 252, 7]}, False),
    (decoded, ALL, {"output": ["batch", "boxes", 7]}, False),
    (onnx_detections, (), {"output": ["detections", 7]}, False),
    (onnx_detections, ALL, {"output": ["detections", 7]}, False),
    (tensorrt_detections, ("batch",), TENSORRT, False),
    (onnx_detections, ALL, {"output": ["detections", 7]}, True),
    (tensorrt_detections, ("batch",), TENSORRT, True),
])  # fmt: skip
def test_what_varies(model, one_level, make, free, shape, dynamo, tmp_path):
    """Names and shapes of both exporters, and equal results at another size and batch."""
    if dynamo:
        pytest.importorskip("onnxscript", reason="needs requirements-export.txt")
    outputs, opset = make(one_level if dynamo else model), 18 if dynamo else 12
    proto = write(outputs, tmp_path / "a.onnx", free=free, dynamo=dynamo, opset=opset)
    assert shapes(proto.graph.output) == shape
    size = dict(zip(ALL, (1, 64, 96), strict=True)) | {axis: axis for axis in free}
    assert shapes(proto.graph.input) == {"images": [size["batch"], 3, size["height"], size["width"]]}
    assert proto.opset_import[0].version == opset and "/outputs.py" not in str(proto), "no stack traces"
    other = (3, 3, 96, 64) if free == ALL else (3, 3, 64, 96) if free else (1, 3, 64, 96)
    check_onnx(tmp_path / "a.onnx", outputs, [drawn_image()], [(1, 3, 64, 96), other])


def test_tensorrt_finds_its_node(model, tmp_path):
    node = write(TensorRTDetections(model, (20, 0.45, 0.25)), tmp_path / "a.onnx").graph.node[-1]
    assert (node.op_type, node.domain) == ("EfficientNMS_TRT", "TRT")
    found = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert found == {
        "background_class": -1, "box_coding": 1, "iou_threshold": pytest.approx(0.45), "max_output_boxes": 20,
        "plugin_version": b"1", "score_activation": 0, "score_threshold": pytest.approx(0.25),
    }  # fmt: skip


def test_a_simplified_file(model, tmp_path):
    pytest.importorskip("onnxslim", reason="needs requirements-export.txt")
    made = OnnxDetections(model, LIMITS, 640)
    full, slim = (write(made, tmp_path / "a.onnx", free=ALL, simplify=simplify) for simplify in (False, True))
    assert len(slim.graph.node) < len(full.graph.node) and slim.opset_import[0].version == 12
    check_onnx(tmp_path / "a.onnx", made, [drawn_image()], [(2, 3, 96, 64)])


def test_metadata_is_read_as_python_values(model, tmp_path):
    about = metadata(model, (64, 96), 1, {"grid": True})
    assert ast.literal_eval(about["names"]) == {0: "red", 1: "it's green"}
    assert ast.literal_eval(about["imgsz"]) == [64, 96] and ast.literal_eval(about["args"]) == {"grid": True}
    assert (about["stride"], about["batch"], about["task"], about["channels"]) == ("32", "1", "detect", "3")
    write_torchscript(RawMaps(model), IMAGES, tmp_path / "a.torchscript.pt", about)
    extra = {"config.txt": ""}
    with quiet():
        torch.jit.load(str(tmp_path / "a.torchscript.pt"), _extra_files=extra)
    assert json.loads(extra["config.txt"]) == about
