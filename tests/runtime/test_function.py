"""A function that is stated once: what a statement may say, and what packages make of it, in either launcher."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from evo.errors import KernelError
from evo.export import find_exporter
from evo.problem.function import Function
from evo.problem.kernel import Argument
from evo.problem.loading import load_function, load_kernel
from evo.runtime.expression import CodeError, Parameter, in_cpp, in_python
from evo.runtime.statement import Bound
from tests.ended import run_python
from tests.export.exports import request_for
from tests.runtime.conftest import Importer

STATED: dict[str, Any] = {
    "signature": "f(Tensor x, Tensor? w=None, float scale=1.0, *, bool flag=False) -> Tensor",
    "original": "torch.mul",
    "tensors": {"x": "x"},
    "sizes": {"n": "x.numel()"},
}
WRONG: dict[str, dict[str, Any]] = {
    "is not like": {"signature": "f(x) = y"},
    "is not TYPE NAME": {"signature": "f(Tensor x, complex y) -> Tensor"},
    "is no Tensor": {"signature": "f(int n) -> Tensor"},
    "have already": {"signature": "f(Tensor x, int len) -> Tensor"},
    "`tensors` names 'y', which is no Tensor": {"tensors": {"x": "y"}},
    "`apart` names 'scale', which is no Tensor": {"apart": ("scale",)},
    "`sizes` has for 'n' 'y.numel()', and 'y' is no argument": {"sizes": {"n": "y.numel()"}},
    r"`fits` has for 'why' 'x.shape ===', which is no expression": {"fits": {"why": "x.shape ==="}},
    "autocast is 'half'": {"autocast": "half"},
    "`results` has for 'y' 'v', and 'v' is no argument": {"results": {"y": "v"}},
    "`passes` has for 'scale' 'scales', and 'scales' is no argument": {"passes": {"scale": "scales"}},
    "`sizes` has for 'n' 3, which is no expression (it is no text)": {"sizes": {"n": 3}},
    "'x' is twice in signature": {"signature": "f(Tensor x, Tensor x) -> Tensor"},
    "has the name 'x_shape', which the launchers have": {"signature": "f(Tensor x, int[] x_shape) -> Tensor"},
    "has the name 'build', which the launchers have": {"signature": "build(Tensor x) -> Tensor"},
    "is none of Python's: ": {"signature": "f(Tensor x, int a=1, int b) -> Tensor"},
    "is none of Python's: invalid": {"signature": "f(Tensor x, float lambda=1.0) -> Tensor"},
    "'int? dim=none' in signature": {"signature": "f(Tensor x, int? dim=none) -> Tensor"},
}


@pytest.mark.parametrize("said", WRONG)
def test_a_statement_that_contradicts_itself_is_refused_with_what_is_wrong(said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Function(**{**STATED, **WRONG[said]})


def test_lists_of_sizes_and_of_bools_are_read_in_both_launchers() -> None:
    function = Function(**{**STATED, "signature": "f(Tensor x, int[] shape, bool[2] wanted) -> Tensor"})
    assert [(p.kind, p.length) for p in function.parameters.values()][1:] == [("int[]", ""), ("bool[N]", "2")]
    assert in_cpp("x.shape[-len(shape):] == shape and wanted[1]", function.parameters) == (
        "((part_of((*a.x_).sizes(), -(static_cast<std::int64_t>(c10::IntArrayRef(a.shape_).size())), std::nullopt)"
        " == c10::IntArrayRef(a.shape_)) && a.wanted_[1])"
    )


def test_a_backward_is_given_what_its_parameters_are_called_by() -> None:
    def bound(name: str) -> Bound:
        kernel = load_kernel(name)
        function = load_function(kernel)
        assert function is not None
        return Bound(function, kernel)

    forward, backward = bound("layernorm"), bound("layernorm_backward")
    names = ["grad_out", "input", "normalized_shape", "mean", "rstd", "weight", "bias", "output_mask"]
    others = {"grad_out": "gradient_y", "output_mask": "wanted"}
    assert forward.passed_to(backward) == {name: others.get(name, name) for name in names}
    with pytest.raises(ValueError, match="parameter 'mean' is neither an argument nor a saved output of rms_norm"):
        bound("rmsnorm").passed_to(backward)
    with pytest.raises(ValueError, match="are not the gradients of the tensors that layer_norm takes"):
        forward.passed_to(forward)
    assert (forward.kept(None), forward.kept(backward)) == ((), ())
    formula = Bound(replace(forward.function, gradient="aten.f(gradient, result)"), forward.kernel)
    assert formula.kept(None) == formula.kept(backward) == ("y",), "the formula takes the result, and comes first"


def test_an_option_of_the_kernel_is_the_argument_of_its_name() -> None:
    kernel = load_kernel(str(Path(__file__).parents[1] / "picked"))
    function = load_function(kernel)
    assert function is not None
    bound = Bound(function, kernel)
    assert not function.options
    assert (bound.number("factor"), bound.looked_at[-1]) == ("factor", "factor")
    may_be_none = replace(function, signature=function.signature.replace("float factor=1.5", "float? factor=None"))
    assert "argument 'factor' may be None" in next(Bound(may_be_none, kernel).faults())


def test_a_signature_is_read_as_pytorch_writes_one() -> None:
    assert [*Function(**STATED).parameters.values()] == [
        Parameter("x", "Tensor", optional=False, default=None, keyword=False),
        Parameter("w", "Tensor", optional=True, default="None", keyword=False),
        Parameter("scale", "float", optional=False, default="1.0", keyword=False),
        Parameter("flag", "bool", optional=False, default="False", keyword=True),
    ]


EXPRESSIONS = {
    "x.shape[-1] * 2": ("x_shape[-1] * 2", "(item_of((*a.x_).sizes(), -(std::int64_t(1))) * std::int64_t(2))"),
    "w is None or x.ndim == 2": ("w is None or len(x_shape) == 2", "((!(a.w_)) || ((*a.x_).dim() == std::int64_t(2)))"),
    "x.dtype != torch.bool": ("x.dtype != torch.bool", "!((*a.x_).scalar_type() == at::kBool)"),
    "0.5 <= scale < 2.0": ("0.5 <= scale < 2.0", "((double(0.5) <= a.scale_) && (a.scale_ < double(2.0)))"),
    "x.stride(0) // 4": (
        "x_stride[0] // 4", "floor_divide<std::int64_t>(item_of((*a.x_).strides(), std::int64_t(0)), std::int64_t(4))"
    ),
    "1 if since(2, 6) else 0": ("1 if True else 0", "(true ? std::int64_t(1) : std::int64_t(0))"),
}  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_an_expression_is_code_of_either_launcher(text: str) -> None:
    python, cpp = EXPRESSIONS[text]
    assert in_python(text) == python
    assert in_cpp(text, Function(**STATED).parameters) == cpp


@pytest.mark.parametrize("text", ["x ** 2", "x.storage()", "[n for n in x.shape]", "'text'", "x.shape[0] / 2"])
def test_what_has_no_translation_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(CodeError, match="has no translation"):
        in_cpp(text, Function(**STATED).parameters)


KERNEL = """
from evo.problem.kernel import Argument, Dimension, Kernel, LaunchPlan
from evo.problem.space import Ordinal, Space


