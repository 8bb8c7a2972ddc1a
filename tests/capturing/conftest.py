import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where the road is run: emulated graphs on the CPU, real ones on a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param
