"""HF names and Megatron-core shards: tables per architecture, and moving tensors between the two (`transfer.py`)."""