def reference(inputs, workload):
    y = inputs["x"] * workload.option("factor")
    y = y if inputs["shift"] is None else y + inputs["shift"]
    return {"y": y, "total": y.sum(1)}


KERNEL = Kernel(
    name="scaled",
    dtypes={"cpu": ("float32",)},
    dimensions=(Dimension(name="rows", low=0, high=2**31 - 1), Dimension(name="cols", low=1, high=65536)),
    options={"shift": True, "factor": 1.0},
    arguments=(
        Argument(name="x", kind="input", shape=("rows", "cols")),
        Argument(name="shift", kind="input", shape=("cols",), optional=True),
        Argument(name="y", kind="output", shape=("rows", "cols")),
        Argument(name="total", kind="output", shape=("rows",)),
        Argument(name="rows", kind="scalar", dtype="int64"),
        Argument(name="cols", kind="scalar", dtype="int64"),
        Argument(name="factor", kind="scalar", dtype="opmath"),
    ),
    reference=reference,
    workloads={"cpu": ("rows=64,cols=96,dtype=float32",)},
    space=Space(parameters=(Ordinal(name="unroll", values=(1, 2)),)),
    plan=lambda target, point, workload: LaunchPlan(threads=1),
)
"""
ONE_AXIS = """
import torch

from evo.problem.kernel import Argument, Kernel, LaunchPlan
from evo.problem.space import Space

