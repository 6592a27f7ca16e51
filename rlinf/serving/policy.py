"""LoadedPolicy: a saved policy that acts, from Python (`rlinf.load_policy`) and behind `rlinf serve`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from rlinf.compat.keys import without_old_keys
from rlinf.data.noise import Noise, generator
from rlinf.data.types import Observation
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig, PolicySpec, available_models, find_config
from rlinf.models.files.policy_folder import SETTINGS, saved_settings
from rlinf.models.policy import Policy, find_policy
from rlinf.storage.step_checkpoint import newest_of_run, policy_folder, verify_ckpt_path
from rlinf.typed import convert

Array = np.ndarray


@dataclass
class Episode:
    """An episode that a policy acts in. Its n-th call draws noise of the seed and n alone, whoever shares the batch."""

    seed: int = 0
    calls: int = 0  # answered so far


class LoadedPolicy:
    """A policy that acts: camera images and an instruction in, a chunk of actions out."""

    def __init__(self, policy: Policy, seed: int = 0, *, folder: Path | None = None) -> None:
        self.policy, self.seed = policy, seed
        self.folder = folder  # that the policy was read from
        self._calls = 0  # since `reset`, of those without episodes

    @property
    def spec(self) -> PolicySpec:
        """What the policy reads and gives."""
        return self.policy.spec

    @property
    def device(self) -> torch.device:
        """Where the policy computes."""
        return next(self.policy.parameters()).device

    def act(
        self,
        images: Array,
        *,
        instruction: str | Sequence[str],
        state: Array | None = None,
        wrist_images: Array | None = None,
        episodes: Sequence[Episode] | None = None,
    ) -> Array:
        """Actions f32 [C, A] of the deterministic sampler, in the units of the robot; with a batch f32 [B, C, A].

        images: u8 [H, W, 3] or [B, H, W, 3]; wrist_images: u8 [N, h, w, 3] or [B, N, h, w, 3]; state: f32 [S] or
        [B, S]. With `episodes`, one per row, each row's noise is its episode's; otherwise it depends on the seed, the
        row and the number of calls since the last `reset`, and row 0 acts as `Episode(seed)` does.
        """
        single = images.ndim == 3
        texts = [instruction] * (1 if single else len(images)) if isinstance(instruction, str) else list(instruction)

        def tensor(x: Array | None) -> torch.Tensor | None:
            return None if x is None else torch.from_numpy(np.ascontiguousarray(x[None] if single else x))

        pixels = tensor(images)
        assert pixels is not None
        if len(texts) != len(pixels):
            raise ValueError(f"{len(texts)} instructions for {len(pixels)} images")
        if episodes is not None and len(episodes) != len(pixels):
            raise ValueError(f"{len(episodes)} episodes for {len(pixels)} images")
        obs = Observation(pixels, tensor(wrist_images), tensor(state), texts)
        if episodes is None:
            found = self._predict(obs, [(self.seed, row, self._calls) for row in range(len(texts))])
            self._calls += 1
        else:
            found = self.act_in(obs, episodes)
        actions = found.cpu().numpy()
        return actions[0] if single else actions

    def act_in(self, obs: Observation, episodes: Sequence[Episode]) -> torch.Tensor:
        """Actions f32 [B, C, A], one call of each row's episode; rows beyond `episodes` pad the batch and give none.

        They lie on the policy's device, which may still be computing them.
        """
        episodes = list(episodes)
        padded = episodes + episodes[:1] * (len(obs) - len(episodes))
        actions = self._predict(obs, [(episode.seed, 0, episode.calls) for episode in padded])[: len(episodes)]
        for episode in episodes:
            episode.calls += 1
        return actions

    def reset(self) -> None:
        """Begin a new episode: the next call without `episodes` draws the first call's noise."""
        self._calls = 0

    def _predict(self, obs: Observation, keys: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Actions f32 [B, C, A]; `keys` are the seed, row and call that each row's noise is drawn by."""
        device = self.device
        noise = Noise.of_rows([generator(seed, "eval", 0, row, call, 0) for seed, row, call in keys], device)
        with torch.no_grad():
            obs = obs if self.policy.moves_observations else obs.to(device)
            return self.policy.predict(obs, mode="eval", noise=noise).actions.float()


def load_policy(path: str | Path, *, device: str = "cpu", seed: int = 0, key: str = "path") -> LoadedPolicy:
    """The policy of a checkpoint (`global_step_N`, or a run folder's newest), of `rlinf sft` or of `rlinf export`.

    `key` is what errors call the path.
    """
    place, folder = _device(device), find_folder(path, key=key)
    cfg = stored_settings(folder)
    return LoadedPolicy(find_policy(cfg.model_type).build(cfg, place), seed, folder=folder)


def find_folder(path: str | Path, *, key: str) -> Path:
    """The policy folder that a path means, its files compared with the manifest of the checkpoint they lie in."""
    path = newest_of_run(str(path), key=key) or path
    verify_ckpt_path(str(path), key=key)
    folder = policy_folder(str(path))
    if folder is None:
        raise UserError(f"{key}={path} is a file; pass the folder global_step_N or a policy folder")
    return folder


def stored_settings(folder: Path) -> ModelConfig:
    """The model block that the policy in `folder` was built with, pointing at that folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no config.json, so it is no policy that rlinf saved")
    tree = saved_settings(folder)
    if "model_type" not in tree:
        raise UserError(f"{path} has no entry {SETTINGS!r}: only policies that rlinf saved can be opened")
    if tree["model_type"] not in available_models():
        available = ", ".join(available_models())
        raise UserError(f"{path}: {SETTINGS}.model_type={tree['model_type']} is unknown; available: {available}")
    cfg = convert(find_config(tree["model_type"]), without_old_keys(tree), SETTINGS, lambda _: str(path))
    return replace(cfg, model_path=str(folder))


def _device(name: str) -> torch.device:
    """A device by name; UserError where this machine has none such."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"device={name} is no device of a policy; write cpu, cuda or cuda:1")
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(f"device={name}: torch finds {count} CUDA device{'' if count == 1 else 's'}; use cpu instead")
    return device
