"""`rlinf replay`: play episodes of a result.json again, check them against their records, and film them.

A policy's floats depend on how many rows a call has and on the longest prompt among them, so that an episode is played
with calls of the recorded shape: the row that it had, between rows that stand for those it shared the batch with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlinf.compat.envs import env_class
from rlinf.compat.policies import policy_class
from rlinf.config.load import stored_config
from rlinf.config.schema import Config
from rlinf.data.noise import Noise
from rlinf.data.types import EnvStep, EpisodeRecord
from rlinf.demos.player import PIECE, check_expert
from rlinf.envs.bridge import Bridge
from rlinf.envs.config import VideoConfig
from rlinf.envs.spec import check_setup, env_spec
from rlinf.envs.video import VideoRecorder
from rlinf.errors import UserError, did_you_mean
from rlinf.models.policy import Policy
from rlinf.progress import report
from rlinf.results.identity import policy_identity
from rlinf.results.protocol import differences, evaluation_protocol
from rlinf.results.result import Episode, Result, read_result, saved_config

logger = logging.getLogger(__name__)
SHEET, LARGE, SHEET_OF_LARGE = 16, 256, 9  # tiles of a sheet, and fewer of images with more pixels a side than LARGE
WATCHABLE_HZ = 25.0  # a simulator that is controlled faster is shown slower than life
Act = Callable[[EnvStep], torch.Tensor | None]  # -> actions f32 [B, C, A] of the simulator; None: its expert's


@dataclass(frozen=True)
class Replayed:
    """An episode as it was recorded, and as it went this time."""

    recorded: Episode
    played: EpisodeRecord

    @property
    def differences(self) -> list[str]:
        """What is not as recorded, in words."""
        then, now = self.recorded, self.played
        pairs = {
            "success": (then.success_once, now.success_once),
            "success at end": (then.success_at_end, now.success_at_end),
            "steps": (then.steps, now.steps),
            "return": (then.episode_return, now.episode_return),
        }
        return [f"{name} {b}, recorded {a}" for name, (a, b) in pairs.items() if a != b]

    def __str__(self) -> str:
        now = self.played
        outcome = "success" if now.success_once else "failure"
        line = f"{label(self.recorded)}: {outcome}, {now.steps} steps, return {now.episode_return:g}"
        return f"{line}; " + ("; ".join(self.differences) or "as recorded")


def label(episode: Episode) -> str:
    """What an episode is called on the console and in a video."""
    return f"#{episode.index} {episode.task} {episode.reset_id}"


def run_replay(
    given: str,
    *,
    task: str | None = None,
    failures: bool = False,
    output: Path | None = None,
    policy: Path | None = None,
    film: bool = True,
) -> tuple[list[Replayed], Path | None]:
    """Play the episodes that `given` and the options name; returns them in order, and the video."""
    path, indices = parse(given)
    result = read_result(path)
    episodes = choose(result, indices, task=task, failures=failures)
    check_calls(result, episodes)
    cfg = replay_config(result, policy)
    check_conditions(result, cfg)
    assert result.path is not None
    folder = output.expanduser() if output is not None else result.path.parent / "replay"
    recorder = _recorder(cfg, result, folder, _file_name(episodes, task, failures)) if film else None
    played = play(cfg, result, episodes, recorder)
    return [Replayed(e, played[e.index]) for e in episodes], recorder.path if recorder is not None else None


def parse(given: str) -> tuple[Path, list[int]]:
    """`result.json#17` or `run_folder#3,17` as a path and the episodes' numbers; none where no # follows.

    What exists as a whole is a path, though its name may hold a #.
    """
    path, mark, numbers = given.rpartition("#")
    if not mark or Path(given).expanduser().exists():
        return Path(given), []
    try:
        return Path(path), [int(number) for number in numbers.split(",")]
    except ValueError:
        raise UserError(f"{given}: after # stand numbers of episodes, such as {path}#17 or {path}#3,17") from None


def choose(result: Result, indices: Sequence[int], *, task: str | None, failures: bool) -> list[Episode]:
    """The episodes of a result with these numbers, or of a task, or those that failed."""
    episodes, where = {e.index: e for e in result.episodes}, result.path
    if not episodes:
        raise UserError(f"{where} is damaged: it holds no episodes")
    first, last = min(episodes), max(episodes)
    for index in indices:
        if index not in episodes:
            raise UserError(f"{where}#{index}: its episodes are numbered {first} to {last}")
    if not indices and task is None and not failures:
        raise UserError(f"name what to replay: {where}#{first} (to {last}), --task NAME, or --failures")
    if task is not None and task not in (tasks := sorted({e.task for e in result.episodes})):
        raise UserError(f"--task={task}: {where} holds {', '.join(tasks)}{did_you_mean(task, tasks)}")
    chosen = [episodes[i] for i in dict.fromkeys(indices)] if indices else list(result.episodes)
    chosen = [e for e in chosen if task in (None, e.task) and not (failures and e.success_once)]
    if not chosen:
        what = ("failures" if failures else "episodes") + (f" of {task}" if task is not None else "")
        raise UserError(
            f"{where} holds no {what} among {'those named' if indices else f'its {len(episodes)} episodes'}"
        )
    return chosen


def replay_config(result: Result, policy: Path | None) -> Config:
    """The config under which the result was made, on this machine alone, with the policy that played."""
    assert result.path is not None
    kind, there = result.policy.kind, result.policy.path
    if policy is not None and kind != "checkpoint":
        raise UserError(f"--policy={policy}: {result.path} was played by the {kind} policy, which has no files")
    source, settings = saved_config(result), [f"runner.eval_random={str(kind == 'random').lower()}"]
    model, runner = source["actor"]["model"], source["runner"]
    named = (runner.get("ckpt_path"), model.get("model_path"), model.get("lora_path"))
    if kind == "checkpoint":
        if policy is None and there is None:
            raise UserError(
                f"{result.path}: the policy of step {result.step} was never saved; with runner.save_interval equal to "
                "runner.val_check_interval every evaluation has a checkpoint, and --policy names one"
            )
        where = policy if policy is not None else _find_policy(result)
        if str(where) not in named:
            settings.append(f"runner.ckpt_path={where}")
    alone = {"torch_threads": source["cluster"].get("torch_threads")}
    tree = {**source, "cluster": alone, "rollout": {**source["rollout"], "pipeline_stage_num": 1}}
    return stored_config(tree, str(result.path), ["runner.resume_dir=null", *settings])


def _find_policy(result: Result) -> Path:
    """The folder or file of the policy that played; a relative path began in the folder of that command."""
    there = Path(result.policy.path or "").expanduser()
    places = (there, Path(str(result.provenance.get("folder", ""))) / there)
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise UserError(
            f"{result.path} was played by {there}, which does not exist; --policy names the place it was moved to"
        )
    return found


def check_conditions(result: Result, cfg: Config) -> None:
    """Refuse another policy, protocol or simulator: the episode would not be the recorded one."""
    check_setup(cfg.env.eval, "env.eval")
    if cfg.runner.eval_expert:
        check_expert(cfg.env.eval)
    identity, recorded = policy_identity(cfg), result.policy
    if recorded.sha256 is not None and identity.sha256 != recorded.sha256:
        raise UserError(
            f"{identity.path} is not the policy that played {result.path}: its files have changed "
            f"(SHA-256 {str(identity.sha256)[:16]}, recorded {recorded.sha256[:16]})"
        )
    if found := differences(evaluation_protocol(cfg), result.protocol):
        lines = "; ".join(f"{d.key} is {d.first}, recorded {d.second}" for d in found)
        raise UserError(f"{result.path} cannot be replayed here: {lines}")
    kind, here = result.device.get("kind"), _device().type
    if kind not in (None, here):
        logger.warning("%s was computed on %s, this is %s: floats differ, and episodes may", result.path, kind, here)


def check_calls(result: Result, episodes: Sequence[Episode]) -> None:
    """Refuse a result that does not tell the calls with which these episodes were played."""

    def damaged(what: str) -> UserError:
        return UserError(f"{result.path} is damaged: {what}")

    if len({e.reset_id for e in result.episodes}) < len(result.episodes):
        raise damaged("two of its episodes have the same reset_id")
    threads = result.device.get("threads", 1)
    if not isinstance(threads, int) or threads < 1:
        raise damaged(f"device.threads={threads!r} must be an integer of at least 1")
    if result.policy.kind == "expert":  # who acts for each env alone
        return
    for episode in episodes:
        batch = next((batch for batch in result.batches if episode.env_id in batch), None)
        if batch is None:
            raise damaged(f"its batches do not hold env_id {episode.env_id} of episode #{episode.index}")
        for env_id in batch:
            told = [e.instructions for e in result.episodes if e.env_id == env_id]
            if not told or not all(pairs and pairs[0][0] == 0 for pairs in told):
                raise damaged(f"episodes of env_id {env_id} have no instructions from call 0 on")


def play(
    cfg: Config, result: Result, episodes: Sequence[Episode], recorder: VideoRecorder | None = None
) -> dict[int, EpisodeRecord]:
    """Play these episodes again, several at a time; returns their records by the episodes' index."""
    act, chunk, reads_critic_state = _actor(cfg, result)
    spec = env_spec(cfg.env.eval, "env.eval")
    spec = replace(spec, batched=False) if cfg.runner.eval_expert else spec
    num_envs = min(len(episodes), _tiles(spec.image_size))
    env = env_class(cfg.compat)(
        replace(cfg.env.eval, total_num_envs=num_envs),
        spec,
        env_ids=range(num_envs),
        mode="eval",
        chunk_size=chunk,
        seed=cfg.runner.seed + cfg.env.eval.seed,
        trials=[e.reset_id for e in episodes],
        video=recorder,
        critic_state=reads_critic_state,
        labels={e.reset_id: label(e) for e in episodes},
    )
    records: dict[int, EpisodeRecord] = {}
    index = {e.reset_id: e.index for e in episodes}
    try:
        step = env.reset()
        while not env.done:
            step = env.chunk_step(act(step))
            records |= {index[record.reset_id]: record for record in env.drain_episodes()}
            report("replay", len(records), len(episodes))
    finally:
        env.close()
    return records


