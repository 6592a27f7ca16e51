"""Which mistake explains that numbers or pictures differ from what they should be: each is tried until one fits.

Letters: M samples, C actions of a chunk, A action columns, S state columns, n cameras, h x w pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product

import numpy as np

Array = np.ndarray
FEW = 12  # samples below which no factor or offset is fitted: any would fit
SAME_SHARE = 0.9  # of recorded samples must agree: simulators of other versions drift apart within an episode
SAME_LEVELS, MAX_LEVELS = 1.0, 8.0  # of 255: pictures that are equal, and those that a codec or renderer may change
# Statistics fit where few values lie outside of their range, -1..1, and the range is not far too wide for them. Tokens
# cannot leave the range; a Gaussian's mean and deviation leave more room.
OUTSIDE = {True: 1.05, False: 1.75}  # by ActionPath.clips
MOST_OUTSIDE, TOO_WIDE = 0.1, 10.0
USUAL_SPREAD = 0.43  # standard deviation of Gaussian numbers whose 1 % and 99 % quantiles are -1 and 1
UNITS = {57.29578: "degrees and radians", 1000.0: "millimetres and metres", 100.0: "centimetres and metres"}


# ------------------------------------------------------------------ actions
def action_mistakes(
    wanted: Array,  # f [M, C, A]
    got: Array,  # f [M, C, A]
    *,
    names: Sequence[str],
    tolerance: Array,  # f [A]
    states: Sequence[Array] = (),  # f [M, C or 1, S] each: what may have been added or left out
    counted: Array | None = None,  # bool [M, C, A]; None: all
    share: float = 1.0,
) -> list[str]:
    """One line for every mistake in `got`; empty where a `share` of it is `wanted` up to `tolerance`."""
    check = Columns(wanted, got, tolerance, np.ones(wanted.shape, bool) if counted is None else counted, share)
    wrong = check.wrong()
    if not wrong:
        return []
    for what, moved in _reordered(wanted):
        if all(check.agree(c, moved[..., c]) for c in wrong):
            return [
                f"{_listed(names, wrong)}: {what}; as it should be, the largest error is {check.largest(wrong):.3g}"
            ]
    return [
        f"{names[c]} (column {c}): {_column_mistake(check, c, names, states)}; largest error {check.largest([c]):.3g}"
        for c in wrong
    ]


class Columns:
    """Compares one column at a time."""

    def __init__(self, wanted: Array, got: Array, tolerance: Array, counted: Array, share: float = 1.0) -> None:
        self.wanted, self.got, self.tolerance, self.counted, self.share = wanted, got, tolerance, counted, share

    def wrong(self) -> list[int]:
        """Columns that are not as they should be."""
        return [c for c in range(self.wanted.shape[2]) if not self.agree(c, self.wanted[..., c])]

    def agree(self, c: int, guess: Array) -> bool:
        """Whether `guess` [M, C] is what column c of `got` holds, for the share of the samples."""
        used = self.counted[..., c] & np.isfinite(guess)
        if not used.any():
            return True
        return float((np.abs(self.got[..., c] - guess)[used] <= self.tolerance[c]).mean()) >= self.share

    def largest(self, columns: Sequence[int]) -> float:
        """The largest error of these columns."""
        errors = np.where(self.counted, np.abs(self.got - self.wanted), 0.0)
        return float(errors[..., list(columns)].max())


def _reordered(wanted: Array) -> Iterator[tuple[str, Array]]:
    """Every other order in which the actions of a chunk may have arrived; NaN where one cannot be known."""
    chunk = wanted.shape[1]
    if chunk == 1:
        return
    yield "the actions of a chunk are in reverse order", wanted[:, ::-1]
    for steps, what in ((1, "later"), (-1, "earlier")):
        moved = np.full(wanted.shape, np.nan)
        moved[:, max(steps, 0) : chunk + min(steps, 0)] = wanted[:, max(-steps, 0) : chunk - max(steps, 0)]
        yield f"chunk order: actions come one step {what} than they were recorded", moved
    yield "chunk order: the first action of a chunk is repeated", np.repeat(wanted[:, :1], chunk, 1)


def _column_mistake(check: Columns, c: int, names: Sequence[str], states: Sequence[Array]) -> str:
    """What explains one column."""
    wanted, got, used = check.wanted[..., c], check.got[..., c], check.counted[..., c]
    if check.agree(c, -wanted):
        return "sign reversed"
    for (low, high), what in (((0.0, 1.0), "0 and 1"), ((1.0, 0.0), "1 and 0")):
        if np.isin(np.sign(wanted[used]), (-1.0, 1.0)).all() and check.agree(c, np.where(wanted > 0, high, low)):
            return f"-1 and 1 have become {what}"
    for other in range(check.wanted.shape[2]):
        for sign, reversed_ in ((1.0, ""), (-1.0, ", sign reversed")):
            if other != c and np.ptp(got[used]) > 0 and check.agree(c, sign * check.wanted[..., other]):
                return f"holds {names[other]} (column {other}){reversed_}: columns are swapped"
    for rows in states:
        if (shift := _state_shift(check, c, rows)) is not None:
            return shift
    return _scaled(got[used], wanted[used])


def _state_shift(check: Columns, c: int, states: Array) -> str | None:
    """Whether a column of the state was added, or left out: relative and absolute actions mixed up."""
    wanted, got = check.wanted[..., c], check.got[..., c]
    order = sorted(range(states.shape[2]), key=lambda j: j != c)  # the same column first: layouts usually agree
    for j in order:
        at = states[..., j]
        for guess, what in (
            (wanted + at, "absolute: the state's column {} is added to it"),
            (wanted - at, "relative: the state's column {} is taken from it"),
        ):
            if check.agree(c, guess):
                return f"{what.format(j)}, so that delta and absolute actions are mixed up"
    used = check.counted[..., c]
    if used.sum() < FEW or np.ptp(got[used]) == 0:
        return None
    for j in order:
        at = np.broadcast_to(states[..., j], wanted.shape)[used]
        if np.ptp(at) == 0:
            continue
        factors, share = _fit(got[used], wanted[used], at)
        _, plain = _fit(got[used], wanted[used])
        if share > 0.98 and abs(abs(factors[1]) - 1.0) < 0.15 and abs(factors[0]) > 1e-6 and share - plain > 0.01:
            return (
                f"{'absolute' if factors[1] > 0 else 'relative'}: it follows the state's column {j}, so that delta and "
                "absolute actions are mixed up"
            )
    return None


def _scaled(got: Array, wanted: Array) -> str:
    """A factor and an offset, or nothing that is known."""
    if np.ptp(got) == 0:
        return f"is always {got.flat[0]:.3g}"
    if np.ptp(wanted) == 0:
        return f"should always be {wanted.flat[0]:.3g}"
    if len(got) >= FEW:
        (factor, offset), share = _fit(got, wanted)
        if share > 0.98:
            return f"is {factor:.3g} times what it should be {offset:+.3g}: statistics of other data, or other units"
    return "differs, for no reason that is known"


def _fit(got: Array, *by: Array) -> tuple[Array, float]:
    """Least squares of got [M] by some columns and a constant; the factors, and the share of the variance explained."""
    table = np.stack([*by, np.ones(len(got))], 1)
    factors = np.linalg.lstsq(table, got, rcond=None)[0]
    rest, total = np.square(got - table @ factors).sum(), np.square(got - got.mean()).sum()
    return factors, 1.0 - float(rest / max(total, 1e-12))


def _listed(names: Sequence[str], columns: Sequence[int]) -> str:
    return f"{', '.join(names[c] for c in columns)} (columns {', '.join(map(str, columns))})"


# ------------------------------------------------------------------ statistics
def statistics_mistakes(normal: Array, names: Sequence[str], *, clips: bool) -> list[str]:
    """Columns of normal [M, n], in units of the statistics' range -1..1, that the statistics do not fit."""
    lines, outside = [], (np.abs(normal) > OUTSIDE[clips]).mean(0)
    for c in np.flatnonzero(outside > MOST_OUTSIDE).tolist():
        what = "and would be clipped" if clips else f"by {np.abs(normal[:, c]).max():.0f} times its half"
        lines.append(
            f"{names[c]}: {100 * outside[c]:.0f} % of the demonstrations lie outside of the usual range, {what}"
        )
    spread = normal.std(0)
    moving = np.flatnonzero(spread > 1e-4).tolist()
    if not lines and moving and (wide := USUAL_SPREAD / float(np.median(spread[moving]))) > TOO_WIDE:
        shown = ", ".join(names[c] for c in moving)
        lines.append(f"{shown}: the range is {wide:.0f} times too wide for the demonstrations")
    return lines


