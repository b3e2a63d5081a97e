"""For all tests, before anything imports transformers."""

import sys

import torch

if not torch.cuda.is_available():  # PyPI's torchvision does not load beside a CPU build of torch: do without it
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
