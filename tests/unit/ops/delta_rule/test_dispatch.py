"""The choice of the backend, the operator's shapes and FLOPs, and determinism."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from qkflow.errors import UsageError
from qkflow.ops.csrc import build
from qkflow.ops.delta_rule import choose_backend, delta_rule, delta_rule_flops, dispatch, use_backend

CPU = torch.device("cpu")


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """C kernels are available and no backend is requested."""
    monkeypatch.setattr(build, "load", lambda: None)
    monkeypatch.setattr(build, "is_loaded", lambda: True)
    monkeypatch.setattr(dispatch, "_requested", None)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no C compiler."""
    monkeypatch.setattr(build, "load", lambda: None)
    monkeypatch.setattr(build, "is_loaded", lambda: False)
    monkeypatch.setattr(build, "load_error", lambda: "there is no C compiler (cc, gcc or clang)")
    monkeypatch.setattr(dispatch, "_requested", None)


def set_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process started with QKFLOW_DELTA."""
    monkeypatch.setenv("QKFLOW_DELTA", value)
    monkeypatch.setattr(dispatch, "_requested", dispatch._environment_backend())


@pytest.mark.usefixtures("with_kernels")
def test_the_fastest_available_backend_is_chosen() -> None:
    assert choose_backend(CPU) == "cpu"
    assert choose_backend(torch.device("meta")) == "chunked"


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_the_chunked_backend_is_chosen() -> None:
    assert choose_backend(CPU) == "chunked"


@pytest.mark.usefixtures("with_kernels")
def test_the_argument_overrides_use_backend_which_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment("chunked", monkeypatch)
    assert choose_backend(CPU) == "chunked"
    with use_backend("naive"):
        assert choose_backend(CPU) == "naive"
        assert choose_backend(CPU, "cpu") == "cpu"
        assert choose_backend(CPU, "chunked") == "chunked"
        with use_backend(None):
            assert choose_backend(CPU) == "cpu"
        assert choose_backend(CPU) == "naive"
    assert choose_backend(CPU) == "chunked"


@pytest.mark.usefixtures("with_kernels")
def test_an_empty_environment_variable_is_ignored_and_an_unknown_backend_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_environment("", monkeypatch)
    assert choose_backend(CPU) == "cpu"
    set_environment("cp", monkeypatch)
    with pytest.raises(UsageError, match="unknown backend 'cp': did you mean 'cpu'"):
        choose_backend(CPU)


@pytest.mark.usefixtures("with_kernels")
def test_use_backend_is_restored_after_an_exception() -> None:
    with pytest.raises(ArithmeticError), use_backend("naive"):
        raise ArithmeticError
    assert choose_backend(CPU) == "cpu"
    with pytest.raises(UsageError, match="unknown backend"), use_backend("slow"):
        pass
    assert choose_backend(CPU) == "cpu"


def test_use_backend_selects_the_backend_that_runs(helpers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, backends = helpers.make_inputs(5), []
    run = dispatch._run

    def record(*args: Any) -> Any:
        backends.append(args[-1])
        return run(*args)

    monkeypatch.setattr(dispatch, "_run", record)
    expected = [name for name in ("cpu", "chunked") if name == "chunked" or build.load_error() is None]
    for name in (*expected, "naive"):
        with use_backend(name):
            delta_rule(**inputs)
    assert backends == expected


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that reports the capabilities of a recent NVIDIA GPU."""
    monkeypatch.setattr(dispatch, "_HAS_TRITON", True)
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch, "_requested", None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_is_chosen_on_a_gpu(gpu: torch.device, dtype: torch.dtype) -> None:
    assert choose_backend(gpu, None, dtype) == "triton"
    assert choose_backend(gpu, "chunked", dtype) == "chunked"
    with use_backend("naive"):
        assert choose_backend(gpu, None, dtype) == "naive"


