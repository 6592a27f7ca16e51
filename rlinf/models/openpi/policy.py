"""π0 and π0.5 as a stochastic policy.

Letters: B rows, C actions executed, H denoised, A columns, D padded columns, N denoising steps, P prefix tokens.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Self, cast

import torch
from torch.nn import functional as F

from rlinf.data.noise import Noise
from rlinf.data.types import Observation, PolicyEval, PolicyOutput
from rlinf.errors import UserError
from rlinf.models import policy
from rlinf.models.checkpoint import load_weights, save_weights
from rlinf.models.config import ModelConfig
from rlinf.models.nn.gemma import KeyValue
from rlinf.models.openpi import flow, tokenizer
from rlinf.models.openpi.architecture import Architecture
from rlinf.models.openpi.config import ALL_CAMERAS, Config
from rlinf.models.openpi.heads import NoiseHead, StateValueHead, ValueHead
from rlinf.models.openpi.model import PiNet, Prefix
from rlinf.models.openpi.normalize import load_statistics, save_statistics
from rlinf.models.openpi.processor import Processor
from rlinf.models.openpi.sampler import Sampler
from rlinf.models.openpi.weights import HEADS, initialize, initialize_value_head, published_names

Tensor = torch.Tensor


class Policy(policy.Policy):
    """A flow model with a sampler, a critic and the robot's conventions around it."""

    def __init__(
        self,
        cfg: Config,
        device: torch.device | str = "cpu",
        *,
        arch: Architecture | None = None,
        tokenizer_file: Path = tokenizer.BUNDLED,
    ) -> None:
        """Network weights are left uninitialised: use `build`, or load them. `arch` overrides the sizes of `cfg`."""
        super().__init__()
        self.cfg, self.spec = cfg, cfg.spec()
        self.arch = arch = arch or cfg.architecture()
        self.tokenizer_model = tokenizer_file.read_bytes()  # kept: the folder may be gone when we save
        with torch.device("meta"):
            self.net = PiNet(arch)
        if cfg.stored_precision == "bf16":
            self.net.apply_bf16_rule()
        self.net.to_empty(device=device)
        self.net.vlm.requires_grad_(not cfg.freeze_vlm)
        options = cfg.openpi
        with torch.random.fork_rng(devices=[]):
            self.value_head = _value_head(cfg, arch)
            self.noise_head = None
            if options.noise_method == "flow_noise":
                low, high = options.noise_logvar_range
                self.noise_head = NoiseHead(arch.expert_width, cfg.noise_hidden(), arch.action_dim, (low, high))
        prompts = tokenizer.load_tokenizer(tokenizer_file, max_len=arch.max_token_len, vocab_size=arch.vocab_size)
        self.processor = Processor(cfg, arch, prompts)
        for part in (self.value_head, self.noise_head, self.processor):
            if part is not None:
                part.to(device)
        self.noise_level = options.noise_level
        self.set_global_step(0)

    @classmethod
    def build(cls, cfg: ModelConfig, device: torch.device, *, seed: int = 0) -> Self:
        """From `cfg.model_path`, or from random weights drawn from `seed`."""
        assert isinstance(cfg, Config)
        folder = None if cfg.model_path is None else Path(cfg.model_path).expanduser()
        if folder is not None and not folder.is_dir():
            raise UserError(f"actor.model.model_path={cfg.model_path} is not a folder")
        self = cls(cfg, device, tokenizer_file=tokenizer.find_tokenizer(folder, size=cfg.size))
        generator = torch.Generator(device).manual_seed(seed)
        if folder is None and cfg.size == "base":
            warnings.warn("actor.model.model_path is null: the base model starts from random weights", stacklevel=2)
        if folder is None:
            initialize(self.net, generator)
        if self.noise_head is not None:
            initialize(self.noise_head, generator)
        if self.value_head is not None:
            initialize_value_head(self.value_head, generator)
        if folder is not None:
            self.load_pretrained(folder)
        return self

    # ------------------------------------------------------------------ acting
    @torch.no_grad()
    def predict(self, obs: Observation, *, mode: Literal["train", "eval"], noise: Noise) -> PolicyOutput:
        """Actions for one chunk; in train mode with everything `evaluate` needs to score them again."""
        inputs = self.processor.encode(obs)
        sampler, shape = self.sampler(), (self.arch.action_horizon, self.arch.action_dim)
        if mode == "eval":
            prefix = self._prefix(inputs.images, inputs.tokens, inputs.token_valid)
            x = sampler.ode(prefix, inputs.state, noise.normal(shape)).x[:, -1]
            actions = self.processor.decode_actions(x, inputs.raw_state)
            return PolicyOutput(actions, torch.zeros_like(actions), None, {})
        index = None if sampler.joint else noise.integers(sampler.num_choices(ignore_last=self.cfg.openpi.ignore_last))
        start = noise.normal(shape)
        draws = noise.normal((sampler.num_steps if sampler.joint else 1, *shape))  # [B, N or 1, H, D]
        prefix = self._prefix(inputs.images, inputs.tokens, inputs.token_valid)
        chain = sampler.sample(prefix, inputs.state, start, lambda i: draws[:, i if sampler.joint else 0], index)
        rows = torch.arange(len(start), device=start.device)
        replay = {"images": inputs.images, "tokens": inputs.tokens, "token_valid": inputs.token_valid, "x": chain.x}
        features = chain.features
        if index is not None:
            replay |= {"x": torch.stack((chain.x[rows, index], chain.x[rows, index + 1]), 1), "index": index}
            if not self.cfg.openpi.upstream_values:
                features = features[rows, index][:, None]  # the value evaluate() will compute
        if inputs.state is not None:
            replay["state"] = inputs.state
        if self.cfg.value_input == "state":
            replay["critic_state"] = self._critic_state(obs)
        pooled = self.pool(prefix)
        return PolicyOutput(
            actions=self.processor.decode_actions(chain.x[:, -1], inputs.raw_state),
            logprobs=self.executed(chain.logprobs),
            values=self.critic(features, pooled, replay.get("critic_state")),
            replay=replay,
            cache=self._cache(prefix, pooled) if self.cfg.freeze_vlm else None,
        )

    def evaluate(
        self,
        replay: dict[str, Tensor],
        *,
        values: bool,
        entropy: bool,
        cache: dict[str, Tensor] | None = None,
    ) -> PolicyEval:
        """Log-probs, values and entropy of stored actions under the current weights."""
        if cache is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.cfg.freeze_vlm):
                prefix = self._prefix(replay["images"], replay["tokens"], replay["token_valid"])
                pooled = self.pool(prefix)
        else:
            prefix, pooled = self._from_cache(cache, replay["token_valid"])
        score = self.sampler().score(prefix, replay.get("state"), replay["x"], replay.get("index"))
        return PolicyEval(
            logprobs=self.executed(score.logprobs),
            values=self.critic(score.features, pooled, replay.get("critic_state")) if values else None,
            entropy=self.executed(score.entropy) if entropy else None,
        )

    @torch.no_grad()
    def value(self, obs: Observation, *, noise: Noise) -> Tensor:
        """f32 [B, 1]; an expert critic reads the features of pure noise, the first point of every chain."""
        if self.cfg.value_input is None:
            raise ValueError("this policy has no critic: set actor.model.add_value_head=True")
        if self.cfg.value_input == "state":
            return self._required(self.critic(None, None, self._critic_state(obs)))
        inputs = self.processor.encode(obs)
        prefix = self._prefix(inputs.images, inputs.tokens, inputs.token_valid)
        features = None
        if self.cfg.value_input == "expert":
            start = noise.normal((self.arch.action_horizon, self.arch.action_dim))
            first = torch.zeros(len(start), dtype=torch.long, device=start.device)
            features = self.sampler().transition(prefix, inputs.state, start, first).features[:, None]
        return self._required(self.critic(features, self.pool(prefix), None))

    # ------------------------------------------------------------------ imitation
    def sft_loss(self, obs: Observation, actions: Tensor, *, noise: Noise, draws: int = 1) -> Tensor:
        """Flow matching: mean squared velocity error over real columns, `draws` (noise, time) pairs per sample."""
        inputs = self.processor.encode(obs)
        target = self.processor.encode_actions(actions.to(self.processor.device), inputs.raw_state)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.cfg.freeze_vlm):
            prefix = self._prefix(inputs.images, inputs.tokens, inputs.token_valid, output=False)
            prefix = self.net.repeat(prefix, draws)
        eps = noise.normal((draws, *target.shape[1:])).flatten(0, 1)  # [B * draws, H, D]
        t = flow.beta_time(noise.uniform((draws,))).flatten()
        target = target.repeat_interleave(draws, 0)
        state = None if inputs.state is None else inputs.state.repeat_interleave(draws, 0)
        x = t[:, None, None] * eps + (1 - t[:, None, None]) * target
        velocity = self.net.velocity(self.net.suffix(prefix, state, x, t))
        error = velocity - (eps - target)
        return error[..., : self.cfg.action_dim].square().mean()

    def fit_statistics(self, states: Tensor | None, actions: Tensor) -> None:
        """Normalise by these data from now on."""
        self.processor.fit(states, actions)

    # ------------------------------------------------------------------ state
    def set_global_step(self, step: int) -> None:
        """Anneal the noise level."""
        if self.cfg.openpi.noise_anneal:
            start, end, steps = self.cfg.openpi.noise_params
            self.noise_level = flow.annealed_noise_level(step, start, end, steps)

    def sampler(self) -> Sampler:
        """The configured noise method at the current noise level."""
        options = self.cfg.openpi
        return Sampler(
            net=self.net,
            method=options.noise_method,
            num_steps=self.cfg.denoise_steps,
            noise_level=self.noise_level,
            joint=options.joint_logprob,
            squared_error=options.safe_get_logprob,
            noise_head=self.noise_head,
        )

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json, weights, normalisation statistics and tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name.removeprefix("net."): tensor for name, tensor in self.state_dict().items()}
        save_weights(tensors, folder)
        stats = {"state": self.processor.state_stats, "actions": self.processor.action_stats}
        save_statistics(folder, self.cfg.convention.asset_id, stats)
        (folder / tokenizer.FILE).write_bytes(self.tokenizer_model)
        content = {
            "model_type": "openpi",
            "size": self.cfg.size,
            "config_name": self.cfg.openpi.config_name,
            "architecture": asdict(self.arch),
        }
        (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")

    def load_pretrained(self, folder: Path) -> None:
        """Take weights and normalisation statistics of a folder."""
        self._check_saved_config(folder)
        self.load_weights(folder)
        row = self.cfg.convention
        self.processor.set_statistics(load_statistics(folder, row.asset_id, quantile=row.quantile_norm))

    def load_weights(self, file: Path) -> None:
        """Take the weights of a file or folder; a head it lacks altogether keeps its own."""
        lost = load_weights(self, file, rename=published_names(pi05=self.arch.pi05), optional=HEADS)
        for head in HEADS:
            parts = {name for name in self.state_dict() if name.startswith(head)}
            if 0 < len(parts & lost) < len(parts):
                raise UserError(f"{file} holds only a part of {head}*: {', '.join(sorted(parts & lost))} are missing")

    def _check_saved_config(self, folder: Path) -> None:
        """A folder of ours says which network it holds; published ones only by their shapes."""
        path = folder / "config.json"
        saved = json.loads(path.read_text()).get("architecture") if path.is_file() else None
        if saved is None:
            return
        for key, value in asdict(self.arch).items():
            if key != "max_token_len" and saved.get(key) != value:
                raise UserError(f"{path} says {key}={saved.get(key)}, this configuration needs {value}")

    # ------------------------------------------------------------------ prefix
    def _prefix(self, images: Tensor, tokens: Tensor, valid: Tensor, *, output: bool | None = None) -> Prefix:
        """Trim what is padding in the whole batch, then run the vision-language model."""
        if output is None:
            output = self.cfg.value_input == "vlm"
        if self.cfg.openpi.upstream_values:
            return self.net.prefix(
                images,
                tokens,
                valid,
                image_valid=self.processor.image_valid(len(images)),
                output=output,
                full_mask=True,
            )
        shortest, longest = torch.stack(valid.sum(1).aminmax()).tolist()
        padding = None if shortest == longest else valid[:, :longest]
        return self.net.prefix(images, tokens[:, :longest], padding, output=output)

    def pool(self, prefix: Prefix) -> Tensor | None:
        """The critic's view of the vision-language output, f32 [B, vlm width]."""
        if prefix.output is None:
            return None
        out, mode = prefix.output.float(), self.cfg.openpi.value_vlm_mode
        if mode == "first_token":
            return out[:, 0]
        if self.cfg.openpi.upstream_values:
            images = self.arch.image_tokens * self.cfg.num_cameras
            tokens = torch.cat((out[:, :images], out[:, -self.arch.max_token_len :]), 1)
            return tokens.mean(1) if mode == "mean_token" else out[:, -1]
        if mode == "last_token":
            return out[torch.arange(len(out), device=out.device), prefix.lengths() - 1]
        if prefix.valid is None:
            return out.mean(1)
        return (out * prefix.valid[..., None]).sum(1) / prefix.valid.sum(1, keepdim=True)

    def _cache(self, prefix: Prefix, pooled: Tensor | None) -> dict[str, Tensor]:
        """The prefix in fixed shapes: keys and values [B, layers, G, P, E] padded to the longest prompt allowed."""
        missing = self._prefix_length() - prefix.kv[0].k.shape[2]
        cache = {
            "k": F.pad(torch.stack([kv.k for kv in prefix.kv], 1), (0, 0, 0, missing)),
            "v": F.pad(torch.stack([kv.v for kv in prefix.kv], 1), (0, 0, 0, missing)),
        }
        return cache if pooled is None else cache | {"pooled": pooled}

    def _from_cache(self, cache: dict[str, Tensor], token_valid: Tensor) -> tuple[Prefix, Tensor | None]:
        images = self._prefix_length() - self.arch.max_token_len
        shortest, longest = torch.stack(token_valid.sum(1).aminmax()).tolist()
        end = images + longest
        kv = [
            KeyValue(k, v)
            for k, v in zip(cache["k"][..., :end, :].unbind(1), cache["v"][..., :end, :].unbind(1), strict=True)
        ]
        valid = None
        if shortest != longest or self.cfg.openpi.upstream_values:
            cameras = self.processor.image_valid(len(token_valid))
            if cameras is None:
                cameras = token_valid.new_ones(len(token_valid), images // self.arch.image_tokens)
            valid = torch.cat((cameras.repeat_interleave(self.arch.image_tokens, 1), token_valid[:, :longest]), 1)
        return self.net.attach(kv, valid), cache.get("pooled")

    def _prefix_length(self) -> int:
        cameras = ALL_CAMERAS if self.cfg.openpi.upstream_values else self.cfg.num_cameras
        return cameras * self.arch.image_tokens + self.arch.max_token_len

    # ------------------------------------------------------------------ read-out
    def executed(self, x: Tensor) -> Tensor:
        """[B, H, D] -> the part the simulator sees, [B, C, A]."""
        return x[:, : self.cfg.num_action_chunks, : self.cfg.action_dim]

    def critic(self, features: Tensor | None, pooled: Tensor | None, critic_state: Tensor | None) -> Tensor | None:
        """f32 [B, 1], averaged over the steps of features [B, 1 or N, H, W]."""
        if self.value_head is None:
            return None
        if self.cfg.value_input == "state":
            assert critic_state is not None
            return self.value_head(critic_state)
        if self.cfg.value_input == "vlm":
            assert pooled is not None
            view = pooled[:, None]
        else:
            assert features is not None
            view = (
                features[:, :, : self.cfg.num_action_chunks] if self.cfg.openpi.chunk_critic_input else features
            ).mean(2)
        if self.cfg.openpi.detach_critic_input:
            view = view.detach()
        return self.value_head(view).mean(1)

    def _critic_state(self, obs: Observation) -> Tensor:
        wanted = self.cfg.openpi.critic_state_dim
        if obs.critic_state is None or obs.critic_state.shape[1] != wanted:
            have = "none" if obs.critic_state is None else str(obs.critic_state.shape[1])
            raise UserError(
                f"actor.model.openpi.critic_state_dim={wanted}, but the simulator's critic state has {have}"
            )
        return obs.critic_state.to(self.processor.device, torch.float32)

    @staticmethod
    def _required(values: Tensor | None) -> Tensor:
        return cast(Tensor, values)


def _value_head(cfg: Config, arch: Architecture) -> ValueHead | StateValueHead | None:
    if cfg.value_input is None:
        return None
    if cfg.value_input == "state":
        if cfg.openpi.critic_state_dim < 1:
            raise UserError(
                "actor.model.openpi.value_input=state needs openpi.critic_state_dim, the simulator's state size"
            )
        return StateValueHead(cfg.openpi.critic_state_dim, cfg.value_hidden())
    width = arch.expert_width if cfg.value_input == "expert" else arch.vlm_width
    return ValueHead(width, cfg.value_hidden())
