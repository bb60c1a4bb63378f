"""Small .pt files of allowed names only that stand for more than any memory holds, or would keep a reader for ever.

`HOSTILE` is {name: function of a random.Random that returns the bytes of such a file}; each is refused.
`ODD` are files of the same make that can be read.
"""

import struct
import zipfile

import torch
from torch import nn

from tests.engine.pickle_code import (
    REBUILD,
    archive,
    dictionary,
    get,
    hand_made,
    legacy,
    nested_list,
    nested_tuple,
    number,
    numbers,
    put,
    saved,
    storage,
    tensor,
    text,
)  # fmt: skip
from tests.tiny_model import tiny_model
from utils.head_config import HeadConfig

MODEL = b"cmodels.yolo\nModel\n)\x81"  # a new, empty Model


def model(code):
    """The bytes of a checkpoint whose model is what `code` makes."""
    return archive(dictionary(model=code))


def state(*entries, **places):
    """The bytes of a checkpoint whose model is a state dict of hand-made tensors."""
    return archive(dictionary(model=dictionary(**{f"w{i}": entry for i, entry in enumerate(entries)})), **places)


# ---- things that name each other -------------------------------------------------------------------------------------


def shared_list(depth=40, width=2, leaf="x"):
    for _ in range(depth):
        leaf = [leaf] * width
    return leaf


def endless_list():
    content = [1]
    content.append(content)
    return content


def deep_list(depth=100_000):
    return b"]" * depth + b"a" * (depth - 1)


def graph(depth=40):
    """Layers, each of which stands twice in the next one."""
    layer = nn.Conv2d(1, 1, 1)
    for _ in range(depth):
        layer = nn.Sequential(layer, layer)
    model = tiny_model()
    model.model[0] = layer
    return saved({"model": model})


def with_yaml(rng, content):
    model = tiny_model()
    key = rng.choice(["backbone", "head", "anchors", "nc", "head_config", "args", "comment"])
    if key == "args":
        model.yaml["backbone"][0][3] = content
    else:
        model.yaml[key] = content
    return saved({rng.choice(["model", "ema"]): model})


def with_attribute(rng, content):
    model = tiny_model()
    setattr(model, rng.choice(["names", "hyp", "nc", "gr", "class_weights", "yaml"]), content)
    return saved({"model": model})


def with_entry(rng, content):
    key = rng.choice(["optimizer", "scaler", "full_state", "training_results", "other", "epoch", "best_fitness"])
    content = {"state": {0: content}} if key in ("optimizer", "scaler") and rng.random() < 0.7 else content
    return saved({"model": {"w": torch.ones(1)}, key: content})


def with_heads(rng, content):
    model = tiny_model()
    config = HeadConfig.__new__(HeadConfig)
    vars(config).update(nc=2, num_heads=2, head_classes=[[0], [1]], weights=[1.0, 1.0], head_names=["a", "b"])
    setattr(config, rng.choice(["nc", "num_heads", "head_classes", "weights", "head_names", "grouping"]), content)
    model.model[-1].head_config = config
    return saved({"model": model})


def looping_layers(rng):
    model = tiny_model()
    layer = rng.choice([model, model.model, model.model[2]])
    layer._modules["again"] = rng.choice([model, layer])
    return saved({"model": model})


PLACES = (with_yaml, with_attribute, with_entry, with_heads)


# ---- tensors ---------------------------------------------------------------------------------------------------------


def same_storage_often(rng):
    """Thousands of tensors that are one and the same large storage: a model of many GB."""
    count = 1_000_000
    entry = tensor([count], [1], count=count)
    return state(*[entry] * rng.choice([200, 2000]), storages={"0": bytes(4 * count)})


def same_tensor_often(rng):
    count = 1_000_000
    entries = dictionary(w=tensor([count], [1], count=count) + put(7), **{f"v{i}": get(7) for i in range(3000)})
    return archive(dictionary(model=entries), {"0": bytes(4 * count)})


