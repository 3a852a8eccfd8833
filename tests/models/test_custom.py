import sys

import pytest
import torch

from leadline.core.errors import UsageError
from leadline.models.custom import load_workload
from leadline.models.opening import open_workload
from leadline.models.workload import Workload

SOURCE = """
from dataclasses import dataclass
import torch


@dataclass(frozen=True)
class Own:
    width: int = 2
    name: str = "own"
    vocab_size: int = 257

    def build(self):
        return torch.nn.Linear(self.width, 257)

    def loss(self, model, inputs, targets):
        return model.weight.sum() * 0

    def compile(self, model):
        model.was_compiled = True


ready = Own()
number = 3


def make(width):
    return Own(width=width)


def make_nothing():
    return None


class NotEnough:
    name = "x"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own.py").write_text(SOURCE, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "args", "width"),
    [("ready", None, 2), ("ready", {}, 2), ("make", {"width": 5}, 5), ("Own", {"width": 4}, 4)],
)
def test_workload_of_an_object_a_function_or_a_class_is_opened(folder, name, args, width):
    workload = load_workload(folder, f"own.py:{name}", args)
    assert isinstance(workload, Workload)
    assert workload.width == width
    assert (workload.name, workload.vocab_size) == ("own", 257)


def test_workload_passes_every_call_on_to_the_users(folder):
    workload = load_workload(folder, "own.py:ready")
    model = workload.build()
    workload.compile(model)
    assert model.was_compiled
    assert workload.loss(model, torch.zeros(1), torch.zeros(1)).item() == 0


def test_workload_may_import_what_lies_beside_its_file(folder):
    (folder / "sizes.py").write_text("WIDTH = 7\n", encoding="utf-8")
    source = "import sizes\n" + SOURCE + "\nwide = Own(width=sizes.WIDTH)\n"
    (folder / "own.py").write_text(source, encoding="utf-8")
    before = list(sys.path)
    assert load_workload(folder, "own.py:wide").width == 7
    assert sys.path == before
    del sys.modules["sizes"]


@pytest.mark.parametrize(
    ("named", "args", "words"),
    [
        ("own.py", None, "wanted 'file.py:name'"),
        ("gone.py:ready", None, "with a file that exists"),
        (":ready", None, "with a file that exists"),
        ("own.py:", None, "defines no ''"),
        ("own.py:gone", None, "defines no 'gone'"),
        ("own.py:number", None, "is a int, not a workload; it needs name"),
        ("own.py:make_nothing", None, "not a workload"),
        ("own.py:NotEnough", None, "is a NotEnough, not a workload"),
        ("own.py:ready", {"width": 5}, "takes none"),
    ],
)
def test_workload_that_is_none_is_refused_in_one_sentence(folder, named, args, words):
    with pytest.raises(UsageError, match=words):
        load_workload(folder, named, args)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import a_module_that_is_not_there\n", "ModuleNotFoundError"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_workload_whose_file_does_not_import_is_refused_with_why(folder, source, words):
    (folder / "own.py").write_text(source, encoding="utf-8")
    with pytest.raises(UsageError, match=rf"importing .*own\.py failed: {words}"):
        load_workload(folder, "own.py:ready")


@pytest.mark.parametrize("args", [{}, {"wide": 1}, {"width": 1, "depth": 2}])
def test_workload_with_arguments_that_do_not_fit_is_refused(folder, args):
    spec = {"kind": "python", "object": "own.py:make", "args": args}
    with pytest.raises(UsageError, match="does not take these keys"):
        open_workload(spec, folder)


def test_workload_file_of_a_folder_above_is_found(folder):
    inside = folder / "configurations"
    inside.mkdir()
    assert load_workload(inside, "../own.py:ready").name == "own"
