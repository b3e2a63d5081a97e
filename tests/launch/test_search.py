"""`sao plan --search`: what it finds is what trying everything finds, and what it prints can be pasted."""

import dataclasses
import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launch.cli import command
from launch.estimate import Workload
from launch.plan import GPU_BYTES, engine_role, trained_role
from launch.rates import COMPUTE_EFFICIENCY, GPUS, LINK_EFFICIENCY, Group, Links
from launch.search import NUM_KEPT, RoleSearch, is_aligned, search
from launch.search_table import layout_toml
from megatron_sao.config import Config, LayoutConfig, RoleConfig, load
from megatron_sao.megatron.mapping.architectures import read_hf_config
from megatron_sao.megatron.mapping.count import num_parameters
from megatron_sao.megatron.mapping.hf_config import HFConfig

CONFIGS = Path(__file__).parent.parent.parent / "configs"
MATH = CONFIGS / "qwen3-30b-a3b-math.toml"
SMALL = ["cluster.gpus_per_node=4", "engine.tensor=1", "actor.router_replay=false"]
SMALL += [f"{role}.max_tokens_per_micro_batch=16384" for role in ("actor", "critic")]
SMALL += ["rollout.max_episode_tokens=16384", "rollout.max_turn_tokens=4096", "rollout.trajectories_per_step=6"]
SIZES = (1, 2, 3, 4, 8)  # of a role, where a node has 4 GPUs


@cache
def small(loop: str = "overlapped") -> tuple[Config, HFConfig]:
    """12 layers of 128 experts: on some numbers of GPUs most layouts fit, on others a few or none."""
    hf = read_hf_config(CONFIGS / "models/Qwen/Qwen3-30B-A3B-Thinking-2507")
    moe = (True,) * 12
    return load(MATH, [*SMALL, f"run.loop={loop}"]), dataclasses.replace(hf, num_layers=12, is_moe_layer=moe)


def every_role(role: RoleConfig, num_ranks: int) -> Iterator[RoleConfig]:
    """All that the configuration takes, with up to 4 virtual stages: no shortcut of the search's."""
    names = ("tensor", "context", "pipeline", "expert", "expert_tensor", "virtual_stages")
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for values in itertools.product(*[sizes] * 5, range(1, 5)):
        try:
            layout = LayoutConfig(num_ranks=num_ranks, **dict(zip(names, values, strict=True)))
        except ValueError:
            continue
        for recompute in ("none", "selective", "full"):
            yield role.model_copy(update={"layout": layout, "recompute": recompute})


@cache
def by_trying_all(role_name: str, num_ranks: int) -> dict[str, float]:
    """Seconds of every layout that fits."""
    config, hf = small()
    role = getattr(config, role_name)
    hf = dataclasses.replace(hf, role="critic" if role_name == "critic" else "policy")
    work, times = Workload.of(config, role, hf), {}
    for each in every_role(role, num_ranks):
        try:
            fits = trained_role(config, each, hf).fits
        except ValueError:  # does not divide the model
            continue
        if fits:
            times[named(each)] = work.seconds(each).total
    return times


def named(role: RoleConfig) -> str:
    return f"{layout_toml(role.layout)} {role.recompute}"


def fastest(role_name: str, num_ranks: int) -> float:
    return min(by_trying_all(role_name, num_ranks).values())


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_every_layout_that_fits_is_found_and_the_fastest_are_the_fastest_of_all(name: str) -> None:
    config, hf = small()
    role = RoleSearch(
        config=config,
        role=getattr(config, name),
        hf=dataclasses.replace(hf, role="critic" if name == "critic" else "policy"),
    )
    numbers = {size: len(by_trying_all(name, size)) for size in SIZES}
    assert min(numbers.values()) == 0
    assert max(numbers.values()) > 50
    for size in SIZES:
        times = by_trying_all(name, size)
        assert role.fits(size) is bool(times)
        apart = {each: seconds for each, seconds in times.items() if not each.endswith("selective")}
        assert {named(each) for each, _ in role.fitting(role.divisions(size))} == apart.keys()
        found = role.best(size)
        assert [each.seconds.total for each in found] == pytest.approx(sorted(apart.values())[:NUM_KEPT])
        assert min(times.values(), default=0) == min(apart.values(), default=0)
        assert all(each.plan.fits and each.plan.num_gpus == size for each in found)
        assert all(role.least_s(size) <= seconds for seconds in times.values())
    assert role.fewest == next(size for size, number in numbers.items() if number)


