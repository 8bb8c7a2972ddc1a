"""The walk over generated code, on code of the kinds that Inductor writes for a GPU and for a CPU."""

import textwrap

import pytest
import torch

from cgkit import torch_hooks
from cgkit.measuring.piece_tape import PieceTape, StorageWatch, walk_piece, wrapper_function
from tests.capturing.models import Layers, toy


def walked(body, args, device="cpu", extra=""):
    """Events of a made-up wrapper function, as (block, nbytes)."""
    source = f"{extra}\nclass Runner:\n    def call(self, args):\n{textwrap.indent(textwrap.dedent(body), ' ' * 8)}"
    mode = torch_hooks.new_fake_mode()
    events, sizes = [], []

    def began(nbytes):
        sizes.append(nbytes)
        events.append((len(sizes) - 1, nbytes))
        return len(sizes) - 1

    with torch_hooks.running_fake(mode):
        fakes = [torch.empty(arg) if isinstance(arg, tuple) else arg for arg in args]
        watch = StorageWatch(device, began, lambda block: events.append((block, -1)), fakes)
        with watch:
            results = wrapper_function(source)(list(fakes))
    watch.sweep()
    return events, results


def test_kernels_streams_and_guards_do_nothing_and_deletes_end_a_buffer():
    events, results = walked(
        """
        arg0_1, arg1_1 = args
        args.clear()
        s77 = arg0_1
        assert_size_stride(arg1_1, (s77, 16), (16, 1))
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cpu((s77, 16), (16, 1), torch.bfloat16)
            stream0 = get_raw_stream(0)
            triton_poi_fused_0.run(arg1_1, buf0, 16*s77, stream=stream0)
            buf1 = empty_strided_cpu((s77, 32), (32, 1), torch.bfloat16)
            extern_kernels.mm(buf0, reinterpret_tensor(arg1_1, (16, 32), (1, 16), 0), out=buf1)
            del arg1_1
            del buf0
            buf2 = empty_strided_cpu((s77, ), (1, ), torch.float32)
            triton_red_fused_1.run(buf1, buf2, s77, 32, stream=stream0)
            buf3 = buf1; del buf1  # reuse
        return (reinterpret_tensor(buf3, (s77, 4, 8), (32, 8, 1), 0), buf2)
        """,
        [8, (8, 16)],
    )
    assert events == [(0, 8 * 16 * 2), (1, 8 * 32 * 2), (0, -1), (2, 32)]
    assert [tuple(r.shape) for r in results] == [(8, 4, 8), (8,)]


def test_what_an_operator_returns_is_counted_and_its_views_are_not():
    events, _ = walked(
        """
        arg0_1, = args
        buf0 = torch.ops.aten.sin.default(arg0_1)
        buf1 = reinterpret_tensor(buf0, (4, ), (1, ), 4)
        buf2 = extern_kernels.bmm(reinterpret_tensor(buf0, (1, 4, 4), (16, 4, 1), 0), arg0_1)
        del buf0
        buf3 = torch.ops.aten.cos.default(buf1)
        del buf1
        buf4 = torch.ops.aten.sin.default(buf3)
        return (buf4, )
        """,
        [(1, 4, 4)],
    )
    assert events[:3] == [(0, 64), (1, 64), (2, 16)]
    assert (0, -1) in events and events.index((0, -1)) < events.index(
        (3, 16)
    )  # its last view is gone by then


def test_partitions_are_called_through_the_runner():
    events, _ = walked(
        """
        arg0_1, = args
        partition0_args = [arg0_1]
        (buf1,) = self.partitions[0](partition0_args)
        del partition0_args
        return (buf1, )
        """,
        [(4,)],
        extra="def partition_0(args):\n    arg0_1, = args\n    args.clear()\n"
        "    buf0 = empty_strided_cpu((4,), (1,), torch.float32)\n    cpp_fused_0(arg0_1, buf0)\n    return (buf0,)\n",
    )
    assert events == [(0, 16)]


def test_a_module_without_the_function_is_refused():
    with pytest.raises(ValueError, match=r"no function call\(\)"):
        wrapper_function("x = 1")


def test_peak_bytes_are_those_of_the_events():
    tape = PieceTape([(0, 10), (1, 20), (0, -1), (2, 5)], [], "", sizes={0: 10, 1: 20, 2: 5})
    assert tape.peak_bytes == 30


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_piece_is_walked_by_its_code_or_by_its_operators(compiler):
    if compiler == "inductor" and torch_hooks.find_cpp_compiler() is None:
        pytest.skip("no C++ compiler")
    compiled = toy("cpu", Layers(2, 8), compiler=compiler)
    tape = walk_piece(compiled.backends[1], 4, "cpu")
    assert tape.note == ""
    assert tape.source == ("operators" if compiler == "eager" else "generated code")
    live = {block for block, nbytes in tape.events if nbytes >= 0} - {b for b, n in tape.events if n < 0}
    assert live == {spec.block for spec in tape.outputs if spec.block >= 0}
    assert all(tape.sizes[block] == 4 * 8 * 4 for block in live)
    opaque = walk_piece(compiled.backends[1], 4, "cpu", outputs_only=True)
    assert [nbytes for _, nbytes in opaque.events] == [4 * 8 * 4] * len(live)


def test_code_that_cannot_be_walked_falls_back_to_the_graph_and_says_so(monkeypatch):
    compiled = toy("cpu", Layers(1, 8))
    monkeypatch.setattr(
        torch_hooks, "generated_wrapper", lambda runnable: "def call(args):\n    return nothing.at(1)"
    )
    tape = walk_piece(compiled.backends[0], 4, "cpu")
    assert tape.source == "operators"
    assert "could not be walked" in tape.note
