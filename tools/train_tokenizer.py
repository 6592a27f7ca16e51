"""Train the small byte-fallback tokenizer that ships with the `small` and `compact` sizes.

Reads the benchmarks' instruction strings from RLINF_TEST_DATA (default ../shared/data); the result is deterministic.
Run: python tools/train_tokenizer.py
"""

from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path

import sentencepiece
import yaml

from rlinf.models.files.tokenizers import BUNDLED
from rlinf.models.openpi.architecture import SMALL_VOCAB

REPO = Path(__file__).resolve().parent.parent

# Two-armed tabletop phrases in the manner of RoboTwin's instructions.
_VERBS = (
    "pick up",
    "grab",
    "lift",
    "take",
    "place",
    "put",
    "move",
    "push",
    "press",
    "click",
    "stack",
    "hand over",
    "shake",
)
_OBJECTS = """bottle, empty cup, coaster, bell, alarm clock, red block, green block, blue block, hammer, roller, shoe
can, basket, bread, burger, fries, tray, phone stand, mouse, mouse pad, stapler, scanner, mic, laptop, microwave
cabinet, drawer, dual shoes, dustbin, pot, plate, bowl, seal, switch, fan, card, playing cards, pillbox, box, scale"""
_ARMS = ("with the left arm", "using the right arm", "with both arms", "from the table", "")
_WHERE = ("on the {}", "next to the {}", "into the {}", "to the left of the {}", "onto the {}")

_PLAIN = """The robot looks at the table and decides what to do next. It moves its arm forward, opens its hand, waits.
Close the gripper slowly, then raise the object and carry it to the target. Turn left, turn right, go up, go down, stop.
A small red cube is in front of the big yellow box, and a round plate is behind it. Do not touch the glass near the edge
Find the key under the book, unlock the door, switch the light on and bring me the towel from the second shelf.
Slide the window open by about ten centimetres. Rotate the knob clockwise until it clicks. Pour water into the pan.
Please clean up the kitchen counter: throw away the trash, wipe the surface, and arrange the spoons, forks and knives.
First pick the banana, then the apple, the carrot and the orange; last, put the lid back on the jar. Try it again.
Task: reach the goal, State: 0 12 34 56 78 90 128 255;"""


def sentences(data: Path) -> list[str]:
    """Every line the tokenizer learns from, benchmarks first."""
    lines = list(json.loads((data / "metaworld" / "task_table.json").read_text())["descriptions"].values()) * 8
    for name in ("new_playtable.yaml", "new_playtable_validation.yaml"):
        tasks = yaml.safe_load((data / "calvin" / "tasks" / name).read_text())
        lines += [line for variants in tasks.values() for line in variants]
    templates = json.loads((data / "maniskill" / "instruct_templates.json").read_text())
    names = [
        sorted(
            {
                v["name"]
                for v in json.loads((data / "maniskill" / "carrot" / kind / "model_db.json").read_text()).values()
            }
        )
        for kind in ("more_carrot", "more_plate")
    ]
    for i, (thing, plate) in enumerate(itertools.product(*names)):
        lines.append(templates[0].replace("$C$", thing).replace("$P$", plate))
        lines.append(templates[i % len(templates)].replace("$C$", thing).replace("$P$", plate))
    objects = _OBJECTS.replace("\n", ", ").split(", ")
    for i, (verb, thing) in enumerate(itertools.product(_VERBS, objects)):
        where = _WHERE[i % len(_WHERE)].format(objects[(i * 7) % len(objects)])
        lines.append(" ".join(f"{verb} the {thing} {where} {_ARMS[i % len(_ARMS)]}".split()))
    lines += _PLAIN.splitlines() * 4
    return lines


def main() -> None:
    """Write rlinf/models/files/tokenizer_compact.model."""
    data = Path(os.environ.get("RLINF_TEST_DATA", REPO.parent / "shared" / "data"))
    BUNDLED.parent.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(data)),
        model_writer=model,
        model_type="bpe",
        vocab_size=SMALL_VOCAB,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n"],
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        num_threads=1,
        minloglevel=2,
    )
    BUNDLED.write_bytes(model.getvalue())


if __name__ == "__main__":
    main()
