"""What the toy offers: its options and its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rlinf.simulators.contract import EVAL_LAYOUTS, EnvSpec, split_ids
from rlinf.simulators.toy.tasks import COLOURS, SUITES, task_name
from rlinf.typed import Within, ZeroOrMore


@dataclass(frozen=True)
class Options:
    """`init_params` of the toy."""

    task_suite_name: str = "toy_2"
    """toy_2 (reach the red or the blue dot, as told), toy_red or toy_blue."""
    image_size: Annotated[int, Within(8, 4096)] = 32
    """Pixels of the square image."""
    step_size: Annotated[float, Within(0.001, 2)] = 0.2
    """Distance moved by an action of 1; the world is the square [-1, 1]^2."""
    radius: Annotated[float, Within(0.001, 2)] = 0.25
    """Distance to the target that counts as success."""
    distance: Annotated[float, Within(0, 2)] = 0.9
    """How far from the agent a target starts."""
    spread: Annotated[float, Within(0, 180)] = 180.0
    """Degrees the target's direction may differ from straight right; a narrow spread is learnt without looking."""
    batched: bool = False
    """Hold all scenes in one object and one process, the way a simulator on a GPU does."""
    fault: Literal["none", "crash", "hang", "raise", "nan"] = "none"
    """Test hook: how the simulator misbehaves."""
    fault_at: Literal["reset", "step"] = "step"
    """Test hook: where it does."""
    fault_file: str = ""
    """Test hook: <fault_file>.0, .1, ... are created one per fault, which counts them across processes and restarts."""
    fault_times: ZeroOrMore = 1
    """Test hook: how many faults there are."""

    def __post_init__(self) -> None:
        if self.task_suite_name not in SUITES:
            raise ValueError(f"task_suite_name={self.task_suite_name!r} must be one of {', '.join(SUITES)}")


def spec(options: Options) -> EnvSpec:
    """The toy's shape."""
    colours = SUITES[options.task_suite_name]
    numbers = tuple(list(COLOURS).index(c) for c in colours)
    return EnvSpec(
        suite=options.task_suite_name,
        tasks=tuple(map(task_name, colours)),
        action_dim=2,
        action_names=("x", "y"),
        gripper="none",
        state_dim=2,
        image_size=(options.image_size, options.image_size),
        reset_ids=split_ids(numbers, trials=len(EVAL_LAYOUTS)),
        control_hz=10.0,
        robot="toy",
        critic_state_dim=4,
        batched=options.batched,
    )


def protocol(options: Options) -> dict[str, Any]:
    """Neither how scenes are held nor the test hooks change what is measured."""
    return dict.fromkeys(("batched", "fault", "fault_at", "fault_file", "fault_times"))
