"""Importing this file registers every published id with ManiSkill and gymnasium.

`gym.make("PutOnPlateInScene25Main-v3", num_envs=128, obj_set="train", obs_mode="rgb+segmentation")` then works;
`reset(options={"episode_id": ids, "env_idx": rows})` begins episodes, both being optional.
"""

from __future__ import annotations

from rlinf.simulators.maniskill.tasks import ENV_IDS
from rlinf.simulators.vulkan import choose_driver

choose_driver()  # SAPIEN takes its driver when it is imported

from mani_skill.utils.registration import register_env  # noqa: E402

from rlinf.simulators.maniskill.gpu.environment import PutOnPlate  # noqa: E402

MAX_EPISODE_STEPS = 80

for _env_id in ENV_IDS:
    register_env(_env_id, max_episode_steps=MAX_EPISODE_STEPS, task=_env_id)(PutOnPlate)
