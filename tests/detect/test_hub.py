"""Models for scripts: what they take, what comes out, and the example of the documentation."""

import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

import hubconf
from tests import small_run
from tests.detect_cases import picture, random_detector, run, write_weights
from utils.detect.hub import AutoShape, load
from utils.system.files import PROJECT_ROOT

FORMS = ("xyxy", "xywh", "xyxyn", "xywhn")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("weights") / "best.pt")


@pytest.fixture
def model(weights):
    model = hubconf.custom(path=str(weights))
    model.conf, model.iou = 0.02, 0.3
    return model


def test_everything_that_is_an_image(model, tmp_path):
    image = picture(1, 48, 64)
    rgb = np.ascontiguousarray(image[..., ::-1])
    cv2.imwrite(str(tmp_path / "one.png"), image)
    with_alpha = np.dstack((rgb, np.full((48, 64), 9, np.uint8)))
    kinds = [str(tmp_path / "one.png"), tmp_path / "one.png", Image.fromarray(rgb), rgb, rgb.transpose(2, 0, 1),
             with_alpha, rgb / 255]  # fmt: skip
    results = model(kinds, size=64)
    assert len(results) == results.n == 7 and results.files == ["one.jpg"] * 2 + [f"image{k}.jpg" for k in range(2, 7)]
    assert len(results.xyxy[0]) > 3
    saved = sorted(path.name for path in results.save(tmp_path / "hub").iterdir())
    assert saved == ["image2.jpg", *(f"image{k}.jpg" for k in range(3, 7)), "one (0).jpg", "one (1).jpg"]
    for rows in results.xyxy:
        torch.testing.assert_close(rows, results.xyxy[0], rtol=0, atol=1e-3)
    assert model(rgb[..., 0], size=64).imgs[0].shape == (48, 64, 3), "gray becomes three channels"
    alone = model(str(tmp_path / "one.png"), size=64)
    torch.testing.assert_close(alone.xyxy[0], results.xyxy[0], rtol=0, atol=1e-3)


def test_the_same_boxes_as_detect_py(weights, model, tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), picture(2, 48, 64))
    folder, _ = run(
        weights, tmp_path / "a.png", tmp_path, "--save-txt", "--save-conf", "--conf", "0.02", "--iou", "0.3"
    )
    rows = np.loadtxt(folder / "labels" / "a.txt", ndmin=2)
    found = model(tmp_path / "a.png", size=64).xywhn[0].numpy()
    np.testing.assert_allclose(found[:, [5, 0, 1, 2, 3, 4]], rows, atol=1e-5)


def test_results(model, tmp_path, capsys, monkeypatch):
    images = [picture(0)[..., ::-1], picture(1, 40, 64)[..., ::-1]]
    for image in images:
        image.flags.writeable = False  # as those of Pillow are
    results = model(images, size=64)
    results.print()
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"image 2/2: 40x64 (\d+ (red|green)s?(, )?)+", lines[1])
    assert re.fullmatch(r"Speed: [\d.]+ms pre-process, [\d.]+ms inference, [\d.]+ms NMS per image at shape "
                        r"\(2, 3, 64, 64\)", lines[2])  # fmt: skip
    x1, y1, x2, y2, conf, cls = results.xyxy[1][0].tolist()
    assert results.xywhn[1][0].tolist() == pytest.approx([(x1 + x2) / 128, (y1 + y2) / 80, (x2 - x1) / 64,
                                                          (y2 - y1) / 40, conf, cls], abs=1e-5)  # fmt: skip
    drawn = results.render()
    assert drawn[0].shape == images[0].shape and (drawn[0] != images[0]).any() and results.imgs is drawn
    shown = []
    monkeypatch.setattr(Image.Image, "show", lambda self: shown.append(self.size))
    results.show()
    assert shown == [(64, 64), (64, 40)]
    folders = [results.save(tmp_path / "hub") for _ in range(2)]
    assert [folder.name for folder in folders] == ["hub", "hub2"]
    assert sorted(path.name for path in folders[1].iterdir()) == ["image0.jpg", "image1.jpg"]
    crops = results.crop(save_dir=tmp_path / "crops")
    assert len(crops) == sum(map(len, results.xyxy)) > 5 and set(crops[0]) == {"box", "conf", "cls", "label", "im"}
    part = images[0][round(crops[0]["box"][1]) : round(crops[0]["box"][3])]
    assert crops[0]["im"].shape[0] == part.shape[0] and crops[0]["label"] in ("red", "green")
    assert len(list((tmp_path / "crops" / "crops").rglob("*.jpg"))) > 0
    single = results.tolist()[1]
    assert len(single) == 1 and single.names == ["red", "green"] and single.files == ["image1.jpg"]
    assert torch.equal(single.xyxy[0], results.xyxy[1])


