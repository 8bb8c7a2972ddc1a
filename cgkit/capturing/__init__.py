from cgkit.capturing.capture import capture
from cgkit.capturing.captured import CapturedGraphs, free_all
from cgkit.capturing.dispatcher import CudagraphDispatcher
from cgkit.capturing.sizes import CaptureSizes, check_compile_sizes
from cgkit.capturing.wrapper import CUDAGraphWrapper
