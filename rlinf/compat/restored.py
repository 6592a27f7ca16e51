"""What `compat: rlinf-0.4` restores, row by row, and the code that switches it. Torch-free.

`docs/compat.md` prints this table; tests/compat/test_restored.py finds every switch, and no published class or function
without a row.
"""

from __future__ import annotations

from typing import NamedTuple


class Restored(NamedTuple):
    """A published behaviour that is put right here by default."""

    switches: tuple[str, ...]  # what holds the published behaviour, as module.name
    published: str
    here: str
    pinned: str  # golden vectors or tests that compare it


RESTORED: tuple[Restored, ...] = (
    Restored(
        ("rlinf.compat.formulas.PublishedAverager",),
        "Masked means at token level divide by the number of *mask* entries, before the mask is spread "
        "over the tokens: without trajectory weights the policy loss, its gradient and `approx_kl` come "
        "out larger by the number of tokens per mask entry, and `clip_fraction` can exceed 1",
        "means over the entries that are averaged; `clip_fraction` lies in [0, 1]",
        "`rl_algorithms`: losses, gradients and metrics of the masked token-level cases "
        "(`test_losses_in_compat_mode`; `test_losses` shows that the default differs by exactly that "
        "factor)",
    ),
    Restored(
        ("rlinf.compat.formulas.published_loss",),
        "`dual_cliped_ratio` is the mean ratio where the dual clip acted",
        "the share of entries it bounded",
        "`rl_algorithms`, metrics",
    ),
    Restored(
        ("rlinf.compat.formulas.published_loss",),
        "`value_clip_ratio` compares the value *after* clamping with the clip range, so only rounding "
        "makes it non-zero",
        "the share of values that moved further than `value_clip`",
        "`rl_algorithms`, metrics",
    ),
    Restored(
        ("rlinf.compat.formulas.published_targets",),
        "Advantages are normalised on each rank by itself",
        "over the unmasked entries of all ranks",
        "`tests/algorithms/test_advantages.py`; one rank is the same either way",
    ),
    Restored(
        ("rlinf.compat.envs.PublishedVecEnv", "rlinf.compat.formulas.published_targets"),
        "A success on the last allowed step counts as truncated too and is bootstrapped",
        "a success is an end, never a cut; an environment sets only one of the two flags",
        "`tests/algorithms/test_advantages.py`, `tests/compat/test_published_envs.py`",
    ),
    Restored(
        ("rlinf.compat.formulas.Formulas.first_warmup_step",),
        "The warm-up of a learning rate is `step / lr_warmup_steps`: the first training step learns nothing",
        "`(step + 1) / lr_warmup_steps`",
        "`tests/training/test_optim.py`, `tests/compat/test_published_envs.py`",
    ),
    Restored(
        ("rlinf.compat.formulas.num_rows",),
        "The mean entropy of a micro batch weighs by its rows, so that how a batch is cut changes the "
        "gradient of the entropy bonus",
        "by its unmasked entries",
        "`tests/workers/test_loop.py`",
    ),
    Restored(
        ("rlinf.compat.policies.PublishedOpenPi.averages_values",),
        "π0: the rollout stores the critic's value averaged over all denoising steps, while the update "
        "recomputes it at one step; the values it bootstraps on are such averages too",
        "both use the step whose log-prob is scored, so that old and new value agree at unchanged "
        "weights; with `joint_logprob` all three are averages",
        "`pi_rlinf_policy`: `prev_values` against `train_values`; `tests/models/test_openpi_policy.py`",
    ),
    Restored(
        ("rlinf.compat.policies.PublishedOpenPi.pool",),
        "π0.5: `mean_token` averages the vision-language output over padded prompt slots, and over black "
        "images in place of missing cameras",
        "over valid tokens; missing cameras are never computed",
        "`pi_rlinf_policy`, π0.5 cases",
    ),
    Restored(
        ("rlinf.compat.policies.PublishedTopK",),
        "OpenVLA, OpenVLA-OFT: updates rank the whole vocabulary for `top_k`, so that a bin drawn in the "
        "rollout may be impossible",
        "updates rank the 256 action bins, as rollouts do, and keep the drawn one",
        "`openvla_rlinf_policy`, `openvla_oft_rlinf`: `train_logprobs`",
    ),
    Restored(
        ("rlinf.compat.policies.PublishedOpenVlaOft",),
        "OpenVLA-OFT `official`: the critic counts its position from the end of the padded sequence, so "
        "it reads a slot, `</s>` or a pad",
        "the last prompt token",
        "`openvla_oft_rlinf_official`: `prev_values`, `train_values`",
    ),
    Restored(
        ("rlinf.simulators.calvin.starts.geometry",),
        "CALVIN: scenes A, B and C start from scene D's positions; blocks of B and C fall out of the "
        "cabinet, C's door stands beyond its joint, a block of B lies on the button",
        "positions that fit the scene ([calvin.md](calvin.md#scenes-a-to-c))",
        "`calvin_rollouts`: the stored starts (`test_starts_are_the_published_ones_in_compat_mode`)",
    ),
    Restored(
        ("rlinf.simulators.calvin.suite.Options.looks_after_subtask",),
        "CALVIN, `protocol: official`: after a solved subtask the rest of the chunk is played",
        "the policy looks again at once, as with the benchmark's own evaluator",
        "`tests/envs/test_calvin.py::test_a_solved_subtask_ends_the_chunk_in_the_official_protocol`",
    ),
    Restored(
        ("rlinf.simulators.robotwin.scene.Scene.told",),
        "RoboTwin: the instruction names the arms and objects of the first seed that a scene was made with, whatever "
        "it plays",
        "those of the seed that is played",
        "`tests/envs/test_robotwin.py::test_as_published_the_first_seed_is_described`",
    ),
    Restored(
        ("rlinf.simulators.robotwin.scene.Scene.attempt",),
        "RoboTwin: an unstable seed is followed by the next number, which another trial may play, too",
        "by a seed of no list, within a bound that is kept either way",
        "`tests/envs/test_robotwin.py::test_as_published_the_first_seed_is_described`",
    ),
)
