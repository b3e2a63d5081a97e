"""What the installed Megatron-core can compute, read in its source: importing it takes seconds."""

import importlib.util
import re
from pathlib import Path
from typing import Final

OPTIONS_OF_GLM_DSA = {
    "dsa_indexer_topk_freq",  # layers share a choice
    "dsa_indexer_skip_topk_offset",
    "dsa_indexer_rope_interleaved",
    "dsa_indexer_rotate_activation",
    "dsa_indexer_k_norm_epsilon",
    "dsa_kernel_backend",
}


def transformer_options() -> frozenset[str]:
    """Names of TransformerConfig's options, and of what else its module annotates; none without Megatron-core."""
    package = importlib.util.find_spec("megatron")  # a namespace: finding it imports nothing
    for folder in (package and package.submodule_search_locations) or ():
        source = Path(folder) / "core" / "transformer" / "transformer_config.py"
        if source.is_file():
            return frozenset(re.findall(r"^ {4}(\w+)\s*:", source.read_text(encoding="utf-8"), re.MULTILINE))
    return frozenset()


SPARSE_ATTENTION: Final = transformer_options() >= OPTIONS_OF_GLM_DSA
"""Whether the installed Megatron-core computes GLM's sparse attention (DSA): 0.16.1 has another one."""
