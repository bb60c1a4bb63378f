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