KERNEL = Kernel(
    name="quick",
    dtypes={"cpu": ("float32",)},
    arguments=(Argument(name="x", kind="input", shape=("n",)), Argument(name="y", kind="output", shape=("n",))),
    reference=lambda inputs, workload: torch.nn.functional.silu(inputs["x"]),
    workloads={"cpu": ("n=64,dtype=float32",)},
    space=Space(parameters=()),
    plan=lambda target, point, workload: LaunchPlan(threads=1),
)
"""
# The names of its arguments are those that generated code would use, too.
FUNCTION = """
import torch

from evo.problem.function import Function
from evo.problem.kernel import Argument


def scaled(a, table=None, default=1.0, *, device=False):
    y = a * default if table is None else a * default + table
    return y, y.sum(-1)


FUNCTION = Function(
    signature="scaled(Tensor a, Tensor? table=None, float default=1.0, *, bool device=False) -> (Tensor, Tensor)",
    original=scaled,
    tensors={"x": "a", "shift": "table"},
    sizes={"rows": "a.numel() // a.shape[-1]", "cols": "a.shape[-1]"},
    options={"factor": "default"},
    results={"y": "a", "total": "a.shape[:-1]"},
    fits={
        'device is not "for" variants': "not device",
    },
    call={"default": "factor", "device": "False"},
)
"""
SOURCE = """
extern "C" void scaled(
    const float* x, const float* shift, float* y, float* total, long long rows, long long cols, float factor) {
    for (long long r = 0; r < rows; ++r) {
        double sum = 0;
        for (long long c = 0; c < cols; ++c) {
            y[r * cols + c] = x[r * cols + c] * factor + (shift ? shift[c] : 0.0f);
            sum += y[r * cols + c];
        }
        total[r] = (float)sum;
    }
}
// {{ p.unroll }}
"""


@pytest.fixture(scope="module", params=["Python", "native"])
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("kernels") / "scaled"
    folder.mkdir()
    for name, text in {"kernel.py": KERNEL, "function.py": FUNCTION, "cpu.cpp.j2": SOURCE}.items():
        (folder / name).write_text(text)
    out = tmp_path_factory.mktemp("export") / f"exported_scaled_{request.param.lower()}"
    made = request_for("cpu", "native", out, "rows=64,cols=96,dtype=float32", kernel=str(folder))
    find_exporter("module").export(replace(made, kernel=str(folder)))
    importer: Importer = request.getfixturevalue("natively" if request.param == "native" else "use")
    found = importer(out)
    found.also_serve(measure=False)
    return found


CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "two axes": lambda: ((torch.randn(5, 96),), {}),
    "three axes, all arguments": lambda: ((torch.randn(2, 3, 96), torch.randn(96), 2.5), {"device": False}),
    "not dense": lambda: ((torch.randn(96, 7).t(), torch.randn(192)[::2]), {}),
    "an int for a float": lambda: ((torch.randn(4, 96), None, 3), {}),
}
LEFT: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    'device is not "for" variants': lambda: ((torch.randn(5, 96),), {"device": True}),
    "device is not a bool": lambda: ((torch.randn(5, 96),), {"device": 0}),
    "table has not as many elements": lambda: ((torch.randn(5, 96), torch.randn(5, 96)), {}),
    "table has not as many elements as the kernel's shift": lambda: ((torch.randn(5, 96), torch.randn(192)[:1]), {}),
    "an expression of the function's statement has no value": lambda: ((torch.tensor(2.0),), {}),
    "default is not a number": lambda: ((torch.randn(5, 96), None, torch.tensor(2.0)), {}),
    "different dtypes": lambda: ((torch.randn(5, 96), torch.randn(96, dtype=torch.float64)), {}),
    "gradients are being recorded": lambda: ((torch.randn(5, 96, requires_grad=True),), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_function_of_a_users_own_is_served_with_both_results(module: ModuleType, name: str) -> None:
    args, options = CALLS[name]()
    assert module.explain(*args, **options).startswith("variant")
    for own, right in zip(module.scaled(*args, **options), module.frontend.ORIGINAL(*args, **options), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reason", LEFT)
def test_a_call_that_no_variant_takes_is_the_originals(module: ModuleType, reason: str) -> None:
    args, options = LEFT[reason]()
    assert reason in module.explain(*args, **options)
    for own, right in zip(module.scaled(*args, **options), module.frontend.ORIGINAL(*args, **options), strict=True):
        torch.testing.assert_close(own, right)


@pytest.mark.slow
def test_its_gradients_are_pytorchs_of_the_original_where_they_are_asked_for(module: ModuleType) -> None:
    x, shift = torch.randn(5, 96, requires_grad=True), torch.randn(96, requires_grad=True)
    module.also_serve(gradients=True)
    try:
        assert module.explain(x, shift, 2.0).startswith("variant")
        own = module.scaled(x, shift, 2.0)
        right = module.frontend.ORIGINAL(x, shift, 2.0)
        for result, theirs in zip(own, right, strict=True):
            torch.testing.assert_close(result, theirs, rtol=1e-5, atol=1e-4)
        upstream = [torch.randn_like(t) for t in right]
        found = torch.autograd.grad(own, (x, shift), upstream)
        torch.testing.assert_close(found, torch.autograd.grad(right, (x, shift), upstream))
    finally:
        module.also_serve(gradients=False)


def write_and_export(folder: Path, out: Path, kernel: str, function: str, cpu: str) -> None:
    """A package of a kernel for one axis, n, whose files have these texts."""
    folder.mkdir()
    for name, text in {"kernel.py": kernel, "function.py": function, "cpu.cpp": cpu}.items():
        (folder / name).write_text(text)
    find_exporter("module").export(request_for("cpu", "native", out, "n=64,dtype=float32", kernel=str(folder)))


def test_a_call_with_arguments_that_a_statement_lacks_is_the_originals(tmp_path: Path) -> None:
    write_and_export(
        tmp_path / "quick",
        tmp_path / "exported_quick",
        ONE_AXIS,
        "from evo.problem.function import Function\n\nFUNCTION = Function(\n"
        '    signature="quick_silu(Tensor input) -> Tensor", original="torch.nn.functional.silu",\n'
        '    tensors={"x": "input"}, sizes={"n": "input.numel()"},\n)\n',
        '#include <math.h>\nextern "C" void quick(const float* x, float* y, long long n) {\n'
        "    for (long long i = 0; i < n; ++i) y[i] = x[i] / (1.0f + expf(-x[i]));\n}\n",
    )
    program = (
        "import torch, exported_quick as q\nq.also_serve(slower=True, measure=False)\nx = torch.randn(64)\n"
        "assert q.explain(x).startswith('variant'), q.explain(x)\nwith q.patch():\n    y = torch.nn.SiLU()(x)\n"
        "assert torch.equal(y, torch.nn.functional.silu(x)) and torch.allclose(q.quick_silu(x), y, atol=1e-6)\n"
        "z = x.clone()\nassert q.quick_silu(z, True) is z and torch.equal(z, y)\n"
    )
    done = run_python(tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr


POINTS = """
import torch

