"""Stage 5: recorded graphs -> tokens.

A readable Llama (:class:`Llama`), where its weights come from (:func:`load_model`), the paged KV cache,
attention as a splitting operator, and the :class:`Runner`: persistent buffers, ``capture_model``, steps
and whole answers. ``README.md`` in this folder is the short tour.
"""

from cgkit.serving.attention import AttentionMetadata as AttentionMetadata
from cgkit.serving.attention import attention as attention
from cgkit.serving.attention import build_metadata as build_metadata
from cgkit.serving.attention import unified_attention_with_output as unified_attention_with_output
from cgkit.serving.engine import Arrival as Arrival
from cgkit.serving.engine import Engine as Engine
from cgkit.serving.engine import RequestOutput as RequestOutput
from cgkit.serving.executor import Executor as Executor
from cgkit.serving.input_batch import InputBatch as InputBatch
from cgkit.serving.input_batch import PersistentBuffers as PersistentBuffers
from cgkit.serving.kv_cache import BlockAllocator as BlockAllocator
from cgkit.serving.kv_cache import PagedKVCache as PagedKVCache
from cgkit.serving.llama import PRESETS as PRESETS
from cgkit.serving.llama import Llama as Llama
from cgkit.serving.llama import LlamaConfig as LlamaConfig
from cgkit.serving.llama import RopeScaling as RopeScaling
from cgkit.serving.opt import OPT as OPT
from cgkit.serving.opt import OPT_PRESETS as OPT_PRESETS
from cgkit.serving.opt import OPTConfig as OPTConfig
from cgkit.serving.request import Completion as Completion
from cgkit.serving.request import Request as Request
from cgkit.serving.request import Scheduled as Scheduled
from cgkit.serving.request import StepOutput as StepOutput
from cgkit.serving.runner import Runner as Runner
from cgkit.serving.sampling import SamplingParams as SamplingParams
from cgkit.serving.sampling import sample as sample
from cgkit.serving.scheduler import ScheduledStep as ScheduledStep
from cgkit.serving.scheduler import Scheduler as Scheduler
from cgkit.serving.tokenizer import ByteTokenizer as ByteTokenizer
from cgkit.serving.tokenizer import chat_prompt as chat_prompt
from cgkit.serving.weights import SMOLLM2 as SMOLLM2
from cgkit.serving.weights import LoadedModel as LoadedModel
from cgkit.serving.weights import build_model as build_model
from cgkit.serving.weights import load_model as load_model
from cgkit.serving.weights import random_weights as random_weights
