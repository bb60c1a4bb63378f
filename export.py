"""Write a YOLOv7 detector as TorchScript and ONNX files, run each of them, and compare it with PyTorch.

python export.py --weights runs/train/exp/weights/best.pt --grid --end2end --max-wh 640 --img 640
"""

import importlib.util
import logging
import sys
from pathlib import Path

if __name__ == "__main__":  # before what takes seconds to import
    from utils.system import signals

    signals.quiet_interrupt()

import torch

from models.experimental import attempt_load
from utils.config.options import check_export_options, check_img_size, export_parser
from utils.export.compare import check_onnx, check_torchscript, images_to_compare
from utils.export.outputs import BoxesAndMaps, Decoded, OnnxDetections, RawMaps, TensorRTDetections
from utils.export.writers import metadata, write_onnx, write_torchscript
from utils.run import entry
from utils.system.distributed import select_device
from utils.system.files import printable, replacement
from utils.system.streams import wants_traceback

logger = logging.getLogger("export")

MAX_REASON = 400  # characters of what an exporter says


def check_packages(opt):
    """Raise ValueError when a package that --include onnx needs is not installed."""
    needed = ["onnx", "onnxruntime"] + ["onnxscript"] * (opt.exporter == "dynamo") + ["onnxslim"] * opt.simplify
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if "onnx" in opt.include and missing:
        raise ValueError(
            f"--include onnx needs {' and '.join(missing)}: pip install -r requirements-export.txt, or give "
            "--include torchscript"
        )


def onnx_outputs(model, opt):
    """The module whose outputs the ONNX file has."""
    limits = opt.topk_all, opt.iou_thres, opt.conf_thres
    if opt.end2end:
        return TensorRTDetections(model, limits) if opt.max_wh is None else OnnxDetections(model, limits, opt.max_wh)
    return Decoded(model) if opt.grid else RawMaps(model)


def shapes_to_compare(shape, stride, free):
    """The shape that is traced, and a larger one where axes are free."""
    batch_size, channels, height, width = shape
    batch_size += "batch" in free
    if "height" in free:
        height, width = height + stride, width + 2 * stride
    return list(dict.fromkeys([tuple(shape), (batch_size, channels, height, width)]))


def export_torchscript(model, path, traced, images, opt):
    """Traced: the boxes and the maps with --grid, else the maps."""
    module = BoxesAndMaps(model) if opt.grid or opt.end2end else RawMaps(model)
    shapes = shapes_to_compare(traced.shape, int(model.stride.max()), ("batch", "height"))
    with replacement(path) as temporary:
        write_torchscript(module, traced, temporary, about(model, traced, opt))
        check_torchscript(temporary, module, images, shapes)


def export_onnx(model, path, traced, images, opt):
    outputs = onnx_outputs(model, opt)
    free = ("batch", "height", "width") if opt.dynamic else ("batch",) if opt.dynamic_batch else ()
    shapes = shapes_to_compare(traced.shape, int(model.stride.max()), free)
    with replacement(path) as temporary:
        write_onnx(outputs, traced, temporary, about(model, traced, opt), free=free, opset=opt.opset,
                   dynamo=opt.exporter == "dynamo", simplify=opt.simplify)  # fmt: skip
        check_onnx(temporary, outputs, images, shapes)


def about(model, traced, opt):
    """The metadata of a file."""
    names = ("grid", "end2end", "max_wh", "topk_all", "iou_thres", "conf_thres", "dynamic", "dynamic_batch", "exporter",
             "opset", "simplify")  # fmt: skip
    return metadata(model, tuple(traced.shape[2:]), len(traced), {name: getattr(opt, name) for name in names})


EXPORTS = {"torchscript": (".torchscript.pt", export_torchscript), "onnx": (".onnx", export_onnx)}


def check_outputs(opt):
    """Raise ValueError when a file that is to be written is the one that is read."""
    for kind in opt.include:
        path = Path(opt.weights).with_suffix(EXPORTS[kind][0]) if Path(opt.weights).name else Path()
        if path.is_file() and Path(opt.weights).is_file() and path.samefile(opt.weights):
            raise ValueError(
                f"--weights {printable(opt.weights)} would be written over by --include {kind}, as {printable(path)}; "
                "give the weights another name"
            )


def main(opt):
    """Write what --include names, each file whole or not at all; status 1 when one failed."""
    check_export_options(opt)
    check_packages(opt)
    check_outputs(opt)
    images, shown = images_to_compare(opt.source, opt.data)
    device = select_device(opt.device, opt.batch_size)
    model = attempt_load(opt.weights, map_location=device)
    if hasattr(model.model[-1], "num_heads") and not (opt.grid or opt.end2end):
        logger.info("Several heads: boxes with the class ids of the data set are written, as with --grid")
        opt.grid = True
    height, width = (check_img_size(side, int(model.stride.max())) for side in opt.img_size)
    traced = torch.zeros(opt.batch_size, model.yaml["ch"], height, width, device=device)
    logger.info("Compared on %s", shown)

    failed = []
    for kind in dict.fromkeys(opt.include):
        suffix, export = EXPORTS[kind]
        path = Path(opt.weights).with_suffix(suffix)
        try:
            export(model, path, traced, images, opt)
            logger.info("%s: %.1f MB", path, path.stat().st_size / 1e6)
        except Exception as error:  # exporters and runtimes raise anything
            if wants_traceback():
                raise
            failed.append(kind)
            reason = " ".join(str(error).split())[:MAX_REASON]
            logger.error("%s is not written: %s (%s)", path, reason, type(error).__name__)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    entry.run(main, export_parser().parse_args())
