"""The native launcher of a function that a kernel states (statement.py): what of it is the function's own, as C++ code.

function.h has the rest, which is the same for all. What this writes is in the order of that file's list.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from .expression import NO_VALUE, TYPES, Parameter, in_cpp, operator_call, schema_of
from .package import Package
from .statement import Bound

_OPERANDS = {"Tensor": "const Tensor&", "int[]": "c10::SymIntArrayRef"}
_SCALARS = {"int64": "std::int64_t", "int32": "std::int32_t", "float32": "float", "float64": "double"}

_FIELD_TYPES = {
    "P": "std::uintptr_t", "q": "std::int64_t", "Q": "std::uint64_t", "i": "std::int32_t", "I": "std::uint32_t",
    "f": "float", "d": "double",
}  # fmt: skip


def _fields_of(layout: str) -> Iterator[tuple[str, int]]:
    """The code of each field of a structure, and where it lies."""
    before = ""
    for count, code in re.findall(r"(\d*)([a-zA-Z])", layout):
        for _ in range(int(count or 1)):
            before += code
            if code != "x":
                yield code, struct.calcsize(before) - struct.calcsize(code)


def native_code(bound: Bound, package: Package, backward: tuple[Bound, Package] | None = None) -> str:
    """The source of the launcher. backward: of the package within this one, which computes gradients. Raises CodeError for
    an expression that has no translation."""
    return "\n".join(_Writer(bound, package, None if backward is None else _Writer(*backward)).parts())


class _Writer:
    def __init__(self, bound: Bound, package: Package, backward: _Writer | None = None) -> None:
        function = bound.function
        self._bound, self._package, self._function, self._kernel = bound, package, function, bound.kernel
        self._backward, self._order = backward, [d["name"] for d in package.dimensions]
        self._read = {name: function.parameters[name] for name in bound.looked_at}
        self._operands = {name: self._read[name] for name in function.operands if name in self._read}
        self._tensors, self._first, self._results = function.given_tensors, bound.first, bound.results
        schema = schema_of(function.operator, function.parameters) if function.operator else (False, None)
        self._schema: Mapping[str, bool] | None = schema[1]
        self._suffix = "_symint" if schema[0] else ""

    # -- parts --------------------------------------------------------------------------------------------------------

    def parts(self) -> Iterator[str]:
        function = self._function
        yield f"// {function.name} as Python and PyTorch's dispatcher call it, by its statement. See runtime/function.h."
        yield "#define AT_PER_OPERATOR_HEADERS  // PyTorch's headers include what they need, not every operator"
        yield "#include <ATen/Context.h>\n#include <ATen/ExpandUtils.h>"
        yield from (f"#include <ATen/ops/{name}.h>" for name in self._headers())
        yield '#include "runtime/call.h"\n\nnamespace {\n'
        yield from self._struct()
        yield from self._arguments()
        if self._backward is not None:
            yield "namespace backward {\n"
            yield from self._backward._struct()
            yield from self._backward._problem()
            yield from self._backward._misfit()
            yield from self._backward._launching()
            yield "}  // namespace backward\n"
        yield "}  // namespace\n"
        yield '#include "runtime/function.h"\n\nnamespace {\n'
        yield from self._reading()
        yield from self._problem()
        yield from self._misfit()
        yield from self._launching()
        yield from self._originals()
        yield from self._pairing()
        yield from self._operator()
        yield "}  // namespace"

    def _headers(self) -> Iterator[str]:
        for text in (self._function.operator, self._function.gradient):
            if text:
                yield operator_call(text)[0]
        yield from ("empty", "empty_like")

    def _field(self, parameter: Parameter) -> str:
        kind = TYPES[parameter.kind].in_cpp.format(parameter.name, parameter.length)
        return f"std::optional<{kind}>" if parameter.optional and parameter.type != "Tensor" else kind

    def _struct(self) -> Iterator[str]:
        yield "// Of a call. Tensors that are not there are null."
        yield "struct Arguments {"
        yield from (f"    {self._field(p)} {n}_{{}};" for n, p in self._read.items())
        count, tensors = len(self._tensors), ", ".join(f"{name}_" for name in self._tensors)
        yield f"\n    std::array<const Tensor*, {count}> tensors() const {{ return {{{tensors}}}; }}"
        yield f"    void set_tensors(const std::array<const Tensor*, {count}>& given) {{"
        yield from (f"        {name}_ = given[{i}];" for i, name in enumerate(self._tensors))
        yield "    }"
        others = [n for n, p in self._operands.items() if p.type != "Tensor"]
        yield "    template <class Self, class Visit> static void visit(Self& a, Visit visit) {"
        yield from (f"        visit(a.{name}_);" for name in others)
        yield "    }"
        symbolic = " || ".join(f"::is_symbolic({n}_)" for n, p in self._read.items() if p.type == "int[]")
        yield f"    bool is_symbolic() const {{ return {symbolic or 'false'}; }}\n}};"

    def _arguments(self) -> Iterator[str]:
        saved = [str(self._order.index(name)) for name in self._function.saved]
        yield f"const Py_ssize_t ARGUMENTS = {len(self._read)};"
        yield f"constexpr size_t RESULTS = {len(self._results)}, SAVED = {len(saved)};"
        yield f"constexpr std::array<size_t, SAVED> SAVED_SIZES = {{{', '.join(saved)}}};"
        kept = self._bound.kept(None if self._backward is None else self._backward._bound)
        places = ", ".join(str([*self._results].index(name)) for name in kept)
        yield f"constexpr std::array<size_t, {len(kept)}> KEPT = {{{places}}};"
        yield f"const bool HAS_FORMULA = {str(bool(self._function.gradient)).lower()};"
        yield f"const bool HAS_OPERATOR = {str(bool(self._function.operator)).lower()};"
        yield f"const bool MAY_BE_REFUSED = {str(self._bound.may_be_refused).lower()};"
        casts = {"original": "ORIGINALS", "lower": "LOWER", "float32": "FLOAT32"}[self._function.autocast]
        yield f"enum Autocast {{ ORIGINALS, LOWER, FLOAT32 }};\nconst Autocast AUTOCAST_CASTS = {casts};"
        yield f'const char* const NAME = "{self._function.name}";'
        several = ", ".join(["Tensor"] * len(self._results))
        operands = ", ".join(map(self._declared, self._operands.values()))
        result = "Tensor" if len(self._results) == 1 else f"({several})"
        yield f'const char* const SCHEMA = "{self._function.name}({operands}) -> {result}";'
        result = "Tensor" if len(self._results) == 1 else f"std::tuple<{several}>"
        yield f"using Signature = {result}({', '.join(map(self._operand_type, self._operands.values()))});"

    def _declared(self, p: Parameter) -> str:
        """A parameter of the operator, in PyTorch's notation."""
        kind = "SymInt[]" if p.type == "int[]" else p.type
        if not p.optional or self._is_optional(p):
            return f"{kind}{'?' * p.optional} {p.name}" + (f"={p.default}" if p.default is not None else "")
        return f"{kind} {p.name}"

    def _is_optional(self, p: Parameter) -> bool:
        return p.optional and (self._schema is None or self._schema[p.name])

    def _operand_type(self, p: Parameter) -> str:
        if p.type == "Tensor":
            return "const std::optional<Tensor>&" if self._is_optional(p) else "const Tensor&"
        kind = _OPERANDS.get(p.type) or self._field(p._replace(optional=False))
        return f"std::optional<{kind}>" if self._is_optional(p) else kind

    def _reading(self) -> Iterator[str]:
        yield "// The call in Python's arguments, or why they cannot be read as one. Does not look into the tensors."
        yield "const char* read(PyObject* const* args, Arguments& a) {"
        yield "    if (overridden()) return OVERRIDDEN;"
        for i, (name, p) in enumerate(self._read.items()):
            given = f"args[{i}] != Py_None && " if p.optional else ""
            if p.type == "Tensor":
                yield f"    if ({given}!(a.{name}_ = plain_tensor(args[{i}]))) return NO_PLAIN_TENSOR;"
            else:
                yield f"    if ({given}!read_as(args[{i}], a.{name}_)) return \"{TYPES[p.kind].reason.format(name)}\";"
        yield "    return nullptr;\n}\n"

    def _misfit(self) -> Iterator[str]:
        yield "// Why no variant can serve, whichever there are; null if one may. Gradients may be recorded."
        yield "const char* misfit(const Arguments& a) try {"
        if any(p.type == "int[]" for p in self._read.values()):
            yield "    if (a.is_symbolic()) return \"a graph is being made for any size\";"
        for reason, text in self._bound.fits(of_tensors=False).items():
            yield f"    if ({in_cpp(f'not ({text})', self._read)}) return {_quoted(reason)};"
        if together := ", ".join(f"a.{name}_" for name in self._bound.together):
            yield f"    if (const char* reason = unfit({{{together}}})) return reason;"
        for name in self._bound.apart:
            yield f"    if (a.{name}_ && a.{name}_->device() != a.{self._first}_->device())"
            yield f"        return \"{name} is on another device\";"
            yield f"    if (a.{name}_)"
            yield f"        if (const char* reason = unfit({{a.{name}_}})) return reason;"
        for reason, text in self._bound.fits(of_tensors=True).items():
            yield f"    if ({in_cpp(f'not ({text})', self._read)}) return {_quoted(reason)};"
        yield "    problem_of(a);\n    return nullptr;"
        yield f"}} catch (const NoValue&) {{\n    return {_quoted(NO_VALUE)};\n}}\n"

    def _problem(self) -> Iterator[str]:
        yield "Problem problem_of(const Arguments& a) {"
        yield f"    const at::Device device = a.{self._first}_->device();"
        texts = (in_cpp(self._bound.size(d["name"]), self._read) for d in self._package.dimensions)
        sizes = ", ".join(f"static_cast<std::int64_t>({text})" for text in texts)
        dtype = in_cpp(self._bound.problem_dtype, self._read)
        yield f"    return {{device.is_cpu() ? -1 : device.index(), {dtype}, {{{sizes}}}}};\n}}\n"

    def _launching(self) -> Iterator[str]:
        bound, arguments = self._bound, self._kernel.arguments
        outputs = [*self._results, *self._function.saved]
        asked = "what the backward takes where it is asked for"
        yield f"// The results, and {asked}; undefined where the launch failed. Records no gradient."
        head = "Table& table, const Arguments& a, const Problem& problem, const Answer& answer"
        yield f"std::array<Tensor, {len(outputs)}> run({head}) {{"
        yield "    const at::AutoDispatchBelowADInplaceOrView below;"
        for of, name in bound.inputs.items():
            if bound.is_made_dense(of):  # PyTorch's own kernels copy it, too
                dense = f"a.{name}_->contiguous()"
                dense = f"a.{name}_ ? {dense} : Tensor()" if self._read[name].optional else dense
                yield f"    const Tensor in_{of} = {dense};"
            if name in self._function.expanded:
                whole = in_cpp(self._function.expanded[name], self._read)
                yield f"    const auto stride_{of} = expanded_strides(a.{name}_, {whole});"
        for output in outputs:
            made = self._made(next(a for a in arguments if a.name == output), bound.results.get(output, ""))
            if output in self._function.saved:
                made = f"answer.gives_more || problem.sizes()[{self._order.index(output)}] ? {made} : Tensor()"
            elif bound.is_optional(output):
                made = f"{in_cpp(bound.size(output), self._read)} ? {made} : Tensor()"
            yield f"    Tensor out_{output} = {made};"
            if initial := next(a.initial for a in arguments if a.name == output):
                filled = "zero_()" if initial == "zeros" else f"copy_(*a.{bound.inputs[initial]}_)"
                yield f"    if (out_{output}.defined()) out_{output}.{filled};"
        if any(a.kind == "workspace" for a in arguments):
            yield f"    const Workspace memory(answer, problem, a.{self._first}_->options());"
        number, values, numbers = 0, list[str](), list[str]()
        structures = [line for a in arguments if a.kind == "structure" for line in self._structure(a)]
        for a in self._kernel.parameters:
            values.append(f"p_{a.name}")
            if a.kind == "structure":
                continue
            if a.kind == "input":
                text = "nullptr"
                if (given := bound.inputs.get(a.name)) is not None:
                    there = f"a.{given}_ ? a.{given}_->const_data_ptr() : nullptr"
                    text = f"address_of(in_{a.name})" if bound.is_made_dense(a.name) else there
                yield f"    const void* p_{a.name} = {text};"
            elif a.kind == "output":
                text = f"memory_of(out_{a.name})" if a.name in outputs else "nullptr"
                yield f"    void* p_{a.name} = {text};"
            elif a.kind == "workspace":
                yield f"    void* p_{a.name} = memory[{number}];"
                number += 1
            else:
                dtype = _SCALARS.get(a.dtype, "Opmath")
                numbers.append(f"        const {dtype} p_{a.name} = static_cast<{dtype}>({self._scalar(a)});")
        yield "    const auto launched = [&](auto opmath) {"
        yield "        using Opmath [[maybe_unused]] = decltype(opmath);"
        yield from (*numbers, *structures)
        yield f"        return table.run(answer, problem, {', '.join(values)});\n    }};"
        yield f"    const bool wide = {in_cpp(self._bound.problem_dtype, self._read)} == at::kDouble;"
        yield f"    if (!({'wide ? launched(double()) : ' if self._has_opmath() else ''}launched(float()))) return {{}};"
        yield f"    return {{{', '.join(f'out_{output}' for output in outputs)}}};\n}}\n"

    def _has_opmath(self) -> bool:
        return any(a.kind == "scalar" and a.dtype == "opmath" for a in self._kernel.arguments)

    def _structure(self, a: Any) -> Iterator[str]:
        """Lines that fill it, behind the other arguments."""
        order = self._order
        others = {b.name: b.kind for b in self._kernel.arguments}
        yield f"        Structure<{a.size_bytes}, {a.alignment}> p_{a.name};"
        for name, (code, place) in zip(a.fields, _fields_of(a.layout), strict=True):
            value = f"p_{name}"
            if name not in others:
                of_call = "" if name in order else in_cpp(self._bound.number(name), self._read)
                value = of_call or f"problem.words[{2 + order.index(name)}]"
            elif others[name] != "scalar":
                value = f"reinterpret_cast<std::uintptr_t>(p_{name})"
            yield f"        p_{a.name}.put({place}, static_cast<{_FIELD_TYPES[code]}>({value}));"

    def _scalar(self, a: Any) -> str:
        order = self._order
        if a.stride_of is not None:
            tensor, axis = a.stride_of
            if tensor in self._results:
                return f"out_{tensor}.strides()[{axis}]"
            name = self._bound.inputs[tensor]
            if name in self._function.expanded:
                return f"stride_{tensor}[{axis}]"
            return f"a.{name}_ ? a.{name}_->strides()[{axis}] : 0"
        if a.name in order:
            return f"problem.words[{2 + order.index(a.name)}]"
        return in_cpp(self._bound.number(a.name), self._read)

    def _made(self, argument: Any, form: str) -> str:
        options = f"a.{self._first}_->options().dtype({in_cpp(self._bound.dtype(argument), self._read)})"
        if not form:
            sizes = ", ".join(
                str(n) if type(n) is int else f"problem.words[{2 + self._order.index(n)}]" for n in argument.shape
            )
            return f"at::empty({{{sizes}}}, {options})"
        if form in self._function.given_tensors:
            strided = argument.name in self._bound.strided
            return f"at::empty_like(*a.{form}_)" if strided else f"at::empty(a.{form}_->sizes(), {options})"
        return f"at::empty({in_cpp(form, self._read)}, {options})"

    def _originals(self) -> Iterator[str]:
        yield "// PyTorch's own, of arguments that its operator takes."
        if self._schema is None:
            yield "bool is_complete(const Arguments&) { return false; }"
            given = ", ".join(f"a.{name}_" for name in self._read)
            yield f"Results originals(const Arguments& a) {{ return by_python({given}); }}\n"
        else:
            taken = [f"a.{n}_" for n, p in self._operands.items() if p.optional and not self._schema[n]]
            taken += [f"!a.{n}_" if p.optional else "false" for n, p in self._read.items() if n not in self._operands]
            yield f"bool is_complete(const Arguments& a) {{ return {' && '.join(taken) or 'true'}; }}"
            yield "Results originals(const Arguments& a) {"
            yield f"    return many({self._at(self._function.operator, self._suffix)});\n}}\n"
        yield "// A result in the memory layout that the module's _fake promises."
        yield "Tensor as_promised(const Arguments& a, size_t number, const Tensor& result) {"
        for i, (output, form) in enumerate(self._results.items()):
            if output in self._bound.strided and form in self._function.given_tensors:
                yield f"    if (number == {i}) return like(result, at::empty_like(*a.{form}_));"
        yield "    return result.contiguous();\n}\n"
        yield "// The gradient of the first tensor, which PyTorch's operator gives."
        yield "Tensor formula(const Arguments& a, const Tensor& gradient, const Tensor& result) {"
        yield f"    return {self._at(self._function.gradient) if self._function.gradient else 'Tensor()'};\n}}\n"

    def _pairing(self) -> Iterator[str]:
        """The calls of the backward's function, whose gradients have the form of the results."""
        takes = "Operator&, const Arguments&, const torch::autograd::variable_list&, const Tensor*, const Wanted&"
        if self._backward is None:
            yield "bool is_served_backward(Operator&, const Arguments&, const Wanted&) { return false; }"
            yield f"Gradients run_backward({takes}) {{ return {{}}; }}\n"
            return
        heads = [
            "bool is_served_backward(Operator& op, const Arguments& a, const Wanted& wanted)",
            "Gradients run_backward(\n    Operator& op, const Arguments& a, const torch::autograd::variable_list& gradients,"
            " const Tensor* kept, const Wanted& wanted)",
        ]
        bound, backward, saved = self._bound, self._backward._bound, self._function.saved
        passed, results = bound.passed_to(backward), bound.kept(backward)
        forms = {n: f"a.{form if form in self._tensors else self._first}_" for n, form in self._results.items()}
        at_first = {f"gradient_{n}": form for n, form in forms.items()} | {n: forms[n] for n in results}
        at_first |= {"wanted": "wanted"} | dict.fromkeys(saved, "nullptr")
        later = {f"gradient_{n}": f"present(gradients[{i}])" for i, n in enumerate(self._results)}
        later |= {n: f"&kept[{i}]" for i, n in enumerate(results + saved)} | {"wanted": "wanted"}
        fields = self._backward._read
        for head, of in zip(heads, (at_first, later), strict=True):
            yield f"{head} {{\n    backward::Arguments b;"
            given = {name: of.get(value, f"a.{value}_") for name, value in passed.items() if name in fields}
            yield from (f"    b.{name}_ = {value};" for name, value in given.items())
            if of is at_first:
                yield "    return op.backward->find(backward::problem_of(b)).serves();\n}\n"
        for n, value in given.items():
            if value.startswith("present") and not fields[n].optional:
                yield f"    if (!b.{n}_) return {{}};"
        yield "    if (backward::misfit(b)) return {};"
        yield "    const Problem problem = backward::problem_of(b);"
        yield "    const Answer answer = op.backward->find(problem);"
        yield "    if (!answer.serves()) return {};"
        yield "    const auto found = backward::run(*op.backward, b, problem, answer);"
        each = [*backward.results]
        yield f"    return {{{', '.join(f'found[{each.index(name)}]' for name in backward.gradients)}}};\n}}\n"

    def _at(self, text: str, suffix: str = "") -> str:
        """A call of an operator, such as aten.softmax(input, dim)."""
        name, given = operator_call(text)
        values = []
        for _, value in given:
            if value in ("gradient", "result"):
                values.append(value)
            elif value in self._read:
                p = self._read[value]
                if p.type == "Tensor":
                    values.append(f"optional(a.{value}_)" if p.optional else f"*a.{value}_")
                else:
                    required = self._schema is not None and not self._schema.get(value, True)
                    values.append(f"*a.{value}_" if p.optional and required else f"a.{value}_")
            else:
                values.append(in_cpp(value, self._read))
        return f"at::{name}{suffix}({', '.join(values)})"

    def _operator(self) -> Iterator[str]:
        heads = ", ".join(f"{self._operand_type(p)} {n}_" for n, p in self._operands.items())
        yield "template <class Function> auto with_operator(Operator& op, Function function) {"
        yield f"    return [&op, function]({heads}) {{"
        yield "        Arguments a;"
        for name, p in self._operands.items():
            if p.type == "Tensor":
                yield f"        a.{name}_ = {f'pointer({name}_)' if self._is_optional(p) else f'&{name}_'};"
            else:
                yield f"        a.{name}_ = {name}_;"
        yield "        return one(function(op, a));\n    };\n}\n"
        given = []
        for name, p in self._operands.items():
            if p.type == "Tensor":
                given.append(f"optional(a.{name}_)" if self._is_optional(p) else f"*a.{name}_")
            else:
                given.append(f"*a.{name}_" if p.optional and not self._is_optional(p) else f"a.{name}_")
        yield "// The operator by way of the dispatcher."
        yield "Results dispatched(const Operator& op, const Arguments& a) {"
        yield f"    return many(op.handle->typed<Signature>().call({', '.join(given)}));\n}}\n"
        yield "void add_kernels(Operator& op, torch::Library& library) {"
        yield "    using Key = c10::DispatchKey;"
        yield "    const auto left = [](Operator&, const Arguments& a) { return originals(a); };"
        yield "    const auto below = [](Operator& op, const Arguments& a) { return forward(op, a); };"
        yield "    const auto above = [](Operator& op, const Arguments& a) { return with_gradients(op, a); };"
        yield "    const auto cast = [](Operator& op, const Arguments& a) { return with_autocast(op, a); };"
        yield "    add_kernel(library, NAME, with_operator(op, below), {Key::CompositeExplicitAutograd});"
        yield "    add_kernel(library, NAME, with_operator(op, above), {Key::Autograd});"
        yield "    add_kernel(library, NAME, with_operator(op, cast), {Key::AutocastCPU, Key::AutocastCUDA});"
        yield "    add_kernel(library, NAME, with_operator(op, left), {Key::FuncTorchBatched});\n}"


def _quoted(text: str) -> str:
    """A text in C++."""
    return json.dumps(text, ensure_ascii=False)
