"""Kernels found in Inductor's generated Python."""

from cgkit import torch_hooks
from cgkit.compiling.generated import GeneratedCode, Kernel, find_kernels

#: Written for this test in the form of Inductor's code for a GPU; no machine made it.
SYNTHETIC = """
async_compile = AsyncCompile()
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''import triton''')
triton_tem_fused_mm_1 = async_compile.triton('triton_tem_fused_mm_1', '''...''', device_str='cuda')
never_called = async_compile.triton('never_called', '''...''')
async_compile.wait(globals())

class Runner:
    def call(self, args):
        arg0_1, = args
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((s0, 8), (8, 1), torch.float32)
            triton_poi_fused_add_0.run(arg0_1, buf0, stream=stream0)
            extern_kernels.mm(buf0, arg0_1, out=buf0)
            triton_tem_fused_mm_1.run(arg0_1, buf0, stream=stream0)
            triton_poi_fused_add_0.run(arg0_1, buf0, stream=stream0)
            buf1 = torch.ops.mine.attention.default(buf0, arg0_1)
            buf2 = reinterpret_tensor(buf1, (s0, 8), (8, 1), 0)
            buf3 = aten.sort.default(buf2)
        return (buf3, )

def benchmark_compiled_module():
    triton_poi_fused_add_0.run(None)
"""


def test_own_and_foreign_kernels_are_told_apart_and_counted_by_their_starts():
    assert find_kernels(SYNTHETIC) == (
        Kernel("triton_poi_fused_add_0", "triton", 2),
        Kernel("triton_tem_fused_mm_1", "triton", 1),
        Kernel("never_called", "triton", 0),
        Kernel("extern_kernels.mm", "extern", 1),
        Kernel("torch.ops.mine.attention.default", "operator", 1),
        Kernel("aten.sort.default", "operator", 1),
    )


def test_code_that_cannot_be_read_has_no_kernels():
    assert find_kernels("def call(") == find_kernels("\0") == find_kernels("") == ()


def test_calls_after_the_passes_are_counted_without_inputs():
    graph = (
        "class <lambda>(torch.nn.Module):\n"
        '    def forward(self, arg0_1: "f32[s0][1]cpu"):\n'
        "        # File: toy.py:1 in forward, code: x = y\n"
        '        mul: "f32[s0][1]cpu" = torch.ops.aten.mul.Tensor(arg0_1, 2);  arg0_1 = None\n'
        "        constant = self.constant\n"
        '        add: "f32[s0][1]cpu" = torch.ops.aten.add.Tensor(mul, 1);  mul = None\n'
        "        return (add,)\n"
    )
    assert GeneratedCode("", "", graph).calls_after == 2
    assert GeneratedCode("", "", "").calls_after is None


def test_a_callable_of_somebody_else_has_no_generated_code():
    assert torch_hooks.generated_code(lambda x: x) == {}
    assert torch_hooks.generated_code(len) == {}