def test_float64_on_a_gpu_falls_back_with_one_warning(gpu: torch.device) -> None:
    with pytest.warns(RuntimeWarning, match=r"no float64.*falling back to PyTorch"):
        assert choose_backend(gpu, None, torch.float64) == "chunked"
    assert choose_backend(gpu, None, torch.float64) == "chunked"  # a second warning would raise here
    with pytest.raises(UsageError, match=r"no float64.*use backend 'chunked'"):
        choose_backend(gpu, "triton", torch.float64)


def test_a_decay_per_channel_on_a_gpu_falls_back_with_one_warning(gpu: torch.device) -> None:
    with pytest.warns(RuntimeWarning, match=r"not one per key channel.*falling back to PyTorch"):
        assert choose_backend(gpu, has_vector_decay=True) == "chunked"
    assert choose_backend(gpu, "triton", has_vector_decay=True) == "chunked"  # a second warning would raise here
    assert choose_backend(gpu) == "triton"


@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        (dispatch, "_HAS_TRITON", False, r"triton is not installed \(pip install triton\)"),
        (
            torch.cuda,
            "get_device_capability",
            lambda device: (7, 5),
            "require compute capability 8.0, and cuda:0 has 7.5",
        ),
        (torch.version, "cuda", None, "require an NVIDIA GPU, and the tensors are on cuda"),
    ],
)
def test_an_unsupported_gpu_falls_back_with_one_warning(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, value: Any, words: str
) -> None:
    monkeypatch.setattr(where, name, value)
    with pytest.warns(RuntimeWarning, match=words):
        assert choose_backend(gpu) == "chunked"
    assert choose_backend(gpu) == "chunked"
    with pytest.raises(UsageError, match=words):
        choose_backend(gpu, "triton")


def test_triton_on_a_cpu_requires_the_interpreter(helpers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "_HAS_TRITON", True)
    with pytest.raises(UsageError, match=r"on a CPU, .*TRITON_INTERPRET=1.*use backend 'chunked'"):
        delta_rule(**helpers.make_inputs(3, dtype=torch.float32), backend="triton")


def test_importing_the_package_does_not_import_triton() -> None:
    code = "import sys, qkflow, qkflow.laws.kernels; sys.exit('qkflow.ops.delta_rule.triton_launch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("without_kernels")
def test_the_cpu_backend_without_a_compiler_raises_with_the_reason(helpers: Any) -> None:
    with pytest.raises(UsageError, match=r"cannot run: there is no C compiler .*; use backend 'chunked'"):
        delta_rule(**helpers.make_inputs(3), backend="cpu")


@pytest.mark.usefixtures("with_kernels")
def test_the_cpu_backend_on_another_device_raises(helpers: Any) -> None:
    with pytest.raises(UsageError, match=r"the tensors are on meta"):
        delta_rule(**{name: x.to("meta") for name, x in helpers.make_inputs(3).items()}, backend="cpu")


def test_meta_tensors_give_the_shapes(helpers: Any) -> None:
    inputs = {name: x.to("meta") for name, x in helpers.make_inputs(70).items()}
    o, final = delta_rule(**inputs)
    assert (o.shape, final.shape) == (inputs["v"].shape, inputs["state"].shape)


@pytest.mark.parametrize("vector", [False, True])
def test_fake_tensors_give_the_shapes(helpers: Any, backend: str, vector: bool) -> None:
    with FakeTensorMode() as mode:
        inputs = {name: mode.from_tensor(x) for name, x in helpers.make_inputs(5, vector=vector).items()}
        o, final = delta_rule(**inputs, backend=backend)
    assert (o.shape, final.shape) == (inputs["v"].shape, inputs["state"].shape)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("t", [1, 64, 70])