def long_names(rng):
    """Names of layers that are a megabyte long, one inside the other."""
    name = "n" * 1_000_000
    layer = nn.Conv2d(1, 1, 1)
    for _ in range(50):
        outer = nn.Module.__new__(nn.Sequential)
        nn.Module.__init__(outer)
        outer._modules[name] = layer
        layer = outer
    model = tiny_model()
    model._modules["long"] = layer
    return saved({"model": model})


# ---- archives --------------------------------------------------------------------------------------------------------

GOOD = dictionary(model=dictionary(w=tensor([4], [1])))


def compressed(rng):
    count = rng.choice([1, 50_000_000])
    return archive(dictionary(model=dictionary(w=tensor([count], [1], count=count))), {"0": bytes(4 * count)},
                   compressed=rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]))  # fmt: skip


def patched_directory(rng, place, form, value, data=None):
    """An archive of which one field in the directory entry of the tensor is another."""
    data = bytearray(data or archive(GOOD))
    at = data.index(b"a/data/0", data.index(b"PK\1\2")) - 46
    struct.pack_into(form, data, at + place, value)
    return bytes(data)


def overlapping(rng):
    """A thousand members that are the same 4 MB of the file."""
    count = 1_000_000
    content, names = bytes(4 * count), {str(i): f"a/data/{i}".encode() for i in range(1000)}
    pickled = dictionary(model=dictionary(**{f"w{i}": tensor([count], [1], count=count, key=i) for i in names}))
    return hand_made([(b"a/data.pkl", pickled), *((name, content) for name in names.values())])


def twice(rng):
    name = rng.choice(["a/data.pkl", "a/data/0", "a/version"])
    return archive(GOOD, more=[(name, b"\x80\x02}.")])


def many_members(rng):
    return hand_made([(b"a/data.pkl", GOOD), *((f"a/data/{i}".encode(), b"") for i in range(350_000))])


def end_of_archive(place, value):
    data = bytearray(archive(GOOD))
    struct.pack_into("<L", data, data.rindex(b"PK\5\6") + place, value)
    return bytes(data)


def large_end(rng):
    """The end of the archive in its long form, that promises more than the file has."""
    data = archive(GOOD)
    at = data.rindex(b"PK\5\6")
    huge = rng.choice([2**40, 2**63, 2**64 - 1])
    long_form = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 4, 4, huge, rng.choice([0, huge]))
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at, 1)
    return data[:at] + long_form + locator + data[at:]


# ---- steps that cost more than they look ----------------------------------------------------------------------------


def repeated_call(rng, name, argument, times=100_000):
    """A function of the file, called on one large argument very often."""
    call = get(6) + get(5) + b"\x85R"
    return archive(dictionary(a=argument + put(5), b=b"c" + name + put(6), c=b"](" + call * times + b"e", model=b"N"))


def long_list_of_buffers(rng):
    """Every buffer is looked up in a list, which takes as long as both are long."""
    names = [text(f"k{i}") for i in range(300_000)]
    buffers = b"}(" + names[0] + tensor([1], [1]) + put(3) + b"".join(name + get(3) for name in names) + b"u"
    temporary = b"](" + b"N" * 400_000 + b"e"
    return model(MODEL + dictionary(_buffers=buffers, _non_persistent_buffers_set=temporary, yaml=text("none")) + b"b")


def heads_of_one_text(rng):
    """As many heads as a text has letters."""
    count = 20_000_000
    code = text("x" * count) + put(5)
    config = dictionary(num_heads=number(count), nc=code, head_classes=get(5), weights=get(5), head_names=get(5))
    layer = b"cmodels.yolo\nDetect\n)\x81" + dictionary(
        head_config=b"cutils.head_config\nHeadConfig\n)\x81" + config + b"b"
    )
    inner = b"ctorch.nn.modules.container\nSequential\n)\x81" + dictionary(_modules=dictionary(a=layer + b"b")) + b"b"
    return model(MODEL + dictionary(yaml=dictionary(nc=number(2)), _modules=dictionary(model=inner)) + b"b")


