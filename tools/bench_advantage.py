"""Time skip-observation GAE on a full-size step: 128 trajectories of 131,072 action tokens, float64, one thread.

OMP_NUM_THREADS=1 python -m tools.bench_advantage
"""

import argparse
import time

import numpy as np

from megatron_sao.algorithm.advantage import action_gae, lambda_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    values = rng.normal(size=(args.trajectories, args.tokens)).astype(np.float32)
    rewards = np.zeros(args.tokens, dtype=np.float32)
    rewards[-1] = 1.0
    lam = lambda_policy(1.5, args.tokens)
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        for row in values:
            action_gae(rewards, row, gamma=1.0, lam=lam)
        seconds.append(time.perf_counter() - start)
    print(f"{args.trajectories} x {args.tokens} tokens: best {min(seconds):.3f} s, worst {max(seconds):.3f} s")


if __name__ == "__main__":
    main()
