"""Pickles and .pt files by hand, so that they hold what torch.save would never write."""

import io
import pickle
import struct
import zipfile

import torch

END = b"."
FLOATS = b"ctorch\nFloatStorage\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"

# ---- pickles by hand -------------------------------------------------------------------------------------------------


def text(value):
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value):
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = pickle.encode_long(value)
    return b"\x8a" + bytes([len(raw)]) + raw


def put(index):
    return b"r" + struct.pack("<I", index)


def get(index):
    return b"j" + struct.pack("<I", index)


def numbers(*values):
    return b"(" + b"".join(map(number, values)) + b"t"


def dictionary(**entries):
    return b"}(" + b"".join(text(key) + value for key, value in entries.items()) + b"u"


def storage(count, key="0", kind=FLOATS):
    return b"(" + text("storage") + kind + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(size, stride, offset=0, count=4, key="0", kind=FLOATS):
    parts = storage(count, key, kind) + number(offset) + numbers(*size) + numbers(*stride) + b"\x89}"
    return REBUILD + b"(" + parts + b"tR"


def nested_tuple(depth):
    """A tuple that holds the one before twice, and so on."""
    return b")" + put(1000) + b"".join(get(1000 + i) + b"\x86" + put(1001 + i) for i in range(depth))


def nested_list(depth):
    """A list of lists, each of which holds the one before twice."""
    lists = [b"](" + get(1000 + i) * 2 + b"e" + put(1001 + i) for i in range(depth)]
    return b"](](" + text("x") + b"e" + put(1000) + b"".join(lists) + b"e"


