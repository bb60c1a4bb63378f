"""A run without flags loads no opt-in module: what those are is read off the rooms of the house and their imports."""

import sys
from importlib import import_module

from tests import forked, small_run
from tests.test_house import OPT_IN, belongs_to, imports, modules


def opt_in_modules():
    """The modules of the opt-in rooms, and those that nothing but such modules imports."""
    names = [name for name in modules() if not belongs_to(name, ("tools",))]
    importers = {name: set() for name in names}
    for name in names:
        for target in importers.keys() & imports(name).keys():
            importers[target].add(name)
    found = {name for name in names if belongs_to(name, OPT_IN)}
    while more := {name for name, users in importers.items() if users and users <= found} - found:
        found |= more
    return found


def test_a_run_without_flags_loads_no_opt_in_module(tmp_path):
    opt_in = opt_in_modules()
    assert {"utils.fast.graph_step", "utils.data.fast.worker_pool", "utils.loss.candidates", "models.fused.kernels",
            "utils.data.keyed_dataset"} <= opt_in  # fmt: skip
    assert not {"utils.loss.criterion", "utils.data.mosaic", "utils.engine.trainer", "utils.metrics.detection"} & opt_in
    line = small_run.arguments(tmp_path, "--epochs", "1")
    ended = forked.run(tmp_path, print_loaded, line)
    assert ended.status == 0, ended.text
    loaded = set(ended.text.splitlines()[-1].split())
    assert "utils.loss.criterion" in loaded
    assert sorted(loaded & opt_in) == []


def print_loaded(line):
    """Train as if nothing of the project had been imported before."""
    of_the_project = {name.partition(".")[0] for name in modules()} | {"tests"}
    for name in [name for name in sys.modules if name.partition(".")[0] in of_the_project]:
        del sys.modules[name]
    assert import_module("tests.small_run").program("train", line) == 0
    print(*sys.modules)
