"""The linear policy itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors.torch import load_file, save_file

from my_lab.models.linear.config import Config
from rlinf.data.noise import Noise
from rlinf.data.types import Observation, PolicyEval, PolicyOutput
from rlinf.models.policy import Policy as BasePolicy


class Policy(BasePolicy):
    """mean = W s + b, with a fixed standard deviation."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, self.spec = cfg, cfg.spec()
        self.shape = (cfg.num_action_chunks, cfg.action_dim)
        self.mean = torch.nn.Linear(cfg.state_dim, cfg.num_action_chunks * cfg.action_dim)

    @classmethod
    def build(cls, cfg: Config, device: torch.device, *, seed: int = 0) -> Self:
        policy = cls(cfg)
        torch.nn.init.zeros_(policy.mean.bias)
        torch.nn.init.normal_(policy.mean.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
        if cfg.model_path is not None:
            policy.load_pretrained(Path(cfg.model_path))
        return policy.to(device)

    def predict(self, obs: Observation, *, mode: Literal["train", "eval"], noise: Noise) -> PolicyOutput:
        mean = self._mean(obs.states)
        actions = mean + self.cfg.std * noise.normal(self.shape) if mode == "train" else mean
        replay = {"states": obs.states, "actions": actions}
        return PolicyOutput(actions, self._logprobs(mean, actions), None, replay)

    def evaluate(self, replay, *, values: bool, entropy: bool, cache=None) -> PolicyEval:
        mean = self._mean(replay["states"])
        return PolicyEval(self._logprobs(mean, replay["actions"]), None, None)

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "linear"}))
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / "model.safetensors")

    def load_pretrained(self, folder: Path) -> None:
        self.load_state_dict(load_file(folder / "model.safetensors"))

    def _mean(self, states: torch.Tensor) -> torch.Tensor:
        return self.mean(states).unflatten(-1, self.shape)

    def _logprobs(self, mean: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(mean, self.cfg.std).log_prob(actions)
