"""Any causal language model of ``transformers``, as it is, on cgkit's road. ``README.md`` is the short tour."""

from cgkit.serving.adopt.adopt import adopt as adopt
from cgkit.serving.adopt.model import AdoptedConfig as AdoptedConfig
from cgkit.serving.adopt.model import AdoptedModel as AdoptedModel
from cgkit.serving.adopt.refusals import AdoptError as AdoptError
