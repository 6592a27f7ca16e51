"""π0 and π0.5 as a stochastic policy.

Letters: B rows, C actions executed, H denoised, A columns, D padded columns, N denoising steps, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch.nn import functional as F

from rlinf.data.noise import Noise
from rlinf.data.types import Observation, PolicyEval, PolicyOutput
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig
from rlinf.models.files import tokenizers
from rlinf.models.files.policy_folder import CONFIG, read_json_if_there
from rlinf.models.files.pretrained import PretrainedPolicy
from rlinf.models.files.weights import Rename, SideFiles
from rlinf.models.images import resize_with_pad
from rlinf.models.inputs import Prompts
from rlinf.models.nn.graphs import GradientRecorder, Recorder
from rlinf.models.nn.initialize import initialize_value_head
from rlinf.models.nn.packed import pack
from rlinf.models.nn.recompute import set_checkpointing
from rlinf.models.openpi import flow, prefix_cache
from rlinf.models.openpi.architecture import VLM, Architecture
from rlinf.models.openpi.config import Config
from rlinf.models.openpi.heads import NoiseHead, make_value_head
from rlinf.models.openpi.imitation import flow_matching
from rlinf.models.openpi.model import PiNet, Prefix
from rlinf.models.openpi.processor import Inputs, Processor
from rlinf.models.openpi.prompts import load_tokenizer
from rlinf.models.openpi.sampler import Sampler
from rlinf.models.openpi.weights import HEADS, initialize, published_names
from rlinf.models.policy import ImageTokenLoss

Tensor = torch.Tensor
REPLAYED = ("index", "state", "critic_state")  # inputs of `predict` that `evaluate` needs again
PROMPT_STEP = 16  # recorded kernels need fixed shapes: mixed prompts are padded to a multiple of this


class Policy(PretrainedPolicy):
    """A flow model with a sampler, a critic and the robot's conventions around it."""

    cfg: Config
    net: PiNet
    heads = HEADS
    moves_observations = True

    def __init__(
        self,
        cfg: Config,
        device: torch.device | str = "cpu",
        *,
        arch: Architecture | None = None,
        tokenizer_file: Path = tokenizers.BUNDLED,
    ) -> None:
        """Network weights are left uninitialised: use `build`, or load them. `arch` overrides the sizes of `cfg`."""
        super().__init__(cfg, tokenizer_file)
        self.arch = arch = arch or cfg.architecture()
        with torch.device("meta"):
            self.net = PiNet(arch)
        if cfg.stored_precision == "bf16":
            self.net.apply_bf16_rule()
        self.net.to_empty(device=device)
        self.net.vlm.requires_grad_(not cfg.freeze_vlm)
        options = cfg.openpi
        with torch.random.fork_rng(devices=[]):
            self.value_head = make_value_head(cfg, arch)
            self.noise_head = None
            if options.noise_method == "flow_noise":
                low, high = options.noise_logvar_range
                self.noise_head = NoiseHead(arch.expert_width, cfg.noise_hidden(), arch.action_dim, (low, high))
        prompts = load_tokenizer(tokenizer_file, max_len=arch.max_token_len, vocab_size=arch.vocab_size)
        self.processor = Processor(cfg, arch, prompts)
        self.to(device)
        pack(self.net)
        set_checkpointing(self.net, cfg.gradient_checkpointing)
        self._act = Recorder(self._actions, self, enabled=cfg.cuda_graphs)
        # Launches cost more than the work in the small sizes, and in an expert behind a frozen prefix; recordings keep
        # the memory of their activations. Dropout and recomputation cannot be recorded.
        plain, small = cfg.cuda_graphs and not (cfg.is_lora or cfg.gradient_checkpointing), cfg.size != "base"
        self._imitate = GradientRecorder(self._imitation, self, enabled=plain and small)
        self._score = GradientRecorder(self._evaluation, self, enabled=plain and (small or cfg.freeze_vlm))
        self.noise_level = options.noise_level
        self.set_global_step(0)

    @classmethod
    def unloaded(cls, cfg: ModelConfig, device: torch.device, folder: Path | None) -> Self:
        """The network of `cfg`, uninitialised, with the folder's tokenizer."""
        assert isinstance(cfg, Config)
        return cls(cfg, device, tokenizer_file=_tokenizer_file(cfg, folder))

    @classmethod
    def unloaded_path(cls, cfg: ModelConfig, folder: Path | None) -> Processor:
        """The processor alone."""
        assert isinstance(cfg, Config)
        arch = cfg.architecture()
        file = _tokenizer_file(cfg, folder)
        return Processor(cfg, arch, load_tokenizer(file, max_len=arch.max_token_len, vocab_size=arch.vocab_size))

    def draw_weights(self, generator: torch.Generator, *, net: bool) -> None:
        """Random weights of the heads and, where asked, of the network."""
        if net:
            initialize(self.net, generator)
        if self.noise_head is not None:
            initialize(self.noise_head, generator)
        if self.value_head is not None:
            initialize_value_head(self.value_head, generator)

    def forget_recordings(self) -> None:
        """Free all recordings; the next calls record anew."""
        super().forget_recordings()
        self._imitate.clear()
        self._score.clear()

    def unadapted(self) -> tuple[str, ...]:
        """A frozen vision-language model gets no adapters: its cached prefix must stay valid."""
        return (VLM,) if self.cfg.freeze_vlm else ()

    # ------------------------------------------------------------------ acting
    @torch.no_grad()
    def predict(self, obs: Observation, *, mode: Literal["train", "eval"], noise: Noise) -> PolicyOutput:
        """Actions for one chunk; in train mode with everything `evaluate` needs to score them again."""
        train = mode == "train"
        inputs = self.processor.encode(obs) if train else self.processor.read(obs)  # nothing of the latter is kept
        sampler, shape = self.sampler(), (self.arch.action_horizon, self.arch.action_dim)
        given = self._observed(inputs)
        if train and self.cfg.value_input == "state":
            given["critic_state"] = self._critic_state(obs)
        if train and not sampler.joint:
            given["index"] = noise.integers(sampler.num_choices(ignore_last=self.cfg.openpi.ignore_last))
        given["start"] = (noise if train else noise.on_host()).normal(shape)
        if train:
            draws = shape if sampler.together is None else (1, self.arch.action_dim)
            given["draws"] = noise.normal((sampler.num_steps if sampler.joint else 1, *draws))  # [B, N or 1, H or 1, D]
            given["table"] = torch.stack(tuple(sampler.weights(inputs.images.device)))  # [4, N]; noise levels change
        raw_state = None  # before the call below, as the host waits for such a copy
        if self.relative_actions:
            assert inputs.raw_state is not None
            raw_state = inputs.raw_state.to(self.processor.device)
        out = self._act(given, train=train)
        actions = self.processor.to_simulator(out["actions"], raw_state)
        if not train:
            return PolicyOutput(actions, torch.zeros_like(actions), None, {})
        prompts = inputs.prompts
        replay = {"images": inputs.images, "tokens": prompts.ids, "token_valid": prompts.valid, "x": out["x"]}
        replay |= {name: t for name, t in given.items() if name in REPLAYED and t is not None}
        cache = {name: t for name, t in out.items() if name in prefix_cache.NAMES}
        return PolicyOutput(actions, out["logprobs"], out.get("values"), replay, cache or None)

    def _actions(self, given: dict[str, Tensor], *, train: bool) -> dict[str, Tensor]:
        """A call of `predict` as a function of tensors, which a GPU records: nothing random, nothing waited for.

        Gives the executed `actions`, un-normalised, and, to train, the scored points `x`, log-probs, values and the
        prefix cache.
        """
        sampler, state, start = self.sampler(), given.get("state"), given["start"]
        prefix = self.prefix(given["images"], given["tokens"], given.get("valid"))
        if not train:
            return {"actions": self.processor.unnormalize_actions(sampler.end(prefix, state, start))}
        index, draws = given.get("index"), given["draws"]
        sampler = replace(sampler, table=flow.Weights(*given["table"]))
        chain = sampler.sample(prefix, state, start, lambda i: draws[:, i if sampler.joint else 0], index)
        x, pooled = chain.x, self.pool(prefix)
        if index is not None:
            rows = torch.arange(len(start), device=start.device)
            x = torch.stack((x[rows, index], x[rows, index + 1]), 1)
        actions = self.processor.unnormalize_actions(chain.x[:, -1])
        out = {"actions": actions, "x": x, "logprobs": self.executed(sampler.logprobs(chain, index))}
        values = self.critic(self.rollout_features(chain.features, index), pooled, given.get("critic_state"))
        if values is not None:
            out["values"] = values
        return out | (prefix_cache.store(prefix, pooled, self.prefix_length()) if self.cfg.freeze_vlm else {})

    def evaluate(
        self, replay: dict[str, Tensor], *, values: bool, entropy: bool, cache: dict[str, Tensor] | None = None
    ) -> PolicyEval:
        """Log-probs, values and entropy of stored actions under the current weights.

        The entropy, [B, 1, 1], is a mean over denoising steps, actions and columns, as published at every level.
        """
        sampler, x = self.sampler(), replay["x"]
        prompts = Prompts.stored(replay["tokens"], replay["token_valid"], pads_last=True)
        tokens, valid = prompts.trimmed(step=PROMPT_STEP if x.is_cuda and self._score.enabled else 1)
        given = {"x": x, "valid": valid} | {name: replay.get(name) for name in REPLAYED}
        if cache is None:
            given |= {"images": replay["images"], "tokens": tokens}
        else:
            given |= prefix_cache.trimmed(cache, replay["tokens"].shape[1] - tokens.shape[1])
        given["table"] = torch.stack(tuple(sampler.weights(x.device)))  # [4, N]; noise levels change
        found = iter(self._score(given, values=values, entropy=entropy))
        return PolicyEval(
            logprobs=next(found),
            values=next(found) if values and self.value_head is not None else None,
            entropy=next(found) if entropy else None,
        )

    def _evaluation(self, given: dict[str, Tensor], *, values: bool, entropy: bool) -> tuple[Tensor, ...]:
        """A call of `evaluate` as a function of tensors, which a GPU records: log-probs, and the others as asked."""
        cache = {name: given[name] for name in prefix_cache.NAMES if name in given}
        if cache:
            prefix, pooled = self.cached_prefix(cache, given.get("valid"))
        else:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.cfg.freeze_vlm):
                prefix = self.prefix(given["images"], given["tokens"], given.get("valid"))
                pooled = self.pool(prefix)
        sampler = replace(self.sampler(), table=flow.Weights(*given["table"]))
        found = self._scored(sampler, prefix, pooled, given, values=values, entropy=entropy)
        return tuple(tensor for tensor in (found.logprobs, found.values, found.entropy) if tensor is not None)

    def _scored(
        self,
        sampler: Sampler,
        prefix: Prefix,
        pooled: Tensor | None,
        replay: dict[str, Tensor],
        *,
        values: bool,
        entropy: bool,
    ) -> PolicyEval:
        """Stored actions behind a prefix."""
        score = sampler.score(prefix, replay.get("state"), replay["x"], replay.get("index"))
        return PolicyEval(
            logprobs=self.executed(score.logprobs),
            values=self.critic(score.features, pooled, replay.get("critic_state")) if values else None,
            entropy=self.executed(score.entropy).mean((1, 2), keepdim=True) if entropy else None,
        )

    @torch.no_grad()
    def value(self, obs: Observation, *, noise: Noise) -> Tensor:
        """Critic value f32 [B, 1], which means what the values of rollouts and updates mean.

        An expert critic reads the features of pure noise, where every chain starts, or of all points of the
        deterministic path from it, where values are means over the denoising steps.
        """
        if self.cfg.value_input is None:
            raise ValueError("this policy has no critic: set actor.model.add_value_head=True")
        features = pooled = critic_state = None
        if self.cfg.value_input == "state":
            critic_state = self._critic_state(obs)
        else:
            inputs, sampler = self.processor.encode(obs), self.sampler()
            prefix = self.prefix(inputs.images, *self._trimmed(inputs))
            pooled = self.pool(prefix)
            if self.cfg.value_input == "expert":
                start = noise.normal((self.arch.action_horizon, self.arch.action_dim))
                steps = sampler.num_steps if self.averages_values else 1
                features = sampler.ode(prefix, inputs.state, start, steps=steps).features
        values = self.critic(features, pooled, critic_state)
        assert values is not None
        return values

    # ------------------------------------------------------------------ imitation
    def resize_images(self, images: Tensor) -> Tensor:
        """u8 [B, H, W, 3] -> u8 [B, size, size, 3]."""
        return resize_with_pad(images, self.arch.image_size)

    @property
    def action_horizon(self) -> int:
        """H of the architecture."""
        return self.arch.action_horizon

    @property
    def image_width(self) -> int | None:
        """Width of an image token; None where the vision-language model is frozen, which no such loss could teach."""
        return None if self.cfg.freeze_vlm else self.arch.vlm_width

    def sft_loss(
        self,
        obs: Observation,
        actions: Tensor,
        *,
        noise: Noise,
        is_target: Tensor | None = None,
        draws: int = 1,
        image_token_loss: ImageTokenLoss | None = None,
    ) -> Tensor:
        """Flow matching: mean squared velocity error, `draws` (noise, time) pairs per sample.

        Padded columns count too, with target 0: the sampler denoises them with the others. `actions` [B, 1..H, A] may
        be fewer than the horizon; those that are missing are not learned.
        """
        inputs, device = self.processor.encode(obs), self.processor.device
        target = self.processor.encode_actions(actions.to(device), inputs.raw_state)
        if is_target is None:
            is_target = torch.ones(actions.shape[:2], dtype=torch.bool)
        given = self._observed(inputs)
        given["target"] = target
        given["is_target"] = F.pad(is_target.to(device), (0, self.action_horizon - actions.shape[1]))
        given["eps"] = noise.normal((draws, *target.shape[1:]))  # [B, draws, H, D]
        given["t"] = flow.beta_time(noise.uniform((draws,)))  # [B, draws]
        loss, image_token = self._imitate(given)
        return loss if image_token_loss is None else loss + image_token_loss(image_token)

    def _imitation(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Flow matching as a function of tensors, which a GPU records: the loss, and the mean image token [B, W]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.cfg.freeze_vlm):
            prefix = self.prefix(given["images"], given["tokens"], given.get("valid"), output=False)
            assert prefix.image_tokens is not None
            image_token = prefix.image_tokens.mean(1).float()
        learned = {name: given[name] for name in ("target", "is_target", "eps", "t")}
        return flow_matching(self.net, prefix, given.get("state"), **learned), image_token

    @property
    def relative_actions(self) -> bool:
        """Whether config_name stores actions relative to the state."""
        return bool(self.cfg.convention.delta_mask)

    def fit_statistics(self, states: Tensor | None, actions: Tensor) -> None:
        """Normalise by these data from now on."""
        self.processor.fit(states, actions)
        self.forget_recordings()  # they read the statistics

    # ------------------------------------------------------------------ noise
    def set_global_step(self, step: int) -> None:
        """Set the noise level of this training step, where it is annealed."""
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
            together=self.cfg.num_action_chunks if options.noise_per == "chunk" else None,
            noise_head=self.noise_head,
        )

    # ------------------------------------------------------------------ saving and loading
    def published_names(self, side: SideFiles = ()) -> Rename:
        """From openpi's, LeRobot's and older names."""
        return published_names(pi05=self.arch.pi05)

    def config_json(self) -> dict[str, Any]:
        """What config.json says of the network."""
        return {
            "model_type": "openpi",
            "size": self.cfg.size,
            "config_name": self.cfg.openpi.config_name,
            "architecture": asdict(self.arch),
        }

    def save_extras(self, folder: Path) -> None:
        """Write normalisation statistics."""
        self.processor.save(folder)

    def prepare_extras(self, folder: Path) -> Callable[[], None]:
        """Check the folder's statistics."""
        take = self.processor.prepare(folder)

        def take_and_forget() -> None:
            take()
            self.forget_recordings()  # they read the statistics

        return take_and_forget

    def check_folder(self, folder: Path) -> None:
        """A folder that rlinf saved says which network it holds; published ones are known by their shapes only."""
        super().check_folder(folder)
        path, saved = folder / CONFIG, read_json_if_there(folder / CONFIG).get("architecture")
        if saved is None:
            return
        if not isinstance(saved, dict):
            raise UserError(f"{path}: architecture={str(saved)[:60]} must be an object")
        for key, value in asdict(self.arch).items():
            if key != "max_token_len" and saved.get(key) != value:
                raise UserError(f"{path} says {key}={saved.get(key)}, this configuration needs {value}")

    # ------------------------------------------------------------------ prefix
    def _trimmed(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Prompt slots [B, L] that any row uses, and which count (None: all); a GPU gets few different lengths."""
        return inputs.prompts.trimmed(step=PROMPT_STEP if self.processor.device.type == "cuda" else 1)

    def _observed(self, inputs: Inputs) -> dict[str, Tensor | None]:
        """What recorded functions get of an observation."""
        tokens, valid = self._trimmed(inputs)
        return {"images": inputs.images, "tokens": tokens, "valid": valid, "state": inputs.state}

    def prefix(self, images: Tensor, tokens: Tensor, valid: Tensor | None, *, output: bool | None = None) -> Prefix:
        """Run the vision-language model on images [B, n, ...] and a trimmed prompt [B, L].

        `output` asks for its last hidden states too; by default a critic that pools them decides.
        """
        output = self.cfg.value_input == "vlm" if output is None else output
        return self.net.prefix(images, tokens, valid, output=output)

    def pool(self, prefix: Prefix) -> Tensor | None:
        """The critic's view of the vision-language output, f32 [B, vlm width]."""
        if prefix.output is None:
            return None
        out, mode = prefix.output.float(), self.cfg.openpi.value_vlm_mode
        if mode == "first_token":
            return out[:, 0]
        if mode == "last_token":
            return out[torch.arange(len(out), device=out.device), prefix.lengths() - 1]
        if prefix.valid is None:
            return out.mean(1)
        return (out * prefix.valid[..., None]).sum(1) / prefix.valid.sum(1, keepdim=True)

    def prefix_length(self) -> int:
        """Tokens of the longest prefix, which the prefix cache has room for."""
        return self.cfg.num_cameras * self.arch.image_tokens + self.arch.max_token_len

    def cached_prefix(self, cache: dict[str, Tensor], valid: Tensor | None) -> tuple[Prefix, Tensor | None]:
        """Prefix and pooled view from trimmed rows of `PolicyOutput.cache`; bool [B, L] marks valid prompt slots."""
        return prefix_cache.restore(self.net, cache, valid)

    # ------------------------------------------------------------------ actions and values
    def executed(self, x: Tensor) -> Tensor:
        """[B, H, D] -> the actions and columns that are executed, [B, C, A]."""
        return x[:, : self.cfg.num_action_chunks, : self.cfg.action_dim]

    @property
    def averages_values(self) -> bool:
        """Whether the value of an expert critic in a rollout is the mean over all denoising steps."""
        return self.cfg.openpi.joint_logprob

    def rollout_features(self, features: Tensor, index: Tensor | None) -> Tensor:
        """The expert features that a rollout's critic reads, of those of every step [B, N, H, W].

        Where one step, `index` [B], is scored, it is that step's alone: `evaluate` will compute the same value.
        """
        if self.averages_values:
            return features
        assert index is not None
        return features[torch.arange(len(index), device=index.device), index][:, None]

    def critic(self, features: Tensor | None, pooled: Tensor | None, critic_state: Tensor | None) -> Tensor | None:
        """f32 [B, 1] of whichever input the configured critic reads; None without one.

        Expert features [B, 1 or N, H, W] give a value per denoising step, which are averaged.
        """
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
            executed = self.cfg.num_action_chunks if self.cfg.openpi.chunk_critic_input else None
            view = features[:, :, :executed].mean(2)
        if self.cfg.openpi.detach_critic_input:
            view = view.detach()
        return self.value_head(view).mean(1)

    def _critic_state(self, obs: Observation) -> Tensor:
        """The simulator's privileged state, f32 [B, K]."""
        wanted = self.cfg.openpi.critic_state_dim
        if obs.critic_state is None or obs.critic_state.shape[1] != wanted:
            have = "none" if obs.critic_state is None else str(obs.critic_state.shape[1])
            raise UserError(
                f"actor.model.openpi.critic_state_dim={wanted}, but the simulator's critic state has {have}"
            )
        return obs.critic_state.to(self.processor.device, torch.float32)


def _tokenizer_file(cfg: Config, folder: Path | None) -> Path:
    """The tokenizer of a checkpoint folder, or the bundled one."""
    names = (tokenizers.FILE, "paligemma_tokenizer.model")
    return tokenizers.find_tokenizer(folder, size=cfg.size, model="PaliGemma", names=names)