def repeated_build(rng):
    attributes = dictionary(**{f"k{i}": b"N" for i in range(50_000)})
    return archive(dictionary(a=attributes + put(5), model=MODEL + (get(5) + b"b") * 300_000))


def colliding_keys(rng):
    """Keys that have one hash: whole numbers that differ by multiples of 2^61 - 1."""
    prime = 2**61 - 1
    return archive(dictionary(model=b"}(" + b"".join(number(i * prime) + b"N" for i in range(300_000)) + b"u"))


def many_keys(rng):
    form = rng.choice([lambda i: text(f"w{i}") + b"N", lambda i: text(f"w{i}") + get(3)])
    entries = b"".join(form(i) for i in range(2_000_000))
    return archive(dictionary(first=tensor([1], [1]) + put(3), model=b"}(" + entries + b"u"))


def long_equal_keys(rng):
    """Two equal texts of 15 MB, as keys of one dict again and again: each time they are compared."""
    long = text("k" * 15_000_000)
    code = b"}" + put(1) + text("a") + long + put(2) + b"s" + text("b") + long + put(3) + b"s"
    return archive(dictionary(model=code + (get(2) + b"Ns" + get(3) + b"Ns") * 200_000))


LONG = b"(" + b"N" * 1_000_000 + b"t"
LIST = b"](" + b"N" * 1_000_000 + b"e"
PAIRS = b"](" + (text("k") + b"N\x86") * 300_000 + b"e"
GOOD_STATE = dictionary(w=tensor([4], [1]))