from evo.problem.kernel import Argument, Kernel, LaunchPlan
from evo.problem.space import Space

KERNEL = Kernel(
    name="along",
    dtypes={"cpu": ("float32",)},
    arguments=(
        Argument(name="x", kind="input", shape=("n", 3)),
        Argument(name="w", kind="input", shape=(3,)),
        Argument(name="y", kind="output", shape=("n", 1)),
    ),
    reference=lambda inputs, workload: {"y": inputs["x"] @ inputs["w"][:, None]},
    workloads={"cpu": ("n=64,dtype=float32",)},
    space=Space(parameters=()),
    plan=lambda target, point, workload: LaunchPlan(threads=1),
)
"""
ALONG = """
from evo.problem.function import Function


def along(x, w):
    return x @ w[:, None]


FUNCTION = Function(signature="along(Tensor x, Tensor w) -> Tensor", original=along, tensors={"x": "x", "w": "w"})
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["Python", "native"])
def test_sizes_follow_from_shapes_and_numbers_in_them(tmp_path: Path, launcher: str) -> None:
    out = tmp_path / f"exported_along_{launcher.lower()}"
    write_and_export(
        tmp_path / "along",
        out,
        POINTS,
        ALONG,
        'extern "C" void along(const float* x, const float* w, float* y, long long n) {\n'
        "    for (long long i = 0; i < n; ++i) y[i] = x[3 * i] * w[0] + x[3 * i + 1] * w[1] + x[3 * i + 2] * w[2];\n}\n",
    )
    for words in (["check"], ["build"], ["check"])[: 3 if launcher == "native" else 1]:
        done = run_python(tmp_path, "-m", out.name, *words)
        assert done.returncode == 0, done
    program = (
        f"import torch, {out.name} as q\nq.also_serve(measure=False)\nw = torch.randn(3)\n"
        "for shape, told in (((64, 3), 'variant'), ((2, 32, 3), 'x has not 2 axes')):\n"
        "    x = torch.randn(shape)\n    assert told in q.explain(x, w), q.explain(x, w)\n"
        "    torch.testing.assert_close(q.along(x, w), x @ w[:, None])\n"
        "assert 'axis 1 of x is not 3' in q.explain(torch.randn(6, 32), w), q.explain(torch.randn(6, 32), w)\n"
    )
    done = run_python(tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_it_is_timed_and_raced_beside_an_original_that_has_keyword_only_arguments(module: ModuleType) -> None:
    timing = __import__("importlib").import_module(f"{module.__name__}.runtime.timing")
    assert timing.compare(module.frontend, 0, 3)["call"][0] > 0
    module.also_serve(measure=True)
    try:
        assert "no race" not in module.explain(torch.randn(300, 96))
    finally:
        module.also_serve(measure=False)


@pytest.mark.slow
def test_its_check_is_the_kernels_own_cases_and_all_are_right(module: ModuleType) -> None:
    trial = __import__("importlib").import_module(f"{module.__name__}.runtime.trial")
    verdicts = list(trial.verdicts(module.frontend, 0, 3, 4))
    assert [v for v in verdicts if v.reason] == []
    assert sum(v.on_variant for v in verdicts) >= 15


SHIPPED = ("attention", "layernorm", "layernorm_backward", "rmsnorm", "rmsnorm_backward", "softmax")
COUNTS = {
    "by a shape": ({"why": "a.shape == b.shape"}, "a.numel()", []),
    "by a number of elements": ({"why": "b is None or b.numel() == a.numel()"}, "a.numel()", []),
    "not at all": ({}, "a.numel()", ["b.shape == a.shape"]),
    "of another": ({"why": "a.ndim == 1 or a.shape == b.shape"}, "a.numel()", ["b.shape == a.shape"]),
    "in part": ({"why": "b.shape[:1] == a.shape[:1]"}, "a.numel()", ["b.shape == a.shape"]),
    "of neither": (
        {"why": "a.shape == b.shape"}, "n", ["a.numel() == n", "b.shape == a.shape", "a.numel() == n"],
    ),
    "each axis": ({"why": "a.ndim == 1 and a.shape == b.shape"}, "a.shape[0]", []),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_a_tensor_is_asked_for_its_elements_unless_the_statement_says_how_many_they_are(name: str) -> None:
    fits, size, asked = COUNTS[name]
    arguments = [Argument(name=n, kind="input", shape=("n",)) for n in ("a", "b")]
    arguments.append(Argument(name="c", kind="output", shape=("n",)))
    kernel = SimpleNamespace(arguments=arguments, choices={}, options={}, dimensions=[], compile_time_dims={})
    function = Function(
        signature="f(Tensor a, Tensor b, int n=3) -> Tensor",
        original="torch.add",
        tensors={"a": "a", "b": "b"},
        sizes={"n": size},
        fits=fits,
    )
    found = Bound(function, kernel).fits(of_tensors=True)
    assert [text for text in found.values() if text not in fits.values()] == asked


DENSE = {
    "a.is_contiguous()": False,
    "a is None or a.ndim == 1 and a.is_contiguous()": False,
    "a.is_contiguous() or a.ndim == 1": True,
    "not a.is_contiguous()": True,
    "ba.is_contiguous()": True,
}


@pytest.mark.parametrize("text", DENSE)
def test_a_tensor_is_copied_unless_a_condition_refuses_one_that_is_not_dense(text: str) -> None:
    kernel = SimpleNamespace(arguments=[Argument(name="x", kind="input", shape=("n",))])
    stated = {**STATED, "signature": "f(Tensor a, Tensor ba) -> Tensor", "tensors": {"x": "a"}, "sizes": {"n": "a.numel()"}}
    assert Bound(Function(**stated, fits={"why": text}), kernel).is_made_dense("x") is DENSE[text]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_functions_say_all_that_their_calls_are_asked(name: str) -> None:
    kernel = load_kernel(name)
    function = load_function(kernel)
    assert function is not None
    bound = Bound(function, kernel)
    derived = {**bound.fits(of_tensors=False), **bound.fits(of_tensors=True)}
    of_dtypes = {"weight_dtype is none of same, float32", "bias is not of the dtype that the kernel takes"}
    assert {reason: text for reason, text in derived.items() if reason not in of_dtypes} == function.fits


def test_an_argument_that_the_kernel_needs_is_left_to_the_original_where_it_is_none() -> None:
    kernel = load_kernel("softmax")
    function = load_function(kernel)
    assert function is not None
    may_be_none = replace(function, signature=function.signature.replace("Tensor input", "Tensor? input"))
    assert next(iter(Bound(may_be_none, kernel).fits(of_tensors=True).values())) == "input is not None"


FAULTS = {
    "`tensors` names 'z', which is no input of the kernel": ('tensors={"x": "a"', 'tensors={"z": "a"'),
    "`sizes` says nothing of the kernel's 'cols'": ('"cols": "a.shape[-1]"}', '}, expanded={"a": "a.shape"}'),
    "the signature has 1 results, and `results` 2": ("(Tensor, Tensor)", "Tensor"),
    "ValueError: `results` is ['a']: write a dict": ('{"y": "a", "total": "a.shape[:-1]"}', '["a"]'),
    "[a.shape[0]] is a list: write it as a tuple, (a.shape[0],)": ('"a.shape[:-1]"', '"[a.shape[0]]"'),
    "has no translation to C++": ("not device", "not device and a.storage() != 0"),
    "argument 'device' has no effect: name it in": ("not device", "True"),
    "default has no translation to C++: it is float, not int or bool": ('"cols": "a.shape[-1]"', '"cols": "default"'),
    "fails on import: ValueError: `fits` has for": ("not device", "not divice"),
    "must define FUNCTION": ("FUNCTION =", "FUNCTIONS ="),
}


TYPOS: dict[str, dict[str, Any]] = {
    "`original` is 'torch.softmaxx', which does not take the arguments of the signature (there is no torch.softmaxx)": {
        "original": "torch.softmaxx"
    },
    "`original` is 'softmax', which does not take": {"original": "softmax"},
    "which does not take the arguments of the signature (too many positional arguments)": {
        "original": "torch.nn.functional.relu"
    },
    "`operator` is 'softmax(input, dim)', which is no call of an operator of PyTorch's: write aten.NAME": {
        "operator": "softmax(input, dim)"
    },
    "`operator` is 'aten.softmaxx(input, dim)', which is no call of an operator of PyTorch's: there is no": {
        "operator": "aten.softmaxx(input, dim)"
    },
    "dims is no argument of the function": {"operator": "aten.softmax(input, dims)"},
    "no overload of aten.softmax takes such arguments": {"operator": "aten.softmax(dim, input)"},
    "no overload of aten.softmax takes such arguments, in this order": {"operator": "aten.softmax(dim=dim, self=input)"},
    "`gradient` is 'aten._softmax_backward_dat(gradient, result, dim, input.dtype)', which is no call": {
        "gradient": "aten._softmax_backward_dat(gradient, result, dim, input.dtype)"
    },
    "`modules` has for 'Softmax' 'torch.nn.Softmaxx', which is no class of modules": {
        "modules": {"Softmax": ("torch.nn.Softmaxx", "softmax(input, self.dim)")}
    },
    "and 'softmaxx' is no parameter of the forward of torch.nn.Softmax": {
        "modules": {"Softmax": ("torch.nn.Softmax", "softmaxx(input, self.dim)")}
    },
    "and 'dims' is no argument of the function": {
        "modules": {"Softmax": ("torch.nn.Softmax", "softmax(input, dims=self.dim)")}
    },
    "`passes` names '_stacklevl', which is no argument of the function": {"passes": {"_stacklevl": "1", "_stacklevel": "1"}},
    "`served` names 'rowz', which is no dimension of the kernel": {"served": {"rowz": "1"}},
    "`served` has for 'rows' 'colz', and 'colz' is no dimension or option of the kernel": {"served": {"rows": "colz"}},
    "`timed` names 'mask', which is no option of the kernel": {"timed": {"mask": 1}},
    "`data_decide` names 'mask', which is no option of the kernel": {"data_decide": ("mask",)},
    "`call` names 'dims', which is no argument beside the inputs of the kernel": {"call": {"dims": "-1"}},
    "`call` has for 'dim' 'colz - 1', and 'colz' is no dimension or option of the kernel": {"call": {"dim": "colz - 1"}},
    "`call` has for 'dim' -1, which is no expression (it is no text)": {"call": {"dim": -1}},
    "`options` names 'eps', which is no option of the kernel": {"options": {"eps": "1.0"}},
    "`returned` gives the outputs in `saved`, which names none": {"returned": lambda given, *_: given},
    "`expanded` names 'dim', which is no argument that is an input of the kernel": {"expanded": {"dim": "input.shape"}},
}


@pytest.mark.parametrize("said", TYPOS)
def test_a_misspelt_name_is_found_when_a_statement_is_loaded(said: str) -> None:
    kernel = load_kernel("softmax")
    function = load_function(kernel)
    assert function is not None
    assert said in next(Bound(replace(function, **TYPOS[said]), kernel).faults())


@pytest.mark.parametrize("said", FAULTS)
def test_a_statement_that_does_not_fit_its_kernel_is_refused_when_it_is_exported(said: str, tmp_path: Path) -> None:
    folder = tmp_path / "scaled"
    folder.mkdir()
    old, new = FAULTS[said]
    for name, text in {"kernel.py": KERNEL, "function.py": FUNCTION.replace(old, new), "cpu.cpp.j2": SOURCE}.items():
        (folder / name).write_text(text)
    made = request_for("cpu", "native", tmp_path / "out", "rows=64,cols=96,dtype=float32", kernel=str(folder))
    with pytest.raises(KernelError) as raised:
        find_exporter("module").export(made)
    assert said in str(raised.value)
    assert "function.py" in str(raised.value)
    assert not (tmp_path / "out").exists()
