"""Reads the pickle inside a .pt file. It builds plain values and tensors, and calls nothing but stand_ins.py.

torch's own restricted unpickler runs no code either, but a few hundred bytes make it hang or fill the memory. Here
every step has a price, and a file that asks for more than STEPS is refused.
"""

import gc
import pickle
import struct
from pickle import UnpicklingError

from utils.engine.stand_ins import ALLOWED, SCALARS, Array, Function, Layer, LayerClass, NumberType, StorageType

STEPS = 2_000_000  # a training checkpoint of the largest model takes 0.7 million
MAX_BYTES = 64 << 20  # of a pickle; the tensors lie outside of it
MAX_NUMBER_KEYS = 50_000  # hashes of numbers can be made to collide, those of text cannot
MAX_NUMBER_KEY = 2**60  # from 2**61 on, numbers share their hashes


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
                self.pay(1 + len(part) // 100)
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
        self.pay(called.price + len(args) + sum(_size(argument) for argument in args))
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
        entry = self.stack.pop()
        if type(entry) is not tuple or not 4 <= len(entry) <= 6:
            raise UnpicklingError("something that lies outside and is no storage")
        kind, storage_type, key, _, number, *view = list(entry) + [None]
        if type(kind) is str and kind == "module" and storage_type is LayerClass:  # before torch 1.6, with its source
            self.push(LayerClass)
            return
        plain = type(kind) is type(key) is str and kind == "storage" and not any(view)
        if not plain or type(storage_type) is not StorageType or type(number) is not int or number < 0:
            raise UnpicklingError("something that lies outside and is no storage")
        self.stack.append(self.open_storage(storage_type.dtype, key, number))

    def get(self, form):
        self.stack.append(self.memo[struct.unpack(form, self.read(struct.calcsize(form)))[0]])

    def put(self, form):
        self.memo[struct.unpack(form, self.read(struct.calcsize(form)))[0]] = self.stack[-1]


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
