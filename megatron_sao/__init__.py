"""Single-rollout asynchronous optimization (SAO, arXiv 2607.07508) on Megatron-core and SGLang."""
