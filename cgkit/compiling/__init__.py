"""Stage 3: a piece becomes a callable (fake-tensor interpreter, adaptors, content key, backends)."""

from cgkit.compiling.adaptors import CompilerInterface as CompilerInterface
from cgkit.compiling.adaptors import EagerAdaptor as EagerAdaptor
from cgkit.compiling.adaptors import InductorStandaloneAdaptor as InductorStandaloneAdaptor
from cgkit.compiling.compiled_graph import CompiledGraph as CompiledGraph
from cgkit.compiling.compiled_graph import compile_pieces as compile_pieces
from cgkit.compiling.content_key import ContentKey as ContentKey
from cgkit.compiling.content_key import content_key as content_key
from cgkit.compiling.content_key import diff_keys as diff_keys
from cgkit.compiling.inductor_adaptor import InductorAdaptor as InductorAdaptor
from cgkit.compiling.inductor_adaptor import InductorHandle as InductorHandle
from cgkit.compiling.inductor_config import set_inductor_config as set_inductor_config
from cgkit.compiling.interpreter import PiecewiseCompileInterpreter as PiecewiseCompileInterpreter
from cgkit.compiling.manager import CompiledPiece as CompiledPiece
from cgkit.compiling.manager import CompilerManager as CompilerManager
from cgkit.compiling.piecewise_backend import ConcreteSizeEntry as ConcreteSizeEntry
from cgkit.compiling.piecewise_backend import PiecewiseBackend as PiecewiseBackend
from cgkit.compiling.piecewise_backend import RangeEntry as RangeEntry
from cgkit.compiling.warm import compile_model as compile_model