# ------------------------------------------------------------------ robot state
def state_mistakes(recorded: Array, seen: Array) -> list[str]:
    """One line for every mistake between states f [M, S] of a dataset and those that an evaluation gives the policy."""
    scale = np.maximum(np.ptp(seen, 0), 0.1 * np.abs(seen).max(0)) + 1e-3

    def agree(a: Array, b: Array, size: Array) -> Array:
        return (np.abs(a - b) <= 1e-3 * size).mean(0) >= SAME_SHARE

    wrong = np.flatnonzero(~agree(recorded, seen, scale))
    if not len(wrong):
        return []
    for first in range(seen.shape[1] - 3):
        four = slice(first, first + 4)
        if not set(range(first, first + 4)) & set(wrong) or not _are_quaternions(recorded[:, four], seen[:, four]):
            continue
        for order, sign in product(permutations(range(4)), (1.0, -1.0)):
            if agree(sign * recorded[:, four][:, order], seen[:, four], np.full(4, 1.0)).all():
                rest = [int(c) for c in wrong if not first <= c < first + 4]
                others = state_mistakes(recorded[:, rest], seen[:, rest]) if rest else []
                return [_quaternion(first, order, sign), *others]
    moved = {}
    for c in wrong:
        same = [int(j) for j in wrong if agree(recorded[:, [j]], seen[:, [c]], scale[[c]])[0]]
        if same:
            moved[int(c)] = same[0]
    if moved and set(moved) == set(map(int, wrong)) == set(moved.values()):
        pairs = ", ".join(f"column {j} is the simulator's column {c}" for c, j in moved.items())
        return [f"columns are swapped: the dataset's {pairs}"]
    return [f"column {c}: {_state_column(recorded[:, c], seen[:, c], float(scale[c]))}" for c in wrong]


