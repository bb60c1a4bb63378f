"""Reads the pickle inside a .pt file. It builds plain values and tensors, and calls nothing but functions of this file.

torch's own restricted unpickler is as safe, but a few hundred bytes make it hang or fill the memory. Here every step
has a price, and a file that asks for more than STEPS is refused. The stand-ins below take the place of all classes and
functions that a checkpoint mentions; every other name is refused.
"""

import gc
import math
import pickle
import struct
from pickle import UnpicklingError

import numpy as np
import torch

STEPS = 2_000_000  # a training checkpoint of the largest model takes 0.7 million
MAX_BYTES = 64 << 20  # of a pickle; the tensors lie outside of it
MAX_NUMBER_KEYS = 50_000  # hashes of numbers can be made to collide, those of text cannot
MAX_NUMBER_KEY = 2**60  # from 2**61 on, numbers share their hashes
PRICE_OF_TENSOR = 20
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


# ---- stand-ins ------------------------------------------------------------------------------------------------------


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


# ---- the machine ----------------------------------------------------------------------------------------------------


class Unpickler:
    """Reads one pickle after the other from the open binary `file`.

    `open_storage(dtype, key, number)` returns the Storage of so many numbers under that key. Raises UnpicklingError for
    names that are not allowed and for whatever would take too long, and other errors for damaged files.
    """

    def __init__(self, file, open_storage):
        self.file, self.open_storage = file, open_storage
        self.steps, self.left, self.number_keys = STEPS, MAX_BYTES, 0

    def load(self):
        """The next value of the file."""
        collects = gc.isenabled()
        gc.disable()  # it would go through millions of new containers again and again
        try:
            return self._load()
        finally:
            if collects:
                gc.enable()

    def _load(self):
        self.stack, self.marks, self.memo = [], [], {}
        file_read, operations = self.file.read, OPERATIONS
        while True:
            code = file_read(1)
            if code == b".":
                return self.stack.pop()
            operation = operations.get(code)
            if operation is None:
                raise EOFError("its end is missing") if not code else UnpicklingError(f"Unsupported operand {code[0]}")
            self.pay(1)
            operation(self)

    def pay(self, steps):
        self.steps -= steps
        if self.steps < 0:
            raise UnpicklingError(f"it has, or stands for, more than {STEPS} entries")

    def read(self, length):
        """`length` bytes, of which the caller pays the price."""
        self.left -= length
        if self.left < 0:
            raise UnpicklingError(f"more than {MAX_BYTES >> 20} MB of it are not tensors")
        data = self.file.read(length)
        if len(data) < length:
            raise EOFError("its end is missing")
        return data

    def line(self):
        line = self.file.readline(300)
        if not line.endswith(b"\n"):
            raise UnpicklingError("a name without an end")
        return line[:-1].decode()

    def key(self, key):
        """`key` if it is one that a dict may have: its hash takes long if tuples are nested, or numbers chosen well."""
        parts = key if type(key) is tuple else (key,)
        for part in parts:
            if type(part) not in SCALARS:
                raise UnpicklingError(f"a key that is a {type(part).__name__}")
            if isinstance(part, (str, bytes)):
                self.pay(len(part) // 100)
                continue
            self.number_keys += 1
            if isinstance(part, int) and abs(part) > MAX_NUMBER_KEY:
                raise UnpicklingError("a key that is a number of many digits")
        if self.number_keys > MAX_NUMBER_KEYS:
            raise UnpicklingError(f"more than {MAX_NUMBER_KEYS} keys that are numbers")
        return key

    def above_mark(self):
        items, self.stack = self.stack, self.marks.pop()
        return items

    # each operation is named as in the pickle module

    def proto(self):
        (version,) = self.read(1)
        if version > 3:
            raise UnpicklingError(f"pickle protocol {version}; torch.save writes 2 unless it is told otherwise")

    def global_(self):
        module, name = self.line(), self.line()
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in ALLOWED:
            raise UnpicklingError(f"Unsupported global: GLOBAL {full.removeprefix('builtins.')}")
        self.stack.append(ALLOWED[full])

    def newobj(self):
        args, kind = self.stack.pop(), self.stack.pop()
        if kind is not LayerClass or args != ():
            raise UnpicklingError("a new object that is no layer")
        self.stack.append(Layer())

    def reduce(self):
        args, called = self.stack.pop(), self.stack.pop()
        if type(called) is not Function or type(args) is not tuple:
            raise UnpicklingError("a call of something that is no function")
        self.pay(called.price + sum(_size(argument) for argument in args))
        self.stack.append(called.function(self, *args))

    def build(self):
        state, target = self.stack.pop(), self.stack[-1]
        parts = state if type(state) is tuple else (state,)
        self.pay(len(parts) + sum(_size(part) for part in parts))
        if type(target) in (Array, NumberType):
            target.set_state(state)
        elif type(target) is Layer and len(parts) <= 2:  # attributes, and those of __slots__
            if not all(type(part) in (dict, type(None)) for part in parts):
                raise UnpicklingError("a layer whose attributes are no dict")
            target.__dict__ = {key: value for part in parts for key, value in (part or {}).items()}
        elif type(target) is not dict:  # attributes of an OrderedDict, which nobody reads
            raise UnpicklingError(f"a state for a {type(target).__name__}")

    def append(self):
        item = self.stack.pop()
        self._list().append(item)

    def appends(self):
        items = self.above_mark()
        self._list().extend(items)

    def _list(self):
        if type(self.stack[-1]) is not list:
            raise UnpicklingError(f"entries for a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def setitem(self):
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items((key, value))

    def setitems(self):
        self._set_items(self.above_mark())

    def _set_items(self, items):
        target = self.stack[-1]
        if type(target) is not dict:
            raise UnpicklingError(f"keys for a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self.key(key)] = value

    def mark(self):
        self.marks.append(self.stack)
        self.stack = []

    def tuple(self):
        items = self.above_mark()
        self.stack.append(tuple(items))

    def tuple_of(self, length):
        if len(self.stack) < length:
            raise IndexError("a tuple of nothing")
        self.stack[-length:] = [tuple(self.stack[-length:])]

    def push(self, value):
        self.stack.append(value)

    def number(self, form):
        self.stack.extend(struct.unpack(form, self.read(struct.calcsize(form))))

    def long1(self):
        self.stack.append(pickle.decode_long(self.read(self.read(1)[0])))

    def binunicode(self):
        self.stack.append(str(self.read(*struct.unpack("<I", self.read(4))), "utf-8", "surrogatepass"))

    def short_binstring(self):
        self.stack.append(self.read(self.read(1)[0]).decode())

    def binpersid(self):
        kind, storage_type, key, _, number, *view = [*self.stack.pop()] + 4 * [None]
        plain = type(kind) is type(key) is str and kind == "storage" and not any(view)
        if not plain or type(storage_type) is not StorageType or type(number) is not int or number < 0:
            raise UnpicklingError("something that lies outside and is no storage")
        self.stack.append(self.open_storage(storage_type.dtype, key, number))

    def get(self, form):
        self.stack.append(self.memo[struct.unpack(form, self.read(struct.calcsize(form)))[0]])

    def put(self, form):
        self.memo[struct.unpack(form, self.read(struct.calcsize(form)))[0]] = self.stack[-1]


def _short(value):
    return repr(value)[:40] if type(value) in SCALARS else f"a {type(value).__name__}"


def _size(value):
    """What it costs to copy a value."""
    if isinstance(value, (str, bytes)):
        return len(value) // 10
    return len(value) if isinstance(value, (list, tuple, dict, set)) else 0


OPERATIONS = {
    pickle.PROTO: Unpickler.proto, pickle.GLOBAL: Unpickler.global_, pickle.NEWOBJ: Unpickler.newobj,
    pickle.REDUCE: Unpickler.reduce, pickle.BUILD: Unpickler.build, pickle.APPEND: Unpickler.append,
    pickle.APPENDS: Unpickler.appends, pickle.SETITEM: Unpickler.setitem, pickle.SETITEMS: Unpickler.setitems,
    pickle.MARK: Unpickler.mark, pickle.TUPLE: Unpickler.tuple,
    pickle.TUPLE1: lambda self: self.tuple_of(1),
    pickle.TUPLE2: lambda self: self.tuple_of(2),
    pickle.TUPLE3: lambda self: self.tuple_of(3),
    pickle.NONE: lambda self: self.push(None),
    pickle.NEWFALSE: lambda self: self.push(False),
    pickle.NEWTRUE: lambda self: self.push(True),
    pickle.EMPTY_TUPLE: lambda self: self.push(()),
    pickle.EMPTY_LIST: lambda self: self.push([]),
    pickle.EMPTY_DICT: lambda self: self.push({}),
    pickle.BININT: lambda self: self.number("<i"),
    pickle.BININT1: lambda self: self.number("<B"),
    pickle.BININT2: lambda self: self.number("<H"),
    pickle.BINFLOAT: lambda self: self.number(">d"),
    pickle.LONG1: Unpickler.long1, pickle.BINUNICODE: Unpickler.binunicode,
    pickle.SHORT_BINSTRING: Unpickler.short_binstring, pickle.BINPERSID: Unpickler.binpersid,
    pickle.BINGET: lambda self: self.get("<B"),
    pickle.LONG_BINGET: lambda self: self.get("<I"),
    pickle.BINPUT: lambda self: self.put("<B"),
    pickle.LONG_BINPUT: lambda self: self.put("<I"),
}  # fmt: skip
