"""What the fork server of `tests.support.ranks` imports once, so that each rank starts in a moment."""

import megatron.core.distributed
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.models.gpt.gpt_model
import megatron.core.optimizer
import megatron.core.pipeline_parallel  # noqa: F401