def test_pandas(model):
    results = model([picture(0)], size=64)
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install pandas"):
            results.pandas()
        return
    tables = results.pandas()
    corners = ["xmin", "ymin", "xmax", "ymax"]
    centre = ["xcenter", "ycenter", "width", "height"]
    for form in FORMS:
        (table,) = getattr(tables, form)
        assert list(table.columns) == [*(corners if "xyxy" in form else centre), "confidence", "class", "name"]
        assert len(table) == len(results.xyxy[0])
    assert set(tables.xyxy[0]["name"]) <= {"red", "green"} and isinstance(results.xyxy[0], torch.Tensor)


def test_attributes_and_raw_output(model):
    image = picture(0)
    model.classes = [0]
    assert set(model(image, size=64).xyxy[0][:, 5].tolist()) == {0}
    model.classes, model.agnostic = None, True
    assert len(model(image, size=64).xyxy[0]) > 0
    assert len(model(image, size=64, augment=True).xyxy[0]) > 0
    output = model(torch.zeros(1, 3, 64, 64))
    assert output[0].shape == (1, 168, 7) and len(output[1]) == 3


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("http://127.0.0.1:9/a.jpg", "cannot be fetched .* save the image and give its path"),
        ("http://host/a b.jpg", "cannot be fetched .* save the image and give its path"),
        ("none.jpg", r"none\.jpg: cannot be opened"),
        (3, "image 0 is a int; give paths"),
        (np.zeros((5, 5, 7), np.uint8), r"has the shape \[5, 5, 7\]"),
        ([], "there is no image"),
        ("", "the path of image 0 is empty"),
        (np.array([["a"]]), "image 0 is an array of <U1; numbers are wanted"),
        (np.zeros((64, 64, 3), complex), "an array of complex128"),
        (torch.zeros(3, 64, 64), r"a tensor has to be \[b x 3 x h x w\], not \[3, 64, 64\]"),
        (np.zeros((0, 5, 3), np.uint8), "has the shape"),
        (["none.jpg", None], "cannot be opened"),
        (b"jpeg", "image 0 is a bytes"),
    ],
)
def test_refused(model, image, message):
    with pytest.raises(ValueError, match=message):
        model(image)


@pytest.mark.parametrize("size", [0, -5, "640", (64, 64), None, 0.5])
def test_refused_sizes(model, size):
    with pytest.raises(ValueError, match="has to be a whole number of pixels, such as 640"):
        model(picture(0), size=size)


@pytest.mark.parametrize("mode", ["16 bit", "16 bit of the other byte order", "32 bit", "float", "bilevel"])
def test_a_pillow_image_is_what_its_file_is(mode, tmp_path):
    """Pillow's own way to RGB makes white of nearly everything above 255."""
    levels = np.linspace(0, 250, 48 * 64).reshape(48, 64)
    samples = {"16 bit": (levels * 100).astype("<u2"), "16 bit of the other byte order": (levels * 100).astype(">u2"),
               "32 bit": (levels * 2**16).astype(np.int32), "float": (levels / 255).astype(np.float32),
               "bilevel": levels > 100}[mode]  # fmt: skip
    Image.fromarray(samples).save(tmp_path / "a.tif")
    of_file = load(tmp_path / "a.tif")[0]
    assert 10 < of_file.mean() < 245
    with Image.open(tmp_path / "a.tif") as image:
        np.testing.assert_array_equal(load(image)[0], of_file)
    np.testing.assert_array_equal(load(samples)[0], of_file, "and as an array")


