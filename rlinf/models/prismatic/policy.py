"""OpenVLA and OpenVLA-OFT as stochastic policies over action bins; each adds how its tokens are decoded.

Letters: B rows, n cameras, L prompt slots, C actions a chunk, A columns, M = C * A action tokens, W width, V values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.nn import functional as F

from rlinf.data.noise import Noise
from rlinf.data.types import Observation, PolicyEval, PolicyOutput
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig
from rlinf.models.files import tokenizers
from rlinf.models.files.policy_folder import CONFIG, check_settings, saved_settings, write_json
from rlinf.models.files.pretrained import PretrainedPolicy
from rlinf.models.files.weights import Rename, SideFiles
from rlinf.models.inputs import Prompts
from rlinf.models.nn.graphs import Recorder
from rlinf.models.nn.initialize import initialize_value_head
from rlinf.models.nn.packed import pack
from rlinf.models.nn.recompute import set_checkpointing
from rlinf.models.nn.value_head import ValueHead
from rlinf.models.policy import ImageTokenLoss
from rlinf.models.prismatic import action_bins
from rlinf.models.prismatic.architecture import Architecture
from rlinf.models.prismatic.base_config import PrismaticConfig
from rlinf.models.prismatic.folder import PREPROCESSOR, config_json, preprocessor_json, read_architecture
from rlinf.models.prismatic.model import PrismaticNet
from rlinf.models.prismatic.processor import Inputs, Processor
from rlinf.models.prismatic.prompts import load_tokenizer
from rlinf.models.prismatic.sequence import Context, make_context
from rlinf.models.prismatic.weights import SIDE, initialize, published_names, side_files

Tensor = torch.Tensor
PROMPT_STEP = 8  # recorded kernels need fixed shapes: mixed prompts are padded to a multiple of this


@dataclass(frozen=True)
class Readout:
    """Hidden states [B, ..., W] that are read."""

    slots: Tensor  # [B, M, W]; slot i predicts token i
    value: Tensor  # [B, W]


class PrismaticPolicy(PretrainedPolicy):
    """A network with a sampler over bins, a critic and a robot's statistics around it."""

    cfg: PrismaticConfig
    net: PrismaticNet

    def __init__(
        self,
        cfg: PrismaticConfig,
        device: torch.device | str = "cpu",
        *,
        arch: Architecture | None = None,
        tokenizer_file: Path = tokenizers.BUNDLED,
    ) -> None:
        """Network weights are left uninitialised: use `build`, or load them. `arch` overrides the sizes of `cfg`."""
        super().__init__(cfg, tokenizer_file)
        self.arch = arch = arch or cfg.architecture()
        with torch.device("meta"):
            self.net = PrismaticNet(arch, cfg.parts())
            self.value_head = None
            if cfg.has_critic:
                hidden, outputs = cfg.value_hidden(), cfg.values_per_chunk
                self.value_head = ValueHead(arch.width, hidden, outputs, activation=nn.GELU, bias=False)
        if cfg.stored_precision == "bf16":
            self.net.to(torch.bfloat16)
        self.to_empty(device=device)
        tokenizer = load_tokenizer(tokenizer_file, max_len=cfg.prompt_slots, vocab_size=arch.vocab_size)
        self.processor = Processor(cfg, arch, tokenizer).to(device)
        pack(self.net)
        set_checkpointing(self.net, cfg.gradient_checkpointing)
        self._act = Recorder(self.act, self, enabled=cfg.cuda_graphs)

    @classmethod
    def unloaded(cls, cfg: ModelConfig, device: torch.device, folder: Path | None) -> Self:
        """The network of `cfg`, with the folder's tokenizer, norm epsilon and pixel statistics."""
        assert isinstance(cfg, PrismaticConfig)
        arch = cfg.architecture() if folder is None else read_architecture(folder, cfg.architecture())
        tokenizer_file = tokenizers.find_tokenizer(folder, size=cfg.size, model="Llama-2")
        return cls(cfg, device, arch=arch, tokenizer_file=tokenizer_file)

    @classmethod
    def unloaded_path(cls, cfg: ModelConfig, folder: Path | None) -> Processor:
        """The processor alone."""
        assert isinstance(cfg, PrismaticConfig)
        arch = cfg.architecture() if folder is None else read_architecture(folder, cfg.architecture())
        file = tokenizers.find_tokenizer(folder, size=cfg.size, model="Llama-2")
        return Processor(cfg, arch, load_tokenizer(file, max_len=cfg.prompt_slots, vocab_size=arch.vocab_size))

    def draw_weights(self, generator: torch.Generator, *, net: bool) -> None:
        """Random weights of the critic and, where asked, of the network."""
        if net:
            initialize(self.net, generator)
        if self.value_head is not None:
            initialize_value_head(self.value_head, generator)

    # ------------------------------------------------------------------ acting
    @torch.no_grad()
    def predict(self, obs: Observation, *, mode: Literal["train", "eval"], noise: Noise) -> PolicyOutput:
        """Actions for one chunk; in train mode with everything `evaluate` needs to score them again."""
        cfg, inputs, train = self.cfg, self.processor.encode(obs), mode == "train"
        stored = {"images": inputs.images, "ids": inputs.prompts.ids, "valid": inputs.prompts.valid}
        ids, valid = inputs.prompts.trimmed(step=PROMPT_STEP if inputs.images.is_cuda else 1)
        temperature = cfg.temperature_train if train else max(cfg.temperature_eval, 0.0)
        uniforms = noise.uniform((cfg.num_tokens,)) if temperature > 0 else None
        given = {"images": inputs.images, "ids": ids, "valid": valid, "state": inputs.state, "uniforms": uniforms}
        out = self._act(given, temperature=temperature, train=train)
        if "actions" in out:
            actions = self.processor.decode_actions(out["actions"])
        else:
            actions = self.processor.decode_bins(out["bins"])
        if not train or not self.spec.has_logprob:
            return PolicyOutput(actions, torch.zeros_like(actions), None, {})
        replay = stored | {"bins": out["bins"]}
        if inputs.state is not None:
            replay["state"] = inputs.state
        return PolicyOutput(actions, self._by_action(out["logprobs"]), out.get("values"), replay)

    def act(self, given: dict[str, Tensor], *, temperature: float, train: bool) -> dict[str, Tensor]:
        """One call as a function of tensors, which a GPU records: nothing random, nothing waited for.

        Given images, ids, valid, state and uniforms [B, M]; gives bins u8 [B, M] (an L1 head: normalised actions
        [B, C, A]) and, to train, logprobs f32 [B, M] and values f32 [B, V]. A temperature of 0 is greedy.
        """
        raise NotImplementedError

    def choose(self, hidden: Tensor, uniforms: Tensor | None, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Bins i64 [...] and their log-probs f32 [...] for hidden states [..., W]."""
        logits = self.net.action_logits(hidden)
        log_prob = action_bins.log_probs(logits, temperature=temperature or 1.0, top_k=self.cfg.top_k)
        bins = log_prob.argmax(-1) if uniforms is None else action_bins.draw(log_prob, uniforms)
        return bins, action_bins.chosen(log_prob, bins)

    # ------------------------------------------------------------------ scoring
    def read(self, context: Context, bins: Tensor | None) -> Readout:
        """The hidden states that predict each token of bins i64 [B, M]; without bins at least the critic's."""
        raise NotImplementedError

    def context(self, images: Tensor, ids: Tensor, valid: Tensor | None, state: Tensor | None) -> Context:
        """The embedded sequence before the actions."""
        return make_context(self.net, images, ids, valid, state, stop=self.stop_token)

    @property
    def stop_token(self) -> int | None:
        """The id after the last action token, where the network was trained with one in sight."""
        return self.processor.tokenizer.eos if self.cfg.has_stop_token else None

    def evaluate(
        self, replay: dict[str, Tensor], *, values: bool, entropy: bool, cache: dict[str, Tensor] | None = None
    ) -> PolicyEval:
        """Log-probs, values and entropy of stored bins under the current weights."""
        bins = replay["bins"].long()
        prompts = Prompts.stored(replay["ids"], replay["valid"], pads_last=False)
        read = self.read(self._context(Inputs(replay["images"], prompts, replay.get("state"))), bins)
        log_prob = self.score(read.slots, bins)
        return PolicyEval(
            logprobs=self._by_action(action_bins.chosen(log_prob, bins)),
            values=self.critic(read.value) if values else None,
            entropy=self._by_action(action_bins.entropy(log_prob)) if entropy else None,
        )

    def _context(self, inputs: Inputs) -> Context:
        ids, valid = inputs.prompts.trimmed()
        return self.context(inputs.images, ids, valid, inputs.state)

    def score(self, slots: Tensor, bins: Tensor) -> Tensor:
        """Log-probs f32 [B, M, 256] of every bin under the training sampler; `bins` i64 [B, M] were drawn."""
        logits, cfg = self.net.action_logits(slots), self.cfg
        return action_bins.log_probs(logits, temperature=cfg.temperature_train, top_k=cfg.top_k, keep=bins)

    @torch.no_grad()
    def value(self, obs: Observation, *, noise: Noise) -> Tensor:
        """Critic value f32 [B, V]; the same with and without actions."""
        values = self.critic(self.read(self._context(self.processor.encode(obs)), None).value)
        if values is None:
            raise ValueError("this policy has no critic: set actor.model.add_value_head=True")
        return values

    def critic(self, hidden: Tensor) -> Tensor | None:
        """[B, W] -> f32 [B, V]."""
        return None if self.value_head is None else self.value_head(hidden.float())

    def _by_action(self, tokens: Tensor) -> Tensor:
        """[B, M] -> [B, C, A]."""
        return tokens.unflatten(1, (-1, self.cfg.action_dim))

    # ------------------------------------------------------------------ imitation
    @property
    def image_width(self) -> int:
        """Width of an image token, which stands in the language model's sequence."""
        return self.arch.width

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
        """Mean cross entropy of the expert's bins, or mean absolute error of an L1 head; nothing is drawn."""
        if is_target is None:
            is_target = torch.ones(actions.shape[:2], dtype=torch.bool)
        target = self.processor.encode_actions(actions)
        bins = action_bins.encode(target).flatten(1)
        context = self._context(self.processor.encode(obs))
        slots = self.read(context, bins).slots
        if self.cfg.regression is not None:
            errors = (self.net.regress(slots) - target).abs()  # [B, C, A]
        else:
            logits = self.net.action_logits(slots).flatten(0, 1)
            errors = self._by_action(F.cross_entropy(logits, bins.flatten(), reduction="none").view(bins.shape))
        counted = is_target.to(errors.device)[..., None].expand_as(errors)
        loss = (errors * counted).sum() / counted.sum()
        return loss if image_token_loss is None else loss + image_token_loss(context.mean_image_token)

    def fit_statistics(self, states: Tensor | None, actions: Tensor) -> None:
        """Normalise by these data from now on."""
        self.processor.fit(states, actions)

    # ------------------------------------------------------------------ checkpoints
    def published_names(self, side: SideFiles = ()) -> Rename:
        """From any published layout to this policy's names."""
        return published_names(self.arch, side={prefix.removeprefix(SIDE).removesuffix(".") for _, prefix in side})

    def side_files(self, folder: Path) -> SideFiles:
        """Parts that fine-tuning runs keep in files of their own, as far as this network has them."""
        parts = self.cfg.parts()
        there = {"action_head": parts.regression is not None, "proprio_projector": parts.proprio_dim > 0}
        there["vision_backbone"] = parts.film
        return [(file, f"{SIDE}{part}.") for part, file in side_files(folder).items() if there[part]]

    def config_json(self) -> dict[str, Any]:
        """config.json in the published layout."""
        return config_json(self.arch)

    def save_extras(self, folder: Path) -> None:
        """Write statistics of actions and pixels."""
        if self.processor.table.entries:
            self.processor.table.save(folder)
        write_json(folder / PREPROCESSOR, preprocessor_json(self.arch))

    def check_folder(self, folder: Path) -> None:
        """Layout, head and normalisation change what the same weights mean."""
        super().check_folder(folder)
        keys = asdict(self.cfg)
        check_settings(folder, {key: keys[key] for key in ("implement_version", "action_head") if key in keys})
        kept = saved_settings(folder)
        kind = replace(self.cfg, statistics=kept.get("statistics")).statistics_kind
        if kept and kind != self.cfg.statistics_kind:
            raise UserError(
                f"{folder / CONFIG}: it was trained with statistics={kind}, this configuration has "
                f"actor.model.statistics={self.cfg.statistics_kind}"
            )

    def prepare_extras(self, folder: Path) -> Callable[[], None]:
        """Check that the folder is of this network, and read its statistics."""
        if read_architecture(folder, self.arch) != self.arch:
            raise UserError(
                f"{folder}: norm epsilon or pixel statistics differ from those of the folder this policy was built from"
            )
        return self.processor.prepare(folder)