def _are_quaternions(*columns: Array) -> bool:
    return all(np.allclose(np.linalg.norm(x, axis=1), 1.0, atol=0.02) for x in columns)


def _quaternion(first: int, order: tuple[int, ...], sign: float) -> str:
    """`order` brings the dataset's numbers into the simulator's order."""
    where = f"columns {first} to {first + 3} hold a quaternion"
    known = {(3, 0, 1, 2): ("x y z w", "w x y z"), (1, 2, 3, 0): ("w x y z", "x y z w")}
    if order == (0, 1, 2, 3):
        return f"{where} of the opposite sign, which is the same rotation to a robot but not to a policy"
    if order in known:
        mine, its = known[order]
        return f"{where} in another order: {mine} in the dataset where the simulator has {its}"
    return f"{where} in another order: the simulator's are the dataset's {', '.join(str(first + i) for i in order)}"


def _state_column(recorded: Array, seen: Array, scale: float) -> str:
    """What explains one column."""
    difference = float(np.abs(recorded - seen).max())
    if np.mean(np.abs(recorded + seen) <= 1e-3 * scale) >= SAME_SHARE:
        return "sign reversed"
    if np.abs(seen).min() > 1e-3 * scale:
        ratio = float(np.median(recorded / seen))
        for factor, units in UNITS.items():
            for known in (factor, 1 / factor):
                if abs(ratio / known - 1.0) < 0.01:
                    return f"{ratio:.4g} times what the simulator gives: {units} are mixed up"
    return f"differs by up to {difference:.3g} from what the simulator gives, for no reason that is known"


# ------------------------------------------------------------------ pictures
TURNED: dict[str, Callable[[Array], Array]] = {
    "flipped vertically (upside down)": lambda x: x[..., ::-1, :, :],
    "flipped horizontally (mirrored)": lambda x: x[..., :, ::-1, :],
    "turned by 180 degrees": lambda x: x[..., ::-1, ::-1, :],
    "turned by 90 degrees": lambda x: np.rot90(x, 1, (-3, -2)),
    "turned by 270 degrees": lambda x: np.rot90(x, 3, (-3, -2)),
    "transposed (rows and columns swapped)": lambda x: np.swapaxes(x, -3, -2),
    "with the colours red and blue swapped": lambda x: x[..., ::-1],
    "flipped vertically (upside down) with red and blue swapped": lambda x: x[..., ::-1, :, ::-1],
    "turned by 180 degrees with red and blue swapped": lambda x: x[..., ::-1, ::-1, ::-1],
}


def picture_mistakes(recorded: Array, seen: Array, cameras: Sequence[str]) -> list[str]:
    """One line for every mistake between pictures u8 [M, n, h, w, 3] of a dataset and those that an evaluation sees."""
    lines = []
    for i, name in enumerate(cameras):
        mine, its = recorded[:, i], seen[:, i]
        plain = levels(mine, its)
        if plain <= SAME_LEVELS:
            continue
        guesses = {what: levels(turn(mine), its) for what, turn in TURNED.items()}
        guesses |= {
            f"those of camera {other}": levels(recorded[:, j], its) for j, other in enumerate(cameras) if j != i
        }
        guesses["not cropped as the simulator's are"] = levels(_cropped(mine), its)
        guesses["cropped, as the simulator's are not"] = levels(mine, _cropped(its))
        what, best = min(guesses.items(), key=lambda item: item[1])
        if best < 0.5 * plain:
            lines.append(
                f"camera {name}: the dataset's pictures are {what}; put right they differ by {best:.1f} of 255 levels "
                f"from those of an evaluation, as they are by {plain:.1f}"
            )
        elif plain > MAX_LEVELS:
            lines.append(
                f"camera {name}: the dataset's pictures differ by {plain:.1f} of 255 levels from those of an evaluation"
                " and no turn or swap explains it: another camera, scene, light or renderer?"
            )
    return lines


def levels(a: Array, b: Array) -> float:
    """The mean difference of pictures u8 [M, h, w, 3], of 255; the median over them."""
    return float(np.median(np.abs(a.astype(np.int16) - b).mean((1, 2, 3))))


def _cropped(images: Array) -> Array:
    """The central nine tenths of the area of images u8 [M, h, w, 3], in the same size."""
    height, width = images.shape[1:3]
    rows, columns = (
        np.round((size - 1) * (0.5 + np.sqrt(0.9) * (np.arange(size) / (size - 1) - 0.5))).astype(int)
        for size in (height, width)
    )
    return images[:, rows][:, :, columns]