def archive(pickled, storages=None, more=(), compressed=zipfile.ZIP_STORED, version=b"3\n"):
    """The bytes of a .pt file whose data.pkl is given."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compressed) as packed:
        packed.writestr("a/data.pkl", b"\x80\x02" + pickled + END)
        for key, content in (storages if storages is not None else {"0": bytes(16)}).items():
            packed.writestr(f"a/data/{key}", content)
        for name, content in more:
            packed.writestr(name, content)
        packed.writestr("a/version", version)
    return file.getvalue()


def saved(content, **options):
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def legacy(pickled, tail=b"", keys=b"]"):
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    system = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)
    return magic + system + b"\x80\x02" + pickled + END + b"\x80\x02" + keys + END + tail


def hand_made(members):
    """An archive of (name, content) whose equal contents lie in the file once."""
    out, entries, starts = io.BytesIO(), [], {}
    for name, content in members:
        content = b"\x80\x02" + content + END if name.endswith(b".pkl") else content
        if content not in starts:
            starts[content] = out.tell()
            sizes = (0, len(content), len(content), len(name), 0)
            out.write(struct.pack("<4s2B4HL2L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, *sizes) + name + content)
        sizes = (0, len(content), len(content), len(name), 0, 0, 0, 0, 0, starts[content])
        entries.append(struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 0, 20, 0, 0, 0, 0, 0, *sizes) + name)
    directory, begin, count = b"".join(entries), out.tell(), min(len(entries), 0xFFFF)
    return out.getvalue() + directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), begin, 0)


def pickle_broken(data, rng, injure):
    """A .pt file with an injured data.pkl inside an archive that is whole."""
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        content = {name: packed.read(name) for name in packed.namelist()}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for name, part in content.items():
            packed.writestr(name, injure(part, rng) if name.endswith("data.pkl") else part)
    return file.getvalue()


# ---- random pickles --------------------------------------------------------------------------------------------------

NAMES = [
    "models.yolo Model", "models.common Conv", "utils.head_config HeadConfig", "torch.nn.modules.conv Conv2d",
    "torch FloatStorage", "torch HalfStorage", "torch LongStorage", "torch float32", "torch Size", "torch device",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter",
    "torch._tensor _rebuild_from_type_v2", "torch._utils _rebuild_sparse_tensor", "torch.nn.parameter Parameter",
    "collections OrderedDict", "collections Counter", "__builtin__ set", "builtins complex", "builtins bytearray",
    "_codecs encode", "numpy dtype", "numpy ndarray", "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray scalar", "pathlib PosixPath", "torch.storage UntypedStorage", "os system", "builtins eval",
]  # fmt: skip
KEYS = ["model", "ema", "optimizer", "epoch", "best_fitness", "updates", "scaler", "training_results", "state_dict",
        "yaml", "names", "nc", "hyp", "gr", "_modules", "_parameters", "_buffers", "head_config", "state",
        "param_groups", "backbone", "head", "anchors", "_non_persistent_buffers_set", "num_heads", "w"]  # fmt: skip
SIZES = [0, 1, 2, 3, 4, 5, 7, 16, 255, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, -1, -(2**40)]


def random_value(rng, depth=4):
    """A pickle that makes one value: plain ones, tensors, layers, calls, things that were made before."""
    kinds = [_scalar, _scalar, _again] if depth == 0 else [
        _scalar, _again, _list, _tuple, _mapping, _mapping, _some_tensor, _layer, _layer, _call, _doubled,
    ]  # fmt: skip
    code = rng.choice(kinds)(rng, depth - 1)
    return code + put(rng.randrange(20)) if rng.random() < 0.5 else code


def _scalar(rng, depth):
    return rng.choice([
        b"N", b"\x88", b"\x89", number(rng.choice(SIZES)), text(rng.choice(KEYS)), text("x" * rng.choice([0, 9, 9999])),
        b"G" + struct.pack(">d", rng.choice([0.0, 1.5, float("nan"), float("inf"), 1e308])), text("\ud800"),
        b"U\x03abc", number(rng.randrange(2**1000)),
    ])  # fmt: skip


def _again(rng, depth):
    return get(rng.randrange(20))


def _list(rng, depth):
    return b"](" + b"".join(random_value(rng, depth) for _ in range(rng.randrange(5))) + b"e"


def _tuple(rng, depth):
    return b"(" + b"".join(random_value(rng, depth) for _ in range(rng.randrange(5))) + b"t"


def _mapping(rng, depth):
    keys = (text(rng.choice(KEYS)) if rng.random() < 0.9 else random_value(rng, depth) for _ in range(rng.randrange(6)))
    return b"}(" + b"".join(key + random_value(rng, depth) for key in keys) + b"u"


def _some_tensor(rng, depth):
    dims = rng.choice([0, 1, 1, 2, 4])
    size, stride = ([rng.choice(SIZES[: rng.choice([6, 17])]) for _ in range(dims)] for _ in "ab")
    kind = f"ctorch\n{rng.choice(['Float', 'Half', 'Long', 'Bool', 'ComplexFloat'])}Storage\n".encode()
    return tensor(
        size, stride, rng.choice([0, 0, 1, rng.choice(SIZES)]), rng.choice([1, 2, 4, rng.choice(SIZES)]), kind=kind
    )


def _layer(rng, depth):
    name = rng.choice(NAMES[:4]).replace(" ", "\n")
    return f"c{name}\n)".encode() + b"\x81" + (_mapping(rng, depth) + b"b" if rng.random() < 0.9 else b"")


def _call(rng, depth):
    called = f"c{rng.choice(NAMES)}\n".replace(" ", "\n").encode() if rng.random() < 0.9 else random_value(rng, depth)
    return called + _tuple(rng, depth) + b"R" + (random_value(rng, depth) + b"b" if rng.random() < 0.2 else b"")


def _doubled(rng, depth):
    """A list that stands for very many entries."""
    return random_value(rng, depth) + put(19) + nested_list(rng.choice([2, 10, 30, 60]))[:-1] + get(19) + b"e" + b"\x86"


def random_file(rng):
    """A .pt file whose content is random, but of the kind that a checkpoint has."""
    entries = b"".join(text(rng.choice(KEYS[:10])) + random_value(rng, 5) for _ in range(rng.randrange(1, 5)))
    content = b"}(" + entries + b"u" if rng.random() < 0.8 else random_value(rng, 6)
    code = b"".join(b"N" + put(i) for i in range(20)) + content
    return (
        archive(code) if rng.random() < 0.9 else legacy(code, bytes(24), rng.choice([b"]", b"](" + text("0") + b"e"]))
    )
