"""One function for each kind of file. They write to the path given, which the caller makes a temporary one."""

import datetime
import io
import json
import logging
import warnings
from contextlib import contextmanager

import torch

from utils.export.outputs import COUNTED, as_list
from utils.system.streams import quiet_loggers


def metadata(model, size, batch_size, settings):
    """What other programs read from a file, {key: text}; `size` is (height, width) in pixels."""
    return {
        "description": "YOLOv7 detector, exported by Yolov7fast",
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "license": "GPL-3.0",
        "stride": str(int(model.stride.max())),
        "task": "detect",
        "batch": str(batch_size),
        "imgsz": str(list(size)),
        "channels": str(model.yaml["ch"]),
        "names": str(dict(enumerate(map(str, model.names)))),
        "args": str(settings),
    }


def write_torchscript(module, images, path, about):
    """A traced `module`; sizes of images and batches may vary. `about` is stored in it as config.txt."""
    with torch.no_grad(), quiet():
        traced = torch.jit.trace(module, images, strict=False, check_trace=False)
        torch.jit.save(traced, str(path), _extra_files={"config.txt": json.dumps(about)})


def write_onnx(outputs, images, path, about, *, free=(), opset, dynamo=False, simplify=False):
    """An ONNX file, all of it in one, of a module of outputs.py, traced with `images`.

    `free` names the axes that may vary: batch, and height and width together, multiples of the stride. Raises whatever
    an exporter raises.
    """
    import onnx

    inputs = {axis: name for axis, name in {0: "batch", 2: "height", 3: "width"}.items() if name in free}
    all_sizes = "height" in free
    varying = [[name if name in free or name == COUNTED or (all_sizes and name) else None for name in axes]
               for axes in outputs.axes]  # fmt: skip
    with torch.no_grad(), quiet():
        shapes = [value.shape for value in as_list(outputs(images))]
        export = _with_dynamo if dynamo else _with_tracing
        proto = export(outputs, images, opset, inputs, varying)
    if simplify:
        import onnxslim

        proto = onnxslim.slim(proto)
    for value, shape, names in zip(proto.graph.output, shapes, varying, strict=True):
        _set_shape(value, [name or number for name, number in zip(names, shape, strict=True)])
    _set_shape(proto.graph.input[0], [inputs.get(axis, number) for axis, number in enumerate(images.shape)])
    del proto.metadata_props[:]
    onnx.helper.set_model_props(proto, about)
    onnx.checker.check_model(proto)
    path.write_bytes(proto.SerializeToString())


def _with_tracing(outputs, images, opset, inputs, varying):
    import onnx

    axes = {name: {i: axis for i, axis in enumerate(names) if axis}
            for name, names in zip(outputs.names, varying, strict=True)}  # fmt: skip
    buffer = io.BytesIO()
    torch.onnx.export(
        outputs, (images,), buffer, opset_version=opset, dynamo=False, input_names=["images"],
        output_names=outputs.names, dynamic_axes={"images": inputs, **axes}, custom_opsets=outputs.domains,
    )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())


def _with_dynamo(outputs, images, opset, inputs, varying):
    from torch.export import Dim

    stride = int(outputs.model.stride.max())
    dims = {axis: Dim(name) if name == "batch" else stride * Dim(name) for axis, name in inputs.items()}
    # a size of 1, of the batch or of the smallest map, would count as one that never varies
    repeats = [2 if axis in inputs and images.shape[axis] in (1, stride) else 1 for axis in range(4)]
    program = torch.onnx.export(
        outputs, (images.repeat(repeats),), opset_version=opset, dynamo=True, verbose=False, input_names=["images"],
        output_names=outputs.names, dynamic_shapes={"images": dims} if dims else None,
    )  # fmt: skip
    proto = program.model_proto
    del proto.graph.value_info[:]  # has the stand-in for the number of detections; runtimes infer shapes themselves
    for part in (*proto.graph.node, *proto.graph.input, *proto.graph.output):
        del part.metadata_props[:]  # stack traces of the machine that exports
    return proto


def _set_shape(value, shape):
    """Write the shape of an input or output of a graph: numbers, and names for what may vary."""
    dims = value.type.tensor_type.shape.dim
    del dims[:]
    for size in shape:
        if isinstance(size, str):
            dims.add().dim_param = size
        else:
            dims.add().dim_value = size


@contextmanager
def quiet():
    """Without what the exporters say of themselves: each file is run, which shows more."""
    loggers = quiet_loggers("torch.onnx", "onnxscript", "onnx_ir", "onnxslim", level=logging.ERROR)
    with loggers, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
