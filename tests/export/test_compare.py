"""A file that computes something else does not pass."""

import cv2
import numpy as np
import pytest
import torch

from tests import small_run
from tests.tiny_model import tiny_model
from utils.export.compare import (
    LOST,
    MAX_IMAGES,
    _compare_detections,
    batches,
    check_onnx,
    check_torchscript,
    drawn_image,
    images_to_compare,
)
from utils.export.outputs import Decoded, OnnxDetections, RawMaps, TensorRTDetections
from utils.export.writers import write_onnx, write_torchscript

IMAGES = torch.zeros(1, 3, 64, 64)
SHAPES = [(1, 3, 64, 64)]


def model(seed):
    torch.manual_seed(seed)
    return tiny_model().eval().fuse().requires_grad_(False)


def test_a_torchscript_file_of_another_model(tmp_path, caplog):
    caplog.set_level("INFO")
    write_torchscript(RawMaps(model(0)), IMAGES, tmp_path / "a.pt", {})
    check_torchscript(tmp_path / "a.pt", RawMaps(model(0)), [drawn_image()], SHAPES)
    said = " ".join(caplog.text.split())  # the line goes on in the next one
    assert "TorchScript" in said and "at 1x3x64x64, largest differences: map 0: 0 (values up to" in said
    with pytest.raises(ValueError, match=r"TorchScript .* differs from PyTorch in map 0 and map 1 and map 2"):
        check_torchscript(tmp_path / "a.pt", RawMaps(model(1)), [drawn_image()], SHAPES)


def test_an_onnx_file_of_another_model(tmp_path):
    pytest.importorskip("onnxruntime", reason="needs requirements-export.txt")
    path = tmp_path / "a.onnx"
    write_onnx(Decoded(model(0)), IMAGES, path, {}, opset=12)
    with pytest.raises(ValueError, match="ONNX Runtime .* differs from PyTorch in boxes"):
        check_onnx(path, Decoded(model(1)), [drawn_image()], SHAPES)
    with pytest.raises(ValueError, match=r"output 0 has the shape \[1, 168, 7\], not \[1, 2, 8, 8, 7\]"):
        check_onnx(path, RawMaps(model(0)), [drawn_image()], SHAPES)


def test_no_detection_is_no_proof(tmp_path, caplog):
    pytest.importorskip("onnxruntime", reason="needs requirements-export.txt")
    path, outputs = tmp_path / "a.onnx", OnnxDetections(model(0), (10, 0.5, 0.9999), 4096)
    write_onnx(outputs, IMAGES, path, {}, opset=12)
    check_onnx(path, outputs, [drawn_image()], SHAPES)
    assert "neither finds anything in these images, so no box was compared" in caplog.text


def test_a_tensorrt_node_with_other_thresholds(tmp_path):
    pytest.importorskip("onnxruntime", reason="needs requirements-export.txt")
    path = tmp_path / "a.onnx"
    write_onnx(TensorRTDetections(model(0), (10, 0.5, 0.2)), IMAGES, path, {}, opset=12)
    with pytest.raises(ValueError, match=r"EfficientNMS_TRT has .*, not .*'iou_threshold': 0.6"):
        check_onnx(path, TensorRTDetections(model(0), (10, 0.6, 0.2)), [drawn_image()], SHAPES)
    write_onnx(Decoded(model(0)), IMAGES, path, {}, opset=12)
    with pytest.raises(ValueError, match="the last node is .*, not EfficientNMS_TRT"):
        check_onnx(path, TensorRTDetections(model(0), (10, 0.5, 0.2)), [drawn_image()], SHAPES)


def test_detections_beside_their_counterparts():
    rows = torch.tensor([[0, 10, 10, 50, 50, 1, 0.9], [0, 60, 60, 90, 90, 0, 0.8], [1, 10, 10, 50, 50, 1, 0.7]])
    moved = rows[[2, 0, 1]] + torch.tensor([0, 0.01, 0, 0, 0, 0, 0.001])
    found = _compare_detections([moved], [rows])
    assert found[LOST] == (0, 3) and float(found["boxes"][0]) == pytest.approx(0.01, abs=1e-4)
    assert float(found["scores"][0]) == pytest.approx(0.001, abs=1e-5)
    moved[0, 5] = 0  # another class
    assert _compare_detections([moved], [rows])[LOST] == (2, 3)
    assert _compare_detections([rows[:0]], [rows])[LOST] == (3, 3)


def test_images(tmp_path):
    assert (drawn_image() == drawn_image()).all() and drawn_image().std() > 20
    data = small_run.make_data(tmp_path, num_images=9)
    found, shown = images_to_compare(data=str(data))
    assert len(found) == MAX_IMAGES and "data.yaml" in shown
    (image,), _ = images_to_compare(source=str(tmp_path / "images/val/00.png"))
    assert (image == cv2.imread(str(tmp_path / "images/val/00.png"))).all()
    (tmp_path / "broken.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="none of its images can be read"):
        images_to_compare(source=str(tmp_path / "broken.png"))
    (tmp_path / "images/val/00.png").write_bytes(b"nothing")
    others, _ = images_to_compare(data=str(data))
    assert [image.tobytes() for image in others[:7]] == [image.tobytes() for image in found[1:]], "as with --source"
    for file in (tmp_path / "images/val").iterdir():
        file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="data.yaml: none of its val images can be read"):
        images_to_compare(data=str(data))
    first, second = batches(found[:3], (2, 3, 64, 96))
    assert first.shape == (2, 3, 64, 96) and first.max() <= 1 and torch.equal(second[1], first[0]), "begins again"
    grey = first[0, :, :, 0]
    np.testing.assert_allclose(grey, 114 / 255, atol=1e-6)
