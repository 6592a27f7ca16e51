"""ManiSkill's put-on-plate tasks: a WidowX arm puts one of 25 objects on a plate, as a sentence asks.

One task table (tasks.py) and one judge (judge.py) for two back ends: `cpu/` steps one world at a time on SAPIEN's CPU
physics, equal everywhere; `gpu/` is the same as a ManiSkill environment, many worlds at once.
"""

from rlinf.simulators.maniskill.expert import Expert as Expert
from rlinf.simulators.maniskill.gpu.batch import Batch as Batch
from rlinf.simulators.maniskill.scene import Scene as Scene
from rlinf.simulators.maniskill.suite import Options as Options
from rlinf.simulators.maniskill.suite import check_setup as check_setup
from rlinf.simulators.maniskill.suite import protocol as protocol
from rlinf.simulators.maniskill.suite import spec as spec
