import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgkit.capturing import CaptureSizes, check_compile_sizes, ladder
from cgkit.config import LADDERS, CompilationConfig
from cgkit.errors import CgkitError, ConfigError

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("name", "count", "head", "last"),
    [
        ("article", 35, (1, 2, 4, 8, 16), 256),
        ("vllm-0.10.1", 67, (1, 2, 4, 8, 16), 512),
        ("vllm-0.33", 51, (1, 2, 4, 8, 16), 512),
        ("sglang", 36, (1, 2, 4, 8, 12, 16, 24), 256),
        ("tensorrt-llm", 20, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), 3072),
    ],
)
def test_ladders_for_256_requests(name, count, head, last):
    sizes = ladder(name, 256)
    assert (len(sizes), sizes[: len(head)], sizes[-1]) == (count, head, last)


def test_ladders_at_their_edges():
    assert ladder("article", 1) == (1,)
    assert ladder("article", 250)[-1] == 256  # the least size that covers it
    assert ladder("article", 10_000)[-1] == 10_000  # the article's own list ends at 8192 with an IndexError
    assert ladder("vllm-0.33", 256, 100)[-2:] == (96, 100)  # off the stride, but not dropped
    assert 12 in ladder("vllm-0.33", 12)
    assert ladder("sglang", 600)[-4:] == (512, 544, 576, 600)
    assert ladder("vllm-0.10.1", 256, 20) == (1, 2, 4, 8, 16)
    with pytest.raises(ConfigError, match=r"vllm-0\.33"):
        ladder("vllm", 256)
    with pytest.raises(ConfigError, match="max_num_seqs has 0"):
        ladder("article", 0)


@pytest.mark.parametrize("name", LADDERS)
@given(max_num_seqs=st.integers(1, 2000))
def test_every_ladder_is_ascending_and_begins_small(name, max_num_seqs):
    sizes = ladder(name, max_num_seqs)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] in (1, max_num_seqs)
    if name in ("article", "sglang"):
        assert sizes[-1] >= max_num_seqs


@given(SIZES)
def test_padding_gives_the_least_size_that_fits(given_sizes):
    sizes = CaptureSizes(given_sizes)
    padded = [sizes.pad_for_cudagraph(n) for n in range(1, sizes.largest + 1)]
    for n, to in enumerate(padded, 1):
        assert to == min(size for size in given_sizes if size >= n)
        assert sizes.pad_for_cudagraph(to) == to  # padding twice changes nothing
    assert padded == sorted(padded)  # more tokens never get a smaller graph
    assert sizes.bs_to_padded_graph_size[1:] == padded


@given(SIZES, st.integers(-5, 400), st.integers(1, 8))
def test_above_the_largest_nothing_is_captured(given_sizes, n, tensor_parallel_size):
    sizes = CaptureSizes(given_sizes, tensor_parallel_size=tensor_parallel_size)
    assert sizes.is_captured(n) == (1 <= n <= max(given_sizes))
    if n > sizes.largest:
        assert n <= sizes.pad(n) < n + tensor_parallel_size
        assert sizes.pad(n) % tensor_parallel_size == 0
    if n > sizes.largest or n < 0:
        with pytest.raises(CgkitError, match=f"num_tokens={n} is outside"):
            sizes.pad_for_cudagraph(n)


def test_both_ratios_of_waste():
    row = CaptureSizes([32, 40]).to_frame([33]).iloc[0]
    assert row["padding_tokens"] == 7
    assert row["waste_of_real"] == pytest.approx(7 / 33)
    assert row["waste_of_padded"] == pytest.approx(7 / 40)


def test_frame_ends_with_one_uncaptured_batch():
    frame = CaptureSizes([1, 4]).to_frame()
    assert list(frame["batch"]) == [1, 2, 3, 4, 5]
    assert list(frame["captured"]) == [True, True, True, True, False]
    assert list(frame["padded"]) == [1, 4, 4, 4, 5]


@pytest.mark.parametrize("bad", [[0], [-1], [1.5], [True], ["2"], [], "12", 3])
def test_sizes_that_make_no_sense(bad):
    with pytest.raises(ConfigError):
        CaptureSizes(bad)


def test_resolve():
    config = CompilationConfig(max_num_seqs=16)
    assert CaptureSizes.resolve(config).sizes == (1, 2, 4, 8, 16)
    assert CaptureSizes.resolve(config, [4, 2, 2]).sizes == (2, 4)
    assert CaptureSizes.resolve(config, "sglang").sizes == (1, 2, 4, 8, 12, 16)
    listed = CompilationConfig(cudagraph_capture_sizes=[8, 3])
    assert CaptureSizes.resolve(listed).sizes == (3, 8)
    with pytest.raises(ConfigError, match="unknown"):
        CaptureSizes.resolve(config, "fibonacci")


def test_compile_sizes_that_padding_would_change():
    sizes = CaptureSizes([1, 2, 4, 8])
    with pytest.raises(ConfigError, match=r"3 would be padded to 4.*6 would be padded to 8"):
        check_compile_sizes(CompilationConfig(compile_sizes=[3, 4, 6]), sizes)
    check_compile_sizes(CompilationConfig(compile_sizes=[4, 8, 9, 1000]), sizes)  # above: never padded
    check_compile_sizes(CompilationConfig(compile_sizes=[3], cudagraph_mode="NONE"), sizes)
    with pytest.raises(ConfigError, match="would be padded"):
        CaptureSizes.resolve(CompilationConfig(compile_sizes=[3]), [4])
