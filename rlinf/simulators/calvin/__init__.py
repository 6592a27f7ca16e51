"""CALVIN: a robot arm at a table with a drawer, a sliding door, a button, a switch and three blocks.

An episode is a chain of five tasks out of 34; the instruction is that of the current one and changes the moment it is
solved. A task's name, or a list of them, in `task_suite_name` or `init_params.tasks` plays single tasks instead.
"""

from rlinf.simulators.calvin.conditions import protocol as protocol
from rlinf.simulators.calvin.expert import Expert as Expert
from rlinf.simulators.calvin.scene import Scene as Scene
from rlinf.simulators.calvin.scene import check_setup as check_setup
from rlinf.simulators.calvin.suite import Options as Options
from rlinf.simulators.calvin.suite import spec as spec
