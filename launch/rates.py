"""How fast a GPU computes and sends, and how many seconds bytes take among the ranks of a group. Pure numbers."""

from dataclasses import dataclass

COMPUTE_EFFICIENCY = 0.45
"""[choice] Of the peak rate, that a layer's matrices and attention reach on long rows."""
LINK_EFFICIENCY = 0.75
"""[choice] Of the peak rate of a link, that a collective of many megabytes reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Peak rates of one GPU in a node of its kind: dense (no sparsity), and one direction of its links."""

    bfloat16_flops: float
    float32_flops: float
    link_bytes_per_s: float  # to the GPUs of its node, NVLink
    network_bytes_per_s: float  # to other nodes, its own adapter

    def flops(self, dtype: str) -> float:
        """That are reached."""
        return COMPUTE_EFFICIENCY * (self.float32_flops if dtype == "float32" else self.bfloat16_flops)


# NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200 (halved where they count sparsity, or both
# directions of NVLink); network of DGX A100 (8 x 200 Gbit/s), DGX H100, H200 and B200 (8 x 400 Gbit/s).
GPUS = {
    "A100-80GB": Gpu(bfloat16_flops=312e12, float32_flops=19.5e12, link_bytes_per_s=300e9, network_bytes_per_s=25e9),
    "H100-80GB": Gpu(bfloat16_flops=989e12, float32_flops=67e12, link_bytes_per_s=450e9, network_bytes_per_s=50e9),
    "H200-141GB": Gpu(bfloat16_flops=989e12, float32_flops=67e12, link_bytes_per_s=450e9, network_bytes_per_s=50e9),
    "B200-180GB": Gpu(bfloat16_flops=2250e12, float32_flops=75e12, link_bytes_per_s=900e9, network_bytes_per_s=50e9),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that exchange something: `size` of them, each `stride` ranks after the one before."""

    size: int
    stride: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Of a GPU in its cluster. A role's first rank is the first one of a node, or its ranks lie in one node."""

    gpu: Gpu
    gpus_per_node: int

    def is_inside(self, group: Group) -> bool:
        """No such group of the role leaves its node."""
        return group.size == 1 or self.gpus_per_node % (group.size * group.stride) == 0

    def ring_s(self, num_bytes: float, group: Group) -> float:
        """Seconds of a collective in which every rank sends `num_bytes` (all-gather, reduce-scatter).

        A group that leaves its node uses the adapters of all its members there, up to what one of them can pass on.
        """
        members = max(1, self.gpus_per_node // group.stride)
        across = min(members * self.gpu.network_bytes_per_s, self.gpu.link_bytes_per_s)
        return num_bytes / (LINK_EFFICIENCY * (self.gpu.link_bytes_per_s if self.is_inside(group) else across))

    def neighbour_s(self, num_bytes: float, group: Group) -> float:
        """Seconds to send to the next rank of the group, where that is in another node if any is."""
        gpu = self.gpu
        rate = gpu.link_bytes_per_s if self.is_inside(group) else gpu.network_bytes_per_s
        return num_bytes / (LINK_EFFICIENCY * rate)

    def all_to_all_s(self, num_bytes: float, group: Group) -> float:
        """Seconds in which every rank sends `num_bytes`, as much to itself as to every other."""
        near = group.size if self.is_inside(group) else max(1, self.gpus_per_node // group.stride)
        inside, outside = (near - 1) / group.size, (group.size - near) / group.size
        rates = self.gpu.link_bytes_per_s, self.gpu.network_bytes_per_s
        return num_bytes * (inside / rates[0] + outside / rates[1]) / LINK_EFFICIENCY
