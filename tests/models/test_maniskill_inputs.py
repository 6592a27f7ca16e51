"""What OpenVLA and OpenVLA-OFT see of ManiSkill's camera, 480 x 640, and how their actions reach the controller."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from rlinf.data.types import Observation
from rlinf.models import images
from rlinf.models.config import ModelConfig, find_config
from rlinf.models.files.tokenizers import BUNDLED
from rlinf.models.prismatic.architecture import BASE
from rlinf.models.prismatic.processor import Processor
from rlinf.models.prismatic.prompts import load_tokenizer

TASK = "put carrot on plate"


def processor(model: str, **keys: object) -> Processor:
    """The processor of a published size; its network is not built."""
    cfg: ModelConfig = replace(find_config(model).examples()[0], size="base", num_images_in_input=1, **keys)
    arch = cfg.architecture()  # type: ignore[attr-defined]
    tokenizer = load_tokenizer(BUNDLED, max_len=64, vocab_size=arch.vocab_size)
    return Processor(cfg, arch, tokenizer)  # type: ignore[arg-type]


def observation(image: torch.Tensor) -> Observation:
    return Observation(images=image[None], wrist_images=None, states=None, task_descriptions=[TASK])


@pytest.fixture(scope="module")
def picture() -> torch.Tensor:
    """Edges, ramps and noise, u8 [480, 640, 3]."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (480, 640, 3), generator=generator, dtype=torch.uint8)
    image[100:300, 200:450] = torch.tensor([250, 120, 10], dtype=torch.uint8)
    image[300:, :, 0] = torch.linspace(0, 255, 640).to(torch.uint8)
    return image


@pytest.mark.parametrize("model", ["openvla", "openvla_oft"])
def test_the_whole_picture_is_squeezed_into_the_square(picture: torch.Tensor, model: str) -> None:
    """The published rule: bicubic with antialiasing, aspect ignored. The model's `center_crop` crops nothing."""
    seen = [processor(model, center_crop=crop).encode_images(observation(picture)) for crop in (True, False)]
    assert seen[0].shape == (1, 1, 224, 224, 3)
    assert torch.equal(*seen)
    exact = F.interpolate(picture.movedim(-1, 0)[None].float(), (224, 224), mode="bicubic", antialias=True)
    wanted = exact.clamp(0, 255).round().movedim(1, -1)
    difference = (seen[0][0].float() - wanted).abs()
    assert difference.max() <= 1  # pixels within float error of a half
    assert (difference > 0).float().mean() < 1e-4
    cropped = images.center_crop(images.resize(picture[None], 224), 224)
    assert (cropped.float() - wanted).abs().mean() > 5  # a crop would show


@pytest.mark.parametrize("model", ["openvla", "openvla_oft"])
@pytest.mark.parametrize("case", ["down", "same", "up"])
def test_the_processor_gives_the_recorded_pixels(golden_dir, max_delta, model: str, case: str) -> None:
    io = load_file(golden_dir / "preprocess_openvla" / "io.safetensors")
    pixels = processor(model).encode_images(observation(io[f"{case}.image"]))[:, 0].movedim(-1, 1).float() / 255
    towers = [(torch.tensor(t.mean).view(3, 1, 1), torch.tensor(t.std).view(3, 1, 1)) for t in (BASE.dino, BASE.siglip)]
    got = torch.cat([(pixels - mean) / std for mean, std in towers], 1)
    max_delta(f"{model}.{case}", got[..., ::3, ::3], io[f"{case}.tensor_s3"], 1e-5)