def test_flops_are_counted(helpers: Any, fast: str, t: int, vector: bool) -> None:
    inputs = helpers.make_inputs(t, rows=3, heads=2, key=8, value=4, vector=vector)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        plain = delta_rule(**inputs, backend=fast)
    assert forward.get_total_flops() == 3 * delta_rule_flops(t, 2, 8, 4)
    with FlopCounterMode(display=False) as both:
        o, final = delta_rule(**inputs, backend=fast)
        (o.sum() + final.sum()).backward()
    assert 2.5 * forward.get_total_flops() <= both.get_total_flops() <= 4 * forward.get_total_flops()
    helpers.assert_agree({"o": o, "final": final}, dict(zip(("o", "final"), plain, strict=True)))


def test_uninitialized_memory_is_never_read(helpers: Any, fast: str) -> None:
    """Uninitialized tensors are filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        for t, chunk, vector in product((1, 5, 70), (None, 7), (False, True)):
            inputs, expected = helpers.make_inputs(t, vector=vector), helpers.expected(t, vector=vector)
            helpers.assert_agree(helpers.results(inputs, backend=fast, chunk=chunk), expected)
            with torch.no_grad():
                o, final = delta_rule(**inputs, backend=fast, chunk=chunk)
            helpers.assert_agree({"o": o, "final": final}, {name: expected[name] for name in ("o", "final")})
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vector", [False, True])
def test_a_nan_stays_in_its_row_and_head(helpers: Any, fast: str, dtype: torch.dtype, vector: bool) -> None:
    inputs = helpers.make_inputs(70, rows=3, heads=2, vector=vector, dtype=dtype)
    clean = helpers.results(inputs, backend=fast)
    inputs["v"] = inputs["v"].clone()
    inputs["v"][1, 3, 0] = torch.nan
    actual = helpers.results(inputs, backend=fast)
    assert actual["o"][1, 3:, 0].isnan().all()
    for name in clean:
        for row, head in ((0, 0), (1, 1), (2, 0), (2, 1)):
            at = (row, head) if name in ("state", "final") else (row, slice(None), head)
            assert torch.equal(actual[name][at], clean[name][at]), name


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nan_reaches_no_chunk_before_its_own(helpers: Any, fast: str, name: str) -> None:
    inputs = helpers.make_inputs(70)
    clean, _ = delta_rule(**inputs, backend=fast)
    inputs[name] = inputs[name].clone()
    inputs[name][:, 66] = torch.nan
    actual, _ = delta_rule(**inputs, backend=fast)
    assert torch.equal(actual[:, :64], clean[:, :64])
    exact, _ = delta_rule(**inputs, backend="naive")
    assert exact[:, :66].isfinite().all()
    assert exact[:, 66].isnan().all()


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_the_number_of_threads_changes_no_result(helpers: Any) -> None:
    if error := build.load_error():
        pytest.skip(error)
    before = torch.get_num_threads()
    for vector in (False, True):
        inputs, outcomes = helpers.make_inputs(70, rows=3, vector=vector, dtype=torch.float32), []
        try:
            for threads in (1, 2, 3, 2, 16):
                torch.set_num_threads(threads)
                outcomes.append(helpers.results(inputs, backend="cpu"))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(outcomes[0][name], other[name]) for other in outcomes[1:] for name in other)


@pytest.mark.parametrize("vector", [False, True])
def test_results_are_deterministic(helpers: Any, fast: str, vector: bool) -> None:
    inputs = helpers.make_inputs(70, vector=vector, dtype=torch.float32)
    first, again = helpers.results(inputs, backend=fast), helpers.results(inputs, backend=fast)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("t", [1, 70])
def test_denormal_numbers_still_work_after_a_call(helpers: Any, fast: str, t: int) -> None:
    """The kernel flushes them to zero, but only while it runs."""
    tiny = torch.tensor(1e-40)
    assert float(tiny * 0.5) > 0
    helpers.results(helpers.make_inputs(t), backend=fast)
    with torch.no_grad():
        delta_rule(**helpers.make_inputs(t), backend=fast)
    assert float(tiny * 0.5) > 0