def _actor(cfg: Config, result: Result) -> tuple[Act, int, bool]:
    """What acts, the actions it gives at once, and whether it reads the simulator's privileged state."""
    if cfg.runner.eval_expert:
        return lambda step: None, PIECE, False
    device, model = _device(), cfg.actor.model
    if threads := result.device.get("threads"):
        torch.set_num_threads(threads)
    policy = policy_class(model.model_type, cfg.compat).build(model, device, seed=cfg.runner.seed + cfg.actor.seed)
    weights = Path(cfg.runner.ckpt_path).expanduser() if cfg.runner.ckpt_path is not None else None
    if weights is not None and weights.is_file():
        policy.load_weights(weights)
    caller = RecordedCalls(result, policy, cfg.runner.seed)
    bridge = Bridge(env_spec(cfg.env.eval, "env.eval"), policy.spec)
    return lambda step: bridge.to_env(caller.act(step)), policy.spec.num_action_chunks, policy.spec.critic_state_dim > 0


class RecordedCalls:
    """Calls the policy for each episode alone, in a batch of the recorded size, row and prompts."""

    def __init__(self, result: Result, policy: Policy, seed: int) -> None:
        self._policy, self._seed = policy, seed
        self._device = next(policy.parameters()).device
        self._episode = {e.reset_id: e for e in result.episodes}
        self._batch = {env_id: batch for batch in result.batches for env_id in batch}
        by_start = sorted(result.episodes, key=lambda e: e.first_call)
        self._of_env = {env_id: [e for e in by_start if e.env_id == env_id] for env_id in self._batch}

    def act(self, step: EnvStep) -> torch.Tensor:
        """Actions f32 [B, C, A] of the envs of a replay, each as its own recorded call gave them."""
        assert step.trials is not None
        return torch.cat([self._call(step[i : i + 1], *trial) for i, trial in enumerate(step.trials.tolist())])

    @torch.no_grad()
    def _call(self, step: EnvStep, reset_id: int, call: int) -> torch.Tensor:
        """The actions f32 [1, C, A] of an episode at one of its calls."""
        episode = self._episode[reset_id]
        batch = self._batch[episode.env_id]
        row, rows = batch.index(episode.env_id), [0] * len(batch)
        told = [self._told(env_id, episode.first_call + call) for env_id in batch]
        told[row] = step.obs.task_descriptions[0]
        obs = replace(step.obs[rows], task_descriptions=told)
        assert step.trials is not None
        noise = Noise.of_trials(step.trials[rows], seed=self._seed, device=self._device)
        actions = self._policy.predict(obs.to(self._device), mode="eval", noise=noise).actions
        return actions[row : row + 1].cpu()

    def _told(self, env_id: int, call: int) -> str:
        """What the policy was told for an env at a call of its batch; an env without trials left keeps its last."""
        episodes = self._of_env[env_id]
        episode = next((e for e in episodes if e.first_call + e.calls > call), episodes[-1])
        texts = [text for since, text in episode.instructions if since <= max(call - episode.first_call, 0)]
        return texts[-1]


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _tiles(image_size: tuple[int, int]) -> int:
    return SHEET_OF_LARGE if max(image_size) > LARGE else SHEET


def _file_name(episodes: Sequence[Episode], task: str | None, failures: bool) -> str:
    """The video's name without its ending."""
    if len(episodes) == 1:
        return f"episode_{episodes[0].index}"
    return "_".join(["failures" if failures else "episodes", *([task.replace("/", "-")] if task is not None else [])])


def _recorder(cfg: Config, result: Result, folder: Path, name: str) -> VideoRecorder:
    """Films all envs of a replay side by side, in a file that is there already under no circumstances."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output={folder} is a file; name a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output={folder} cannot be written: {error.strerror}; name another folder, or --no-video"
        ) from error
    spec = env_spec(cfg.env.eval, "env.eval")
    fps = max(1, round(min(spec.control_hz, WATCHABLE_HZ)))
    filmed = VideoConfig(save_video=True, video_base_dir=str(folder), max_envs=_tiles(spec.image_size), fps=fps)
    return VideoRecorder(filmed, control_hz=spec.control_hz, run_id=result.run, name=name)
