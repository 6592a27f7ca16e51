"""Several actor ranks learn what one rank learns: replicated or sharded, any policy, and across checkpoints."""

from dataclasses import replace

import pytest

from rlinf.algorithms.config import AlgorithmConfig
from rlinf.config.schema import FsdpConfig, MixedPrecisionConfig
from rlinf.runtime.process_group import disconnect
from rlinf.training.optimizer_files import load_state
from tests.actor_jobs import GRPO, PPO, Case, alone, gradient_of_shards, largest_difference, nonfinite, train

REPLICATED, SHARDED = FsdpConfig(strategy="no_shard"), FsdpConfig(strategy="fsdp2")
BF16 = {"precision": "bf16"}
PI0 = Case("openpi")
CASES = {
    "pi0": PI0,
    "pi05, frozen prefix from the cache": Case("openpi", 1, cache=True),
    "pi0, joint log-probs, two cameras": Case("openpi", 2),
    "pi0, LoRA": Case("openpi", 3),
    "pi0, GRPO with masks": replace(PI0, algorithm=GRPO, masked=True),
    "openvla": Case("openvla"),
    "openvla_oft, FiLM": Case("openvla_oft", 1, masked=True),
    "openvla_oft, LoRA on bf16": Case("openvla_oft", 2, changes=BF16),
}
BOUND = 1e-5


def agree(one, others) -> None:
    """Weights, and every metric but the gap, which looks at one micro batch of each rank."""
    for other in others:
        assert largest_difference(one, other) <= BOUND
        for name, value in one["metrics"].items():
            if name != "train/actor/logprob_gap":
                assert other["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-4, nan_ok=True), name
        assert other["metrics"] == others[0]["metrics"]
    assert one["metrics"]["train/actor/optimizer_steps"] == 2


@pytest.fixture(scope="module")
def one_rank():
    """Runs on one rank, each made once."""
    made = {}

    def get(case: Case):
        key = repr(replace(case, fsdp=SHARDED))
        if key not in made:
            made[key] = alone(case)
        return made[key]

    return get


LONG = ("pi0, joint log-probs, two cameras", "openvla_oft, LoRA on bf16")  # before a release only
assert set(LONG) < set(CASES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in CASES]
)
def test_two_ranks_with_a_shard_each_learn_what_one_does(ranks, one_rank, name):
    one, two = one_rank(CASES[name]), ranks.run(2, train, CASES[name])
    agree(one, two)
    print(f"max |Δ| = {max(largest_difference(one, rank) for rank in two):.1e}")
    assert one["moved"] > 20 * BOUND  # it did learn
    assert max(rank["stepped"] for rank in two) < 0.7 * one["stepped"]


@pytest.mark.parametrize("name", ["pi0", "pi0, LoRA", "pi0, GRPO with masks"])
def test_two_replicas_learn_what_one_does(ranks, one_rank, name):
    case = replace(CASES[name], fsdp=REPLICATED)
    one, two = one_rank(case), ranks.run(2, train, case)
    agree(one, two)
    print(f"max |Δ| = {max(largest_difference(one, rank) for rank in two):.1e}")
    assert [rank["stepped"] for rank in two] == [one["stepped"]] * 2


@pytest.mark.parametrize("size", [1, 3])
def test_other_numbers_of_shards(ranks, one_rank, size):
    agree(one_rank(PI0), ranks.run(size, train, PI0))


@pytest.mark.parametrize(
    "keys",
    [
        {"sharding_strategy": "shard_grad_op"},
        {"enable_gradient_accumulation": False},
        {"cpu_offload": True},
    ],
    ids=str,
)
def test_the_ways_to_shard_are_equal(ranks, one_rank, keys):
    agree(one_rank(PI0), ranks.run(2, train, replace(PI0, fsdp=replace(SHARDED, **keys))))


def test_recomputed_activations_are_equal(ranks, one_rank):
    agree(one_rank(PI0), ranks.run(2, train, replace(PI0, changes={"gradient_checkpointing": True})))


def test_one_rank_may_offload_without_a_group(one_rank):
    try:
        agree(one_rank(PI0), [alone(replace(PI0, fsdp=replace(SHARDED, cpu_offload=True)))])
    finally:
        disconnect()