def nodes_are_shared_well(sizes: tuple[int, ...], per_node: int) -> bool:
    """Each role lies in one node, or has all GPUs of its nodes."""
    owner = [role for role, size in enumerate(sizes) for _ in range(size)]
    nodes = [owner[start : start + per_node] for start in range(0, len(owner), per_node)]
    return all(
        sum(role in node for node in nodes) == 1 or all({role} == set(node) for node in nodes if role in node)
        for role in range(len(sizes))
    )


@pytest.mark.parametrize("loop", ["overlapped", "serial"])
@pytest.mark.parametrize("num_gpus", [None, 9, 12, 13])
def test_shares_of_gpus_are_the_best_of_all_and_nothing_fits_on_fewer(loop: str, num_gpus: int | None) -> None:
    config, hf = small(loop)
    found = search(config, hf, num_gpus=num_gpus)
    step_s: Any = max if loop == "overlapped" else lambda a, c: a + c
    times = {
        pair: (step_s(fastest("actor", pair[0]), fastest("critic", pair[1])), sum(pair) + 1)
        for pair in itertools.product(SIZES, SIZES)
        if by_trying_all("actor", pair[0]) and by_trying_all("critic", pair[1])
        if nodes_are_shared_well((*pair, 1), 4)
    }
    fewest = min(gpus for _, gpus in times.values())
    expected = sorted(seconds for seconds, gpus in times.values() if gpus <= (num_gpus or fewest))
    assert [each.step_s for each in found] == pytest.approx(expected[:NUM_KEPT])
    assert all(each.engine_tensor == 1 and each.num_gpus <= (num_gpus or fewest) for each in found)
    if num_gpus is None:
        assert found[0].num_gpus == fewest
        with pytest.raises(ValueError, match=f"--gpus {fewest - 1}: the fewest that the run fits on are {fewest} H100"):
            search(config, hf, num_gpus=fewest - 1)


def test_a_role_shares_no_node_that_it_does_not_lie_in() -> None:
    for sizes in itertools.product((1, 2, 3, 4, 8), (1, 3, 4, 8), (1, 2, 4, 8)):
        assert is_aligned(sizes, 4) is nodes_are_shared_well(sizes, 4), sizes


def test_an_engine_that_does_not_fit_grows_and_none_shrinks() -> None:
    config, hf = small()
    grown = search(load(MATH, [*SMALL, "engine.extra_args=['--mem-fraction-static','0.04']"]), hf)[0]
    assert grown.engine_tensor > 1
    fitting = engine_role(grown.apply(config), hf)
    assert fitting.fits
    kept = search(load(MATH, [*SMALL, "engine.tensor=2"]), hf)[0]
    assert kept.engine_tensor == 2
    with pytest.raises(ValueError, match="no engine of 1 or more H100-80GB fits: weights leave room for"):
        search(load(MATH, [*SMALL, "engine.max_total_tokens=1000000000"]), hf)


def test_an_engine_that_no_node_takes_says_why() -> None:
    config, hf = small()
    cluster = config.cluster.model_copy(update={"gpus_per_node": 3})
    engine = config.engine.model_copy(update={"tensor": 8})
    with pytest.raises(ValueError, match="none divides the attention heads, 32, and is up to or of whole nodes of 3"):
        search(config.model_copy(update={"cluster": cluster, "engine": engine}), hf)


