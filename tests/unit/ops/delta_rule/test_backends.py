"""Which form runs, what it tells of itself, and that it depends on nothing but its arguments."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from qkflow.errors import UsageError
from qkflow.ops import csrc
from qkflow.ops.delta_rule import backends, choose, delta_rule, operator, use

CPU = torch.device("cpu")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with kernels, and nobody who asks for anything."""
    monkeypatch.setattr(csrc, "prepare", lambda: None)
    monkeypatch.setattr(csrc, "ready", lambda: True)
    monkeypatch.setattr(backends, "_asked", None)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler."""
    monkeypatch.setattr(csrc, "prepare", lambda: None)
    monkeypatch.setattr(csrc, "ready", lambda: False)
    monkeypatch.setattr(csrc, "fault", lambda: "there is no C compiler (cc, gcc or clang)")
    monkeypatch.setattr(backends, "_asked", None)


def with_setting(value: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`backends` as it is in a process that was started with QKFLOW_DELTA."""
    monkeypatch.setenv("QKFLOW_DELTA", value)
    spec = importlib.util.spec_from_file_location("backends_again", str(backends.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("kernels")
def test_the_fastest_form_that_can_run_is_taken() -> None:
    assert choose(CPU) == "native"
    assert choose(torch.device("meta")) == "chunked"


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_the_plain_form_serves() -> None:
    assert choose(CPU) == "chunked"


@pytest.mark.usefixtures("kernels")
def test_a_call_is_heard_before_use_and_use_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    again = with_setting("chunked", monkeypatch)
    assert again.choose(CPU) == "chunked"
    with again.use("reference"):
        assert again.choose(CPU) == "reference"
        assert again.choose(CPU, "native") == "native"
        assert again.choose(CPU, "chunked") == "chunked"
        with again.use(None):
            assert again.choose(CPU) == "native"
        assert again.choose(CPU) == "reference"
    assert again.choose(CPU) == "chunked"


@pytest.mark.usefixtures("kernels")
def test_an_empty_setting_asks_for_nothing_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_setting("", monkeypatch).choose(CPU) == "native"
    with pytest.raises(UsageError, match="unknown backend 'nativ': did you mean 'native'"):
        with_setting("nativ", monkeypatch).choose(CPU)


@pytest.mark.usefixtures("kernels")
def test_use_ends_with_its_block_whatever_happens_in_it() -> None:
    with pytest.raises(ArithmeticError), use("reference"):
        raise ArithmeticError
    assert choose(CPU) == "native"
    with pytest.raises(UsageError, match="unknown backend"), use("slow"):
        pass
    assert choose(CPU) == "native"


def test_use_reaches_the_operator(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given, seen = bench.case(5), []
    true = operator.run

    def watched(*args: Any) -> Any:
        seen.append(args[-1])
        return true(*args)

    monkeypatch.setattr(operator, "run", watched)
    forms = [name for name in ("native", "chunked") if name == "chunked" or csrc.fault() is None]
    for name in (*forms, "reference"):
        with use(name):
            delta_rule(**given)
    assert seen == forms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that is asked only what it can, and nobody who asks for anything."""
    monkeypatch.setattr(backends, "_INSTALLED", True)
    monkeypatch.setattr(backends, "_told", set())
    monkeypatch.setattr(backends, "_asked", None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_it_is_triton(gpu: torch.device, dtype: torch.dtype) -> None:
    assert choose(gpu, None, dtype) == "triton"
    assert choose(gpu, "chunked", dtype) == "chunked"
    with use("reference"):
        assert choose(gpu, None, dtype) == "reference"


def test_float64_on_a_gpu_goes_the_plain_way_with_one_notice(gpu: torch.device) -> None:
    with pytest.warns(RuntimeWarning, match=r"the tensors are float64: give .float\(\).*plain torch serves instead"):
        assert choose(gpu, None, torch.float64) == "chunked"
    assert choose(gpu, None, torch.float64) == "chunked"  # a second one would be an error here
    with pytest.raises(UsageError, match=r"the tensors are float64: give .*; or use backend 'chunked'"):
        choose(gpu, "triton", torch.float64)


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        (backends, "_INSTALLED", False, r"triton is not installed \(pip install triton\)"),
        (torch.cuda, "get_device_capability", lambda device: (7, 5), "need compute capability 8.0, and cuda:0 has 7.5"),
        (torch.version, "cuda", None, "are for NVIDIA's GPUs, and the tensors are on cuda"),
    ],
)
def test_a_gpu_that_cannot_is_told_why_once(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, value: Any, words: str
) -> None:
    monkeypatch.setattr(where, name, value)
    with pytest.warns(RuntimeWarning, match=words):
        assert choose(gpu) == "chunked"
    assert choose(gpu) == "chunked"
    with pytest.raises(UsageError, match=words):
        choose(gpu, "triton")


def test_triton_on_a_cpu_says_what_it_would_take(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "INTERPRETED", False)
    monkeypatch.setattr(backends, "_INSTALLED", True)
    with pytest.raises(UsageError, match=r"on a CPU, which .* only with TRITON_INTERPRET=1 .*use backend 'chunked'"):
        delta_rule(**bench.case(3, dtype=torch.float32), backend="triton")


def test_the_package_is_imported_without_its_kernels_in_triton() -> None:
    code = "import sys, qkflow, qkflow.laws.kernels; sys.exit('qkflow.ops.delta_rule.triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("no_kernels")
def test_the_native_form_is_refused_with_the_reason(bench: Any) -> None:
    with pytest.raises(UsageError, match=r"cannot run: there is no C compiler .*; use backend 'chunked'"):
        delta_rule(**bench.case(3), backend="native")


@pytest.mark.usefixtures("kernels")
def test_the_native_form_is_refused_on_another_device(bench: Any) -> None:
    with pytest.raises(UsageError, match=r"runs on a CPU, the tensors are on meta"):
        delta_rule(**{name: x.to("meta") for name, x in bench.case(3).items()}, backend="native")


def test_tensors_without_numbers_give_the_shapes(bench: Any) -> None:
    given = {name: x.to("meta") for name, x in bench.case(70).items()}
    o, final = delta_rule(**given)
    assert (o.shape, final.shape) == (given["v"].shape, given["state"].shape)


def test_fake_tensors_give_the_shapes(bench: Any, backend: str) -> None:
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(x) for name, x in bench.case(5).items()}
        o, final = delta_rule(**given, backend=backend)
    assert (o.shape, final.shape) == (given["v"].shape, given["state"].shape)


@pytest.mark.parametrize("t", [1, 64, 70])
def test_torch_counts_the_products(bench: Any, fast: str, t: int) -> None:
    given = {name: x.requires_grad_() for name, x in bench.case(t, rows=3, heads=2, key=8, value=4).items()}
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        plain = delta_rule(**given, backend=fast)
    assert forward.get_total_flops() == 3 * operator.flops(t, 2, 8, 4)
    with FlopCounterMode(display=False) as both:
        o, final = delta_rule(**given, backend=fast)
        (o.sum() + final.sum()).backward()
    assert 2.5 * forward.get_total_flops() <= both.get_total_flops() <= 4 * forward.get_total_flops()
    bench.agree({"o": o, "final": final}, dict(zip(("o", "final"), plain, strict=True)))


def test_memory_that_was_never_written_is_never_read(bench: Any, fast: str) -> None:
    """New tensors are filled with NaN here."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        for t, chunk in ((1, None), (5, None), (70, None), (70, 7)):
            bench.agree(bench.outcome(bench.case(t), backend=fast, chunk=chunk), bench.truth(t))
            with torch.no_grad():
                o, final = delta_rule(**bench.case(t), backend=fast, chunk=chunk)
            bench.agree({"o": o, "final": final}, {name: bench.truth(t)[name] for name in ("o", "final")})
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_is_not_finite_stays_by_itself(bench: Any, fast: str, dtype: torch.dtype) -> None:
    given = bench.case(70, rows=3, heads=2, dtype=dtype)
    want = bench.outcome(given, backend=fast)
    given["v"] = given["v"].clone()
    given["v"][1, 3, 0] = torch.nan
    got = bench.outcome(given, backend=fast)
    assert got["o"][1, 3:, 0].isnan().all()
    for name in want:
        for row, head in ((0, 0), (1, 1), (2, 0), (2, 1)):
            at = (row, head) if name in ("state", "final") else (row, slice(None), head)
            assert torch.equal(got[name][at], want[name][at]), name


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is one core")
def test_the_number_of_threads_changes_no_bit(bench: Any) -> None:
    if fault := csrc.fault():
        pytest.skip(fault)
    given, found, before = bench.case(70, rows=3, dtype=torch.float32), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 2, 16):
            torch.set_num_threads(threads)
            found.append(bench.outcome(given, backend="native"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in other)


def test_the_same_call_gives_the_same_bits(bench: Any, fast: str) -> None:
    given = bench.case(70, dtype=torch.float32)
    first, again = bench.outcome(given, backend=fast), bench.outcome(given, backend=fast)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("t", [1, 70])
def test_tiny_numbers_are_what_they_were_after_a_call(bench: Any, fast: str, t: int) -> None:
    """The kernel takes them for zeros while it runs, since decay makes so many; nobody else should."""
    tiny = torch.tensor(1e-40)
    assert float(tiny * 0.5) > 0
    bench.outcome(bench.case(t), backend=fast)
    with torch.no_grad():
        delta_rule(**bench.case(t), backend=fast)
    assert float(tiny * 0.5) > 0