def test_a_pillow_image_that_is_cut_off(model, tmp_path):
    cv2.imwrite(str(tmp_path / "a.jpg"), picture(0))
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:700])
    with Image.open(tmp_path / "a.jpg") as image, pytest.raises(ValueError, match=r"image 0 \(a\) cannot be read \("):
        model(image)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("conf", 50, "conf 50 has to be between 0 and 1"),
        ("conf", "0.5", "conf '0.5' has to be"),
        ("iou", -0.1, "iou -0.1 has to be between 0 and 1"),
        ("classes", [0, 2], "classes has 2, and the detector knows the ids 0 to 1"),
        ("classes", ["red"], "classes has 'red'"),
        ("classes", -1, "classes has -1"),
    ],
)
def test_refused_attributes(model, name, value, message):
    setattr(model, name, value)
    with pytest.raises(ValueError, match=message):
        model(picture(0))
    model(torch.zeros(1, 3, 64, 64))  # which needs none of them


def test_a_model_of_gray_images():
    model = hubconf.create("yolov7-tiny", channels=1, classes=2)
    with pytest.raises(ValueError, match="takes images of 1 channel, which only a tensor can hold"):
        model(picture(0), size=64)


def test_several_heads_with_unequal_groups(tmp_path):
    model = hubconf.custom(write_weights(tmp_path / "heads.pt", heads=True))
    results = model(picture(0), size=64)
    assert model.names == ["red", "green", "blue"] and len(set(results.xyxy[0][:, 5].tolist())) > 1


def test_custom_takes_paths_dicts_and_modules(weights, tmp_path, monkeypatch):
    image = torch.rand(1, 3, 64, 64)
    trained = random_detector()
    expected = trained.eval()(image)[0]
    for source in (weights, {"model": trained, "ema": None}, {"ema": trained, "model": None}, trained):
        plain = hubconf.custom(source, autoshape=False)
        assert not isinstance(plain, AutoShape) and any(isinstance(m, torch.nn.BatchNorm2d) for m in plain.modules())
        torch.testing.assert_close(plain(image)[0], expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="a checkpoint dict with a model"):
        hubconf.custom({"model": None})
    monkeypatch.chdir(tmp_path)
    loaded = torch.hub.load(str(PROJECT_ROOT), "custom", path_or_model=str(weights), source="local")
    assert len(loaded([picture(0)], size=64)) == 1


def test_models_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = hubconf.create("yolov7-tiny", classes=3)
    assert isinstance(model, AutoShape) and len(model.names) == 3
    with pytest.raises(ValueError, match=r"yolov7-tiny\.pt is not here, and nothing is downloaded"):
        hubconf.yolov7_tiny()
    with pytest.raises(ValueError, match="there is no model yolov9; there are yolov7, "):
        hubconf.create("yolov9")
    with pytest.raises(ValueError, match=r"there is no model \.\./training/yolov7; there are yolov7, "):
        hubconf.create("../training/yolov7")
    torch.save({"model": model.model}, "yolov7-tiny.pt")
    again = hubconf.yolov7_tiny(classes=3, autoshape=False)
    assert torch.equal(again.state_dict()["model.0.conv.weight"], model.model.state_dict()["model.0.conv.weight"])


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    """With a small data set and network in the places that it names."""
    text = (PROJECT_ROOT / "docs" / "python.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    monkeypatch.chdir(tmp_path)
    small_run.arguments(tmp_path)  # writes data.yaml, cfg.yaml, hyp.yaml
    for name, place in (
        ("data.yaml", "birds.yaml"),
        ("cfg.yaml", "yolov7-tiny.yaml"),
        ("hyp.yaml", "hyp.scratch.tiny.yaml"),
    ):
        code = re.sub(rf"\S*{re.escape(place)}", name, code)
    code = code.replace("hyp.yaml", "hyp.yaml --epochs 1 --noautoanchor --workers 0").replace("640", "64")
    found = {}
    with small_run.drawing(False):
        exec(compile(code.replace("a.jpg", str(next(Path("images/val").iterdir()))), "python.md", "exec"), found)
    assert len(found["results"].xyxy) == 1 and len(found["scores"]) == 7
