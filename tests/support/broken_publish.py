"""A DELIBERATE BREAK, for tests only: a role's rank whose publish leaves one expert out."""

from collections.abc import Sequence

from megatron_sao.roles import main
from megatron_sao.sync.plan import Publishable
from megatron_sao.sync.source import MegatronSource

LEFT_OUT = "model.layers.1.mlp.experts.5.down_proj.weight"
_all_tensors = MegatronSource.tensors


def without_one_expert(self: MegatronSource) -> Sequence[Publishable]:
    tensors = _all_tensors(self)
    assert any(tensor.spec.name == LEFT_OUT for tensor in tensors)
    return [tensor for tensor in tensors if tensor.spec.name != LEFT_OUT]


if __name__ == "__main__":
    MegatronSource.tensors = without_one_expert  # type: ignore[method-assign]
    main.main()