HOSTILE = {
    "graph of layers": lambda rng: graph(rng.choice([30, 40, 80])),
    "layers in a circle": looping_layers,
    "shared lists": lambda rng: rng.choice(PLACES)(rng, shared_list(rng.choice([25, 40, 55]))),
    "wide lists": lambda rng: rng.choice(PLACES)(rng, shared_list(4, 1000)),
    "shared text": lambda rng: rng.choice(PLACES)(rng, ["x" * 1_000_000] * 900_000),
    "list in itself": lambda rng: rng.choice(PLACES)(rng, endless_list()),
    "deep list": lambda rng: archive(dictionary(model=dictionary(w=tensor([1], [1])), other=deep_list())),
    "deep yaml": lambda rng: archive(MODEL + dictionary(yaml=dictionary(backbone=deep_list(), _modules=b"}")) + b"b"),
    "key of nested tuples": lambda rng: model(b"}" + nested_tuple(rng.choice([30, 60])) + b"Ns"),
    "element of nested tuples": lambda rng: archive(
        dictionary(model=b"c__builtin__\nset\n](" + nested_tuple(50) + b"e\x85R")),
    "pairs of nested tuples": lambda rng: archive(
        dictionary(model=b"ccollections\nOrderedDict\n](" + nested_tuple(50) + b"N\x86e\x85R")),
    "path of nested lists": lambda rng: model(b"cpathlib\nPosixPath\n" + nested_list(50) + b"\x85R"),
    "device of nested lists": lambda rng: model(b"ctorch\ndevice\n" + nested_list(50) + b"\x85R"),
    "type of nested lists": lambda rng: archive(
        dictionary(model=b"cnumpy\ndtype\n" + nested_list(50) + b"\x89\x88\x87R")),
    "size of nested lists": lambda rng: model(b"ctorch\nSize\n" + nested_list(50) + b"\x85R"),
    "key that is a list": lambda rng: archive(dictionary(model=b"}](" + b"NNeNs")),
    "colliding keys": colliding_keys,
    "many keys": many_keys,
    "long equal keys": long_equal_keys,
    "long names": long_names,
    "stride 0": lambda rng: state(tensor([2 ** rng.choice([34, 50, 61])], [0])),
    "stride 0 in two directions": lambda rng: state(tensor([2**17, 2**17], [0, 0])),
    "negative stride": lambda rng: state(tensor([4], [-1], offset=3)),
    "negative offset": lambda rng: state(tensor([2], [1], offset=-4)),
    "negative size": lambda rng: state(tensor([-4], [1])),
    "offset beyond the storage": lambda rng: state(tensor([1], [1], offset=rng.choice([4, 2**40, 2**62, 2**63]))),
    "size beyond the storage": lambda rng: state(tensor([rng.choice([5, 2**40, 2**62])], [1])),
    "stride beyond the storage": lambda rng: state(tensor([2], [rng.choice([4, 2**40, 2**62, 2**70])])),
    "sizes whose product overflows": lambda rng: state(tensor([2**32, 2**32, 2], [0, 0, 0])),
    "empty with huge sizes": lambda rng: state(tensor([0, 2**61, 2**61], [1, 1, 1])),
    "many dimensions": lambda rng: state(tensor([1] * 5000, [0] * 5000)),
    "fewer strides": lambda rng: state(tensor([2, 2], [1])),
    "size of text": lambda rng: state(REBUILD + b"(" + storage(4) + number(0) + text("4") + numbers(1) + b"\x89}tR"),
    "storage beyond its member": lambda rng: state(tensor([4], [1], count=rng.choice([5, 2**31, 2**45]))),
    "storage without member": lambda rng: state(tensor([4], [1], key="7")),
    "storage of negative length": lambda rng: state(tensor([4], [1], count=-4)),
    "one storage often": same_storage_often,
    "one tensor often": same_tensor_often,
    "sparse": lambda rng: saved({"model": {"w": torch.ones(2, 2).to_sparse()}}),
    "complex": lambda rng: saved({"model": {"w": torch.ones(2, dtype=torch.complex64)}}),
    "quantised": lambda rng: saved({"model": {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)}}),
    "meta": lambda rng: saved({"model": {"w": torch.ones(2, device="meta")}}),
    "negated": lambda rng: state(
        REBUILD + b"(" + storage(4) + number(0) + numbers(4) + numbers(1) + b"\x89}" + dictionary(neg=b"\x88") + b"tR"),
    "compressed": compressed,
    "size without end": lambda rng: patched_directory(rng, 24, "<L", 0xFFFFFFFF),
    "size of 3 GB": lambda rng: patched_directory(rng, 24, "<L", 3_000_000_000),
    "encrypted": lambda rng: patched_directory(rng, 8, "<H", 1),
    "header beyond the end": lambda rng: patched_directory(rng, 42, "<L", 0xFFFFFF0),
    "name beyond the end": lambda rng: patched_directory(rng, 28, "<H", 0xFFFF),
    "other header": lambda rng: patched_directory(rng, 42, "<L", 3),
    "overlapping members": overlapping,
    "members of one name": twice,
    "many members": many_members,
    "directory without end": lambda rng: end_of_archive(rng.choice([12, 16]), rng.choice([2**31, 2**32 - 1])),
    "directory of many GB": large_end,
    "huge text": lambda rng: model(b"X" + struct.pack("<I", rng.choice([2**32 - 1, 2**31])) + b"abc"),
    "huge pickle": lambda rng: archive(dictionary(model=b"N", other=text("x" * 70_000_000))),
    "memo without end": lambda rng: archive(
        dictionary(model=b"](" + b"".join(b"N" + put(2**32 - 1 - i) for i in range(9)) + b"e")),
    "many marks": lambda rng: archive(b"(" * 6_000_000),
    "many empty lists": lambda rng: archive(dictionary(model=b"](" + b"]" * 6_000_000 + b"e")),
    "many tensors": lambda rng: model(
        b"](" + (REBUILD + b"(" + storage(4) + number(0) + b"))\x89}tR") * 300_000 + b"e"),
    "set of a list again": lambda rng: repeated_call(rng, b"__builtin__\nset\n", LIST),
    "dict of a list again": lambda rng: repeated_call(rng, b"collections\nOrderedDict\n", PAIRS),
    "size of a list again": lambda rng: repeated_call(rng, b"torch\nSize\n", LIST),
    "path of texts again": lambda rng: repeated_call(rng, b"pathlib\nPosixPath\n", text("p" * 10_000_000)),
    "counter again": lambda rng: repeated_call(
        rng, b"collections\nCounter\n", dictionary(**{f"k{i}": b"N" for i in range(100_000)})),
    "bytes again": lambda rng: archive(dictionary(
        a=text("b" * 10_000_000) + put(5),
        model=b"](" + (b"c_codecs\nencode\n" + get(5) + text("latin1") + b"\x86R") * 10_000 + b"e")),
    "build again": repeated_build,
    "long arguments again": lambda rng: archive(dictionary(
        a=LONG + put(5), model=b"](" + (b"cnumpy.core.multiarray\n_reconstruct\n" + get(5) + b"R") * 100_000 + b"e")),
    "long storage again": lambda rng: archive(
        dictionary(a=LONG + put(5), model=b"](" + (get(5) + b"Q") * 100_000 + b"e")),
    "long list of buffers": long_list_of_buffers,
    "heads of one text": heads_of_one_text,
    "long key again": lambda rng: archive(dictionary(
        a=b"(" + text("k") * 1_000_000 + b"t" + put(5), model=b"}(" + (get(5) + b"N") * 100_000 + b"u")),
    "epoch without end": lambda rng: archive(dictionary(model=GOOD_STATE, epoch=number(2**2000))),
    "updates without end": lambda rng: archive(dictionary(model=GOOD_STATE, updates=number(2**2000))),
    "legacy, huge storage": lambda rng: legacy(dictionary(model=dictionary(w=tensor([4], [1], count=2**40)))),
    "legacy, other size": lambda rng: legacy(
        dictionary(model=GOOD_STATE), struct.pack("<q", 2**40) + bytes(16), b"](" + text("0") + b"e"),
    "legacy, no storage": lambda rng: legacy(dictionary(model=GOOD_STATE), bytes(24)),
    "legacy, many storages": lambda rng: legacy(dictionary(model=dictionary(
        **{f"w{i}": tensor([1], [1], count=200_000, key=str(i)) for i in range(4000)})), bytes(800_000)),
}  # fmt: skip

