"""The `algorithm:` block, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rlinf.typed import Count, Share, Weight, Within

Level = Literal["chunk_level", "action_level", "token_level"]
Return = Annotated[float, Within(-1e6, 1e6)]  # simulators may pay negative rewards


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How experience becomes a gradient. T chunks, B envs, C actions per chunk, A action dims."""

    adv_type: str = "gae"
    """Advantage estimator: gae, grpo, one of an installed package, or the dotted path of your own function."""
    loss_type: str = "actor_critic"
    """Loss: actor_critic (PPO with a critic), actor (no critic, GRPO), decoupled_actor_critic (stale experience), or
    one of your own, as for adv_type."""
    group_size: Count = 1
    """Envs that share a start; GRPO compares members of a group. Must equal env.train.group_size."""
    reward_type: Literal["chunk_level", "action_level"] = "chunk_level"
    """One reward per chunk (summed over its actions) or one per action."""
    logprob_type: Level = "chunk_level"
    """Probability ratio per chunk (summed over C and A), per action (over A) or per token."""
    entropy_type: Level = "token_level"
    """Entropies of tokens, or their sums over an action or a chunk; π0 and π0.5 have one mean per chunk in any case."""
    update_epoch: Annotated[int, Within(1, 10**6)] = 1
    """Passes over the rollout per training step."""
    gamma: Share = 0.99
    """Discount per chunk (chunk_level) or per action (action_level)."""
    gae_lambda: Share = 0.95
    """GAE trace decay."""
    normalize_advantages: bool = True
    """Shift and scale advantages to mean 0, std 1 over all unmasked entries of all ranks (GAE only)."""
    clip_ratio_low: Share = 0.2
    """Lower clip: ratio >= 1 - low."""
    clip_ratio_high: Annotated[float, Within(0, 1000)] = 0.2
    """Upper clip: ratio <= 1 + high."""
    dual_clip: bool = False
    """Bound the loss of negative advantages by clip_ratio_c * |A|; the published runs had it off."""
    clip_ratio_c: Annotated[float, Within(1, 1e6)] = 3.0
    """The dual-clip constant; inert unless dual_clip."""
    clip_log_ratio_min: Annotated[float, Within(-100, 0)] | None = None
    """Lower bound on new - old log-prob before the exponential; null for none."""
    clip_log_ratio_max: Annotated[float, Within(0, 80)] | None = None
    """Upper bound on new - old log-prob before the exponential; null for none."""
    behave_weight_threshold: Annotated[float, Within(0, 1e6)] | None = None
    """decoupled_actor_critic: entries whose proximal/behaviour ratio exceeds this are dropped; null keeps all."""
    value_clip: Weight = 0.2
    """Clip range of the value update."""
    huber_delta: Annotated[float, Within(1e-6, 1e6)] = 10.0
    """Where the value loss turns linear."""
    value_coef: Weight = 1.0
    """Weight of the critic loss in the total."""
    entropy_bonus: Weight = 0.0
    """Weight of the entropy bonus; the entropy is logged with any weight."""
    target_kl: Annotated[float, Within(1e-9, 1e6)] | None = None
    """Stop the update epochs of a step once approx_kl of a global batch exceeds 1.5 x this; null never stops."""
    bootstrap_type: Literal["standard", "always"] = "standard"
    """With auto_reset: add gamma * V(final observation) on truncation (standard) or on any end (always)."""
    filter_rewards: bool = False
    """Drop groups whose mean return lies outside the bounds below."""
    rewards_lower_bound: Return = 0.1
    """filter_rewards: smallest mean return of a group that is learnt from."""
    rewards_upper_bound: Return = 0.9
    """filter_rewards: largest mean return of a group that is learnt from."""
    reward_coef: Weight = 1.0
    """Reward of a success; env.train.reward_coef refers to it."""
