"""mixing.py: sums worked by hand, rounded once, a model of which only parts are ever in memory."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from open_r1 import mixing
from open_r1.checkpoint import load_policy, tensor_slots
from open_r1.mixing import Weights, mix, write_masters
from open_r1.submission import write_submission
from tests.faults import status_of
from tests.test_submission import values
from tests.tiny import save_public_form

NORM = "model.language_model.norm.weight"
ULP = 2.0**-7  # of a bfloat16 between 1 and 2


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_public_form(folder, seed=0)
    return folder


def shapes(base):
    return {name: places[0].shape for name, places in tensor_slots(base).items()}


def master(path, base, tensors: dict[str, torch.Tensor], **metadata: str) -> Weights:
    write_masters(path, shapes(base), iter(tensors.items()), metadata)
    return Weights(path)


def test_masters_are_read_as_they_were(base, tmp_path, monkeypatch):
    monkeypatch.setattr(mixing, "CHUNK", 1000)  # no multiple of most sizes
    one = master(tmp_path / "masters/one.safetensors", base, values(1), run="a", step="3")
    assert one.metadata == {"run": "a", "step": "3"} and one.shapes() == Weights(base).shapes()
    expected, stored = values(1), load_file(one.source)
    assert stored.keys() == expected.keys()
    for name, tensor in mix([(one, 1.0)]):
        assert torch.equal(tensor, expected[name]) and torch.equal(stored[name], expected[name])
    with safe_open(one.source, "pt") as file:
        assert file.metadata() == {"run": "a", "step": "3"}


def test_an_average_and_a_mixture_with_the_base(base, tmp_path, monkeypatch):
    monkeypatch.setattr(mixing, "CHUNK", 1000)
    models = {seed: values(seed) for seed in (1, 2)}
    one, two = (master(tmp_path / f"{seed}.safetensors", base, models[seed]) for seed in models)
    stored = {n: p.detach().double() for n, p in load_policy(base, torch.float32).named_parameters()}
    for name, tensor in mix([(Weights(base), 0.25), (one, 0.375), (two, 0.375)]):
        exact = 0.25 * stored[name] + 0.375 * models[1][name].double() + 0.375 * models[2][name].double()
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor.double(), exact, rtol=0, atol=4e-7 * float(exact.abs().max()))


def test_a_mixture_is_rounded_once(base, tmp_path):
    """By hand, in units of the last place of bfloat16 above 1: the mean of 1.4 and 0.4 is 0.9, nearest to 1.
    Rounded first they are 1 and 0, and their mean, a tie, falls onto the even one of the two."""
    start = values(0)
    start[NORM][:] = 1.0
    grown = {name: tensor.clone() for name, tensor in start.items()}
    grown[NORM][:2] = torch.tensor([1 + 1.4 * ULP, 1 + 0.6 * ULP])
    shrunk = {name: tensor.clone() for name, tensor in start.items()}
    shrunk[NORM][:2] = torch.tensor([1 + 0.4 * ULP, 1 + 0.6 * ULP])
    one = master(tmp_path / "1.safetensors", base, grown)
    two = master(tmp_path / "2.safetensors", base, shrunk)
    submission = tmp_path / "submission"
    write_submission(base, submission, mix([(one, 0.5), (two, 0.5)]), {})
    norm = load_policy(submission, torch.float32).model.language_model.norm.weight
    assert norm[:3].tolist() == [1 + ULP, 1 + ULP, 1]  # of 0.9, 0.6 and 0
    rounded = 0.5 * grown[NORM].bfloat16() + 0.5 * shrunk[NORM].bfloat16()
    assert rounded[:2].tolist() == [1, 1 + ULP]


def test_mixed_in_bfloat16_many_weights_are_not_the_nearest():
    """Two models whose weights are a few places from the base: what rounding first does to their mean."""
    random = torch.Generator().manual_seed(0)
    one, two = (1.5 + 2 * ULP * torch.randn(10_000, generator=random) for _ in range(2))
    exact = (0.5 * one + 0.5 * two).bfloat16()
    early = 0.5 * one.bfloat16() + 0.5 * two.bfloat16()
    assert 0.2 < (early != exact).float().mean() < 0.5
    ends = torch.stack([one, two]).bfloat16()
    neighbours = (ends[0] - ends[1]).abs() == ULP
    assert neighbours.any() and ((early == ends[0]) | (early == ends[1]))[neighbours].all()


def test_what_is_not_the_bases_is_refused_and_leaves_no_file(base, tmp_path):
    path = tmp_path / "one.safetensors"
    for change, words in (
        (lambda v: v.pop(NORM), f"1 parameters got no values, first {NORM}"),
        (lambda v: v.update({NORM: torch.ones(63)}), r"came as torch.float32 \[63\]"),
        (lambda v: v.update({NORM: v[NORM].bfloat16()}), "came as torch.bfloat16"),
    ):
        tensors = values(1)
        change(tensors)
        with pytest.raises(ValueError, match=words):
            master(path, base, tensors)
        assert list(tmp_path.iterdir()) == []
    whole = master(path, base, values(1))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="its header says"):
        Weights(path)
    small = tmp_path / "small.safetensors"
    write_masters(small, {NORM: (2,)}, [(NORM, torch.ones(2))], {})
    with pytest.raises(ValueError, match="do not mix"):
        list(mix([(whole, 0.5), (Weights(small), 0.5)]))


def with_memory(extra: float, action: Callable[[], None]) -> int:
    """The exit code of a child that may have `extra` bytes more than the test has."""

    def limited() -> None:
        held = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
        resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(held.split()[1]) + int(extra),) * 2)
        action()

    return status_of(limited)


def test_memory_is_that_of_a_tensor_not_of_a_model(tmp_path, capfd):
    """Models of 256 MB in 16 tensors. Needed are the sum, the one before, which the reader still holds, and
    a chunk of one summand (16 MB each); the rest is the allocator's."""
    shapes = {f"layer{i}": (2048, 2048) for i in range(16)}
    for number in (1, 2):
        tensors = ((name, torch.full(shape, float(number))) for name, shape in shapes.items())
        write_masters(tmp_path / f"{number}.safetensors", shapes, tensors, {})
    models = [(Weights(tmp_path / f"{number}.safetensors"), 0.5) for number in (1, 2)]

    def walk() -> None:
        assert sum(float(tensor[-1, -1]) for _, tensor in mix(models)) == 16 * 1.5

    assert with_memory(110e6, walk) == 0
    assert with_memory(110e6, lambda: list(mix(models))) != 0
    assert "memory" in capfd.readouterr().err