HEAVY = ["shared text", "many keys", "long equal keys", "compressed", "overlapping members", "many members",
         "huge pickle", "many marks", "many empty lists", "many tensors", "colliding keys", "bytes again",
         "path of texts again", "counter again", "build again", "long names", "one storage often",
         "long arguments again", "long storage again", "long key again",
         "one tensor often"]  # fmt: skip
ODD = {
    "small expanded tensor": lambda: saved({"model": {"w": torch.ones(1).expand(1000)}}),
    "views of one storage": lambda: saved({"model": dict(enumerate_names(torch.arange(1000.0).split(10)))}),
    "transposed": lambda: saved({"model": {"w": torch.arange(6.0).view(2, 3).t()}}),
    "empty": lambda: saved({"model": {"w": torch.zeros(0, 3), "v": torch.zeros(3, 0, 2)}}),
    "empty with odd strides": lambda: state(tensor([0, 5], [7, 9])),
    "a number": lambda: saved({"model": {"w": torch.tensor(3), "b": torch.tensor(True)}}),
    "all types": lambda: saved({"model": {str(kind): torch.ones(2, dtype=kind) for kind in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e5m2, torch.uint16)}}),
    "parameters": lambda: saved({"model": {"w": nn.Parameter(torch.ones(2)), "v": nn.Parameter(torch.ones(2), False)}}),
    "one tensor under two names": lambda: saved({"model": dict.fromkeys(("w", "v"), torch.ones(1000))}),
    "tensor with attributes": lambda: saved(
        {"model": {"w": with_note(torch.ones(2)), "v": with_note(nn.Parameter(torch.ones(1)))}}),
    "other memory order": lambda: saved({"model": {"w": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)}}),
    "legacy": lambda: saved(
        {"model": {"w": torch.arange(5.0), "v": torch.arange(9.0)[3:5]}}, _use_new_zipfile_serialization=False),
}  # fmt: skip


def enumerate_names(parts):
    return ((f"w{i}", part) for i, part in enumerate(parts))


def with_note(value):
    value.note = "kept by torch, and not needed"
    return value
