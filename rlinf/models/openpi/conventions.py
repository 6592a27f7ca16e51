"""How published π checkpoints read their robots: one row per `openpi.config_name`, torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataConvention:
    """How a published checkpoint reads its robot: one row per `config_name`."""

    pi05: bool
    action_horizon: int
    max_token_len: int
    asset_id: str  # folder of norm_stats.json inside the checkpoint
    cameras: int  # main, left wrist, right wrist: the first this many exist
    state_dim: int
    action_dim: int
    discrete_state: bool = False  # π0.5 only: the state is written into the prompt
    quantile_norm: bool = False  # q01/q99 to [-1, 1] instead of mean/std
    delta_mask: tuple[bool, ...] = ()  # action columns stored relative to the state
    adapt_to_pi: bool = False  # ALOHA joint signs and gripper geometry
    value_hidden: tuple[int, ...] = (512, 256, 128)
    action_std_floor: float = 0.05  # smallest deviation when statistics are fitted: columns that hardly move stay small


_ALOHA_DELTA = (True,) * 6 + (False,) + (True,) * 6 + (False,)
_MW, _CALVIN = "lerobot/metaworld_mt50", "InternRobotics/InternData-Calvin_ABC"
_MS, _RT = "physical-intelligence/maniskill", "physical-intelligence/robotwin"

CONVENTIONS: dict[str, DataConvention] = {
    "pi0_metaworld": DataConvention(False, 5, 48, _MW, 1, 4, 4),
    "pi05_metaworld": DataConvention(True, 5, 200, _MW, 1, 4, 4, quantile_norm=True),
    "pi0_calvin": DataConvention(False, 5, 48, _CALVIN, 2, 7, 7),
    "pi05_calvin": DataConvention(True, 5, 200, _CALVIN, 2, 7, 7, quantile_norm=True),
    "pi0_maniskill": DataConvention(False, 50, 48, _MS, 1, 8, 7, action_std_floor=0.005),  # metres, radians
    "pi05_maniskill": DataConvention(
        True, 10, 200, _MS, 1, 8, 7, quantile_norm=True, value_hidden=(1024, 512, 256), action_std_floor=0.005
    ),
    "pi0_aloha_robotwin": DataConvention(False, 50, 48, _RT, 3, 14, 14, delta_mask=_ALOHA_DELTA),
    "pi05_aloha_robotwin": DataConvention(
        True, 50, 200, _RT, 3, 14, 14, True, quantile_norm=True, delta_mask=_ALOHA_DELTA, adapt_to_pi=True
    ),
}