def test_rows_of_float32_are_not_shared() -> None:
    """As the run itself refuses it."""
    config, hf = small()
    halves = RoleSearch(config=config, role=config.critic, hf=dataclasses.replace(hf, role="critic"))
    model = config.model.model_copy(update={"dtype": "float32"})
    whole = dataclasses.replace(halves, config=config.model_copy(update={"model": model}))
    contexts = [{role.layout.context for role in each.divisions(8)} for each in (halves, whole)]
    assert contexts == [{1, 2, 4, 8}, {1}]


def paste(text: str, lines: str) -> str:
    """The lines in place of those of the same names in the same tables."""
    for table, values in tomllib.loads(lines).items():
        for key in values:
            line = re.search(rf"^\[{table}\]\n(?:.*\n)*?({key} = .*)", lines, re.MULTILINE)
            assert line
            text, count = re.subn(
                rf"(^\[{table}\]\n(?:[^\[\n].*\n)*?){key} = .*", rf"\g<1>{line[1]}", text, flags=re.MULTILINE
            )
            assert count == 1, (table, key)
    return text


@pytest.mark.parametrize(("name", "num_gpus"), [("qwen3-30b-a3b-math", 56), ("glm-5.2", None)])
def test_what_is_printed_can_be_pasted_and_fits_on_as_many_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, num_gpus: int | None
) -> None:
    recipe, out = CONFIGS / f"{name}.toml", tmp_path / "search.json"
    wanted = [] if num_gpus is None else ["--gpus", str(num_gpus)]
    assert command(["plan", str(recipe), "--search", *wanted, "--json", str(out)]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    assert shown.rstrip().endswith(found["toml"])
    pasted = tmp_path / "pasted.toml"
    pasted.write_text(paste(recipe.read_text(), shown[shown.index("\n[actor]\n") :]))
    assert load(pasted).actor.layout.model_dump() == found["shares"][0]["actor"][0]["layout"]
    model = CONFIGS / "models" / load(recipe).model.path
    again = tmp_path / "plan.json"
    assert command(["plan", str(pasted), f"model.path={model}", "--json", str(again)]) == 0
    planned = json.loads(again.read_text())
    assert (planned["fits"], planned["gpus"]) == (True, found["gpus"])
    held = planned["roles"]["actor"]["bytes_per_gpu"]
    assert held == found["shares"][0]["actor"][0]["bytes_per_gpu"]


def test_a_number_of_gpus_goes_with_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", str(MATH), "--gpus", "8"]) == 2
    assert "--gpus goes with --search" in capsys.readouterr().err
    assert command(["plan", str(MATH), "--search", "--gpus", "8"]) == 2
    assert "--gpus 8: the fewest that the run fits on are" in capsys.readouterr().err
    assert command(["plan", str(MATH), "--search", "--gpus", "100000"]) == 2
    assert "two roles of up to 2048 and the engine can use 4104" in capsys.readouterr().err


def test_every_gpu_of_the_plan_has_rates() -> None:
    assert GPUS.keys() == GPU_BYTES.keys()


def test_links_take_what_the_bytes_and_the_place_of_the_ranks_say() -> None:
    links = Links(gpu=GPUS["H100-80GB"], gpus_per_node=8)
    gb = 1e9 / LINK_EFFICIENCY
    assert links.ring_s(gb, Group(size=8)) == pytest.approx(gb / 450e9 / LINK_EFFICIENCY)
    over_nodes = links.ring_s(gb, Group(size=16))
    assert over_nodes == pytest.approx(gb / 400e9 / LINK_EFFICIENCY)  # eight adapters of 50 GB/s
    assert links.ring_s(gb, Group(size=2, stride=8)) == pytest.approx(gb / 50e9 / LINK_EFFICIENCY)  # one
    assert links.all_to_all_s(gb, Group(size=8)) == pytest.approx(gb * 7 / 8 / 450e9 / LINK_EFFICIENCY)
    half_stays = (7 / 16 / 450e9 + 8 / 16 / 50e9) * gb / LINK_EFFICIENCY
    assert links.all_to_all_s(gb, Group(size=16)) == pytest.approx(half_stays)
    assert links.all_to_all_s(gb, Group(size=1)) == 0


def seconds_of(config: Config, hf: HFConfig, *, recompute: str = "none", **layout: int) -> Any:
    role_name = "critic" if hf.role == "critic" else "actor"
    role = getattr(config, role_name).model_copy(update={"layout": LayoutConfig(**layout), "recompute": recompute})
    return Workload.of(config, role, hf).seconds(role)


def test_the_computation_of_one_gpu_is_six_flops_a_parameter_and_token_and_attention() -> None:
    config, hf = small()
    tokens = 6 * 16384
    met = num_parameters(hf).active - hf.vocab_size * hf.hidden_size  # the embedding is looked up
    attention = 3 * 2 * 2 * hf.num_heads * hf.head_dim * hf.num_layers * 16384 / 2
    expected = (6 * met + attention) * tokens / (989e12 * COMPUTE_EFFICIENCY)
    found = seconds_of(config, hf, num_ranks=1)
    assert found.compute == pytest.approx(expected, rel=1e-4)
    assert found.total == found.compute
    again = seconds_of(config, hf, num_ranks=1, recompute="full").compute
    head = 6 * hf.vocab_size * hf.hidden_size * tokens / (989e12 * COMPUTE_EFFICIENCY)
    assert again - head == pytest.approx((found.compute - head) * 4 / 3)


@pytest.mark.parametrize(
    ("faster", "slower", "part"),
    [
        ({"pipeline": 2, "data": 4}, {"pipeline": 4, "data": 2}, "bubble"),
        ({"pipeline": 4, "virtual_stages": 2}, {"pipeline": 4}, "bubble"),
        ({"expert": 4}, {"expert": 8}, "experts"),  # a node has 4
        ({"expert": 4}, {"expert": 2, "expert_tensor": 2}, "experts"),
        ({"tensor": 2, "context": 2}, {"tensor": 4, "context": 2}, "tensor"),
        ({"tensor": 4}, {"tensor": 8}, "tensor"),
        ({"tensor": 2, "expert": 8}, {"tensor": 2, "expert": 1}, "update"),
    ],
)
def test_what_costs_more_is_estimated_so(faster: dict[str, int], slower: dict[str, int], part: str) -> None:
    config, hf = small()
    times = [
        getattr(seconds_of(config, hf, num_ranks=8, **{k: v for k, v in sizes.items() if k != "data"}), part)
        for sizes in (faster, slower)
    ]
    assert 0 <= times[0] < times[1]


def test_a_critic_pays_for_each_update_and_nothing_for_gradients_of_what_is_frozen() -> None:
    config, hf = small()
    critic = dataclasses.replace(hf, role="critic")
    one, two, three = (
        seconds_of(
            config.model_copy(update={"critic": config.critic.model_copy(update={"num_updates": k})}),
            critic,
            num_ranks=8,
            expert=8,
            tensor=2,
        ).total
        for k in (1, 2, 3)
    )
    assert three - two == pytest.approx(two - one)
    assert one < two
    trained = config.model_copy(update={"critic": config.critic.model_copy(update={"freeze": ()})})
    frozen = seconds_of(config, critic, num_ranks=1).compute
    assert frozen < seconds_of(trained, critic, num_ranks=1).compute


def test_a_ring_that_its_attention_hides_costs_nothing() -> None:
    config, hf = small()
    assert seconds_of(config, hf, num_ranks=4, context=4).context == 0
    short = load(MATH, [*SMALL, "rollout.max_episode_tokens=64", "rollout.max_turn_tokens=64"])
    assert seconds_of(short, hf, num_ranks=8, context=8).context > 0
