"""What takes the place of the classes and functions that a .pt file mentions. None of them is the real one.

A name that is not in ALLOWED is refused. What stands here has to be harmless whatever a file hands to it: it hashes and
prints plain values only, for the hash and the text of nested things may have no end.
"""

import math
from pickle import UnpicklingError

import numpy as np
import torch

PRICE_OF_TENSOR = 20  # in steps of the unpickler
SCALARS = (str, bytes, int, float, bool, type(None))

LAYER_CLASSES = {
    "models.yolo": ("Model", "Detect", "IDetect", "IAuxDetect"),
    "models.common": ("Conv", "Concat", "Chuncat", "Shortcut", "MP", "SP", "ReOrg", "DownC", "SPPCSPC", "RepConv",
                      "ImplicitA", "ImplicitM"),
    "models.multihead": ("MultiHeadDetect",),
    "models.multihead_attention": ("MultiHeadDetectAttention",),
    "models.attention": ("CBAM", "ChannelAttention", "SpatialAttention"),
    "utils.head_config": ("HeadConfig",),
    "torch.nn.modules.conv": ("Conv2d",),
    "torch.nn.modules.batchnorm": ("BatchNorm2d", "SyncBatchNorm"),
    "torch.nn.modules.pooling": ("MaxPool2d", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d"),
    "torch.nn.modules.upsampling": ("Upsample",),
    "torch.nn.modules.container": ("Sequential", "ModuleList"),
    "torch.nn.modules.linear": ("Identity",),
    "torch.nn.modules.activation": ("SiLU", "LeakyReLU", "ReLU", "ReLU6", "Hardswish", "Mish", "GELU", "Sigmoid"),
}  # fmt: skip
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip


class Layer:
    """Stand-in for a layer of any class: what the file says about it stays data in its `__dict__`."""


class Opaque:
    """Stand-in for what no model holds, such as a sparse tensor."""


class Array:
    """Stand-in for numpy.ndarray: a flat list of numbers."""

    def set_state(self, state):
        _, _, kind, _, raw = state
        self.numbers = kind.numbers(raw)


class NumberType:
    """Stand-in for numpy.dtype, which can be forged in a file so that its numbers are taken for addresses."""

    def __init__(self, code, *_):
        if code not in ("f2", "f4", "f8", "i4", "i8"):
            raise UnpicklingError(f"a NumPy array of {_short(code)}")
        self.code = code

    def set_state(self, state):
        if state[1] != "<":
            raise UnpicklingError(f"a NumPy array in the byte order {_short(state[1])}")

    def numbers(self, raw):
        return np.frombuffer(raw, self.code).tolist()


class LayerClass:
    """A name of LAYER_CLASSES as it stands in the file."""


class StorageType:
    """The name of a storage class, which says the type of its numbers."""

    def __init__(self, dtype):
        self.dtype = dtype


class Function:
    """A function that a file may call: `function(unpickler, *args)`; the price is that of the size of its arguments."""

    def __init__(self, function, price=1):
        self.function, self.price = function, price


class Storage:
    """Numbers of `dtype` in one untyped storage, that tensors are views of."""

    def __init__(self, dtype, untyped):
        self.dtype, self.untyped = dtype, untyped


def _short(value):
    return repr(value)[:40] if type(value) in SCALARS else f"a {type(value).__name__}"


def _tensor(unpickler, storage, offset, size, stride, *rest, dtype=None):
    """A view of a storage; `rest` is requires_grad, hooks and metadata, which a stored tensor does not need.

    Raises UnpicklingError unless the view lies inside, so that nothing is allocated for it.
    """
    if not isinstance(storage, Storage) or (len(rest) > 2 and rest[2]):
        raise UnpicklingError("a tensor without a plain storage")
    size, stride, dtype = tuple(size), tuple(stride), dtype or storage.dtype
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or len(size) > 25 or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise UnpicklingError("a tensor of a size, stride or offset that cannot be")
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if (last + 1) * dtype.itemsize > storage.untyped.nbytes():
        raise UnpicklingError("a tensor that reaches beyond its storage")
    if math.prod(size) >= 2**62:
        raise UnpicklingError("a tensor of more numbers than any memory holds")
    return torch.empty(0, dtype=dtype).set_(storage.untyped, offset, size, stride)


def _tensor_of_type(unpickler, storage, offset, size, stride, requires_grad, hooks, dtype, *metadata):
    if not isinstance(dtype, torch.dtype):
        raise UnpicklingError("a tensor without a type")
    return _tensor(unpickler, storage, offset, size, stride, requires_grad, hooks, *metadata, dtype=dtype)


def _subclass(unpickler, function, kind, args, state):
    """A Parameter or a tensor with attributes, of which only the tensor is read."""
    if not isinstance(function, Function) or function.function not in (_tensor, _tensor_of_type, _parameter):
        raise UnpicklingError("a tensor that is made by an unknown function")
    return function.function(unpickler, *args)


def _parameter(unpickler, data, *_):
    return data


def _mapping(unpickler, content=()):
    """An OrderedDict or Counter, as a dict."""
    result = {}
    for key, value in content.items() if isinstance(content, dict) else content:
        result[unpickler.key(key)] = value
    return result


def _joined(unpickler, *parts):
    """A path or a device, as text."""
    if not all(type(part) in (str, int) for part in parts):  # the text of a list could have no end
        raise UnpicklingError("a path or device of other parts than text")
    return "/".join(map(str, parts))


def _allowed():
    """What each name of the file stands for."""
    names = {f"{module}.{name}": LayerClass for module, names in LAYER_CLASSES.items() for name in names}
    names |= {f"torch.{name}": StorageType(dtype) for name, dtype in STORAGES.items()}
    names |= {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    names |= {f"torch.storage.{name}": StorageType(torch.uint8) for name in ("UntypedStorage", "_UntypedStorage")}
    names |= {"torch.Tensor": Opaque, "torch.nn.parameter.Parameter": Opaque, "numpy.ndarray": Opaque}
    called = {
        "torch._utils._rebuild_tensor": (_tensor, PRICE_OF_TENSOR),
        "torch._utils._rebuild_tensor_v2": (_tensor, PRICE_OF_TENSOR),
        "torch._utils._rebuild_tensor_v3": (_tensor_of_type, PRICE_OF_TENSOR),
        "torch._tensor._rebuild_from_type_v2": (_subclass, PRICE_OF_TENSOR),
        "torch._utils._rebuild_parameter": (_parameter, 1),
        "torch._utils._rebuild_parameter_with_state": (_parameter, 1),
        "torch.Size": (lambda _, sizes=(): tuple(sizes), 1),
        "torch.device": (_joined, 1),
        "collections.OrderedDict": (_mapping, 1),
        "collections.Counter": (_mapping, 1),
        "builtins.set": (lambda unpickler, values=(): {unpickler.key(value) for value in values}, 1),
        "builtins.complex": (lambda _, real, imaginary: complex(real, imaginary), 1),
        "builtins.bytearray": (lambda _, content=b"", *__: content if type(content) is bytes else Opaque(), 1),
        "_codecs.encode": (lambda _, text, *__: text.encode("latin1"), 1),  # how pickle writes bytes
        "numpy.dtype": (lambda _, *args: NumberType(*args), 1),
    }
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # NumPy 1 and 2
        called[f"{module}._reconstruct"] = (lambda *_: Array(), 1)
        called[f"{module}.scalar"] = (lambda _, kind, raw: kind.numbers(raw)[0], 1)
    for module in ("pathlib", "pathlib._local"):  # the path of a head configuration; Python 3.13 has the second name
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            called[f"{module}.{name}"] = (_joined, 1)
    for name in ("_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_meta_tensor_no_storage"):
        called[f"torch._utils.{name}"] = (lambda *_: Opaque(), 1)
    called["torch.serialization._get_layout"] = (lambda *_: Opaque(), 1)
    return names | {name: Function(*entry) for name, entry in called.items()}


ALLOWED = _allowed()