@pytest.mark.parametrize(("model", "size"), [("openpi", 2), ("openvla", 1)])
def test_bf16_has_fp32_masters(ranks, tmp_path, model, size):
    """Parameters that stay fp32 in a bf16 policy are neither rounded nor given masters."""
    case = Case(model, changes=BF16)
    want, got = tmp_path / "alone", tmp_path / "sharded"
    alone(case, (0,), save=want)
    ranks.run(size, train, case, (0,), None, got)
    a, b = load_state(want, {}), load_state(got, {})
    assert a.keys() == b.keys()
    assert 0 < sum(key.endswith("/master") for key in a) < sum(key.endswith("/exp_avg") for key in a)
    assert all(a[key].dtype == b[key].dtype for key in a)
    masters = [float((a[key] - b[key]).abs().max()) for key in a if key.endswith("/master")]
    assert max(masters) <= BOUND


def test_gradients_may_travel_in_bf16(ranks, one_rank):
    reduced = replace(SHARDED, mixed_precision=MixedPrecisionConfig(reduce_dtype="bf16"))
    (rank, _), one = ranks.run(2, train, replace(PI0, fsdp=reduced), (0,)), alone(PI0, (0,))
    norm = one["metrics"]["train/actor/grad_norm"]
    assert rank["metrics"]["train/actor/grad_norm"] == pytest.approx(norm, rel=5e-3)
    assert rank["metrics"]["train/actor/grad_norm"] != pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("at_the_end", [True, False])  # gradients travel once, or after every micro batch
def test_micro_batches_add_up_in_fp32_also_where_gradients_travel_in_bf16(ranks, at_the_end):
    """A sum of 64 parts in bf16, of 8 bits, would lose percents; one rounding per rank on the way loses 2^-9."""
    reduced = MixedPrecisionConfig(reduce_dtype="bf16")
    case = replace(PI0, fsdp=replace(SHARDED, mixed_precision=reduced, enable_gradient_accumulation=at_the_end))
    (whole, _), (parts, _) = ranks.run(2, gradient_of_shards, PI0, 1), ranks.run(2, gradient_of_shards, case, 64)
    error = float((parts - whole).norm() / whole.norm())
    print(f"relative error {error:.1e}")
    assert error <= 2**-8


def test_ranks_stop_at_the_same_kl(ranks):
    case = replace(PI0, algorithm=AlgorithmConfig(update_epoch=4, target_kl=1e-4))
    one, two = alone(case), ranks.run(2, train, case)
    assert one["metrics"]["train/actor/optimizer_steps"] < 8
    steps = [rank["metrics"]["train/actor/optimizer_steps"] for rank in two]
    assert steps == [one["metrics"]["train/actor/optimizer_steps"]] * 2
    assert largest_difference(one, two[1]) <= BOUND


def test_critic_warm_up_leaves_the_policy_alone(ranks):
    case = replace(PI0, optim=replace(PI0.optim, critic_warmup_steps=3))
    one, two = alone(case), ranks.run(2, train, case)
    agree(one, two)


@pytest.mark.parametrize("fsdp", [REPLICATED, SHARDED], ids=["replicated", "sharded"])
def test_one_rank_with_a_bad_gradient_makes_all_skip_the_step(ranks, fsdp):
    for skipped, moved in ranks.run(2, nonfinite, replace(PI0, fsdp=fsdp, algorithm=PPO)):
        assert skipped == 2
        assert moved == 0.0


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("pi0", (SHARDED, 2), (SHARDED, 1)),
        ("pi0", (SHARDED, 2), (SHARDED, 2)),
        pytest.param("pi0", (SHARDED, 2), (SHARDED, 3), marks=pytest.mark.slow),
        ("pi0", (SHARDED, 1), (SHARDED, 2)),
        pytest.param("pi0", (REPLICATED, 2), (SHARDED, 3), marks=pytest.mark.slow),
        pytest.param("pi0, LoRA", (SHARDED, 2), (SHARDED, 3), marks=pytest.mark.slow),
        pytest.param("pi0, LoRA", (SHARDED, 3), (REPLICATED, 2), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_resumes_on_another_number_of_ranks(ranks, one_rank, tmp_path, name, before, after):
    case, folder = CASES[name], tmp_path / "actor"

    def run(setting, steps, **folders):
        fsdp, size = setting
        run_as = replace(case, fsdp=fsdp)
        if size == 1:
            return [alone(run_as, steps, **folders)]
        return ranks.run(size, train, run_as, steps, folders.get("load"), folders.get("save"))

    run(before, (0,), save=folder)
    resumed = run(after, (1,), load=folder)
    agree(one_rank(case), resumed)
    if before == after:
        assert largest_difference(run(after, (0, 1))[0], resumed[0]) == 0.0
