"""What decides CALVIN's numbers beside its options: the user's files, Bullet's version and the renderer."""

from __future__ import annotations

import glob
from typing import Any, Literal

from rlinf.simulators.calvin.assets import find_folder, needed_files
from rlinf.simulators.calvin.suite import Options
from rlinf.simulators.contract import SetupError, files_digest, versions_of
from rlinf.simulators.opengl import egl_works


def protocol(options: Options) -> dict[str, Any]:
    """Versions, a digest of the files that are read, and what the options stand for.

    What training alone is paid for, shaped_reward, is no part of it.
    """
    folder = find_folder(options.data_path)
    left_out = dict.fromkeys(("camera_heights", "camera_widths", "whole_chunks", "shaped_reward"))
    resolved = {
        "image_size": options.size,
        "wrist_image_size": options.wrist_size,
        "renderer": choose_renderer(options.renderer),
        "instructions": options.sentences,
        "looks_after_subtask": options.looks_after_subtask,
        "in_a_row": options.in_a_row if options.in_a_row > 1 else None,
        "expert_first": options.expert_first or None,
        "assets": files_digest(folder, needed_files(folder, options.scenes)),
    }
    return left_out | resolved | versions_of("pybullet")


def choose_renderer(wanted: Literal["auto", "tiny", "egl"]) -> Literal["tiny", "egl"]:
    """auto draws on the GPU where there is one, else in software with TinyRenderer (EGL in software is slower)."""
    if wanted == "auto":
        return "egl" if glob.glob("/dev/nvidia[0-9]*") and egl_works() else "tiny"
    if wanted == "egl" and not egl_works():
        raise SetupError("renderer=egl, but libEGL is missing or offers no device; use renderer=tiny")
    return wanted
