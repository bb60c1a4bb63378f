"""tools/reparameterize.py: the right file of cfg/deploy, the same detections, and what has no deploy form."""

from types import SimpleNamespace

import pytest
import torch

from models.experimental import attempt_load
from models.yolo import Detect, Model
from tests.golden_fill import fill
from tests.heads_cases import small_heads
from tests.tiny_model import CFG, tiny_model
from tools import reparameterize as program
from utils.engine.checkpoint_reader import read_checkpoint
from utils.system.files import PROJECT_ROOT

TINY = PROJECT_ROOT / "cfg" / "training" / "yolov7-tiny.yaml"


def run(*line):
    program.main(program.parser().parse_args([str(part) for part in line]))


def saved(model, path):
    torch.save({"model": model, "ema": None, "epoch": 3}, path)
    return path


def test_tiny_with_its_own_classes(tmp_path, caplog):
    """tiny-silu has the same weights, by name and shape, and is not what this network computes."""
    caplog.set_level("INFO")
    model = fill(Model(TINY, nc=3), 1.36).eval()
    model.names = ["a", "b", "c"]
    path = saved(model, tmp_path / "best.pt")
    run(path)
    assert "cfg/deploy/yolov7-tiny.yaml, largest differences: boxes" in caplog.text
    stored = read_checkpoint(tmp_path / "best_deploy.pt")
    assert stored.epoch == -1 and stored.optimizer is None and stored.training_results is None
    assert {value.dtype for value in stored.model.state.values() if value.is_floating_point()} == {torch.float16}
    deploy = attempt_load(tmp_path / "best_deploy.pt")
    assert type(deploy.model[-1]) is Detect and deploy.names == ["a", "b", "c"] and deploy.yaml["nc"] == 3
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        difference = (deploy(images)[0] - attempt_load(path)(images)[0]).abs()
    assert difference[..., 4:].max() < 5e-3, "both files are rounded to half precision"
    with pytest.raises(ValueError, match="best_deploy.pt is in deploy form already"):
        run(tmp_path / "best_deploy.pt")
    with pytest.raises(ValueError, match="--out .*best.pt is read by this command and would be lost"):
        run(path, "--out", str(path))
    renamed = path.rename(tmp_path / "best.pth")
    (tmp_path / "best_deploy.pth").write_text("of an earlier call")
    run(renamed)
    assert read_checkpoint(tmp_path / "best_deploy.pth").epoch == -1


@pytest.mark.parametrize(("rows", "levels", "inputs", "names"), [
    (78, 3, 3, ["yolov7-tiny-silu.yaml", "yolov7-tiny.yaml"]),
    (106, 3, 3, ["yolov7.yaml"]),
    (122, 3, 3, ["yolov7x.yaml"]),
    (123, 4, 8, ["yolov7-w6.yaml"]),
    (145, 4, 8, ["yolov7-e6.yaml"]),
    (167, 4, 8, ["yolov7-d6.yaml"]),
    (266, 4, 8, ["yolov7-e6e.yaml"]),
    (5, 3, 3, []),
])  # fmt: skip
def test_candidates_of_the_family(rows, levels, inputs, names):
    head = SimpleNamespace(nl=levels, f=list(range(inputs)))
    model = SimpleNamespace(model=[None] * (rows - 1) + [head])
    assert [path.name for path in program.candidates(model)] == names


def test_networks_without_a_deploy_form(tmp_path):
    with pytest.raises(ValueError, match="give the path of a .pt file"):
        run("")
    path = saved(tiny_model(), tmp_path / "best.pt")
    with pytest.raises(ValueError, match="no file of cfg/deploy has this network; give the deploy yaml by --cfg"):
        run(path)
    with pytest.raises(ValueError, match="is not the deploy form of this training model"):
        run(path, "--cfg", PROJECT_ROOT / "cfg" / "deploy" / "yolov7-tiny.yaml")
    cfg = CFG | {"nc": 3, "head": [[[2, 3, 4], 1, "MultiHeadDetect", ["nc", "anchors"]]]}
    saved(Model(cfg, head_config=small_heads()), path)
    with pytest.raises(ValueError, match="has a MultiHeadDetect, which has no deploy form"):
        run(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["best.pt"]
