"""Makes the quickstart's start policy: a tiny Qwen3-MoE, taught by demonstrations of mixed quality."""
