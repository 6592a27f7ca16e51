"""Numbers every published Prismatic checkpoint shares, torch-free."""

from __future__ import annotations

# Channel means and deviations of the two vision towers; ImageNet's, rounded to bf16 by the published preprocessor.
DINO_MEAN = (0.484375, 0.455078125, 0.40625)
DINO_STD = (0.228515625, 0.2236328125, 0.224609375)
SIGLIP_MEAN = (0.5, 0.5, 0.5)
SIGLIP_STD = (0.5, 0.5, 0.5)

# Ids of the Llama-2 vocabulary. Action bins are its last 256 ids: [ACTION_END - NUM_BINS, ACTION_END).
BOS, EOS, PAD = 1, 2, 32000
EMPTY_TOKEN = 29871  # "▁": every training prompt ended in it, so actions are read after it
ACTION_END = 32000
NUM_BINS = 256

IGNORE_INDEX = -100  # label of a position without a target
