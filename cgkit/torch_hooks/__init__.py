"""Every private hook of torch (and Triton) that cgkit needs, one function each, one module a subject.

Nothing else in cgkit touches a private name of torch. Each function says on which versions it was
run; on a version where the hook is gone it raises UnsupportedTorchError with what was tried. Callers
use ``torch_hooks.name``: the modules below are only how the hooks are kept apart.
"""

from cgkit.torch_hooks.cuda import (
    current_raw_stream,
    end_failed_capture,
    pool_segments,
    release_pool,
    weak_tensor,
)
from cgkit.torch_hooks.dispatch import TorchDispatchMode, without_dispatch_modes
from cgkit.torch_hooks.dynamo import (
    COMPILED_FN_PREFIX,
    compile_lock,
    count_bytecode_hooks,
    drop_all_guards,
    dynamo_guards,
    fake_example,
    forget_code,
    in_tracing_context,
    is_compiled,
    lean_global,
    mark_dynamic,
    original_of_compiled,
    placeholder_source,
    quiet_loggers,
    register_bytecode_hook,
    traced_code,
    tracing_context,
)
from cgkit.torch_hooks.fakes import (
    data_dependence_errors,
    fake_mode_of,
    fake_tensor_mode,
    is_fake,
    missing_fake_errors,
    new_fake_mode,
    running_fake,
)
from cgkit.torch_hooks.graphs import codegen_of
from cgkit.torch_hooks.inductor import (
    find_cpp_compiler,
    generated_kernels,
    inductor_options,
    standalone_compile,
)
from cgkit.torch_hooks.operators import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    bound_argument,
    destroy_library,
    has_python_kernel,
    is_composite,
    mutated_arguments,
    operator_of,
    register_fake_in,
    resolve_overload,
    returns_several,
    run_cpu_kernel,
    written_arguments,
)
from cgkit.torch_hooks.profiler import profiler_range, profiler_runs
from cgkit.torch_hooks.side_effects import SideEffect, dynamo_side_effects
from cgkit.torch_hooks.symbols import (
    free_symbol_names,
    plain_symbol_name,
    shape_guards,
    specialised_symbols,
    substitute_symbols,
    symbol_facts,
    symbolic_expression,
)
from cgkit.torch_hooks.tensors import storage_key, with_lazy_bits
from cgkit.torch_hooks.triton import triton_direct_launch
from cgkit.torch_hooks.versions import RUN_ON, gone

__all__ = [
    "COMPILED_FN_PREFIX",
    "RUN_ON",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "SideEffect",
    "TorchDispatchMode",
    "bound_argument",
    "codegen_of",
    "compile_lock",
    "count_bytecode_hooks",
    "current_raw_stream",
    "data_dependence_errors",
    "destroy_library",
    "drop_all_guards",
    "dynamo_guards",
    "dynamo_side_effects",
    "end_failed_capture",
    "fake_example",
    "fake_mode_of",
    "fake_tensor_mode",
    "find_cpp_compiler",
    "forget_code",
    "free_symbol_names",
    "generated_kernels",
    "gone",
    "has_python_kernel",
    "in_tracing_context",
    "inductor_options",
    "is_compiled",
    "is_composite",
    "is_fake",
    "lean_global",
    "mark_dynamic",
    "missing_fake_errors",
    "mutated_arguments",
    "new_fake_mode",
    "operator_of",
    "original_of_compiled",
    "placeholder_source",
    "plain_symbol_name",
    "pool_segments",
    "profiler_range",
    "profiler_runs",
    "quiet_loggers",
    "register_bytecode_hook",
    "register_fake_in",
    "release_pool",
    "resolve_overload",
    "returns_several",
    "run_cpu_kernel",
    "running_fake",
    "shape_guards",
    "specialised_symbols",
    "standalone_compile",
    "storage_key",
    "substitute_symbols",
    "symbol_facts",
    "symbolic_expression",
    "traced_code",
    "tracing_context",
    "triton_direct_launch",
    "weak_tensor",
    "with_lazy_bits",
    "without_dispatch_modes",
    "written_arguments",
]
